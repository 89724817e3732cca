"""Acceptance rates by depth and sibling rank, from the rounds of a trace.

No acceptance is sampled: the rule that ran says how likely each node of a draft is to be reached, and these
probabilities are added up in the place of counts. What they are measured on is the contexts that the recorded rounds
began at. Rounds with another tree begin elsewhere in the text, and then the rates may be a little different.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import torch

from experiments.results.statistics import Bootstrap, Interval
from experiments.tracing.draft_sets import DraftSet, refusal
from experiments.tracing.scoring import batches
from specdec.drafting.best_shapes import AcceptanceRates
from specdec.interfaces import Verifier
from specdec.shape import TreeShape
from specdec.tree import DraftTree

PRIOR = 8.0
"""So many nodes' worth of the rank's average over all depths is added to each rate: a few nodes alone say little."""
_SAME = 1e-6
Frame = Any


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
    if (reason := refusal(rule, first)) is not None:
        raise ValueError(reason)
    if all(drafts.is_chain for drafts in sets):
        raise ValueError(
            f"the trace of {first.folder} has chains only ({first.method}, T={first.temperature:g}), from which no "
            f"rank but the first is known: record one with a wide tree, such as experiments.run trace=true "
            f"drafter={first.method} 'drafter.shape=[4,3,2,2]' sampling.temperature={first.temperature:g}"
        )
    frames, shapes, whole, top_down = zip(*(_nodes_of(drafts, rule) for drafts in sets), strict=True)
    nodes: Frame = pandas.concat(frames)
    order, depths, ranks = nodes.prompt.unique(), int(nodes.depth.max()), 1 + int(nodes["rank"].max())
    places = pandas.MultiIndex.from_product([order, range(1, depths + 1), range(ranks)])
    sums = nodes.groupby(["prompt", "depth", "rank"])[["accepted", "offered"]].sum().reindex(places, fill_value=0.0)
    accepted, offered = (sums[name].to_numpy().reshape(len(order), depths, ranks) for name in sums)
    return Recorded(
        drafts=first,
        shape=max(shapes, key=lambda shape: shape.num_nodes),
        prompts=tuple(order),
        accepted=accepted,
        offered=offered,
        rounds=sum(frame["round"].nunique() for frame in frames),
        tokens=float(np.mean(np.concatenate(whole))) if any(map(len, whole)) else float("nan"),
        top_down=all(top_down),
    )


def _nodes_of(drafts: DraftSet, rule: Verifier) -> tuple[Frame, TreeShape, list[float], bool]:
    """Ask the rule about the drafts of one set.

    Returns:
        A row per round and node of the static tree: prompt, round, depth, rank, and by how much it was accepted and
        offered; that tree, of which the end of an output has cut some; the expected tokens of the rounds that drafted
        to full depth; and whether the rule decides from the top down.

    Raises:
        ValueError: The trees change from round to round.
    """
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
    parents = max((above for above, _, _ in rounds), key=len)
    if any((above != parents[: len(above)]).any() for above, _, _ in rounds):
        raise ValueError(
            f"the drafts in the trace of {drafts.folder} ({drafts.method}, T={drafts.temperature:g}) have another "
            f"tree in every round, so that how often a rank was drafted depends on how good it looked: record a "
            f"trace with one static tree, such as 'drafter.shape=[4,3,2,2]'"
        )
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:].tolist(), start=1):
        paths.append((*paths[parent], int((parents[:node] == parent).sum())))
    depths = np.array([len(path) for path in paths])
    deepest = np.array([depths[: len(above)][valid].max() for above, valid, _ in rounds])
    reached = np.stack([np.pad(reached, (0, len(parents) - len(reached))) for *_, reached in rounds])
    # A child that q had nothing left for is missing in a round that drafted others of its depth.
    offered = depths[1:] <= deepest[:, None]
    frame = pandas.DataFrame(
        {
            "prompt": np.repeat(prompts, len(paths) - 1),
            "round": np.repeat(np.arange(len(rounds)), len(paths) - 1),
            "depth": np.tile(depths[1:], len(rounds)),
            "rank": np.tile([path[-1] for path in paths[1:]], len(rounds)),
            "accepted": (reached[:, 1:] * offered).ravel(),
            "offered": (reached[:, parents[1:]] * offered).ravel(),
        }
    )
    whole = reached.sum(1)[deepest == drafts.max_depth].tolist()
    return frame, TreeShape(paths[1:]), whole, top_down


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
