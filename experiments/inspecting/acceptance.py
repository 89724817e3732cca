"""Acceptance by depth, in a few texts that the target writes at temperature 1; and facts by its description."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.heads.files import OURS, TRAINING, Checkpoint
from specdec import bundled
from specdec.checks.playing import prompts_for
from specdec.engine.engine import Engine
from specdec.engine.intake import encode
from specdec.interfaces import Description, Drafter, Round
from specdec.machine import dtype_name
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.rejection import RejectionVerifier

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
"""The most tokens of a prompt that are used."""
_ROOTS = 256
"""Distributions from which the unigram baseline is made, at most."""
LEAST, SHARE = 0.03, 0.05
"""A gain counts from so many tokens per round, and from this share of what was accepted before."""
_SURE, _SURE_BY_PROMPT = 4.0, 2.5
"""Minimum distance in standard errors, over rounds and over prompts."""


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The rounds of a chain.

    Attributes:
        rates: The probability Σ min(p, q) that depth d is accepted, given that all above is; nan where nothing stood.
        reached: How likely depth d - 1 was to be accepted, given the drafted tokens.
        unigram: The acceptance at depth 1 of a drafter that knows nothing but how frequent tokens are here.
        frequencies: The mean of p over roots.
    """

    rates: Float[Tensor, "round depth"]
    reached: Float[Tensor, "round depth"]
    prompts: Int[Tensor, " round"]
    unigram: float
    frequencies: Float[Tensor, " vocab"]

    @property
    def acceptance(self) -> list[float]:
        """The conditional acceptance by depth."""
        weights = self.reached.where(~self.rates.isnan(), 0.0)
        return ((self.rates.nan_to_num() * weights).sum(0) / weights.sum(0)).tolist()

    @property
    def unconditional(self) -> list[float]:
        """The product of the acceptance up to each depth."""
        return torch.tensor(self.acceptance).nan_to_num().cumprod(0).tolist()

    @property
    def length(self) -> float:
        """The expected tokens per round, the recovered or bonus token included."""
        return 1 + sum(self.unconditional)

    @property
    def lengths(self) -> Float[Tensor, " round"]:
        """The expected tokens of each round."""
        return 1 + (self.rates * self.reached).nan_to_num().sum(1)


class Gain(NamedTuple):
    """More tokens per round, their standard error over rounds, and whether they are more than chance and a trifle."""

    tokens: float
    error: float
    counts: bool


def gain(new: Acceptance, old: Acceptance) -> Gain:
    """Compare two ways to run a drafter on the same prompts."""
    one, other = new.lengths, old.lengths
    mean = float(one.mean() - other.mean())
    error = math.sqrt(float(one.var()) / len(one) + float(other.var()) / len(other))
    shared = sorted(set(new.prompts.tolist()) & set(old.prompts.tolist()))
    more = torch.stack([one[new.prompts == each].mean() - other[old.prompts == each].mean() for each in shared])
    sure = mean > max(_SURE * error, LEAST, SHARE * (old.length - 1))
    by_prompt = len(shared) < 2 or float(more.mean()) > _SURE_BY_PROMPT * float(more.std()) / math.sqrt(len(shared))
    return Gain(mean, error, sure and by_prompt)


def prompts_of(target: Target, given: Sequence[str] | None, seed: int) -> list[list[int]]:
    """The tokens of texts, as a user's words where there is a chat template; see ``prompts_for``."""
    texts: Any = PROMPTS if given is None and target.tokenizer is not None else given
    if texts is not None and getattr(target.tokenizer, "chat_template", None) is not None:
        texts = [encode(target.tokenizer, [{"role": "user", "content": text}]) for text in texts]
    return [list(prompt[-_MOST_TOKENS:]) for prompt in prompts_for(target, texts, seed)]


def play(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, tokens: int, seed: int) -> Acceptance:
    """Let the target write so many tokens after each prompt at temperature 1, with the help of a drafter of chains.

    Raises:
        ValueError: The drafter drafts trees, or the texts are too short for it to draft anything.
    """
    rates: list[Tensor] = []
    reached: list[Tensor] = []
    roots: list[Tensor] = []
    streams: list[int] = []

    def look(seen: Round) -> None:
        rows = [row for row, request in enumerate(seen.requests) if request is not None]
        streams.extend(request.sampling.stream or 0 for request in seen.requests if request is not None)
        for kept, part in zip((rates, reached), _rates(seen.tree, seen.target_probs), strict=True):
            kept.extend(part[rows].double().cpu())
        if len(roots) < _ROOTS:
            roots.extend(seen.target_probs[rows, 0].cpu())

    count, longest = len(prompts), max(map(len, prompts)) + tokens
    sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=seed)
    room = min(longest + 2, target.max_length)
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=count, max_length=room, optimize=False) as engine:
        engine.on_round = look
        done = engine.generate([list(prompt) for prompt in prompts], sampling)
    errors = [each.error for each in done if each.error is not None]
    if errors or not any(map(len, rates)):
        raise ValueError(
            f"nothing was drafted after any prompt ({errors[0] if errors else 'the texts are too short'}): give other "
            f"prompts, or more tokens"
        )
    tables = [pad_sequence(each, batch_first=True, padding_value=float("nan")) for each in (rates, reached)]
    drafted, p = ~tables[0][:, 0].isnan(), torch.stack(roots)
    return Acceptance(
        rates=tables[0][drafted],
        reached=tables[1][drafted],
        prompts=torch.tensor(streams)[drafted],
        unigram=float(torch.minimum(p, p.mean(0)).sum(-1).mean()),
        frequencies=p.mean(0),
    )


def _rates(tree: DraftTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance and reach, ``[row, depth]``, of a batch of chains."""
    if not bool((tree.parents[:, 1:] == torch.arange(tree.tokens.shape[1] - 1, device=p.device)).all()):
        raise ValueError("the drafter drafts trees, and chains are inspected: give 'drafter.shape=4'")
    tokens, p = tree.tokens[:, 1:, None], p[:, :-1]
    valid, chosen = tree.valid[:, 1:], (tree.law == DraftSampling.DETERMINISTIC)[:, 1:]
    own = p.gather(2, tokens)[..., 0]
    rates, kept = own, own
    if tree.draft_probs is not None:
        q = tree.draft_probs[:, : p.shape[1]]
        rates = own.where(chosen, torch.minimum(p, q).sum(2))
        kept = own.where(chosen, (own / q.gather(2, tokens)[..., 0]).clamp(max=1))
    reached = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], 1).cumprod(1)
    return rates.where(valid, float("nan")), reached.where(valid, 0.0)


# ---------------------------------------------------------------- facts


def facts_of(drafter: Description, target: Target, frequencies: Float[Tensor, " vocab"]) -> dict[str, str]:
    """Facts by their subject, of one trained model; ``frequencies`` are those of the target's tokens in its texts."""
    module: Any = drafter.parts[0]
    head = getattr(module, "model", module)
    weights, layers = list(module.parameters()), getattr(head, "layers", ())
    deep = f"{len(layers)} decoder layer{'s' * (len(layers) > 1)}, " if len(layers) else ""
    size = f"{sum(weight.numel() for weight in weights):,} parameters, {dtype_name(weights[0].dtype)}"
    facts = {"kind": f"{drafter.kind}, {deep}{size}"}
    if drafter.reads == (-1,):
        facts["reads"] = "the last hidden state, after the final norm"
    elif drafter.reads:
        numbers = ", ".join("the last one" if layer == -1 else str(layer) for layer in drafter.reads)
        of = f"of a target of {target.num_layers} layers"
        facts["reads"] = f"hidden states {numbers} (l is the input of layer l) {of}"
    facts |= drafter.facts
    ids = None if drafter.tokens is None else list(drafter.tokens)
    columns = target.vocab_size if ids is None else len(ids)
    facts["vocabulary"] = f"{columns:,} of the target's {target.vocab_size:,} tokens"
    if ids is not None:
        facts["vocabulary"] += f", which have {float(frequencies[ids].sum()):.1%} of its probability in these texts"
    if hasattr(head, "embed_tokens"):
        own = {True: "the target's", False: "its own"}
        facts["embeddings"] = f"{own[head.embed_tokens is None]}; output layer: {own[module.lm_head is None]}"
    rope, theirs = (_rope(each) for each in (getattr(module, "config", None), target.model.config.get_text_config()))
    if rope is not None:
        facts["RoPE"] = rope + (" (as the target's)" if rope == theirs else f" (the target's: {theirs})")
    unread = ", ".join(getattr(module, "unread", ()))
    return facts | ({"keys that nothing reads": unread} if unread else {})


def trained_on(checkpoint: Checkpoint) -> str | None:
    """The target's name, where a checkpoint says what it was trained on."""
    verifier: Mapping[str, Any] = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = [(checkpoint.json(file) or {}).get("target") for file in (OURS, TRAINING)]
    named += [verifier.get("name_or_path"), checkpoint.config.get("base_model_name_or_path")]
    return next((name for name in named if isinstance(name, str) and name), None)


def same_model(one: str, other: str) -> bool:
    """Whether two names surely mean one model: the same name, or the same folder; not two folders of one name."""
    places = [Path(bundled.resolve(name)).expanduser() for name in (one, other)]
    folders = [str(place.resolve()) for place in places if place.is_dir()]
    return one.rstrip("/") == other.rstrip("/") or (len(folders) == 2 and folders[0] == folders[1])


def _rope(config: Any) -> str | None:
    own = getattr(config, "rope_parameters", None) or {}
    return f"theta {own['rope_theta']:,.0f}, {own.get('rope_type', 'default')}" if "rope_theta" in own else None
