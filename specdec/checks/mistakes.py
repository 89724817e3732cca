"""The output laws of mistakes that engines have shipped, beside the right one: which prompts tell them apart?

A round drafts a chain; a draft token x ~ q stays with probability min(1, p(x) / q(x)), else a token is recovered from
the residual max(p - q, 0), renormalized; behind a chain that stays, a bonus token comes from p (Leviathan et al. 2023,
algorithm 1). Each mistake changes one of these parts, and the law of the tokens that come out follows in closed form:
``MISTAKES[name](place)`` gives the parts, and ``joint`` the law of the next tokens.

Outputs are compared in cells: every opened prefix has a cell for each of its likely tokens, and the rest of the
vocabulary is pooled into two, by whether p or q is larger. Nothing is lost but what a mistake moves within a pool.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors, probs

Path = tuple[int, ...]
Row = Float[np.ndarray, " vocab"]

SMALLEST = 2e-3
"""A token has no cell of its own, and opens no prefix, below this joint probability times the horizon less one."""

EDGE = 2e-6
"""Cumulative probability by which engines that compute in float32 may differ at the edge of a nucleus."""


@dataclass(frozen=True)
class Place:
    """The laws of a next token after one prefix, in float64.

    Attributes:
        p, q: The target's and the drafter's, after all processing.
        whole_p, whole_q: The same without top-p.
        raw_p, raw_q: The same at temperature 1.
        filtered_p: The target's, with a server's own filters beside the request's (llama.cpp's: top-k 40, min-p 0.05).
        edges: The target's, with slightly less and slightly more in the nucleus (top-p, min-p): where a token lies so
            near its edge that rounding decides, they differ from p.
    """

    p: Row
    q: Row
    whole_p: Row
    whole_q: Row
    raw_p: Row
    raw_q: Row
    filtered_p: Row
    edges: tuple[Row, Row]

    @classmethod
    def of(cls, target: Float[Tensor, " vocab"], drafter: Float[Tensor, " vocab"], sampling: SamplingParams) -> "Place":
        """Returns the laws that a request's parameters make of the logits of both models."""

        def law(logits: Tensor, how: SamplingParams) -> Row:
            one = {name: torch.tensor([getattr(how, name)]) for name in ("temperature", "top_k", "top_p", "min_p")}
            one = {name: value if name == "top_k" else value.float() for name, value in one.items()}
            tensors = SamplingTensors.of([how], **one, repetition_penalty=torch.ones(1), seen=None)
            row = probs(logits.cpu().float()[None, None], tensors)[0, 0].double().numpy()
            return row / row.sum()

        ways = sampling, replace(sampling, top_p=1.0), replace(sampling, temperature=1.0)
        own = replace(sampling, top_k=min(sampling.top_k or 40, 40), min_p=max(sampling.min_p, 0.05))
        laws = [*(law(logits, how) for how in ways for logits in (target, drafter)), law(target, own)]
        if sampling.top_p == 1 and sampling.min_p == 0:
            return cls(*laws, edges=(laws[0], laws[0]))
        less, more = (
            replace(sampling, top_p=min(sampling.top_p + by, 1.0), min_p=max(sampling.min_p * (1 - by), 0.0))
            for by in (-EDGE, EDGE)
        )
        return cls(*laws, edges=(law(target, less), law(target, more)))

    @property
    def undrafted(self) -> "Place":
        """The same where nothing is drafted, so that no mistake with q shows."""
        return replace(self, q=self.p, whole_q=self.whole_p, raw_q=self.raw_p)


@dataclass(frozen=True)
class Parts:
    """The parts of a round's law at one place: a token that was drafted and stays, one that is recovered, a bonus."""

    stays: Row
    recovered: Row
    bonus: Row


def _share(value: Row, instead: Row) -> Row:
    total = value.sum()
    return value / total if total > 0 else instead


def _round(p: Row, q: Row, *, says: Row | None = None, stays: Row | None = None, residual: Row | None = None) -> Parts:
    """The parts where drafts come from q and are judged by ``says`` (q itself): with p as bonus, unless it is replaced.

    Args:
        stays: What stays, where it is not q · min(1, p / says).
        residual: The law of a recovered token, where it is not max(p - says, 0), renormalized.
    """
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


def _plain(law: Row) -> Parts:
    return Parts(np.zeros_like(law), law, law)


HONEST = "honest"
EDGES: dict[str, Callable[[Place], Parts]] = {
    "less": lambda at: _plain(at.edges[0]),
    "more": lambda at: _plain(at.edges[1]),
}
"""Laws that rounding may make of the right one."""
MISTAKES: dict[str, Callable[[Place], Parts]] = {
    "one_hot": _one_hot,
    "residual_from_p": lambda at: _round(at.p, at.q, residual=at.p),
    "residual_unscaled": _unscaled,
    "shared_noise": _shared_noise,
    "bonus_from_q": lambda at: replace(_round(at.p, at.q), bonus=at.q),
    "temperature_once": lambda at: _round(at.p, at.q, says=at.raw_q),
    "late_top_p": _late_top_p,
    "temperature_ignored": lambda at: _plain(at.raw_p),
    "top_p_ignored": lambda at: _plain(at.whole_p),
    "own_filters": lambda at: _plain(at.filtered_p),
}
"""The mistakes by name; the last three are of a subject that does not do what it is asked to."""
WORDS = {
    "one_hot": "drafts are the drafter's most probable tokens, and a smooth q is reported",
    "residual_from_p": "a recovered token comes from p, not from the residual",
    "residual_unscaled": "the residual is not renormalized: what it lacks falls to the last token",
    "shared_noise": "one number draws the draft token and decides whether it stays",
    "bonus_from_q": "the bonus token comes from q",
    "temperature_once": "drafts are drawn at the request's temperature, and q is reported at temperature 1",
    "late_top_p": "top-p filters what is recovered, and not the p that drafts are judged by",
    "temperature_ignored": "the request's temperature is not used",
    "top_p_ignored": "the request's top-p is not used",
    "own_filters": "a server's default top-k and min-p are used, too",
}


@dataclass(frozen=True)
class Cells:
    """A partition of the next tokens.

    Attributes:
        opened: By opened prefix: the cell of every next token, -1 where that token opens another prefix.
        count: The number of cells.
    """

    opened: Mapping[Path, np.ndarray]
    count: int

    def cell(self, tokens: Sequence[int]) -> int:
        """Returns the cell of an output, which has all tokens of the horizon or ends before."""
        length = 1
        while (found := int(self.opened[tuple(tokens[: length - 1])][tokens[length - 1]])) < 0:
            length += 1
        return found


Look = Callable[[Sequence[Path]], Sequence[Place]]
"""The places after some prefixes of one length."""


def joint(
    look: Look,
    *,
    horizon: int,
    drafted: int,
    undrafted: int = 0,
    ends: frozenset[int] = frozenset(),
    names: Sequence[str] = (),
) -> tuple[Cells, dict[str, Float[np.ndarray, " cell"]]]:
    """Returns the cells of the next ``horizon`` tokens, and the laws of the right rule (``HONEST``) and of mistakes.

    Beside them are the laws that rounding may make of the right one (``EDGES``).

    Args:
        drafted: Tokens of a round's chain.
        undrafted: The first tokens, which come without drafts.
        ends: Tokens behind which nothing follows.
        names: The mistakes; by default all.
    """
    rules = {HONEST: lambda at: _round(at.p, at.q), **EDGES, **{name: MISTAKES[name] for name in names or MISTAKES}}
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
