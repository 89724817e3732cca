"""As many nodes as earn more than they cost."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.arguments import whole
from specdec.batch import Batch
from specdec.drafting.builders.base import TreeBuilder
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies.nodes import NodePolicy
from specdec.drafting.scorer import Scorer


class CostAwareNodes(NodePolicy):
    """Verifies nodes in the order of their survival while the expected tokens per measured second grow.

    With B rows and n nodes in each, a round is expected to emit B + Σ survival tokens, over the n most likely nodes of
    every row, in C(B, n) seconds (``RoundCosts``). A batch is as wide as its widest row, so all rows take the same
    number: the first n after which one more node per row would lower the ratio. To stop there, and not at the largest
    ratio of all, is what keeps the output exact where tokens are drawn at random: whether there is a node does not
    depend on those behind it (DSpark, arXiv 2607.05147, appendix A and algorithm 1). Nothing is lost by it, because the
    costs are made convex first, and a sum of falling gains over a convex cost has one maximum.

    The whole tree is drafted, whatever is verified of it. With a drafter that works level by level, ``CostAwareLength``
    may save more: it also spares the drafting.

    Args:
        costs: How long rounds take by the number of nodes, or a file of that (``RoundCosts.save``) or of calibrated
            costs. With None, set the attribute before the policy is used (``drafters.round_costs.measure_node_costs``).
        source: See ``NodePolicy``.
        calibration: See ``NodePolicy``.
        learn: See ``NodePolicy``.
        explore: See ``NodePolicy``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range, or the file holds no costs.
    """

    def __init__(
        self,
        costs: RoundCosts | str | Path | None = None,
        *,
        source: str = "auto",
        calibration: str | Path | None = None,
        learn: bool = True,
        explore: int = 32,
    ):
        super().__init__(source=source, calibration=calibration, learn=learn, explore=explore)
        self.costs = RoundCosts.load(costs, by_nodes=True) if isinstance(costs, str | Path) else costs

    @property
    def adapts(self) -> bool:
        """All rows take one number of nodes, so drafts depend on the other requests."""
        return True

    @property
    def version(self) -> tuple[Any, ...]:
        """Differs after a change of the costs, too."""
        return self.learn, self.explore, self.costs

    def bind(self, builder: TreeBuilder, scorer: Scorer, device: torch.device, *, max_batch_size: int) -> None:
        """Begin with a new engine.

        Raises:
            ValueError: As ``NodePolicy``; or the costs are unknown, or were measured with fewer nodes.
        """
        if self.costs is None:
            raise ValueError(
                "this policy needs to know how long rounds take: give costs=…, from "
                "drafters.round_costs.measure_node_costs"
            )
        self.costs.by_nodes(1, builder.max_nodes)
        super().bind(builder, scorer, device, max_batch_size=max_batch_size)
        self._device = device
        self._seconds: dict[tuple[RoundCosts, int], Tensor] = {}

    def prepare(self, rows: int) -> None:
        """Copy the costs of this batch size to the device, once."""
        assert self.costs is not None, "checked by bind"
        if (self.costs, rows) not in self._seconds:
            with torch.inference_mode(False):
                seconds = torch.from_numpy(self.costs.by_nodes(rows, self._builder.max_nodes)).to(self._device)
                self._seconds[self.costs, rows] = seconds

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        """Returns the first nodes of every row, as many as pay."""
        assert self.costs is not None, "checked by bind"
        seconds = self._seconds[self.costs, len(batch)][: survival.shape[1]]
        emitted = survival.clamp(min=0).sum(0).cumsum(0)  # the root, which is certain, stands for the token after it
        speed = emitted / seconds
        pays = (speed[1:] > speed[:-1]).long().cumprod(0) > 0
        return torch.nn.functional.pad(pays, (1, 0), value=True).expand_as(survival)


class FirstNodes(NodePolicy):
    """Verifies the same number of nodes in every round, the most likely ones: to measure what nodes cost.

    Args:
        nodes: This number; None for all.
    """

    def __init__(self, nodes: int | None = None):
        super().__init__(learn=False)
        self.nodes = None if nodes is None else whole("nodes", nodes, least=0)

    @property
    def version(self) -> tuple[Any, ...]:
        """Differs after a change of the number."""
        return (self.nodes,)

    def kept(self, survival: Float[Tensor, "batch node"], batch: Batch) -> Bool[Tensor, "batch node"]:
        """Returns the first nodes of every row."""
        count = survival.shape[1] if self.nodes is None else self.nodes + 1
        return (torch.arange(survival.shape[1], device=survival.device) < count).expand_as(survival)
