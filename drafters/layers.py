"""A model without some of its layers, or parts of layers: what can be left out, and which parts matter least.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) finds attention and MLP parts whose absence changes little by
Bayesian optimization, SWIFT (Xia et al. 2024, arXiv 2410.06916) by their agreement with text that the target has
written, which is what is compared here. The search has no randomness besides that text's.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec.acceptance import parts_of as parts_of_batch
from specdec.checks.playing import prompts_for
from specdec.engine.engine import Engine
from specdec.execution.executor import configs_of
from specdec.quantization.base import stored_bytes, weights_read
from specdec.requests import GREEDY_BELOW, SamplingParams
from specdec.sampling import one_hot_argmax
from specdec.target.target import Target

_RANGE = re.compile(r"(\d+)-(\d*)")
_STEP = 8
"""A round of the search leaves out an eighth of what is still there."""


class Absent(nn.Module):
    """Stands where an attention or an MLP was, and adds nothing to the residual stream; see ``_returned``."""

    def __init__(self, others: int | None):
        super().__init__()
        self.others = others

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Zeros."""
        nothing = torch.zeros_like(inputs[0] if inputs else more["hidden_states"])
        return nothing if self.others is None else (nothing, *[None] * self.others)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Returns a model's decoder layers; refuses a model whose layers stand in no list."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"the {model.config.model_type} model has no list of {count} layers of which some can be left out")


def parts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the parts that can be left out, by name: the children of layers that hold matrices (``3.self_attn``)."""
    return {
        f"{number}.{name}": part
        for number, layer in enumerate(layers_of(model))
        for name, part in layer.named_children()
        if any(parameter.ndim > 1 for parameter in part.parameters())
    }


def chosen_parts(model: PreTrainedModel, given: Collection[object]) -> list[str]:
    """Returns the names of parts by what is given: a layer (``4``), some (``4-7``, ``4-``), or names (``2.mlp``).

    Raises:
        ValueError: There is no such part, or none would be left.
    """
    parts, last = parts_of(model), len(layers_of(model)) - 1
    found = dict[str, None]()
    for entry in map(str, given):
        ends = _RANGE.fullmatch(entry)
        end = int(ends[2] or last) if ends else last
        layers = range(int(ends[1]), end + 1) if ends else [entry]
        some = [name for each in layers for name in parts if name == str(each) or name.startswith(f"{each}.")]
        if not some or end > last:
            known = ", ".join(name.partition(".")[2] for name in parts if name.startswith("0."))
            raise ValueError(
                f"skip: the {model.config.model_type} model has no {entry}: give layers from 0 to {last}, such as 2 or "
                f"{max(last - 1, 0)}-{last}, or parts of them ({known}), such as {next(iter(parts), '')}"
            )
        found |= dict.fromkeys(some)
    if len(found) == len(parts):
        raise ValueError(f"skip={list(given)} leaves nothing of the {last + 1} layers: keep a part of one at least")
    return list(found)


def exits_early(model: PreTrainedModel, names: Collection[str]) -> bool:
    """Returns whether the parts that are left out are those of the last layers, and nothing else."""
    every = list(parts_of(model))
    left = len(every) - len(names)
    layers = [name.partition(".")[0] for name in every[left - 1 :]]
    return {*every[left:]} == {*names} and layers[0] not in layers[1:]


def leave_out(twin: PreTrainedModel, names: Collection[str]) -> None:
    """Take parts out of a model, whose modules are nobody else's; a layer of which nothing stays goes as a whole."""
    layers, parts, returned = layers_of(twin), parts_of(twin), _returned(twin)
    for name in names:
        number, _, child = name.partition(".")
        setattr(layers[int(number)], child, Absent(returned[name]))
    kept = sorted({int(name.partition(".")[0]) for name in parts.keys() - set(names)})
    count = len(layers)
    for number in reversed([number for number in range(count) if number not in kept]):
        del layers[number]
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if "layer_idx" in vars(module):  # where it finds its keys and values in a cache
                module.layer_idx = number  # pyright: ignore[reportArgumentType]
    for config in configs_of(twin):
        if getattr(config, "num_hidden_layers", None) == count:
            for key, value in list(vars(config).items()):
                if "layer" in key and isinstance(value, list) and len(value) == count:
                    setattr(config, key, [value[number] for number in kept])
            config.num_hidden_layers = len(kept)


@torch.inference_mode()
def _returned(model: PreTrainedModel) -> dict[str, int | None]:
    """Returns how many things each part returns besides hidden states, by a trial; None if these by themselves."""
    found: dict[str, int | None] = {}
    with ExitStack() as stack:
        for name, part in parts_of(model).items():

            def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                found[name] = len(output) - 1 if isinstance(output, tuple) else None

            stack.callback(part.register_forward_hook(note).remove)
        model(input_ids=torch.ones(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return found


# ---------------------------------------------------------------- the search


@dataclass(frozen=True)
class Thinner:
    """A choice of parts to leave out, and what it promises.

    Attributes:
        skip: The parts.
        share: The share of the target's weights that the others read.
        acceptance: The probability that one token is accepted, on average.
        tokens: Tokens per round, with chains of the length that was searched for.
        speedup: These over the weights that a round reads, the target's own as 1: the gain where nothing but reading
            weights takes time.
    """

    skip: tuple[str, ...]
    share: float
    acceptance: float
    tokens: float
    speedup: float


class _EnoughError(Exception):
    """All tries are used up."""


class _Search:
    """Tries choices on texts: prompts, each followed by as many tokens that the target has written."""

    def __init__(
        self, target: Target, twin: PreTrainedModel, texts: Sequence[Sequence[int]], *, written: int, depth: int,
        temperature: float, tries: int,
    ):  # fmt: skip
        self._twin, self._temperature, self._depth, self._tries = twin, temperature, depth, tries
        self.parts, self._returned = parts_of(twin), _returned(twin)
        self._layers = layers_of(twin)
        whole = weights_read(target.model).bytes
        self._shares = {
            name: sum(stored_bytes(each) for each in part.parameters()) / whole for name, part in self.parts.items()
        }
        padded = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(target.device)
        ends = torch.tensor([len(text) for text in texts], device=target.device)
        before = ends[:, None] - written - 1 + torch.arange(written, device=target.device)
        parts = parts_of_batch(len(texts), padded.shape[1] * target.vocab_size)
        self._texts = [(padded[part], before[part]) for part in parts]
        self._laws = [self._law(*each) for each in self._texts]
        self.tried: dict[frozenset[str], Thinner] = {}

    def _law(self, texts: Int[Tensor, "text position"], before: Int[Tensor, "text some"]) -> Tensor:
        """Returns the twin's laws of all tokens that were written, ``[text, some, vocab]``."""
        logits = self._twin(input_ids=texts, use_cache=False).logits
        logits = logits.gather(1, before[..., None].expand(-1, -1, logits.shape[2])).float()
        return one_hot_argmax(logits) if self._temperature < GREEDY_BELOW else (logits / self._temperature).softmax(-1)

    @contextmanager
    def _without(self, skip: frozenset[str]) -> Iterator[None]:
        places = [(self._layers[int(name.partition(".")[0])], name.partition(".")[2], name) for name in skip]
        for layer, child, name in places:
            setattr(layer, child, Absent(self._returned[name]))
        try:
            yield
        finally:
            for layer, child, name in places:
                setattr(layer, child, self.parts[name])

    def speedup(self, skip: frozenset[str]) -> float:
        """Returns the promise of leaving out these parts, by which the best is chosen."""
        if skip not in self.tried:
            if len(self.tried) >= self._tries:
                raise _EnoughError
            self.tried[skip] = self._try(skip)
        return self.tried[skip].speedup

    def _try(self, skip: frozenset[str]) -> Thinner:
        with self._without(skip):
            rates = [
                torch.minimum(p, self._law(*each)).sum(-1) for each, p in zip(self._texts, self._laws, strict=True)
            ]
        accepted = torch.cat(rates).double()
        # The drafts of a round that begins at a position are accepted up to the first one that is not.
        tokens = 1 + float(accepted.unfold(1, self._depth, 1).cumprod(-1).sum(-1).mean())
        share = 1 - sum(self._shares[name] for name in skip)
        chosen = tuple(name for name in self.parts if name in skip)
        return Thinner(chosen, share, float(accepted.mean()), tokens, tokens / (1 + self._depth * share))

    def run(self) -> Thinner:
        """Return the best choice: of the first layers alone, of ever fewer parts, and of what is like the best."""
        count = len(self._layers)
        free = [name for name in self.parts if 0 < int(name.partition(".")[0]) < count - 1]
        for first in range(1, count):
            self.speedup(frozenset(name for name in self.parts if int(name.partition(".")[0]) >= first))
        skip = frozenset[str]()
        while left := [name for name in free if name not in skip]:
            ranked = sorted(left, key=lambda name: -self.speedup(skip | {name}))
            skip |= set(ranked[: -(-len(left) // _STEP)])
            self.speedup(skip)
        before = None
        while (best := self.best) is not before:
            before = best
            for name in free:
                if len(changed := frozenset(best.skip) ^ {name}) > 0:
                    self.speedup(changed)
        return best

    @property
    def best(self) -> Thinner:
        return max(self.tried.values(), key=lambda each: each.speedup)


@torch.inference_mode()
def search(
    target: Target,
    twin: PreTrainedModel,
    *,
    depth: int,
    prompts: Sequence[str | Sequence[int]] | None = None,
    tokens: int = 48,
    temperature: float = 0.0,
    tries: int = 400,
    seed: int = 0,
) -> Thinner:
    """Returns the parts of a target without which it drafts best, by how often it then agrees with itself.

    Args:
        twin: A model of modules of its own with the target's tensors; it is left as it was.
        prompts: Texts or token ids, at least two; None for built-in ones.
        tokens: How many tokens the target writes after each of them.
        temperature: At which it writes and drafts.
        tries: How many choices are tried at most, with one forward over the texts each.

    Raises:
        ValueError: The target has fewer than two layers, or the texts are too short for drafts of this length.
    """
    if len(layers_of(twin)) < 2:
        raise ValueError(f"the target {target.name} has one layer, of which none can be left out")
    if tokens <= depth:
        raise ValueError(f"search.tokens={tokens}: give more than the {depth} tokens of a draft")
    encoded = prompts_for(target, prompts, seed=seed)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=tokens, ignore_eos=True, seed=seed)
    room = max(map(len, encoded)) + tokens
    with Engine(target, max_batch_size=len(encoded), max_length=room, optimize=False) as engine:
        texts = [[*done.prompt_ids, *done.token_ids] for done in engine.generate(list(encoded), sampling)]
    found = _Search(target, twin, texts, written=tokens, depth=depth, temperature=temperature, tries=tries)
    with suppress(_EnoughError):
        found.run()
    return found.best


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a search, which there must be."""
    known = ("prompts", "tokens", "temperature", "tries", "seed")
    for name in settings:
        if name not in known:
            raise ValueError(f"search.{name}: there is no such setting, give some of {', '.join(known)}")
    return dict(settings)
