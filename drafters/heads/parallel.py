"""Training of models that fill masks: packed text with the masks of many drafts behind it, fewer at every depth."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from drafters.heads.training import Anchors, Prediction, TextBatch, TrainedHead


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch's text and the masks behind it, as many in every row; those of rows with fewer see only padding.

    A mask sees its document up to the element that predicts its draft's first token, and its own draft's masks above.

    Attributes:
        masks: How many they are in a row.
        seen: The elements that each element sees.
        predicts: The element of the flattened batch that predicts each depth of each anchor's draft; 0 where none does.
    """

    masks: int
    positions: Int[Tensor, "row element"]
    seen: Bool[Tensor, "row element element"]
    predicts: Int[Tensor, "anchor depth"]

    @classmethod
    def behind(cls, batch: TextBatch, anchors: Anchors, *, before: int) -> "Masked":
        """The masks of all valid depths but the first.

        With the text ``a b c`` and one anchor at ``b``, whose draft has the two tokens behind it, there is one mask; it
        stands at the position of ``c``, sees ``a`` and ``b``, and predicts the token after ``c``. Depth 1 is predicted
        ``before`` places before the root: 1 for heads that read pairs.
        """
        rows, length = batch.tokens.shape
        row, place = anchors.index // length, anchors.index % length - before
        draft, depth = anchors.valid[:, 1:].nonzero(as_tuple=True)
        counts = row[draft].bincount(minlength=rows)
        most = int(counts.max())
        slot = torch.arange(len(draft), device=row.device) - (counts.cumsum(0) - counts)[row[draft]]
        origin = row.new_full((rows, most), -1)
        level = torch.zeros_like(origin)
        origin[row[draft], slot], level[row[draft], slot] = place[draft], depth + 1
        known = origin.clamp(min=0)
        own = batch.documents.gather(1, known)[:, :, None] == batch.documents[:, None]
        context = own & (torch.arange(length, device=row.device) <= origin[:, :, None])
        together = (origin[:, :, None] == origin[:, None]) & (level[:, :, None] >= level[:, None])
        text = torch.cat([batch.visible(), together.new_zeros(rows, length, most)], -1)
        predicts = torch.zeros_like(anchors.valid, dtype=torch.long)
        predicts[:, 0] = row * (length + most) + place
        predicts[draft, depth + 1] = row[draft] * (length + most) + length + slot
        return cls(
            masks=most,
            positions=torch.cat([batch.positions, batch.positions.gather(1, known) + level], 1),
            seen=torch.cat([text, torch.cat([context, together], -1)], 1),
            predicts=predicts,
        )

    def prediction(self, hidden: Float[Tensor, "row element width"]) -> Prediction:
        return Prediction([hidden.flatten(0, 1)[places] for places in self.predicts.unbind(1)])


def dropped(anchors: Anchors, batch: TextBatch, ratio: float, least: float, generator: torch.Generator) -> Anchors:
    """Conditional drop (COD; PARD, arXiv 2504.18583, section 3.3): a share of the drafts ends at every depth.

    Depth d + 1 keeps ``max(ratio ** d, least)`` of a row's anchors, drawn from those that reach it and were kept at
    depth d; all of them, if they are fewer.
    """
    rows, length = batch.tokens.shape
    device = anchors.index.device
    numbers = torch.rand(rows * length, generator=generator).to(device)
    row, kept = anchors.index // length, anchors.valid.clone()
    counts = row.bincount(minlength=rows)
    for depth in range(1, kept.shape[1]):
        there = torch.zeros(rows * length, dtype=torch.bool, device=device)
        there[anchors.index] = kept[:, depth] & kept[:, depth - 1]
        rank = (numbers + (~there)).view(rows, length).argsort(1).argsort(1).flatten()[anchors.index]
        kept[:, depth] = there[anchors.index] & (rank < (counts * max(ratio**depth, least)).long()[row])
    return Anchors(anchors.index, kept, kept)


class FillsMasks(TrainedHead):
    """A head whose drafts are masks, of which there are fewer at every depth while it is trained; see ``dropped``."""

    before = 0
    keeps: float
    keeps_least: float

    def drop(self, keeps: float, least: float) -> None:
        """Note the shares. Raises ValueError: they are none."""
        for name, share in (("keeps", keeps), ("keeps_least", least)):
            if not 0 < share <= 1:
                raise ValueError(f"head.{name}={share}: give a share above 0, and at most 1")
        self.keeps, self.keeps_least = keeps, least

    def anchors(self, batch: TextBatch, generator: torch.Generator) -> Anchors:
        every = Anchors.everywhere(batch, self.depths, before=self.before)
        return dropped(every, batch, self.keeps, self.keeps_least, generator) if self.training else every


def mask_token(target_name: str, vocab_size: int, given: int | None) -> int:
    """Returns the token of masks: the one given, which must be the target's, else the last of the vocabulary."""
    if given is not None and not 0 <= given < vocab_size:
        raise ValueError(f"head.mask_token_id={given}: the target {target_name} has the tokens 0 to {vocab_size - 1}")
    return vocab_size - 1 if given is None else given
