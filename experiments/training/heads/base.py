"""A head as the trainer sees it. A new head is one file with a subclass of ``TrainedHead``, and one YAML file."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.training.batch import Anchors, Batch, TargetStates, every_anchor
from specdec.interfaces import Drafter
from specdec.target.target import Target


@dataclass(frozen=True, eq=False)
class Prediction:
    """A head's states for the drafts of a batch, before its output layer.

    Logits of many positions take far more memory than states, so the trainer asks for them piece by piece
    (``TrainedHead.logits``) and keeps none.

    Attributes:
        states: For every depth, what the logits of each anchor's draft are computed from.
        confidence: Logits of the probability that a depth is accepted if all before it are; None without a confidence
            head.
    """

    states: list[Float[Tensor, "anchor width"]]
    confidence: Float[Tensor, "anchor depth"] | None = None


class TrainedHead(nn.Module, ABC):
    """A drafter's weights, and how they are trained. Its constructor takes settings alone; ``begin`` makes the weights.

    The trainer calls ``anchors``, then ``forward``, then ``logits`` for pieces of the result, and compares these with
    the target's distributions.

    Attributes:
        depths: How many tokens a draft has: the depths that are trained, and measured.
        hidden_layers: The target's states that it reads, besides the last one: l is the input of layer l.
        autoregressive: Whether depth 1 is all that is trained, because depth d is depth 1 of a longer text. The
            trainer then works out what deeper drafts bring.
        columns: The target's ids of its logits' columns, ascending; None if they are the target's.
        confidence_weight: How much the confidence's loss counts beside the other.
    """

    depths: int
    hidden_layers: tuple[int, ...] = ()
    autoregressive: bool = False
    columns: Int[Tensor, " column"] | None = None
    confidence_weight: float = 0.0

    @property
    def draft_columns(self) -> int | None:
        """The size of the draft vocabulary, for which ``begin`` wants the counts of tokens; None for all tokens."""
        return None

    @abstractmethod
    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Make the weights for a target.

        Args:
            target: What the head drafts for.
            counts: How often each token is supervised in the training text; None unless ``draft_columns`` asks for it.

        Raises:
            ValueError: The settings do not fit the target.
        """

    def anchors(self, batch: Batch, generator: torch.Generator) -> Anchors:
        """Returns where drafts begin: everywhere, unless a head takes a sample of the positions.

        Args:
            batch: The rows.
            generator: The step's own random numbers, on the CPU.
        """
        return every_anchor(batch, 1 if self.autoregressive else self.depths)

    @abstractmethod
    def forward(self, batch: Batch, states: TargetStates, anchors: Anchors) -> Prediction:
        """The head's states for drafts at the anchors, given the text's own tokens above each depth."""

    @abstractmethod
    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
        """Logits of some places of one depth.

        Args:
            states: Theirs, from ``Prediction.states``.
            previous: The text's token before the predicted one.
            depth: From 1.
        """

    @abstractmethod
    def drafter(self) -> Drafter:
        """A drafter for the engine with a copy of the present weights: a chain of ``depths`` tokens."""

    @abstractmethod
    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the weights as the drafter's ``from_pretrained`` reads them.

        Args:
            folder: New, and empty.
            facts: What is known about the training, for a file beside the weights.
        """


def check_depths(depths: int) -> int:
    """The depth of drafts, if it is one.

    Raises:
        ValueError: It is below 1.
    """
    if depths < 1:
        raise ValueError(f"head.depths={depths}: give at least 1")
    return depths


def output_of(model: PreTrainedModel) -> nn.Linear:
    """A model's output layer."""
    found: Any = model.get_output_embeddings()
    assert found is not None, "FrozenTarget refuses models without one"
    return found


def frozen_copy(module: Any) -> Any:
    """A copy of a module's present weights, for a drafter; ``begin`` has made the module."""
    assert module is not None, "begin comes first"
    return copy.deepcopy(module).requires_grad_(False).eval()


class Borrowed(nn.Module):
    """A module of the target that a head uses. Its parameters are not the head's: nothing trains, moves or saves them.

    Args:
        module: The target's.
        dtype: The dtype that the head computes in.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._module = (module,)  # in a tuple, or it would be registered
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        found: Any = self._module[0].weight
        return found

    def forward(self, given: Tensor) -> Tensor:
        """The module's output in the head's dtype."""
        if given.is_floating_point():
            given = given.to(self.weight.dtype)
        return self._module[0](given).to(self._dtype)


def embeddings_of(model: PreTrainedModel) -> Borrowed:
    """A target's input embeddings, for a head in float32."""
    found: Any = model.get_input_embeddings()
    return Borrowed(found, torch.float32)


def output_layer_of(model: PreTrainedModel) -> Borrowed:
    """A target's output layer, for a head in float32."""
    return Borrowed(output_of(model), torch.float32)
