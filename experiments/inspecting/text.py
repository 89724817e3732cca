"""Text of the target's own with all of its states: what a head is tried on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from experiments.training.batch import Anchors, Batch, OutputLayer, every_anchor
from experiments.training.heads.block import sampled
from experiments.training.states import FrozenTarget
from specdec.engine.engine import Engine
from specdec.engine.prompts import encode
from specdec.requests import SamplingParams
from specdec.target.target import Target

PROMPTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "The first thing that a visitor to the harbour notices is",
    "Question: A train leaves at 9:40 and arrives at 12:15. How long does it take?\nAnswer:",
    "import json\nfrom pathlib import Path\n\n\ndef read(path):\n",
    "Write a short letter to a friend who has moved to another town.",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n",
    "In 1905, a clerk at a patent office published four papers. The first of them",
    "To make bread you need flour, water, salt and yeast. First",
)
"""Code, prose, instructions and arithmetic."""

_MOST_TOKENS = 256
"""The most tokens of a prompt that are used: what stands further back tells little about a head."""


@dataclass(frozen=True, eq=False)
class Text:
    """What the target wrote after some prompts, at temperature 1, and what it computed over it.

    Attributes:
        target: The target.
        batch: A row per prompt; what the target wrote is marked as supervised.
        anchors: Roots of the drafts that are tried, as many in every row.
        kept: Which of them have room for a whole draft; the others fill up rows.
        states: The target's hidden states by number: l is the input of layer l, the number of layers is the last
            layer's output before the final norm, and -1 the same after it.
        depths: The depth of drafts.
        log_p: The target's log-probabilities at some places.
        where: Which of these each kept draft is compared with: column d + s is depth d (from 1), s tokens further on.
    """

    target: Target
    batch: Batch
    anchors: Anchors
    kept: Bool[Tensor, " anchor"]
    states: Mapping[int, Float[Tensor, "row position hidden"]]
    depths: int
    log_p: Float[Tensor, "place vocab"]
    where: Int[Tensor, "draft column"]

    @property
    def before(self) -> Int[Tensor, " draft"]:
        """Flat positions in front of the kept roots: the newest whose states are known when a draft begins."""
        return self.anchors.index[self.kept] - 1

    @property
    def rows(self) -> Int[Tensor, " draft"]:
        """The prompt that each kept draft is of."""
        return self.anchors.index[self.kept] // self.batch.tokens.shape[1]

    @property
    def previous(self) -> Int[Tensor, "draft depth"]:
        """The token in front of each place of the kept drafts."""
        return self.batch.tokens.flatten()[self.anchors.places(self.batch)[self.kept]]

    def target_at(self, depth: int, shift: int = 0) -> Float[Tensor, "draft vocab"]:
        """Returns the target's log-probabilities of a depth's token, or of one that stands ``shift`` further on."""
        return self.log_p[self.where[:, depth + shift]]


def prompts_of(target: Target, given: Sequence[str] | None, seed: int) -> list[list[int]]:
    """Returns the tokens of prompts, as chat messages where the target has a chat template.

    Args:
        target: The target. One without a tokenizer gets random tokens.
        given: Texts; None for the built-in ones.
        seed: The seed of random tokens.

    Raises:
        ValueError: No prompt has two tokens.
    """
    if given is None and target.tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(PROMPTS), 12)
        return torch.randint(target.vocab_size, shape, generator=generator).tolist()
    chat = target.tokenizer is not None and getattr(target.tokenizer, "chat_template", None) is not None
    texts = PROMPTS if given is None else given
    encoded = [
        encode(target.tokenizer, [{"role": "user", "content": text}] if chat else text)[-_MOST_TOKENS:]
        for text in texts
    ]
    found = [tokens for tokens in encoded if len(tokens) > 1]
    if not found:
        raise ValueError("no prompt has two tokens or more: give longer prompts, or none")
    return found


@torch.no_grad()
def text_of(
    target: Target, prompts: Sequence[Sequence[int]], *, tokens: int, depths: int, places: int, seed: int
) -> Text:
    """Let the target continue prompts, and return the text with its states.

    Args:
        target: The target.
        prompts: The tokens of each prompt.
        tokens: How many tokens the target writes after each, unless it ends earlier.
        depths: The depth of the drafts that are tried.
        places: About how many drafts are tried.
        seed: The seed of the text it writes.

    Raises:
        ValueError: What it wrote is too short for a draft.
    """
    longest = max(map(len, prompts)) + tokens
    with Engine(
        target, max_batch_size=len(prompts), max_length=min(longest + 2, target.max_length), optimize=False
    ) as engine:
        sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=seed)
        done = engine.generate([list(prompt) for prompt in prompts], sampling, speculate=False)
    batch = _packed([(list(each.prompt_ids), list(each.token_ids)) for each in done]).to(target.device)
    every = every_anchor(batch, depths)
    if not bool(every.valid.all(1).any()):
        raise ValueError(
            f"the target {target.name} wrote fewer than {depths + 1} tokens after every prompt, which is too short for "
            f"a draft {depths} deep: give other prompts, more tokens or fewer depths"
        )
    complete = Anchors(*(part[every.valid.all(1)] for part in (every.index, every.valid, every.counted)))
    count = math.ceil(places / len(prompts))
    anchors = sampled(complete, batch, count, torch.Generator().manual_seed(seed))
    states, output = _states(target, batch)
    kept = anchors.valid.all(1)
    column = torch.arange(-1, depths + 1, device=target.device)
    at = (anchors.index[kept][:, None] + column).clamp(min=0, max=batch.tokens.numel() - 1)
    distinct, where = at.unique(return_inverse=True)
    last = states[-1].flatten(0, 1)
    log_p = torch.cat([output(last[part]).log_softmax(-1) for part in distinct.split(64)])
    return Text(target, batch, anchors, kept, states, depths, log_p, where)


def _packed(written: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Returns a row per prompt, padded at the end."""
    length = max(len(prompt) + len(answer) for prompt, answer in written)
    tokens, supervised, documents, positions = [], [], [], []
    for number, (prompt, answer) in enumerate(written):
        size = len(prompt) + len(answer)
        room = length - size
        tokens.append(prompt + answer + [0] * room)
        supervised.append([False] * len(prompt) + [True] * len(answer) + [False] * room)
        documents.append([number] * size + [-1] * room)
        positions.append(list(range(length)))
    return Batch(*(torch.tensor(part) for part in (tokens, supervised, documents, positions)))


def _states(target: Target, batch: Batch) -> tuple[dict[int, Tensor], OutputLayer]:
    """Returns all hidden states, and the way from the last one to the logits."""
    count = target.num_layers or 0
    frozen = FrozenTarget(target, tuple(range(count)))
    decoder: Any = target.model.get_decoder()
    norm = next(
        (getattr(decoder, name) for name in ("norm", "ln_f", "final_layernorm") if hasattr(decoder, name)), None
    )
    unnormed: list[Tensor] = []
    hook = None if norm is None else norm.register_forward_pre_hook(lambda _, given: unnormed.append(given[0]))
    try:
        found = frozen(batch)
    finally:
        if hook is not None:
            hook.remove()
    return {**found.hidden, **({count: unnormed[-1]} if unnormed else {})}, found.output
