"""The input of a step: packed rows of tokens, and the target's states over them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of documents, one behind the other, padded at the end.

    Attributes:
        tokens: The tokens; 0 in the padding.
        supervised: Which tokens a head is to predict, such as those that an assistant says.
        documents: The number of the document that a token belongs to; -1 in the padding. Tokens see each other only
            within a document.
        positions: Positions in the document, from 0.
    """

    tokens: Int[Tensor, "row position"]
    supervised: Bool[Tensor, "row position"]
    documents: Int[Tensor, "row position"]
    positions: Int[Tensor, "row position"]

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        parts = (self.tokens, self.supervised, self.documents, self.positions)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def rows(self, start: int, count: int) -> "Batch":
        """Some of the rows."""
        parts = (self.tokens, self.supervised, self.documents, self.positions)
        return Batch(*(part[start : start + count] for part in parts))

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one document."""
        return bool((self.documents.amax(1, keepdim=True) > self.documents.where(self.documents >= 0, 2**30)).any())


@dataclass(frozen=True, eq=False)
class Anchors:
    """Where drafts begin. An anchor is the position of a root: its token is known, the next one is drafted first.

    Attributes:
        index: Positions of the roots in the flattened batch, ascending.
        valid: Whether depth d + 1 of a draft is within its document, supervised, and all before it, too.
        counted: Those of them that the loss counts: all, or with a reduced vocabulary those where the head has the
            target's most probable token.
    """

    index: Int[Tensor, " anchor"]
    valid: Bool[Tensor, "anchor depth"]
    counted: Bool[Tensor, "anchor depth"]

    def places(self, batch: Batch) -> Int[Tensor, "anchor depth"]:
        """The flat positions whose target distribution each depth predicts; the last one past the end."""
        depths = torch.arange(self.valid.shape[1], device=self.index.device)
        return (self.index[:, None] + depths).clamp(max=batch.tokens.numel() - 1)

    def labels(self, batch: Batch) -> Int[Tensor, "anchor depth"]:
        """The text's token at each depth; anything where it is not valid."""
        flat = batch.tokens.flatten()
        return flat[(self.places(batch) + 1).clamp(max=len(flat) - 1)]


def every_anchor(batch: Batch, depths: int, *, before: int = 1) -> Anchors:
    """All positions at which a draft can begin.

    Args:
        batch: The rows.
        depths: How many tokens a draft has.
        before: How many positions of the same document must stand before the root: a head that reads the target's
            states needs one.
    """
    documents, supervised = batch.documents, batch.supervised
    there = (documents >= 0) & (batch.positions >= before)
    columns = []
    for depth in range(1, depths + 1):
        within = torch.zeros_like(there)
        if depth < documents.shape[1]:
            same = documents[:, depth:] == documents[:, :-depth]
            within[:, :-depth] = same & supervised[:, depth:]
        there = there & within
        columns.append(there.flatten())
    index = columns[0].nonzero()[:, 0]
    valid = torch.stack(columns, 1)[index]
    return Anchors(index, valid, valid)


@dataclass(frozen=True, eq=False)
class TargetStates:
    """The target's output over a batch: hidden states, and logits of the positions that are asked for.

    Attributes:
        hidden: By layer: the input of that layer, or the normalized last state for -1.
        output: From the last state to the target's logits in float32.
    """

    hidden: Mapping[int, Float[Tensor, "row position hidden"]]
    output: "OutputLayer"

    def logits(self, index: Int[Tensor, " place"]) -> Float[Tensor, "place vocab"]:
        """The target's logits at flat positions. They are computed now, and nobody keeps them."""
        return self.output(self.hidden[-1].flatten(0, 1)[index])


class OutputLayer:
    """From a target's normalized last state to its logits, with the scale or softcap that some models apply.

    Args:
        layer: The model's output layer.
        scale: Factor of the logits.
        softcap: Logits are squeezed into ± this; None for no cap.
    """

    def __init__(self, layer: torch.nn.Module, *, scale: float = 1.0, softcap: float | None = None):
        self.layer, self.scale, self.softcap = layer, scale, softcap

    def __call__(self, hidden: Float[Tensor, "*place hidden"]) -> Float[Tensor, "*place vocab"]:
        """Logits in float32."""
        logits = self.layer(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
