"""How likely the nodes of a growing tree are to be accepted, known before their tokens are drawn."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.calibration import Calibration
from specdec.drafting.levels import Level
from specdec.drafting.scorer import Scorer
from specdec.host import can_look
from specdec.tree import DraftTree

SOURCES = ("auto", "head", "top", "entropy", "margin")


@dataclass(frozen=True, eq=False)
class Rated:
    """What is known of a tree's nodes before their tokens were drawn; the root is certain.

    Attributes:
        cells: Where the calibration counts each node; -1 for the root.
        survival: The probability that the node is accepted.
    """

    cells: Int[Tensor, "batch node"]
    survival: Float[Tensor, "batch node"]

    def first(self, nodes: int) -> "Rated":
        """Return the ratings of the first nodes."""
        return self if nodes == self.cells.shape[1] else Rated(self.cells[:, :nodes], self.survival[:, :nodes])


class Rater:
    """Rates the nodes of one round's trees.

    Args:
        source: Where confidence comes from: ``"head"`` (the scorer's own), ``"top"`` (the largest probability under the
            drafter at temperature 1), ``"entropy"`` (exp of minus its entropy in nats, which is one over the number of
            tokens that it hesitates between) or ``"margin"`` (σ(m − 2) for the difference m of the two largest
            log-probabilities, so that the calibration tells margins of 0 to 6 nats apart).
        calibration: From confidence to probability.
        least: A draft may end where no node is as likely as this; None to draft all nodes.
    """

    def __init__(self, scorer: Scorer, source: str, calibration: Calibration, batch: Batch, least: float | None):
        self._scorer, self._source, self._calibration = scorer, source, calibration
        self._kind = (batch.sampling.temperature > 0).long()[:, None]
        self._rates = calibration.rates()
        self._rows, self._least = batch.drafting[:, None], least

    def begin(self, nodes: int) -> None:
        """Make room in ``rated`` for the nodes of a static tree, the root included; ``level`` fills it."""
        size, device = (len(self._rows), nodes), self._rows.device
        ones = torch.ones(size, dtype=torch.float64, device=device)
        self.rated = Rated(torch.full(size, -1, dtype=torch.long, device=device), ones)

    def level(self, level: Level, tokens: Int[Tensor, "batch node"], scores: Float[Tensor, "batch some token"]) -> bool:
        """Rate the children of a level's nodes, which are not drawn yet.

        Args:
            tokens: The tokens of all nodes so far.
            scores: Scores of the parents' children; one row may serve all parents.

        Returns:
            Whether there is any that is worth drafting, as far as the host may look.
        """
        rated = self.rated
        confidence = self.confidence(tokens.index_select(1, level.parents), scores, level.depth)
        confidence = confidence.expand(-1, len(level.parents)).index_select(1, level.row_of)
        depth = torch.full_like(level.rank_of, level.depth + 1)[None]
        cells = self._calibration.cells(confidence, self._kind, depth, level.rank_of[None])
        survival = rated.survival.index_select(1, level.parent_of) * self._rates[cells]
        rated.cells[:, level.children_at], rated.survival[:, level.children_at] = cells, survival
        if self._least is None or not can_look(survival):
            return True
        return bool(((survival >= self._least) & self._rows).any())

    def nodes(
        self,
        confidence: Float[Tensor, "batch node"],
        parents: Int[Tensor, "batch node"],
        depth: Int[Tensor, "batch node"],
        rank: Int[Tensor, "batch node"],
    ) -> Rated:
        """Return the ratings of whole trees, the root first (parent -1, depth 0) and every parent before its children.

        ``confidence`` and ``rank``, among siblings, are the nodes' own.
        """
        root = parents < 0
        cells = self._calibration.cells(confidence, self._kind, depth.clamp(min=1), rank)
        survival = self._rates[cells].masked_fill(root, 1.0)
        above, rate = parents.clamp(min=0), survival
        for _ in range(self._calibration.depths - 1):
            survival = survival * rate.gather(1, above)
            above = parents.gather(1, above).clamp(min=0)
        return Rated(cells.masked_fill(root, -1), survival)

    def paths(self, logs: Float[Tensor, "batch node"], tree: DraftTree) -> Rated:
        """Return the ratings of trees by the nodes' own probabilities, from the log-probabilities of their paths."""
        own = logs - logs.gather(1, tree.parents.clamp(min=0))
        return self.nodes(own.exp().nan_to_num(nan=0.0), tree.parents, tree.depth, torch.zeros_like(tree.parents))

    def confidence(
        self, tokens: Int[Tensor, "batch node"], scores: Float[Tensor, "batch some token"], depth: int
    ) -> Float[Tensor, "batch some"]:
        """Return the confidence in the children of some nodes of one depth, before any of them is drawn.

        Args:
            scores: Scores of their children; one row may serve all.
        """
        if self._source == "head":
            found = self._scorer.confidence(tokens, depth)
            assert found is not None, "checked when the policy was bound"
            return found
        if self._source == "margin":
            largest = scores.float().topk(2, dim=-1).values
            return (largest[..., 0] - largest[..., 1] - 2).sigmoid()
        log_probs = scores.float().log_softmax(-1)
        if self._source == "top":
            return log_probs.amax(-1).exp()
        return (log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(-1).exp()


def source_of(source: str, scorer: Scorer) -> str:
    """Return where confidence comes from, for ``"auto"`` the scorer's own if it has one."""
    if source == "auto":
        return "head" if scorer.has_confidence else "top"
    if source == "head" and not scorer.has_confidence:
        raise ValueError(
            "source=head asks for the drafter's confidence head, and this drafter has none: give source=top, entropy, "
            "margin or auto"
        )
    return source


def spared(played: Int[Tensor, "1"], every: int) -> Bool[Tensor, "1"]:
    """Return whether a round is one of those in which nothing is left out, so that all confidences are seen."""
    return (played + 1) % every == 0
