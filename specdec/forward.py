"""A forward as a value: everything that a model's forward over the cache depends on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.topology import Topology
from specdec.tree import DraftTree


class Wants(NamedTuple):
    """What a forward is to return besides the keys and values that it leaves in the cache.

    Attributes:
        logits: How many of the last nodes get logits; None for all of them, 0 for none.
        hidden_layers: Hidden states at every node: -1 for the normalized last one, which the output layer reads, i for
            the input of decoder layer i (transformers' ``hidden_states[i]``).
        top_k: How many of the most probable tokens to return at every node that has logits; 0 for none.
    """

    logits: int | None = None
    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0


LOGITS = Wants()
_LEAST_KEYS = 256
_STEPS_PER_DOUBLING = 4


def bucket_of(keys: int) -> int:
    """Returns the number of positions to read where ``keys`` are needed: one of few numbers, at most a quarter more.

    These are the multiples of 256 up to 1024, and then four numbers from each power of two to the next.
    """
    step = _LEAST_KEYS
    while step * 2 * _STEPS_PER_DOUBLING < keys:
        step *= 2
    return -(-keys // step) * step


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardBatch:
    """One forward over the cache.

    Every row appends nodes behind the committed prefix of its slot. They are the *last* nodes of a topology. Its other
    nodes, if there are any, are in the cache already, which is how a drafter goes down a tree level by level. Node j of
    the topology stands at position ``length + j`` of the cache and is rotated (or embedded) as position
    ``length + depth[j]``. A piece of a prompt is a chain.

    Attributes:
        key_bound: The number of positions of the cache that attention reads, masked; enough for every row. None where
            nobody knows it: found by looking at ``lengths`` where that is free (``specdec.host``), otherwise all that
            there are.
        features: A further input of the model, such as the hidden states that an EAGLE head takes.
        adapters: The number of the adapter that each node goes through; None for its slot's.
        counts: The number of tokens of every row, for pieces of prompts, which are final and padded at the end. None
            for trees.
    """

    tokens: Int[Tensor, "batch node"] | None  # what goes in, or None with ``embeds``
    slots: Int[Tensor, " batch"]  # the slot of every row, in any order, no slot twice
    lengths: Int[Tensor, " batch"]  # committed positions of every row, hence where node 0 of the topology stands
    topology: Topology  # the parents of the nodes: one row for all rows of the batch, or row by row
    key_bound: int | None = None
    embeds: Float[Tensor, "batch node hidden"] | None = None  # input embeddings in place of tokens
    features: Float[Tensor, "batch node width"] | None = None
    adapters: Int[Tensor, "batch node"] | None = None
    wants: Wants = LOGITS
    counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.embeds is None):
            raise ValueError("a forward takes either tokens or embeds: give one of the two")
        if self.nodes > self.topology.width:
            raise ValueError(
                f"the batch has {self.nodes} nodes per row and its topology {self.topology.width}: give the topology "
                f"that these are the last nodes of"
            )

    @classmethod
    def of_tree(
        cls,
        tree: DraftTree,
        *,
        host_slots: np.ndarray | None = None,
        host_lengths: np.ndarray | None = None,
        key_bound: int | None = None,
        slots: Int[Tensor, " batch"] | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        wants: Wants = LOGITS,
    ) -> "ForwardBatch":
        """Returns the forward that verifies all nodes of a batch of trees.

        Slots and lengths are given on the device, on the host or both; ``host_lengths`` also give the bound.
        """
        device = tree.tokens.device
        if lengths is None and host_lengths is not None:
            lengths = torch.from_numpy(host_lengths).to(device, non_blocking=True)
        if slots is None and host_slots is not None:
            slots = slot_index(host_slots, device)
        if key_bound is None and host_lengths is not None:
            key_bound = int(host_lengths.max()) + tree.width
        assert slots is not None and lengths is not None, "they must be known somewhere"
        return cls(
            tokens=tree.tokens, slots=slots, lengths=lengths, topology=tree.topology, key_bound=key_bound, wants=wants
        )

    @classmethod
    def of_chunk(
        cls,
        tokens: Int[Tensor, "batch node"],
        *,
        host_slots: np.ndarray,
        host_lengths: np.ndarray,
        host_counts: np.ndarray | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> "ForwardBatch":
        """Returns the forward that appends a piece of every row's prompt and returns no logits.

        Args:
            tokens: The pieces, padded at the end. Padding is written behind them and never read.
            host_lengths: Tokens that each row has in the cache already.
            host_counts: Tokens of each piece; None if none is padded.
        """
        device = tokens.device
        return cls(
            tokens=tokens,
            slots=slot_index(host_slots, device),
            lengths=torch.from_numpy(host_lengths).to(device, non_blocking=True),
            topology=Topology.chain(tokens.shape[1], device),
            key_bound=int(host_lengths.max()) + tokens.shape[1],
            wants=Wants(logits=0, hidden_layers=hidden_layers),
            counts=np.full(len(tokens), tokens.shape[1]) if host_counts is None else host_counts,
        )

    @cached_property
    def given(self) -> Tensor:
        given = self.embeds if self.tokens is None else self.tokens
        assert given is not None, "checked when the batch was made"
        return given

    @cached_property
    def batch(self) -> int:
        return self.given.shape[0]

    @cached_property
    def nodes(self) -> int:
        return self.given.shape[1]


@dataclass(frozen=True, eq=False)
class ForwardOutput:
    """What a forward returns.

    Attributes:
        logits: The model's raw logits at the nodes that were asked for; None if at none.
        top_tokens: At every node with logits, the most probable first; None if not asked for.
    """

    logits: Float[Tensor, "batch some vocab"] | None
    hidden_states: Mapping[int, Float[Tensor, "batch node hidden"]] = field(default_factory=dict)  # by layer index
    top_tokens: Int[Tensor, "batch some rank"] | None = None

    @classmethod
    def of(cls, wants: Wants, outputs: Sequence[Tensor]) -> "ForwardOutput":
        """Return the wanted hidden states, and the logits behind them if any, by name."""
        hidden = dict(zip(wants.hidden_layers, outputs, strict=False))
        if wants.logits == 0:
            return cls(None, hidden)
        top = outputs[-1].topk(min(wants.top_k, outputs[-1].shape[-1]), dim=-1).indices if wants.top_k else None
        return cls(outputs[-1], hidden, top)

    @property
    def scores(self) -> Float[Tensor, "batch some vocab"]:
        """The logits of a forward that was asked for them."""
        assert self.logits is not None, "the forward was not asked for logits"
        return self.logits


def slot_index(host_slots: np.ndarray, device: torch.device) -> Int[Tensor, " batch"]:
    """Returns the slots of a batch's rows on the device; consecutive slots are not copied there every time."""
    count = len(host_slots)
    if count and int(host_slots[0]) + count - 1 == int(host_slots[-1]) and (np.diff(host_slots) == 1).all():
        return _range(int(host_slots[0]), count, device)
    return torch.from_numpy(np.ascontiguousarray(host_slots)).long().to(device, non_blocking=True)


@lru_cache(maxsize=4096)
def _range(first: int, count: int, device: torch.device) -> Int[Tensor, " batch"]:
    with torch.inference_mode(False):
        return torch.arange(first, first + count, device=device)
