"""Compares what a head predicts with what the target says, piece by piece, so that no logits are kept."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.heads.training import Anchors, TargetStates, TextBatch, TrainedHead
from experiments.training.edr import drawn, everywhere
from experiments.training.losses import LEAST, Compared, CrossEntropy, DraftLoss, Places, Table
from experiments.training.weights import Power, Weights
from specdec.filters import keep_top
from specdec.requests import SamplingParams

ALL = SamplingParams(temperature=1.0)


class Comparison(nn.Module):
    """A head with its loss: from a batch to one number, and what was found on the way.

    Args:
        chunk: How many anchors are compared at a time. With more anchors than that, their logits are computed a second
            time for the gradient, and memory holds those of one piece.
        law: Of the requests that the head is for: its temperature divides both logits, its filters are the target's.

    Raises:
        ValueError: The loss is one of whole drafts, and the head trains none, or there are weights beside its own.
    """

    ends: Sequence[int] = ()  # the target's tokens that end a text

    def __init__(self, head: TrainedHead, loss: DraftLoss, weights: Weights, *, chunk: int, law: SamplingParams = ALL):
        super().__init__()
        name = f"the loss {type(loss).__name__}"
        if head.autoregressive and not loss.by_place:
            raise ValueError(f"{name} is of whole drafts, and this head trains depth 1 alone: give another loss")
        if not loss.by_place and vars(weights) != vars(Power(1.0)):
            raise ValueError(f"{name} weighs the depths of a draft itself: give weights=equal")
        self.head, self.loss, self.weights, self.chunk, self.law = head, loss, weights, chunk, law

    def forward(
        self, batch: TextBatch, states: TargetStates, anchors: Anchors, totals: Float[Tensor, " depth"], progress: float
    ) -> tuple[Float[Tensor, ""], Places]:
        """The loss and the places.

        The loss is the sum over depths of the mean weighted loss at that depth; of a loss over drafts, the mean over
        drafts. The means are over all places of a step: of every process, and of every part of the batch.

        Args:
            totals: The number of counted places at every depth in the whole step. This batch's sums are divided by it.
            progress: How much of the training is over.
        """
        factors = None
        if self.loss.everywhere:
            found = [self.places(batch, states, some) for some in everywhere(self.head, batch, anchors)]
            anchors, factors = drawn(found, batch, anchors)
        loss, places = self._compared(batch, states, anchors, self.loss, progress, factors)
        weighted = (loss * self.weights(places)).where(anchors.counted, 0.0)
        totals = totals if self.loss.by_place else totals[:1]
        return (weighted.sum(0) / totals.clamp(min=1)).sum(), places

    @torch.no_grad()
    def places(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Places:
        """The places alone."""
        return self._compared(batch, states, anchors, CrossEntropy(), 0.0, None)[1]

    def _compared(
        self, batch: TextBatch, states: TargetStates, anchors: Anchors, loss: DraftLoss, progress: float, factors: Any
    ) -> tuple[Table, Places]:
        """The loss at all places, which alone has a gradient, and the places; ``factors`` are the loss's own."""
        head, chunk, (count, depths) = self.head, self.chunk, anchors.valid.shape
        prediction = head(batch, states, anchors)
        assert len(prediction.states) == depths, "one state for each depth"
        ends = column_of(anchors.index.new_tensor(self.ends), head.columns)
        ends = [end for end in ends.tolist() if end >= 0]

        def piece(rows: slice) -> Float[Tensor, "table anchor depth"]:
            places, facts = anchors.places(batch)[rows], list[Tensor]()
            previous, columns = batch.tokens.flatten()[places], column_of(anchors.labels(batch)[rows], head.columns)
            with torch.no_grad():
                # Neighbouring anchors share most of their places: each is computed once.
                distinct, where = places.unique(return_inverse=True)
                log_p = self._target_law(states.logits(distinct))
                best = log_p.argmax(-1)
                covered, restricted, mass = torch.ones_like(best, dtype=torch.bool), log_p, None
                if head.columns is not None:
                    part = log_p.index_select(-1, head.columns)
                    mass = part.logsumexp(-1, keepdim=True)
                    covered, restricted = torch.isin(best, head.columns), part - mass

            def drafts(states: list[Tensor], *, noted: bool = False) -> Iterator[Compared]:
                for depth, state in enumerate(states):
                    at = where[:, depth]
                    given = head.logits(state[rows], previous[:, depth], depth + 1).float()
                    log_q = F.log_softmax(self._warmed(given), -1)
                    more = progress, 0.0 if mass is None else mass[at], ends
                    yield (compared := Compared(log_q, _rows(restricted, at), columns[:, depth], *more))
                    if noted:
                        with torch.no_grad():
                            top = log_q.argmax(-1)
                            agrees = (top if head.columns is None else head.columns[top]) == best[at]
                            text = compared.log_likelihood.exp(), compared.log_ratio.exp(), compared.cost
                            facts.append(torch.stack([compared.acceptance, agrees.float(), covered[at].float(), *text]))

            given = anchors.valid[rows], None if factors is None else factors[rows]
            value = prediction.weight(progress) * loss.over(drafts(prediction.states, noted=True), *given)
            for term in prediction.terms:
                if (weight := term.weight(progress)) > 0:
                    value = value + weight * loss.over(drafts(term.states), *given)
            return torch.cat([value[None], torch.stack(facts, -1)])

        again = count > chunk and torch.is_grad_enabled()
        found = [torch.zeros(7, 0, depths, device=anchors.index.device)]
        for rows in (slice(start, start + chunk) for start in range(0, count, chunk)):
            part: Any = checkpoint(piece, rows, use_reentrant=False) if again else piece(rows)
            found.append(part)
        value, *facts = torch.cat(found, 1)
        alpha, agrees, covered, *more = (fact.detach() for fact in facts)
        confidence = None if prediction.confidence is None else prediction.confidence.float()
        if confidence is not None and head.confidence_weight:
            surprise = F.binary_cross_entropy_with_logits(confidence, alpha.clamp(0, 1), reduction="none")
            value = value + head.confidence_weight * surprise
        judged = None if confidence is None else confidence.detach().sigmoid()
        return value, Places(anchors, alpha, agrees.bool(), covered.bool(), *more, confidence=judged)

    def _target_law(self, logits: Float[Tensor, "place vocab"]) -> Float[Tensor, "place vocab"]:
        """The logarithm of p, very low for tokens that are never drawn."""
        k, p = self.law.top_k, self.law.top_p
        filters = logits.new_tensor([k], dtype=torch.long), logits.new_tensor([p])
        kept = keep_top(self._warmed(logits)[None], *filters, largest_top_k=k, all_top_k=k > 0, any_top_p=p < 1)
        found = F.log_softmax(kept[0], -1)
        return found.clamp_(min=LEAST) if k or p < 1 else found

    def _warmed(self, logits: Float[Tensor, "place column"]) -> Float[Tensor, "place column"]:
        return logits if self.law.temperature == 1 else logits / self.law.temperature


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


def _rows(table: Float[Tensor, "place column"], index: Int[Tensor, " some"]) -> Float[Tensor, "some column"]:
    """Rows of a table: without copying them where they follow one another, as those of dense anchors do."""
    count = len(index)
    if index.is_cpu and count and int(index[-1]) - int(index[0]) == count - 1 and bool((index.diff() == 1).all()):
        return table[int(index[0]) : int(index[0]) + count]
    return table[index]
