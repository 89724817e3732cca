"""The output laws of mistakes that engines have shipped, beside the right one: which prompts tell them apart?

A draft token x ~ q stays with probability min(1, p(x) / q(x)), else a token is recovered from the residual max(p - q,
0), renormalized; behind a chain that stays, a bonus token comes from p (Leviathan et al. 2023, algorithm 1). Each of
``MISTAKES`` changes one of these parts, and ``joint`` gives the law of the next tokens in closed form. Beside them are
settings that servers have of their own, or do not look at (``OF_SERVERS``).

Outputs are compared in cells: every opened prefix has a cell for each of its likely tokens, and the rest of the
vocabulary is pooled into two, by whether p or q is larger.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors, adjust, distribution

Path = tuple[int, ...]
Row = Float[np.ndarray, " vocab"]

SMALLEST = 2e-3
"""A token has no cell of its own, and opens no prefix, below this joint probability times the horizon less one."""
EDGE = 2e-6  # cumulative probability by which engines that compute in float32 may differ at the edge of a nucleus
OF_SERVERS: dict[str, tuple[str, Callable[[SamplingParams], SamplingParams]]] = {
    "temperature_ignored": ("the temperature is 1, whatever is asked for", lambda it: replace(it, temperature=1.0)),
    "temperature_default": ("the temperature is 0.7, whatever is asked for", lambda it: replace(it, temperature=0.7)),
    "top_k_ignored": ("the request's top-k is not used", lambda it: replace(it, top_k=0)),
    "top_p_ignored": ("the request's top-p is not used", lambda it: replace(it, top_p=1.0)),
    "min_p_ignored": ("the request's min-p is not used", lambda it: replace(it, min_p=0.0)),
    "penalty_ignored": ("the request's repetition penalty is not used", lambda it: replace(it, repetition_penalty=1.0)),
    "own_top_k": ("a top-k of 20 is used, too", lambda it: _beside(it, top_k=20)),
    "own_top_p": ("a top-p of 0.95 is used, too", lambda it: _beside(it, top_p=0.95)),
    "own_min_p": ("a min-p of 0.05 is used, too", lambda it: _beside(it, min_p=0.05)),
    "own_filters": ("llama.cpp's top-k of 40 and min-p of 0.05 are used, too", lambda it: _beside(it, 40, min_p=0.05)),
    "generation_config": (
        "a top-k of 20 and a top-p of 0.8 are used, too, as some models' generation_config.json has them",
        lambda it: _beside(it, 20, top_p=0.8),
    ),
    "own_penalty": ("a repetition penalty of 1.1 is used", lambda it: replace(it, repetition_penalty=1.1)),
}
"""Settings that servers have of their own, or do not look at: in words, and what they make of a request's."""
FILTERS_FIRST = "filters_first"
_FIRST = "the filters come before the temperature, as llama.cpp has them by default"


def _beside(asked: SamplingParams, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    """The request's filters and a server's: of both, what leaves less."""
    ranks = [each for each in (asked.top_k, top_k) if each]
    return replace(asked, top_k=min(ranks, default=0), top_p=min(asked.top_p, top_p), min_p=max(asked.min_p, min_p))


@dataclass(frozen=True)
class Place:
    """The laws of a next token after one prefix, in float64.

    Attributes:
        p, q: The target's and the drafter's, after all processing.
        whole_q: The drafter's without top-p.
        raw_q: The drafter's at temperature 1.
        served: The target's with the settings of ``OF_SERVERS``.
        edges: The target's with slightly less and more in the nucleus, which differ from p where rounding decides.
    """

    p: Row
    q: Row
    whole_q: Row
    raw_q: Row
    served: Mapping[str, Row]
    edges: tuple[Row, Row]

    @classmethod
    def of(
        cls,
        target: Float[Tensor, " vocab"],
        drafter: Float[Tensor, " vocab"],
        sampling: SamplingParams,
        before: Sequence[int] = (0,),
    ) -> "Place":
        """Returns the laws that a request's parameters make of both models' logits behind the tokens ``before``."""
        less, more = (
            replace(sampling, top_p=min(sampling.top_p + by, 1.0), min_p=max(sampling.min_p * (1 - by), 0.0))
            for by in (-EDGE, EDGE)
        )
        if sampling.top_p == 1 and sampling.min_p == 0:
            less = more = sampling
        ways = {name: how(sampling) for name, (_, how) in OF_SERVERS.items()}
        p, below, above, *others = _laws(target, [sampling, less, more, *ways.values()], before)
        served = dict(zip(ways, others, strict=True))
        sharper = served["temperature_ignored"] ** (1 / sampling.temperature)
        served[FILTERS_FIRST] = sharper / sharper.sum()
        also = [sampling, ways["top_p_ignored"], ways["temperature_ignored"]]
        return cls(p, *_laws(drafter, also, before), served=served, edges=(below, above))

    @property
    def whole_p(self) -> Row:
        return self.served["top_p_ignored"]

    @property
    def undrafted(self) -> "Place":
        """The same where nothing is drafted, so that no mistake with q shows."""
        return replace(self, q=self.p, whole_q=self.whole_p, raw_q=self.served["temperature_ignored"])


def _laws(logits: Float[Tensor, " vocab"], ways: Sequence[SamplingParams], before: Sequence[int]) -> list[Row]:
    """The law of the next token by each of some requests."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: torch.tensor([getattr(how, name) for how in ways]) for name in names}
    seen = torch.zeros(len(ways), len(logits), dtype=torch.bool)
    tensors = SamplingTensors.of(ways, **given, tables={"seen": seen})
    scores = adjust(logits.cpu().expand(len(ways), 1, -1), tensors, torch.tensor(before).expand(len(ways), 1, -1))
    return [row / row.sum() for row in distribution(scores, tensors)[:, 0].double().numpy()]


@dataclass(frozen=True)
class Parts:
    """The parts of a round's law at one place: a token that was drafted and stays, one that is recovered, a bonus."""

    stays: Row
    recovered: Row
    bonus: Row

    @classmethod
    def plain(cls, law: Row) -> "Parts":
        """The parts where nothing is drafted."""
        return cls(np.zeros_like(law), law, law)


def _share(value: Row, instead: Row) -> Row:
    total = value.sum()
    return value / total if total > 0 else instead


def _round(p: Row, q: Row, *, says: Row | None = None, stays: Row | None = None, residual: Row | None = None) -> Parts:
    """The parts where drafts come from q and are judged by ``says`` (q itself); by default the right ones."""
    says = q if says is None else says
    if stays is None:
        stays = q * np.minimum(1.0, np.divide(p, says, out=np.ones_like(p), where=says > 0))
    residual = _share(np.maximum(p - says, 0.0), p) if residual is None else residual
    return Parts(stays, (1.0 - stays.sum()) * residual, p)


def _one_hot(at: Place) -> Parts:
    return _round(at.p, np.eye(1, len(at.q), int(at.q.argmax()))[0], says=at.q)


def _shared_noise(at: Place) -> Parts:
    """A token x is drawn where a number u falls into its piece of [0, 1), and stays if the same u <= p(x) / q(x)."""
    ends = at.q.cumsum()
    ratio = np.divide(at.p, at.q, out=np.ones_like(at.p), where=at.q > 0)
    return _round(at.p, at.q, stays=np.clip(np.minimum(ends, ratio) - (ends - at.q), 0.0, at.q))


def _unscaled(at: Place) -> Parts:
    """The first index whose cumulative residual exceeds u, without its sum: the last index where there is none."""
    residual = np.maximum(at.p - at.q, 0.0)
    residual[-1] += 1.0 - residual.sum()
    return _round(at.p, at.q, residual=residual)


def _late_top_p(at: Place) -> Parts:
    kept = at.p > 0
    residual = _share(np.maximum(at.whole_p - at.whole_q, 0.0) * kept, at.p)
    return replace(_round(at.whole_p, at.whole_q, residual=residual), bonus=at.p)


HONEST = "honest"
EDGES: dict[str, Callable[[Place], Parts]] = {
    "less": lambda at: Parts.plain(at.edges[0]),
    "more": lambda at: Parts.plain(at.edges[1]),
}
"""Laws that rounding may make of the right one."""
MISTAKES: dict[str, tuple[str, Callable[[Place], Parts]]] = {
    "one_hot": ("drafts are the drafter's most probable tokens, and a smooth q is reported", _one_hot),
    "residual_from_p": (
        "a recovered token comes from p, not from the residual",
        lambda at: _round(at.p, at.q, residual=at.p),
    ),
    "residual_unscaled": ("the residual is not renormalized: what it lacks falls to the last token", _unscaled),
    "shared_noise": ("one number draws the draft token and decides whether it stays", _shared_noise),
    "bonus_from_q": ("the bonus token comes from q", lambda at: replace(_round(at.p, at.q), bonus=at.q)),
    "temperature_once": (
        "drafts are drawn at the request's temperature, and q is reported at temperature 1",
        lambda at: _round(at.p, at.q, says=at.raw_q),
    ),
    "late_top_p": ("top-p filters what is recovered, and not the p that drafts are judged by", _late_top_p),
    **{
        name: (words, lambda at, name=name: Parts.plain(at.served[name]))
        for name, (words, _) in {**OF_SERVERS, FILTERS_FIRST: (_FIRST, None)}.items()
    },
}
"""In words, and the law. Those after ``late_top_p`` are of a subject that does not do what it is asked to."""


@dataclass(frozen=True)
class Cells:
    """A partition of the next tokens into ``count`` cells.

    By opened prefix: the cell of every next token, -1 where that token opens another prefix.
    """

    opened: Mapping[Path, np.ndarray]
    count: int

    def cell(self, tokens: Sequence[int]) -> int:
        """Returns the cell of an output, which has all tokens of the horizon or ends before."""
        length = 1
        while (found := int(self.opened[tuple(tokens[: length - 1])][tokens[length - 1]])) < 0:
            length += 1
        return found


def joint(
    look: Callable[[Sequence[Path]], Sequence[Place]],
    *,
    horizon: int,
    drafted: int,
    undrafted: int = 0,
    ends: frozenset[int] = frozenset(),
    names: Sequence[str] = (),
) -> tuple[Cells, dict[str, Float[np.ndarray, " cell"]]]:
    """Returns the cells of the next ``horizon`` tokens, and the laws of ``HONEST``, ``EDGES`` and mistakes (or all).

    ``look`` gives the places after some prefixes of one length; ``drafted`` tokens are a round's chain; the first
    ``undrafted`` come without drafts; nothing follows ``ends``.
    """
    rules = {HONEST: lambda at: _round(at.p, at.q), **EDGES, **{name: MISTAKES[name][1] for name in names or MISTAKES}}
    opened: dict[Path, np.ndarray] = {}
    pieces: dict[str, list[float]] = {name: [] for name in rules}
    # By prefix and rule: the probability that the prefix comes out, by how many drafts of the round stayed so far.
    level: dict[Path, dict[str, np.ndarray]] = {(): {name: np.eye(1, drafted + 1)[0] for name in rules}}
    count = 0
    for length in range(1, horizon + 1):
        below: dict[Path, dict[str, np.ndarray]] = {}
        for (prefix, weights), place in zip(level.items(), look(list(level)), strict=True):
            if length <= undrafted:
                after = {name: _undrafted(weights[name], rule(place.undrafted)) for name, rule in rules.items()}
            else:
                after = {name: _advance(weights[name], rule(place)) for name, rule in rules.items()}
            likely = after[HONEST].sum(0)
            named = np.flatnonzero(likely >= SMALLEST * max(horizon - 1, 1))
            of = np.where(place.q > place.p, count + 1, count)
            of[likely == 0] = count + 2  # what cannot come out is a cell of its own
            count += 3
            for token in named:
                if length < horizon and int(token) not in ends:
                    of[token] = -1
                    below[(*prefix, int(token))] = {name: each[:, token] for name, each in after.items()}
                else:
                    of[token], count = count, count + 1
            opened[prefix] = of
            first, closed = count - 3 - int((of[named] >= 0).sum()), of >= 0
            for name, each in after.items():
                pieces[name] += np.bincount(of[closed] - first, each.sum(0)[closed], count - first).tolist()
        level = below
        if not level:
            break
    return Cells(opened, count), {name: np.array(each) for name, each in pieces.items()}


def _advance(weights: np.ndarray, parts: Parts) -> Float[np.ndarray, "state vocab"]:
    """The probability of each next token, by how many drafts have stayed after it."""
    after = np.zeros((len(weights), len(parts.bonus)))
    after[1:] = weights[:-1, None] * parts.stays
    after[0] = weights[:-1].sum() * parts.recovered + weights[-1] * parts.bonus
    return after


def _undrafted(weights: np.ndarray, parts: Parts) -> Float[np.ndarray, "state vocab"]:
    """The same where the token comes without drafts, and a round begins behind it."""
    return np.outer(np.eye(1, len(weights))[0], weights.sum() * parts.bonus)
