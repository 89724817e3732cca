"""Searches the parts of layers without which a target drafts best for itself, and writes them for drafter=skip.

    python examples/skip_search.py bundled/target skip.json --depth 4
    python -m experiments.run drafter=skip drafter.skip=skip.json

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) finds such parts by Bayesian optimization, SWIFT (Xia et al. 2024,
arXiv 2410.06916) by their agreement with text that the target has written, which is what is compared here. The search
has no randomness besides that text's.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from drafters.itself import Absent, layers_of, parts_of, returned_by
from drafters.reduced import twin_of
from specdec import Engine, SamplingParams, Target
from specdec.acceptance import parts_of as parts_of_batch
from specdec.arguments import whole
from specdec.checks.playing import prompts_for
from specdec.quantization.base import stored_bytes, weights_read
from specdec.requests import GREEDY_BELOW
from specdec.sampling import one_hot_argmax

_STEP = 8
"""A round of the search leaves out an eighth of what is still there."""


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
        self.parts, self._returned = parts_of(twin), returned_by(twin)
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
    whole("depth", depth, least=1)
    whole("tries", tries, least=1)
    if tokens <= depth:
        raise ValueError(f"tokens={tokens}: give more than the {depth} tokens of a draft")
    encoded = prompts_for(target, prompts, seed=seed)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=tokens, ignore_eos=True, seed=seed)
    room = max(map(len, encoded)) + tokens
    with Engine(target, max_batch_size=len(encoded), max_length=room, optimize=False) as engine:
        texts = [[*done.prompt_ids, *done.token_ids] for done in engine.generate(list(encoded), sampling)]
    found = _Search(target, twin, texts, written=tokens, depth=depth, temperature=temperature, tries=tries)
    with suppress(_EnoughError):
        found.run()
    return found.best


def main() -> None:
    """Search, and write what was found."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("target", help="a folder, a name on the hub, or bundled/…")
    given.add_argument("out", type=Path, help="the JSON file")
    given.add_argument("--depth", type=int, default=4, help="tokens of a draft")
    given.add_argument("--tokens", type=int, default=48, help="tokens that the target writes after each prompt")
    given.add_argument("--temperature", type=float, default=0.0, help="at which it writes and drafts")
    given.add_argument("--tries", type=int, default=400, help="choices that are tried, at most")
    named = given.parse_args()
    settings = {name: getattr(named, name) for name in ("depth", "tokens", "temperature", "tries")}
    try:
        target = Target.from_pretrained(named.target)
        found = search(target, twin_of(target.model), **settings)
    except ValueError as error:
        given.error(str(error))
    named.out.parent.mkdir(parents=True, exist_ok=True)
    said = {"target": target.name, "layers": len(layers_of(target.model)), **asdict(found), **settings}
    named.out.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    print(f"without {', '.join(found.skip)}: {found.speedup:.2f} times as fast where only reading weights takes time")


if __name__ == "__main__":
    main()
