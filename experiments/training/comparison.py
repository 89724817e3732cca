"""Compares what a head predicts with what the target says, piece by piece, so that no logits are kept."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, TrainedHead
from experiments.training.losses import Compared, Loss
from experiments.training.weights import Weights


@dataclass(frozen=True, eq=False)
class Places:
    """The findings at every place of the drafts, for the figures. Places that are not valid hold anything.

    Attributes:
        acceptance: α = Σ min(p, q) over the target's whole vocabulary.
        agrees: Whether q's most probable token is p's.
        covered: Whether the head has a column for p's most probable token.
        confidence: The confidence head's probability; None without one.
    """

    anchors: Anchors
    acceptance: Float[Tensor, "anchor depth"]
    agrees: Bool[Tensor, "anchor depth"]
    covered: Bool[Tensor, "anchor depth"]
    confidence: Float[Tensor, "anchor depth"] | None


class Comparison(nn.Module):
    """A head with its loss: from a batch to one number, and what was found on the way.

    Args:
        chunk: How many anchors are compared at a time. With more anchors than that, their logits are computed a second
            time for the gradient, and memory holds those of one piece.
    """

    def __init__(self, head: TrainedHead, loss: Loss, weights: Weights, *, chunk: int):
        super().__init__()
        self.head = head
        self.loss, self.weights, self.chunk = loss, weights, chunk

    def forward(
        self, batch: TextBatch, states: TargetStates, anchors: Anchors, totals: Float[Tensor, " depth"], progress: float
    ) -> tuple[Float[Tensor, ""], Places]:
        """The loss and the places.

        The loss is the sum over depths of the mean weighted loss at that depth. The means are over all places of a
        step: of every process, and of every part of the batch.

        Args:
            totals: The number of counted places at every depth in the whole step. This batch's sums are divided by it.
            progress: How much of the training is over.
        """
        prediction = self.head(batch, states, anchors)
        assert len(prediction.states) == anchors.valid.shape[1], "one state for each depth"
        total = totals.new_zeros(())
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        count = len(anchors.index)
        for start in range(0, count, self.chunk):
            rows = slice(start, start + self.chunk)
            arguments = (batch, states, anchors, prediction, rows, progress)
            if count > self.chunk and torch.is_grad_enabled():
                found = checkpoint(self._piece, *arguments, use_reentrant=False)
            else:
                found = self._piece(*arguments)
            assert found is not None
            sums, *rest = found
            total = total + (sums / totals.clamp(min=1)).sum()
            parts.append((rest[0], rest[1], rest[2]))
        shape = anchors.valid.shape
        joined = [torch.cat(each) for each in zip(*parts, strict=True)] if parts else [totals.new_zeros(shape)] * 3
        confidence = None if prediction.confidence is None else prediction.confidence.detach().float().sigmoid()
        return total, Places(anchors, joined[0], joined[1].bool(), joined[2].bool(), confidence)

    def _piece(
        self,
        batch: TextBatch,
        states: TargetStates,
        anchors: Anchors,
        prediction: Prediction,
        rows: slice,
        progress: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums of weighted losses by depth, and acceptance, agreement and coverage at some anchors."""
        head = self.head
        places, labels = anchors.places(batch)[rows], anchors.labels(batch)[rows]
        counted = anchors.counted[rows]
        previous = batch.tokens.flatten()[places]
        with torch.no_grad():
            # Neighbouring anchors share most of their places: each is computed once.
            distinct, where = places.unique(return_inverse=True)
            log_p = F.log_softmax(states.logits(distinct), -1)
            best = log_p.argmax(-1)
            covered, restricted = restrict(log_p, best, head.columns)
        columns = column_of(labels, head.columns)
        losses, entropies, alphas, agreements = [], [], [], []
        for depth in range(1, places.shape[1] + 1):
            at = where[:, depth - 1]

            def compare(states: list[Tensor], depth: int = depth, at: Tensor = at) -> Compared:
                found = head.logits(states[depth - 1][rows], previous[:, depth - 1], depth).float()
                return Compared(F.log_softmax(found, -1), _rows(restricted, at), columns[:, depth - 1], progress)

            compared = compare(prediction.states)
            log_q, loss = compared.log_q, prediction.weight(progress) * self.loss(compared)
            for term in prediction.terms:
                if (weight := term.weight(progress)) > 0:
                    loss = loss + weight * self.loss(compare(term.states))
            losses.append(loss)
            with torch.no_grad():
                label = columns[:, depth - 1]
                found = -log_q.gather(-1, label.clamp(min=0)[:, None])[:, 0]
                entropies.append(found.where(label >= 0, 0.0))
                whole = compared.acceptance if head.columns is None else _overlap(log_q, _rows(log_p, at), head.columns)
                alphas.append(whole.detach())
                top = log_q.argmax(-1)
                agreements.append((top if head.columns is None else head.columns[top]) == best[at])
        loss, alpha = torch.stack(losses, 1), torch.stack(alphas, 1)
        weights = self.weights(torch.stack(entropies, 1), anchors.valid[rows]).detach()
        if prediction.confidence is not None and head.confidence_weight:
            given = prediction.confidence[rows].float()
            surprise = F.binary_cross_entropy_with_logits(given, alpha.clamp(0, 1), reduction="none")
            loss = loss + head.confidence_weight * surprise
        sums = (loss * weights).where(counted, 0.0).sum(0)
        return sums, alpha, torch.stack(agreements, 1).float(), covered[where].float()


def restrict(
    log_p: Float[Tensor, "place vocab"], best: Int[Tensor, " place"], columns: Int[Tensor, " column"] | None
) -> tuple[Bool[Tensor, " place"], Float[Tensor, "place column"]]:
    """Whether the most probable token has a column, and p renormalized over the columns."""
    if columns is None:
        return torch.ones_like(best, dtype=torch.bool), log_p
    part = log_p.index_select(-1, columns)
    return torch.isin(best, columns), part - part.logsumexp(-1, keepdim=True)


def column_of(tokens: Int[Tensor, "*shape"], columns: Int[Tensor, " column"] | None) -> Int[Tensor, "*shape"]:
    """The column of each token; -1 for tokens without one."""
    if columns is None:
        return tokens
    found = torch.searchsorted(columns, tokens).clamp(max=len(columns) - 1)
    return found.where(columns[found] == tokens, -1)


def counted(
    anchors: Anchors, batch: TextBatch, states: TargetStates, columns: Int[Tensor, " column"] | None, chunk: int
) -> Anchors:
    """The anchors with the places that the loss counts.

    With a reduced vocabulary these are the places where the target's most probable token has a column.
    """
    if columns is None:
        return anchors
    places = anchors.places(batch)
    distinct, where = places.unique(return_inverse=True)
    with torch.no_grad():
        best = torch.cat([states.logits(part).argmax(-1) for part in distinct.split(chunk)])
    return Anchors(anchors.index, anchors.valid, anchors.valid & torch.isin(best, columns)[where])


def _overlap(log_q: Tensor, log_p: Tensor, columns: Tensor) -> Tensor:
    """Returns Σ min(p, q), with q zero outside its columns."""
    return torch.minimum(log_q.exp(), log_p.index_select(-1, columns).exp()).sum(-1)


def _rows(table: Float[Tensor, "place column"], index: Int[Tensor, " some"]) -> Float[Tensor, "some column"]:
    """Rows of a table: without copying them where they follow one another, as those of dense anchors do."""
    count = len(index)
    if index.is_cpu and count and int(index[-1]) - int(index[0]) == count - 1 and bool((index.diff() == 1).all()):
        return table[int(index[0]) : int(index[0]) + count]
    return table[index]
