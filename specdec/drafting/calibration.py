"""How likely the nodes of a growing tree are to be accepted, known before their tokens are drawn.

``Calibration`` counts how often a drafter is right when it is so confident; ``Rater`` rates the nodes of a round by it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import Scorer
from specdec.host import can_look
from specdec.tree import DraftTree

BINS = 16  # of confidence: half a unit of its logit each, from -4 to 4
_SCALE, _LEAST = 2.0, -4.0
_ERROR_BINS = 15
_PRIOR = 8.0  # observations that the coarser estimate counts for
_SURE = 1 - 1e-6  # no node is as likely to be accepted as its parent, so that parents come first in any order
KINDS = ("greedy", "sampled")


class Calibration:
    """Counts, by a drafter's confidence, how often a node was accepted where its parent was.

    Greedy and sampled requests, ``depths`` and sibling ``ranks`` are counted apart. A cell in which little was counted
    leans on the same cell over all depths, and this one on the confidence itself. Predictions before a round are
    compared with what happened: expected calibration error (Guo et al. 2017, arXiv 1706.04599).
    """

    def __init__(self, depths: int, ranks: int, device: torch.device | str = "cpu"):
        self.depths, self.ranks = depths, ranks
        with torch.inference_mode(False):
            shape = len(KINDS), depths, ranks, BINS
            self.tried = torch.zeros(shape, dtype=torch.float64, device=device)
            self.right = torch.zeros(shape, dtype=torch.float64, device=device)
            # [figure, kind and depth, bin]: summed predictions, summed outcomes, nodes.
            self._judged = torch.zeros(3, len(KINDS) * depths, _ERROR_BINS, dtype=torch.float64, device=device)
            center = torch.sigmoid((torch.arange(BINS, dtype=torch.float64, device=device) + 0.5) / _SCALE + _LEAST)
            rank = torch.arange(ranks, device=device)[:, None]
            self._raw = center * (1 - center) ** rank  # the next sibling has its chance in what the others leave

    def cells(
        self,
        confidence: Float[Tensor, "batch node"],
        kind: Int[Tensor, "batch 1"],
        depth: Int[Tensor, "rows node"],
        rank: Int[Tensor, "rows node"],
    ) -> Int[Tensor, "batch node"]:
        """Return the cells of nodes in the flattened counts; ``kind`` is 0 for greedy rows, depths count from 1."""
        place = ((torch.logit(confidence.double(), eps=1e-6) - _LEAST) * _SCALE).long().clamp_(0, BINS - 1)
        return ((kind * self.depths + depth - 1) * self.ranks + rank) * BINS + place

    def rates(self) -> Float[Tensor, " cell"]:
        """Return the probability that a node is accepted if its parent is, by cell; never more for a later sibling."""
        pooled = (self.right.sum(1, keepdim=True) + _PRIOR * self._raw) / (self.tried.sum(1, keepdim=True) + _PRIOR)
        rates = (self.right + _PRIOR * pooled) / (self.tried + _PRIOR)
        return rates.cummin(dim=2).values.clamp(max=_SURE).flatten()

    def count(
        self,
        cells: Int[Tensor, "batch node"],
        survival: Float[Tensor, "batch node"],
        tried: Bool[Tensor, "batch node"],
        accepted: Bool[Tensor, "batch node"],
        *,
        learn: bool,
    ) -> None:
        """Count a round's nodes (cell -1 for none), ``tried`` if the parent was accepted, and judge ``survival``."""
        there, flat = (cells >= 0).double(), cells.clamp(min=0).flatten()
        if learn:
            tries = (tried * there).flatten()
            self.tried.view(-1).index_add_(0, flat, tries)
            self.right.view(-1).index_add_(0, flat, tries * accepted.flatten())
        place = (survival * _ERROR_BINS).long().clamp_(max=_ERROR_BINS - 1)
        place = cells.clamp(min=0) // (self.ranks * BINS) * _ERROR_BINS + place
        for row, values in enumerate((survival * there, accepted * there, there)):
            self._judged[row].view(-1).index_add_(0, place.flatten(), values.flatten().double())

    def errors(self) -> list[dict[str, Any]]:
        """Return mean ``predicted`` and ``accepted`` rates and ``calibration_error`` by ``requests`` and ``depth``."""
        predicted, happened, count = self._judged.cpu()
        figures = {"predicted": predicted, "accepted": happened, "calibration_error": (predicted - happened).abs()}
        return [
            {"requests": KINDS[number // self.depths], "depth": number % self.depths + 1, "nodes": int(nodes)}
            | {name: float(table[number].sum() / nodes) for name, table in figures.items()}
            for number, nodes in enumerate(count.sum(-1).tolist())
            if nodes
        ]

    def save(self, path: str | Path, **facts: Any) -> None:
        counts = {"tried": self.tried.tolist(), "right": self.right.tolist()}
        text = json.dumps({**facts, "errors": self.errors(), **counts}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def load(self, path: str | Path, *, source: str) -> None:
        """Begin with the counts of a file that ``save`` wrote; deeper nodes and more siblings in it do not count."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            tried, right = (torch.tensor(found[name], dtype=torch.float64) for name in ("tried", "right"))
            if tried.dim() != 4 or tried.shape != right.shape or tried.shape[::3] != (len(KINDS), BINS):
                raise ValueError(f"its counts have the shape {list(tried.shape)}")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no calibration ({error}): give a calibration.json of a run") from error
        depths, ranks = tried.shape[1:3]
        if found.get("source") != source or depths < self.depths or ranks < self.ranks:
            raise ValueError(
                f"{path} is a calibration of source={found.get('source')} to depth {depths} and {ranks} siblings, and "
                f"these drafts have source={source}, depth {self.depths} and {self.ranks}: give that of such a run"
            )
        self.tried.copy_(tried[:, : self.depths, : self.ranks])
        self.right.copy_(right[:, : self.depths, : self.ranks])


SOURCES = ("auto", "head", "top", "entropy", "margin")


@dataclass(frozen=True, eq=False)
class Rated:
    """The cells of a tree's nodes (-1 for the root), and the probability that each is accepted, before it is drawn."""

    cells: Int[Tensor, "batch node"]
    survival: Float[Tensor, "batch node"]


class Rater:
    """Rates the nodes of one round's trees.

    Args:
        source: Where confidence comes from: ``"head"`` (the scorer's own), ``"top"`` (the largest probability under the
            drafter at temperature 1), ``"entropy"`` (exp of minus its entropy in nats), or ``"margin"`` (σ(m − 2) for
            the difference m of the two largest log-probabilities, as in vLLM's ``acceptance_estimator.py``).
        calibration: From confidence to probability.
        least: A draft may end where no node is as likely as this; None to draft all nodes.
    """

    def __init__(self, scorer: Scorer, source: str, calibration: Calibration, batch: Batch, least: float | None):
        self._scorer, self._source, self._calibration = scorer, source, calibration
        self._kind = (batch.sampling.temperature > 0).long()[:, None]
        self._rates = calibration.rates()
        self._rows = batch.drafting[:, None]
        self.least = least if can_look(self._rows) else None

    def pays(self, survival: Float[Tensor, "batch node"]) -> bool:
        """Return whether any of some nodes is worth drafting; the host looks."""
        return bool(((survival >= (self.least or 0.0)) & self._rows).any())

    def nodes(
        self,
        confidence: Float[Tensor, "batch node"],
        parents: Int[Tensor, "batch node"],
        depth: Int[Tensor, "batch node"],
        rank: Int[Tensor, "batch node"],
    ) -> Rated:
        """Return the ratings of whole trees, the root first (parent -1, depth 0), parents before children."""
        root = parents < 0
        cells = self._calibration.cells(confidence, self._kind, depth.clamp(min=1), rank)
        survival = self._rates[cells].masked_fill(root, 1.0)
        above, rate = parents.clamp(min=0), survival
        for _ in range(self._calibration.depths - 1):
            survival = survival * rate.gather(1, above)
            above = parents.gather(1, above).clamp(min=0)
        return Rated(cells.masked_fill(root, -1), survival)

    def paths(self, logs: Float[Tensor, "batch node"], tree: DraftTree) -> Rated:
        own = logs - logs.gather(1, tree.parents.clamp(min=0))
        return self.nodes(own.exp().nan_to_num(nan=0.0), tree.parents, tree.depth, torch.zeros_like(tree.parents))

    def confidence(
        self, tokens: Int[Tensor, "batch node"], scores: Float[Tensor, "batch some token"], depth: int
    ) -> Float[Tensor, "batch some"]:
        if self._source == "head":
            found = self._scorer.confidence(tokens, depth)
            assert found is not None, "checked when the policy was bound"
            return found
        if self._source == "margin":
            first, second = scores.float().topk(2, dim=-1).values.unbind(-1)
            return (first - second - 2).sigmoid()
        log_probs = scores.float().log_softmax(-1)
        if self._source == "top":
            return log_probs.amax(-1).exp()
        return (log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(-1).exp()


def source_of(source: str, scorer: Scorer) -> str:
    """The source of confidence, for ``"auto"`` the scorer's own if it has one."""
    if source == "auto":
        return "head" if scorer.has_confidence else "top"
    if source == "head" and not scorer.has_confidence:
        raise ValueError("source=head is its confidence head; this drafter has none: give top, entropy, margin or auto")
    return source
