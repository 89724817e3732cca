"""Acceptance rates by depth and sibling rank, and the number of tokens that a tree of any shape is expected to emit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from specdec.arguments import shown
from specdec.shape import TreeShape


@dataclass(frozen=True, eq=False)
class AcceptanceRates:
    """How often the child of each rank is the accepted one, among nodes of the depth above that were accepted.

    One number stands for all nodes of a depth and a rank, whichever tokens they are and whichever ranks their ancestors
    have. This is the positional assumption of Sequoia (Chen et al. 2024, arXiv 2402.12374), here for each depth by
    itself. The rates of one parent's children add up to at most 1, because at most one of them is accepted.

    Attributes:
        table: The rate of rank r at depth d in ``table[d - 1, r]``, with NaN where it is not known. The known ranks of
            a depth are the first ones, and the known depths too.

    Raises:
        ValueError: The table is not of this form, or a number in it is no probability.

    A drafter whose first token is right in 70 % of all rounds and its second one in another 10 %, and which is right
    at depth 2 in 60 %::

        rates = AcceptanceRates.of([[0.7, 0.1], [0.6]])
        rates.tokens_per_round(TreeShape.from_paths([(0,), (1,), (0, 0)]))  # 1 + 0.7 + 0.1 + 0.7 * 0.6 = 2.22
    """

    table: Float[np.ndarray, "depth rank"]

    def __post_init__(self) -> None:
        known = ~np.isnan(self.table)
        if self.table.ndim != 2 or not self.table.size or not known[0, 0]:
            raise ValueError(
                f"acceptance rates of shape {self.table.shape}: give one row per depth and one column per rank, the "
                f"rate of rank 0 at depth 1 at least"
            )
        gaps = known[:, 1:] & ~known[:, :-1]
        if gaps.any() or (known[1:, 0] & ~known[:-1, 0]).any():
            raise ValueError("acceptance rates are known behind ranks or depths where they are not: fill in the gap")
        values = self.table[known]
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"acceptance rates {shown(values[(values < 0) | (values > 1)].tolist())}: give 0 to 1")
        if (np.nansum(self.table, axis=1) > 1 + 1e-6).any():
            raise ValueError(
                "the acceptance rates of a depth add up to more than 1, and at most one of a node's children is "
                "accepted: give each rank's share of all nodes whose parent was accepted"
            )

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> "AcceptanceRates":
        """Returns the rates of a list per depth, of a rate per rank; the lists may differ in length."""
        table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for depth, row in enumerate(rows):
            table[depth, : len(row)] = row
        return cls(table)

    @property
    def max_depth(self) -> int:
        """The deepest node of which a rate is known."""
        return int((~np.isnan(self.table[:, 0])).sum())

    def at(self, depth: int) -> Float[np.ndarray, " rank"]:
        """Returns the known rates of a depth, from 1 on."""
        row = self.table[depth - 1] if depth <= len(self.table) else self.table[:0, 0]
        return row[~np.isnan(row)]

    def reached(self, shape: TreeShape) -> Float[np.ndarray, " node"]:
        """Returns the probability that each node is accepted with all nodes above it; the root's is 1.

        Raises:
            ValueError: The rate of a node is not known.
        """
        reached = np.ones(shape.num_nodes + 1)
        for node, depth, rank in _drafted(shape):
            known = self.at(depth)
            if rank >= len(known):
                raise ValueError(
                    f"the tree has a child of rank {rank} at depth {depth}, where "
                    f"{f'the first {len(known)} ranks have' if len(known) else 'no rank has'} a known acceptance rate: "
                    f"give a smaller tree, or rates of a wider one"
                )
            reached[node] = reached[shape.parents[node]] * known[rank]
        return reached

    def tokens_per_round(self, shape: TreeShape) -> float:
        """Returns the expected number of tokens that a round emits, the recovered or bonus token included.

        This is the sum of ``reached`` over all nodes, the root included. It is exact for rules that decide about a node
        before they look at what stands below it, as rejection sampling does, under the assumption of the class.

        Raises:
            ValueError: The rate of a node is not known.
        """
        return float(self.reached(shape).sum())


def _drafted(shape: TreeShape) -> Iterator[tuple[int, int, int]]:
    """Yields number, depth and rank of every drafted node."""
    return ((node, shape.depths[node], shape.ranks[node]) for node in range(1, shape.num_nodes + 1))
