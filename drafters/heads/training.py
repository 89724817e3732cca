"""A head as the trainer sees it: its input, and the methods that the trainer calls."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.heads.bound import output_of, rows_of
from specdec import Drafter, Target


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Packed rows of documents, one behind the other, padded at the end by token 0.

    Attributes:
        supervised: Which tokens a head is to predict, such as those that an assistant says.
        documents: The document that a token belongs to, and within which it sees others; -1 in the padding.
        positions: Positions in the document, from 0.
    """

    tokens: Int[Tensor, "row position"]
    supervised: Bool[Tensor, "row position"]
    documents: Int[Tensor, "row position"]
    positions: Int[Tensor, "row position"]

    def to(self, device: torch.device) -> "TextBatch":
        return TextBatch(*(part.to(device, non_blocking=True) for part in vars(self).values()))

    @property
    def packed(self) -> bool:
        return bool((self.documents.amax(1, keepdim=True) > self.documents.where(self.documents >= 0, 2**30)).any())

    def visible(self, window: int | None = None) -> Bool[Tensor, "row query key"]:
        """The tokens that each token sees: itself and earlier ones of its document, the last ``window`` of them."""
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        distance = place[:, None] - place
        causal = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return (self.documents[:, :, None] == self.documents[:, None, :]) & causal

    def apart(self) -> tuple["TextBatch", Int[Tensor, "row position"]]:
        """The documents as rows of their own (recurrent layers see past masks), and every token's flat place there."""
        there = self.documents >= 0
        number = (there & (self.positions == 0)).flatten().cumsum(0).view_as(self.positions) - 1
        count, length = int(number.max()) + 1, int(self.positions.where(there, 0).max()) + 1
        places = (number * length + self.positions).where(there, 0)

        def spread(values: Tensor, empty: Any) -> Tensor:
            rows = torch.full((count * length,), empty, dtype=values.dtype, device=values.device)
            rows[places[there]] = values[there]
            return rows.view(count, length)

        positions = torch.arange(length, device=there.device).repeat(count, 1)
        tokens, supervised = spread(self.tokens, 0), spread(self.supervised, False)
        return TextBatch(tokens, supervised, spread(self.documents * 0, -1), positions), places


def additive(seen: Bool[Tensor, "row query key"], dtype: torch.dtype) -> Float[Tensor, "row 1 query key"]:
    """A mask that is added to attention scores: zero where a key is seen."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def masks_suffice(model: PreTrainedModel, hidden: Callable[[TextBatch], Tensor]) -> bool:
    """Whether documents in a row leave each other alone, by a trial; ``hidden`` gives a packed batch's last states."""
    found = []
    for first in (1, 2):
        tokens = torch.tensor([[first, first, 3, 3]], device=model.device)
        documents, positions = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]])
        with torch.no_grad():
            batch = TextBatch(tokens, tokens > 0, documents.to(model.device), positions.to(model.device))
            found.append(hidden(batch)[:, 2:])
    return torch.equal(*found)


@dataclass(frozen=True, eq=False)
class Anchors:
    """Where drafts begin. An anchor is the position of a root: its token is known, the next one is drafted first.

    Attributes:
        index: Positions of the roots in the flattened batch, ascending.
        valid: Whether depth d + 1 of a draft is within its document, supervised, and all before it, too.
        counted: Those that the loss counts; with a reduced vocabulary, where it has the target's most probable token.
    """

    index: Int[Tensor, " anchor"]
    valid: Bool[Tensor, "anchor depth"]
    counted: Bool[Tensor, "anchor depth"]

    @classmethod
    def everywhere(cls, batch: TextBatch, depths: int, *, before: int = 1) -> "Anchors":
        """The positions at which a draft of ``depths`` tokens can begin, behind ``before`` others of its document."""
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
        return cls(index, valid, valid)

    def sampled(self, batch: TextBatch, count: int, generator: torch.Generator) -> "Anchors":
        """``count`` anchors of every row, drawn on the CPU, ascending; rows of fewer get some that predict nothing."""
        rows, length = batch.tokens.shape
        device = self.index.device
        there = torch.zeros(rows * length, dtype=torch.bool, device=device)
        there[self.index] = True
        # Those that are there draw a number below 1, the others one above; the smallest are taken.
        numbers = torch.rand(rows * length, generator=generator).to(device) + (~there)
        chosen = numbers.view(rows, length).topk(min(count, length), largest=False).indices.sort(1).values
        index = (chosen + torch.arange(rows, device=device)[:, None] * length).flatten()
        valid = torch.zeros(rows * length, self.valid.shape[1], dtype=torch.bool, device=device)
        valid[self.index] = self.valid
        return Anchors(index, valid[index], valid[index])

    def places(self, batch: TextBatch) -> Int[Tensor, "anchor depth"]:
        """The flat positions whose target distribution each depth predicts; the last one past the end."""
        depths = torch.arange(self.valid.shape[1], device=self.index.device)
        return (self.index[:, None] + depths).clamp(max=batch.tokens.numel() - 1)

    def labels(self, batch: TextBatch) -> Int[Tensor, "anchor depth"]:
        """The text's token at each depth; anything where it is not valid."""
        flat = batch.tokens.flatten()
        return flat[(self.places(batch) + 1).clamp(max=len(flat) - 1)]


@dataclass(frozen=True, eq=False)
class TargetStates:
    """The target's states over a batch: inputs of layers, the normalized last one for -1; ``output`` makes logits."""

    hidden: Mapping[int, Float[Tensor, "row position hidden"]]
    output: Callable[[Float[Tensor, "*place hidden"]], Float[Tensor, "*place vocab"]]

    def logits(self, index: Int[Tensor, " place"]) -> Float[Tensor, "place vocab"]:
        """The target's logits at flat positions, in float32."""
        return self.output(self.hidden[-1].flatten(0, 1)[index]).float()

    def before(self, anchors: Anchors) -> Float[Tensor, "anchor hidden"]:
        """The last state at the position before each root: the newest one that a draft may read."""
        return self.hidden[-1].flatten(0, 1)[anchors.index - 1]


@dataclass(frozen=True, eq=False)
class Term:
    """A further prediction of the same drafts; its loss counts by ``weight`` of how much of the training is over."""

    states: list[Float[Tensor, "anchor width"]]
    weight: Callable[[float], float]


@dataclass(frozen=True, eq=False)
class Prediction:
    """A head's states for the drafts of a batch, before its output layer (``TrainedHead.logits``).

    Attributes:
        states: For every depth, what the logits of each anchor's draft are computed from.
        confidence: Logits of the probability that a depth is accepted if all before it are.
        weight: How much the loss of ``states`` counts, by how much of the training is over.
        terms: Further predictions of the same drafts.
    """

    states: list[Float[Tensor, "anchor width"]]
    confidence: Float[Tensor, "anchor depth"] | None = None
    weight: Callable[[float], float] = lambda progress: 1.0
    terms: Sequence[Term] = ()


class TrainedHead(nn.Module, ABC):
    """A drafter's weights, and how they are trained. Its constructor takes settings alone; ``begin`` makes the weights.

    The trainer calls ``anchors``, then ``forward``, then ``logits`` for pieces of the result.

    Args:
        depths: How many tokens a draft has: the depths that are trained, and measured.

    Attributes:
        head: The weights, once ``begin`` has made them.
        hidden_layers: The target's states that it reads, besides the last one: l is the input of layer l.
        autoregressive: Whether depth 1 is all that is trained, because depth d is depth 1 of a longer text.
        before: How many tokens of its document stand before a root at least.
        draft_columns: The size of the draft vocabulary, for which ``begin`` wants the counts of tokens; None for all.
        confidence_weight: How much the confidence's loss counts beside the other.
    """

    title: str = "head"
    hidden_layers: tuple[int, ...] = ()
    autoregressive: bool = False
    before: int = 1
    draft_columns: int | None = None
    confidence_weight: float = 0.0
    head: Any
    _borrowed: tuple[Any, Any]  # what a head's own or the target's embeddings and output layer are (``borrowed``)

    def __init__(self, depths: int):
        super().__init__()
        if depths < 1:
            raise ValueError(f"head.depths={depths}: give at least 1")
        self.depths = depths

    @property
    def columns(self) -> Int[Tensor, " column"] | None:
        """The target's ids of its logits' columns, ascending; None if they are the target's."""
        return getattr(getattr(self, "head", None), "draft_ids", None)

    @abstractmethod
    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make the weights for a target; ``counts`` are supervised tokens. Raises ValueError: settings do not fit."""

    def anchors(self, batch: TextBatch, generator: torch.Generator) -> Anchors:
        """Where drafts begin: everywhere, unless a head takes a sample, by the step's own generator on the CPU."""
        return Anchors.everywhere(batch, self.depths, before=self.before)

    @abstractmethod
    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The head's states for drafts at the anchors, given the text's own tokens above each depth."""

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """Logits of some places of one depth, from 1, by their ``Prediction.states`` and the text's tokens before."""
        return self._borrowed[1](states).float()

    @abstractmethod
    def drafter(self) -> Drafter:
        """A drafter for the engine with a copy of the present weights: a chain of ``depths`` tokens."""

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the weights in bfloat16 into a new folder, with facts of the training if there is a file for them."""
        frozen_copy(self.head, torch.bfloat16).save_pretrained(folder)


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """Numbers that tell a target from others: its sizes, and some of its embeddings."""
    text, weights = model.config.get_text_config(decoder=True), model.get_input_embeddings()
    table: Any = getattr(weights, "weight", None)
    rows = torch.arange(16) * (text.vocab_size // 16)
    sample = None if table is None else table.detach()[rows, torch.arange(16) % table.shape[1]].double().tolist()
    sizes = {name: getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return sizes | {"embeddings": sample}


def frozen_copy(module: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a module's present weights, for a drafter or a file."""
    assert module is not None, "begin comes first"
    return copy.deepcopy(module).requires_grad_(False).eval().to(dtype)


class Borrowed(nn.Module):
    """A module of the target that a head in float32 uses. Nothing trains, moves or saves its parameters."""

    def __init__(self, module: Any):
        super().__init__()
        self._module: tuple[Any] = (module,)  # in a tuple, or it would be registered

    @property
    def weight(self) -> Tensor:
        return self._module[0].weight

    def forward(self, given: Tensor) -> Float[Tensor, "*place width"]:
        """The module's output in float32."""
        if given.is_floating_point():
            layer = getattr(self._module[0], "layer", self._module[0])
            given = given.to(layer.scale.dtype if hasattr(layer, "dequantized") else self.weight.dtype)
        return self._module[0](given).float()


def borrowed(head: PreTrainedModel, target: Target) -> tuple[Any, Any]:
    """A head's embeddings and output layer, or the target's; in a tuple, so that nothing is registered twice."""
    return (
        head.get_input_embeddings() or Borrowed(target.model.get_input_embeddings()),
        head.get_output_embeddings() or Borrowed(output_of(target.model)),
    )


def most_frequent(counts: Int[Tensor, " vocab"] | None, columns: int | None) -> Int[Tensor, " column"] | None:
    """The ids of so many most frequent tokens, ascending, lower ids first among equals; None without a number."""
    if columns is None:
        return None
    assert counts is not None, "draft_columns asked for them"
    if not 1 <= columns <= len(counts):
        raise ValueError(f"head.draft_vocabulary={columns}: the target has {len(counts)} tokens, give at most as many")
    return counts.sort(descending=True, stable=True).indices[:columns].sort().values


def take_output(head: PreTrainedModel, target: Target) -> None:
    """Let a head's own output layer begin as the target's rows for its columns."""
    own: Any = head.get_output_embeddings()
    rows = rows_of(output_of(target.model))
    if own is not None and own.weight.shape[1] == rows.shape[1]:
        ids: Any = getattr(head, "draft_ids", None)
        rows = rows if ids is None else rows[ids.to(rows.device)]
        own.weight.data.copy_(rows[: own.weight.shape[0]])
