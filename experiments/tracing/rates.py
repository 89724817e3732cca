"""Acceptance rates by depth and sibling rank, from the rounds of a trace.

No acceptance is sampled: the rule that ran says how likely each node of a draft is to be reached, and these
probabilities are added up in the place of counts. What they are measured on is the contexts that the recorded rounds
began at. Rounds with another tree begin elsewhere in the text, and then the rates may be a little different.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from experiments.results.statistics import Bootstrap, Interval, totals
from experiments.tracing.draft_sets import DraftSet, refusal
from experiments.tracing.scoring import batches
from specdec.drafting.best_shapes import AcceptanceRates
from specdec.interfaces import Verifier
from specdec.shape import TreeShape
from specdec.tree import DraftTree

PRIOR = 8.0
"""So many nodes' worth of the rank's average over all depths is added to each rate: a few nodes alone say little."""
_SAME = 1e-6


@dataclass(frozen=True, eq=False)
class Recorded:
    """Acceptance by depth and rank in the drafts of a trace.

    Attributes:
        prompts: The prompts, in the order of the first axis of the following two.
        accepted: For every prompt, depth and rank, the expected number of accepted nodes.
        offered: The expected number of accepted nodes of the depth above for which a child of this rank was drafted
            or, because q had nothing left to draw, could not be.
        tokens: The expected tokens per round, as recorded, in rounds that drafted to full depth.
        top_down: Whether the rule decided about every node before it looked below it.
    """

    drafts: DraftSet
    shape: TreeShape
    prompts: tuple[str, ...]
    accepted: np.ndarray
    offered: np.ndarray
    rounds: int
    tokens: float
    top_down: bool

    def rates(self) -> AcceptanceRates:
        """The rates of all prompts together, of every depth and rank that was drafted."""
        offered = self.offered.sum(0)
        table = np.where(offered > 0, _rates(self.accepted.sum(0), offered), 0)
        # Ranks that only some nodes of a depth had were measured on these alone.
        table /= table.sum(1, keepdims=True).clip(min=1)
        return AcceptanceRates(np.where(offered > 0, table, np.nan))

    def rate_interval(self, depth: int, rank: int, bootstrap: Bootstrap) -> Interval | None:
        """The interval of one rate over prompts; None with fewer than two of them."""
        depths = self.accepted.shape[1]

        def rate(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
            sums = np.stack([column.sum(axis) for column in columns], axis=-1)[..., None]
            return _rates(sums[..., :depths, :], sums[..., depths:, :])[..., depth - 1, 0]

        return bootstrap.interval(rate, [*self.accepted[:, :, rank].T, *self.offered[:, :, rank].T])

    def tokens_interval(self, shape: TreeShape, bootstrap: Bootstrap) -> Interval | None:
        """The interval over prompts of the tokens per round that are predicted for a tree."""
        size = self.accepted[0].size

        def tokens(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
            sums = np.stack([column.sum(axis) for column in columns], axis=-1)
            halves = (sums[..., :size], sums[..., size:])
            rates = _rates(*(half.reshape(*half.shape[:-1], *self.accepted.shape[1:]) for half in halves))
            reached = [np.ones(rates.shape[:-2])]
            for node in range(1, shape.num_nodes + 1):
                parent, depth, rank = shape.parents[node], shape.depths[node], shape.ranks[node]
                reached.append(reached[parent] * rates[..., depth - 1, rank])
            return np.sum(reached, axis=0)

        columns = [column for table in (self.accepted, self.offered) for column in table.reshape(len(table), -1).T]
        return bootstrap.interval(tokens, columns)


def record(sets: Sequence[DraftSet], rule: Verifier) -> Recorded:
    """Add up what the drafts of one drafter at one temperature say.

    Args:
        sets: The drafts, of one run or of several with the same tree.

    Raises:
        ValueError: The drafts had no siblings, or trees that changed from round to round, or the rule cannot be asked.
    """
    first = sets[0]
    reason = refusal(rule, first)
    if reason is not None:
        raise ValueError(reason)
    wide = [each for each in sets if not each.is_chain]
    if not wide:
        raise ValueError(
            f"the trace of {first.folder} has chains only ({first.method}, T={first.temperature:g}), from which no "
            f"rank but the first is known: record one with a wide tree, such as experiments.run trace=true "
            f"drafter={first.method} 'drafter.shape=[4,3,2,2]' sampling.temperature={first.temperature:g}"
        )
    parts = [_rounds_of(drafts, rule) for drafts in sets]
    shapes = [part.shape for part in parts]
    size = max(shape.max_depth for shape in shapes), max(1 + max(shape.ranks) for shape in shapes)
    names = [name for part in parts for name in part.prompts]
    order = list(dict.fromkeys(names))
    tables = np.zeros((len(names), 2, *size))
    for part, end in zip(parts, np.cumsum([len(part.prompts) for part in parts]), strict=True):
        depth, rank = part.tables.shape[2:]
        tables[end - len(part.prompts) : end, :, :depth, :rank] = part.tables
    by_prompt = np.stack([totals(names, column, order) for column in tables.reshape(len(tables), -1).T], axis=1)
    by_prompt = by_prompt.reshape(len(order), 2, *size)
    whole = [value for part in parts for value in part.whole]
    return Recorded(
        drafts=first,
        shape=max(shapes, key=lambda shape: shape.num_nodes),
        prompts=tuple(order),
        accepted=by_prompt[:, 0],
        offered=by_prompt[:, 1],
        rounds=len(names),
        tokens=float(np.mean(whole)) if whole else float("nan"),
        top_down=all(part.top_down for part in parts),
    )


class _Rounds(NamedTuple):
    """The rounds of one set of drafts.

    ``shape`` is the static tree of all, of which the end of an output has cut some; ``tables`` the accepted and the
    offered nodes of every round, by depth and rank; ``whole`` the expected tokens of those that drafted to full depth.
    """

    prompts: list[str]
    shape: TreeShape
    tables: np.ndarray
    whole: list[float]
    top_down: bool


def _rounds_of(drafts: DraftSet, rule: Verifier) -> _Rounds:
    """Ask the rule about the drafts of one set. Raises ValueError: the trees change from round to round."""
    prompts: list[str] = []
    rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parents, valid nodes, how likely each is reached
    top_down = True
    for keys, tree, p in batches(drafts):
        stop = rule.laws(tree, p).stop
        top_down = top_down if prompts else _is_top_down(rule, tree, p, stop)
        reached = (stop[:, None] @ tree.ancestors.to(stop.dtype).expand(len(stop), -1, -1))[:, 0]
        prompts += [key.prompt for key in keys]
        for columns in zip(tree.parents.numpy(), tree.valid.numpy(), reached.numpy(), strict=True):
            end = int(np.flatnonzero(columns[1])[-1]) + 1  # without the padding behind its last node
            rounds.append((columns[0][:end], columns[1][:end], columns[2][:end]))
    parents = max((each[0] for each in rounds), key=len)
    if any((own != parents[: len(own)]).any() for own, _, _ in rounds):
        raise ValueError(
            f"the drafts in the trace of {drafts.folder} ({drafts.method}, T={drafts.temperature:g}) have another "
            f"tree in every round, so that how often a rank was drafted depends on how good it looked: record a "
            f"trace with one static tree, such as 'drafter.shape=[4,3,2,2]'"
        )
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:].tolist(), start=1):
        paths.append((*paths[parent], int((parents[:node] == parent).sum())))
    depths, ranks = np.array([len(path) for path in paths]), np.array([path[-1] for path in paths[1:]])
    deepest = [int(depths[: len(own)][valid].max()) for own, valid, _ in rounds]
    padded = np.stack([np.pad(reached, (0, len(parents) - len(reached))) for *_, reached in rounds])
    # A child that q had nothing left for is missing in a round that drafted others of its depth.
    offered = depths[1:] <= np.array(deepest)[:, None]
    tables = np.zeros((len(rounds), 2, depths.max(), ranks.max() + 1))
    for table, values in zip(tables.swapaxes(0, 1), (padded[:, 1:], padded[:, parents[1:]]), strict=True):
        for node in range(len(ranks)):
            table[:, depths[node + 1] - 1, ranks[node]] += values[:, node] * offered[:, node]
    whole = [float(each[2].sum()) for each, depth in zip(rounds, deepest, strict=True) if depth == drafts.max_depth]
    return _Rounds(prompts, TreeShape(paths[1:]), tables, whole, top_down)


def _rates(accepted: np.ndarray, offered: np.ndarray) -> np.ndarray:
    """Rates by depth and rank, on the last two axes; the rank's average where nothing was offered."""
    over_depths = offered.sum(-2, keepdims=True)
    average = accepted.sum(-2, keepdims=True) / np.where(over_depths > 0, over_depths, 1)
    return (accepted + PRIOR * average) / (offered + PRIOR)


def _is_top_down(rule: Verifier, tree: DraftTree, p: torch.Tensor, stop: torch.Tensor) -> bool:
    """Whether the first level's nodes would be reached as often if nothing stood below them."""
    if tree.max_depth < 2:
        return True
    first = tree.limited(torch.ones(len(p), dtype=torch.long))
    alone = rule.laws(first, p).stop[:, 0]
    return bool((alone - stop[:, 0]).abs().max() < _SAME)
