"""The prompts that tell most: where a mistake would move the law of the next tokens farthest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from specdec.cache.transformers_cache import cache_argument
from specdec.checks.betting import Question
from specdec.checks.mistakes import EDGES, HONEST, Cells, Path, Place, joint
from specdec.requests import SamplingParams

NEGLIGIBLE = 1e-6  # growth of a bet per output below which no audit is long enough for a mistake
KEPT = 0.25  # the part of all outputs that goes to the mistakes' most telling prompts, whatever the bets gain there


@dataclass(frozen=True)
class Telling:
    """A prompt, the laws of what follows it by mistake (and ``HONEST``), and the mistakes that show most here."""

    id: str
    ids: tuple[int, ...]
    cells: Cells
    laws: dict[str, np.ndarray]
    best_for: tuple[str, ...] = ()

    def distance(self, name: str) -> float:
        return 0.5 * float(np.abs(self.laws[name] - self.laws[HONEST]).sum())


def telling(
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    sampling: SamplingParams,
    *,
    horizon: int,
    drafted: int,
    undrafted: int = 0,
    ends: frozenset[int],
    names: Sequence[str],
    tolerance: float = 1e-5,
    advance: Callable[[str], None] = lambda say: None,
) -> list[Telling]:
    """Prompts with the laws of what follows them, but where rounding could move these by more than ``tolerance``."""
    found: list[Telling] = []
    for number, (name, ids) in enumerate(prompts):
        advance(f"laws after prompt {number + 1} of {len(prompts)}")

        models = [_Prefixes(model, ids) for model in (target, drafter)]

        def look(paths: Sequence[Path], models: list[_Prefixes] = models, ids: Path = ids) -> list[Place]:
            rows = [model.logits(paths) for model in models]
            return [Place.of(p, q, sampling, [*ids, *path]) for p, q, path in zip(*rows, paths, strict=True)]

        cells, laws = joint(look, horizon=horizon, drafted=drafted, undrafted=undrafted, ends=ends, names=names)
        made = Telling(name, ids, cells, laws)
        if max(map(made.distance, EDGES)) < tolerance:
            found.append(made)
    if prompts and not found:
        raise ValueError(
            "after every prompt some token lies so near the edge of top-p or min-p that rounding decides whether it is "
            "drawn: give another top_p, another min_p or more prompts"
        )
    return found


def planned(candidates: Sequence[Telling], names: Sequence[str], **settings: Any) -> tuple[list[Telling], Question]:
    """Returns the prompts of an audit, and what is asked at each, with its share of the outputs.

    Shares make the bet grow fastest whose mistake is hardest to see (a linear program, the static design of Chernoff
    1959); every mistake's most telling prompt keeps a small one. There is no bet on mistakes that change nothing here.
    ``settings`` are those of ``Question``.
    """
    every = _question(candidates, names, settings)
    growth = np.array([[every.growth(index, name) for index in range(len(candidates))] for name in names])
    told = growth.max(1) > NEGLIGIBLE
    if not told.any():
        raise ValueError(
            f"with this sampling, {', '.join(names)} would change nothing that can be seen: audit with another "
            f"temperature, top_p or min_p, or for other mistakes"
        )
    growth, names = growth[told], [name for name, each in zip(names, told, strict=True) if each]
    best = {each: max(range(len(candidates)), key=lambda index: candidates[index].distance(each)) for each in names}
    fewest = np.bincount(list(best.values()), minlength=len(candidates)) * (KEPT / len(names))
    # Of the shares and the slowest growth: the growth is to be largest.
    found = scipy.optimize.linprog(
        [*np.zeros(len(candidates)), -1.0],
        A_ub=np.hstack([-growth, np.ones((len(growth), 1))]),
        b_ub=np.zeros(len(growth)),
        A_eq=[[*np.ones(len(candidates)), 0.0]],
        b_eq=[1.0],
        bounds=[*((least, None) for least in fewest), (None, None)],
    )
    shares = found.x[:-1]
    kept = [index for index, share in enumerate(shares) if share > 1e-3]
    prompts = [
        replace(candidates[index], best_for=tuple(name for name in names if best[name] == index)) for index in kept
    ]
    return prompts, replace(_question(prompts, names, settings), shares=[float(shares[index]) for index in kept])


def _question(prompts: Sequence[Telling], names: Sequence[str], settings: dict[str, Any]) -> Question:
    laws = {name: [prompt.laws[name] for prompt in prompts] for name in (HONEST, *names)}
    return Question(laws.pop(HONEST), laws, **settings)


class _Prefixes:
    """A model after a prompt and ever longer paths, each of which goes on from one of the paths before."""

    def __init__(self, model: PreTrainedModel, ids: tuple[int, ...]):
        self.model, self.ids = model, ids
        self._cache: Any = None
        self._rows: dict[Path, int] = {}

    @torch.inference_mode()
    def logits(self, paths: Sequence[Path]) -> Float[torch.Tensor, "path vocab"]:
        """The logits after each of some paths of one length, in float32; they are one token longer at every call."""
        if self._cache is not None:
            rows = torch.tensor([self._rows[path[:-1]] for path in paths], device=self.model.device)
            self._cache.reorder_cache(rows)
        tokens = torch.tensor([path[-1:] or self.ids for path in paths], device=self.model.device)
        name = cache_argument(signature(type(self.model).forward).parameters)
        output = self.model(tokens, use_cache=True, logits_to_keep=1, **{name: self._cache})
        self._cache, self._rows = getattr(output, name), {path: row for row, path in enumerate(paths)}
        return output.logits[:, -1].float()
