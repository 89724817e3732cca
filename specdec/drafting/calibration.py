"""How often a drafter is right when it is so confident: counted, kept in a file, and judged."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BINS = 16
"""Bins of confidence: half a unit of its logit each, from -4 to 4."""
_SCALE, _LEAST = 2.0, -4.0
_ERROR_BINS = 15
_PRIOR = 8.0
"""How many observations the coarser estimate counts for."""
_SURE = 1 - 1e-6
"""No node is as likely to be accepted as its parent, so that parents come first in any order."""
KINDS = ("greedy", "sampled")


class Calibration:
    """Counts, by a drafter's confidence, how often a node was accepted where its parent was.

    Greedy and sampled requests, depths and sibling ranks are counted apart. A cell in which little was counted leans on
    the same cell over all depths, and this one on the confidence itself.

    Beside that it judges itself: of every node that was verified it compares the predicted probability that the node is
    accepted, made before the round, with what happened. The mean gap over bins of the prediction is the expected
    calibration error (Guo et al. 2017, arXiv 1706.04599).

    Args:
        depths: The deepest node.
        ranks: The largest number of siblings that are told apart.
        device: Where the counts are. Their addresses stay.
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
        """Return the cells of nodes, as indices into the flattened counts.

        ``confidence`` is that before the node was drawn, ``kind`` 0 for greedy rows and 1 for sampled ones, ``depth``
        counts from 1 and ``rank`` among siblings from 0.
        """
        place = ((torch.logit(confidence.double(), eps=1e-6) - _LEAST) * _SCALE).long().clamp_(0, BINS - 1)
        return ((kind * self.depths + depth - 1) * self.ranks + rank) * BINS + place

    def rates(self) -> Float[Tensor, " cell"]:
        """Return the probability that a node is accepted if its parent is, by cell.

        A later sibling is never more likely than an earlier one.
        """
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
        """Count the nodes of a round.

        Args:
            cells: Their cells; -1 for nodes that there were not.
            survival: The predicted probability that they are accepted.
            tried: Whether the parent was accepted.
            accepted: Whether the node was.
            learn: Whether to change the rates; otherwise they are judged only.
        """
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
        """Return how good the predictions have been, for every kind and depth at which nodes were verified.

        Each has ``requests`` (greedy or sampled), ``depth``, ``nodes``, ``predicted`` and ``accepted`` (mean rates) and
        ``calibration_error``.
        """
        predicted, happened, count = self._judged.cpu()
        found = []
        for number, nodes in enumerate(count.sum(-1).tolist()):
            if nodes:
                gap = (predicted[number] - happened[number]).abs().sum()
                found.append(
                    {
                        "requests": KINDS[number // self.depths],
                        "depth": number % self.depths + 1,
                        "nodes": int(nodes),
                        "predicted": float(predicted[number].sum() / nodes),
                        "accepted": float(happened[number].sum() / nodes),
                        "calibration_error": float(gap / nodes),
                    }
                )
        return found

    def error(self) -> float | None:
        """Return the expected calibration error over all nodes that were verified; None if there were none."""
        found = self.errors()
        nodes = sum(each["nodes"] for each in found)
        return sum(each["calibration_error"] * each["nodes"] for each in found) / nodes if nodes else None

    def save(self, path: str | Path, **facts: Any) -> None:
        """Write counts and errors as JSON, with more facts by name."""
        counts = {"tried": self.tried.tolist(), "right": self.right.tolist()}
        text = json.dumps({**facts, "calibration_error": self.error(), "errors": self.errors(), **counts}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def load(self, path: str | Path, *, source: str) -> None:
        """Begin with the counts of a file that ``save`` wrote; deeper nodes and more siblings in it do not count.

        Raises:
            ValueError: The file cannot be read, is something else, or was written for other trees or another source.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            tried, right = (torch.tensor(found[name], dtype=torch.float64) for name in ("tried", "right"))
            if tried.dim() != 4 or tried.shape != right.shape or tried.shape[::3] != (len(KINDS), BINS):
                raise ValueError(f"its counts have the shape {list(tried.shape)}")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no calibration ({error}): give a calibration.json of a run") from error
        if found.get("source") != source:
            raise ValueError(
                f"{path} is a calibration of source={found.get('source')}, and these drafts have source={source}: give "
                f"the file of a run with the same kind of drafter and tree"
            )
        if tried.shape[1] < self.depths or tried.shape[2] < self.ranks:
            raise ValueError(
                f"{path} is a calibration of drafts of depth {tried.shape[1]} with {tried.shape[2]} siblings, and "
                f"these are of depth {self.depths} with {self.ranks}: give one of drafts as deep and wide, or null"
            )
        self.tried.copy_(tried[:, : self.depths, : self.ranks])
        self.right.copy_(right[:, : self.depths, : self.ranks])
