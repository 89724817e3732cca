"""One way to run a head, and other ways, each of which would be right if one mistake had been made."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.inspecting.text import Text
from specdec.target.target import Target


class Mistake(StrEnum):
    """What is commonly wrong with a drafter that loads and drafts badly."""

    LAYERS = "wrong hidden layers"
    NORM = "a wrong or missing norm"
    MASK_TOKEN = "the wrong mask token"
    SHIFT = "tokens shifted against states"
    HALVES = "swapped halves of a concatenation"
    ROPE = "another rotary embedding"
    VOCABULARY = "a draft vocabulary read in another way"
    OUTPUT = "another output layer"
    EMBEDDINGS = "other embeddings"
    BLOCK = "another form of block"
    TARGET = "another target"


@dataclass(frozen=True, eq=False, kw_only=True)
class Wiring:
    """One way to run a head.

    Attributes:
        head: The head, with what it borrows from the target.
        layers: The target's hidden states that it reads, as ``Text.states`` numbers them.
        columns: The target's ids of its logits' columns, ascending; None if they are the target's.
        tokens: A pair holds the state at t and token t plus this.
        labels: How many tokens further on than the drafted one is the one that the head predicts.
        change: What is done to the target's states before the head reads them; None for nothing.
    """

    head: Any
    layers: tuple[int, ...]
    columns: Int[Tensor, " column"] | None = None
    tokens: int = 1
    labels: int = 0
    change: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Variation:
    """Another way to run a head.

    Attributes:
        name: What is changed.
        mistake: What was wrong, if this is right.
        remedy: What to set, or to do.
        wiring: How it is run.
    """

    name: str
    mistake: Mistake
    remedy: str
    wiring: Wiring


class Family(ABC):
    """A kind of head: how it is run over a text, and what may be wrong with it.

    Attributes:
        target: What it drafts for.
        depths: How deep it can draft, or is usually asked to.
        wiring: How it was loaded.
    """

    target: Target
    depths: int
    wiring: Wiring

    @abstractmethod
    def logits(self, wiring: Wiring, text: Text) -> Iterator[Tensor]:
        """Yields the logits of the text's kept drafts, ``[draft, column]``, depth by depth."""

    @abstractmethod
    def variations(self, wiring: Wiring) -> Iterator[Variation]:
        """Yields other ways to run a head that is run in a given way."""


def twin(head: Any) -> Any:
    """Returns a copy of a module that shares the parameters and buffers."""
    return copy.deepcopy(head, {id(each): each for each in (*head.parameters(), *head.buffers())})


def weight(tensor: Tensor) -> nn.Parameter:
    """Returns a tensor as a parameter without gradient."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


def final_norm(model: PreTrainedModel) -> Tensor | None:
    """Returns the weight of a model's norm before its output layer; None if it has no such norm, or one with a bias."""
    decoder: Any = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    return None if norm is None or getattr(norm, "bias", None) is not None else norm.weight


def unit_rms(states: Tensor) -> Tensor:
    """Returns states divided by their root mean square, as an RMSNorm without a weight does."""
    return (states.float() * torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(states.dtype)


def elsewhere(states: Tensor) -> Tensor:
    """Returns the states of other places: what they say fits the target, and not this text."""
    flat = states.flatten(0, 1)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(1)).to(flat.device)
    return flat[order].view_as(states)
