"""Acceptance rates by depth and sibling rank, from the rounds of a trace.

No acceptance is sampled: the probabilities that the rule that ran reaches each node stand in the place of counts, in
the contexts that the recorded rounds began at. Rounds with another tree begin elsewhere in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from experiments.results.statistics import Bootstrap, Interval
from experiments.tracing.scoring import DraftSet, batches, refusal
from specdec.drafting.best_shapes import AcceptanceRates
from specdec.interfaces import Verifier
from specdec.shape import TreeShape
from specdec.tree import DraftTree

PRIOR = 8.0
"""So many nodes' worth of the rank's average over all depths is added to each rate: a few nodes alone say little."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """Acceptance by depth and rank in the drafts of a trace.

    Attributes:
        accepted: For every prompt, depth and rank, the expected number of accepted nodes.
        offered: Likewise of accepted nodes of the depth above for which a child of this rank was drafted or, because q
            had nothing left to draw, could not be.
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
        table /= table.sum(1, keepdims=True).clip(min=1)  # ranks that only some nodes had were measured on these alone
        return AcceptanceRates(np.where(offered > 0, table, np.nan))

    def tokens_interval(self, shape: TreeShape, bootstrap: Bootstrap) -> Interval | None:
        """The interval over prompts of the tokens per round that are predicted for a tree."""

        def tokens(sums: np.ndarray) -> np.ndarray:
            rates = _rates(*sums.reshape(len(sums), 2, *self.accepted.shape[1:]).swapaxes(0, 1))
            reached = [np.ones(len(sums))]
            for node in range(1, shape.num_nodes + 1):
                parent, depth, rank = shape.parents[node], shape.depths[node], shape.ranks[node]
                reached.append(reached[parent] * rates[:, depth - 1, rank])
            return np.sum(reached, axis=0)[None]

        tables = np.stack([self.accepted, self.offered], axis=1).reshape(len(self.prompts), -1)
        return (bootstrap.over_tables(tokens, tables) or [None])[0]


def record(sets: Sequence[DraftSet], rule: Verifier) -> Recorded:
    """Add up what the drafts of one drafter at one temperature say, of runs with the same tree, which has siblings."""
    first = sets[0]
    if (reason := refusal(rule, first)) is not None:
        raise ValueError(reason)
    if all(drafts.is_chain for drafts in sets):
        raise ValueError(
            f"the trace of {first.folder} has chains only ({first.method}, T={first.temperature:g}), from which no "
            f"rank but the first is known: record one with a wide tree, such as 'drafter.shape=[4,3,2,2]'"
        )
    prompts: list[str] = []
    rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # parents, valid nodes, how likely each is reached
    top_down = True
    for keys, tree, p in chain.from_iterable(map(batches, sets)):
        stop = rule.laws(tree, p).stop
        top_down = top_down and _is_top_down(rule, tree, p, stop)
        reached = (stop[:, None] @ tree.ancestors.to(stop.dtype).expand(len(stop), -1, -1))[:, 0]
        prompts += [key.prompt for key in keys]
        for columns in zip(tree.parents.numpy(), tree.valid.numpy(), reached.numpy(), strict=True):
            end = int(np.flatnonzero(columns[1])[-1]) + 1  # without the padding behind its last node
            rounds.append((columns[0][:end], columns[1][:end], columns[2][:end]))
    parents = max((above for above, _, _ in rounds), key=len)  # the static tree; the end of an output has cut others
    if any((above != parents[: len(above)]).any() for above, _, _ in rounds):
        raise ValueError(
            f"the drafts in the trace of {first.folder} ({first.method}, T={first.temperature:g}) have another tree in "
            f"every round: record a trace with one static tree, such as 'drafter.shape=[4,3,2,2]'"
        )
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:].tolist(), start=1):
        paths.append((*paths[parent], int((parents[:node] == parent).sum())))
    depths, ranks = np.array([len(path) for path in paths]), np.array([path[-1] for path in paths[1:]])
    deepest = np.array([depths[: len(above)][valid].max() for above, valid, _ in rounds])
    reached = np.stack([np.pad(reached, (0, len(parents) - len(reached))) for *_, reached in rounds])
    # A child that q had nothing left for is missing in a round that drafted others of its depth.
    drafted = depths[1:] <= deepest[:, None]
    order = list(dict.fromkeys(prompts))
    places = np.array([order.index(prompt) for prompt in prompts])[:, None], depths[1:] - 1, ranks
    accepted, offered = np.zeros((2, len(order), depths.max(), ranks.max() + 1))
    np.add.at(accepted, places, reached[:, 1:] * drafted)
    np.add.at(offered, places, reached[:, parents[1:]] * drafted)
    return Recorded(
        drafts=first,
        shape=TreeShape(paths[1:]),
        prompts=tuple(order),
        accepted=accepted,
        offered=offered,
        rounds=len(rounds),
        tokens=float(reached.sum(1)[deepest == depths.max()].mean()),
        top_down=top_down,
    )


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
    return bool((alone - stop[:, 0]).abs().max() < 1e-6)
