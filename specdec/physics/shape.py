"""What the cost of a decoder depends on: the sizes of its layers, without their numbers."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A layer's attention, in numbers: of the projections' weights, of a query's products, and per cached position.

    With latent attention (MLA), a position keeps one latent vector and one rotary key for all heads. While decoding,
    queries are multiplied with the latents themselves (the absorbed form), so that the products (``key_dim``,
    ``value_dim``) are wider than the heads; a prefill expands the latents first. The numbers that are ``kept`` per
    position form so many ``vectors``; ``window`` is how many positions a query sees at most.
    """

    weights: int
    heads: int
    key_dim: int
    value_dim: int
    kept: int
    vectors: int
    window: int | None = None
    prefill_key_dim: int
    prefill_value_dim: int

    @classmethod
    def grouped(
        cls, *, weights: int, heads: int, kv_heads: int, head_dim: int, window: int | None = None
    ) -> "Attention":
        """Return attention with a key and a value for each of ``kv_heads`` heads."""
        dims = dict.fromkeys(("key_dim", "value_dim", "prefill_key_dim", "prefill_value_dim"), head_dim)
        kept = {"kept": 2 * kv_heads * head_dim, "vectors": 2 * kv_heads}
        return cls(weights=weights, heads=heads, window=window, **dims, **kept)

    @property
    def pair_flops(self) -> int:
        """Operations per query and position that it sees, in both products, while decoding."""
        return 2 * self.heads * (self.key_dim + self.value_dim)

    @property
    def prefill_pair_flops(self) -> int:
        """Likewise in a prefill."""
        return 2 * self.heads * (self.prefill_key_dim + self.prefill_value_dim)

    def seen(self, context: Any) -> Any:
        """Return how many of ``context`` positions a query sees; also of an array of them."""
        return context if self.window is None else np.minimum(context, self.window)


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A layer's state of constant size, in place of keys and values per position (Mamba, linear attention).

    ``matrix`` numbers of the state are in float32 in any precision; ``flops`` are operations per token on the state.
    """

    weights: int
    state: int
    flops: int
    matrix: int = 0


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A layer's feed-forward part; ``weights`` are what every token uses: a dense MLP, shared experts, the router."""

    weights: int
    experts: int = 0
    chosen: int = 0
    expert_weights: int = 0

    @property
    def active(self) -> int:
        return self.weights + self.chosen * self.expert_weights

    def hit(self, tokens: float) -> float:
        """Return how many of the experts' weights a step reads, if all are equally likely; routers have favourites."""
        return experts_hit(tokens, experts=self.experts, chosen=self.chosen) * self.expert_weights


def experts_hit(tokens: float, *, experts: int, chosen: int) -> float:
    """Return how many of a layer's experts are used by at least one of so many tokens, if all are equally likely."""
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer: what mixes tokens (attention, a recurrence, or both side by side), and an MLP.

    The ``indexer`` chooses the positions that attention sees (as many as its ``window``), by keys of its own.
    """

    attention: Attention | None = None
    indexer: Attention | None = None
    recurrence: Recurrence | None = None
    mlp: Mlp = Mlp(weights=0)

    @property
    def weights(self) -> int:
        """Numbers in all matrices but those of experts."""
        recurrent = 0 if self.recurrence is None else self.recurrence.weights
        return recurrent + sum(part.weights for part in self.attending) + self.mlp.weights

    @property
    def attending(self) -> tuple[Attention, ...]:
        return tuple(part for part in (self.attention, self.indexer) if part is not None)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder.

    Attributes:
        table_weights: Numbers in tables of which a token reads one row: token and position embeddings.
        tied: Whether the output layer is that table, or belongs to another model, and is not to be counted again.
        borrowed: Whether it belongs to another model.
        other_weights: Numbers in matrices that belong to no layer, and that every token uses.
    """

    kind: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    table_weights: int
    output_weights: int
    tied: bool = False
    borrowed: bool = False
    other_weights: int = 0
    max_length: int | None = None

    def reduced(self, vocab: int | None) -> "ModelShape":
        """Return the same sizes with an output layer of its own, for so many tokens alone; None for all."""
        if vocab is None:
            return self
        rows = self.output_weights * vocab // self.vocab
        return replace(self, vocab=vocab, output_weights=rows, tied=False, borrowed=False)

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        return tuple(Counter(self.layers).items())

    @cached_property
    def dense_weights(self) -> int:
        """Numbers in the matrices that every token is multiplied with, the output layer left out."""
        return sum(layer.weights * count for layer, count in self.groups) + self.other_weights

    @cached_property
    def expert_weights(self) -> int:
        return sum(layer.mlp.experts * layer.mlp.expert_weights * count for layer, count in self.groups)

    @property
    def weights(self) -> int:
        """Numbers in all matrices: the parameters, without norms and biases."""
        output = 0 if self.tied else self.output_weights
        return self.dense_weights + self.expert_weights + self.table_weights + output

    @cached_property
    def active_weights(self) -> int:
        """Numbers in the matrices that one token is multiplied with, the output layer left out."""
        chosen = sum((layer.mlp.active - layer.mlp.weights) * count for layer, count in self.groups)
        return self.dense_weights + chosen

    def experts_read(self, tokens: float) -> float:
        """Return how many of the experts' weights a step with so many tokens must read."""
        return sum(layer.mlp.hit(tokens) * count for layer, count in self.groups)

    @property
    def is_mixture(self) -> bool:
        return any(layer.mlp.experts for layer, _ in self.groups)

    @cached_property
    def kept_per_position(self) -> int:
        """Numbers that the cache keeps per position, over all layers."""
        return sum(part.kept * count for layer, count in self.groups for part in layer.attending)

    @cached_property
    def pair_flops(self) -> int:
        """Operations of attention per query and position, over all layers, where none has a window."""
        return sum(part.pair_flops * count for layer, count in self.groups for part in layer.attending)


def nominal(parameters: int, *, layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> ModelShape:
    """Return the shape of a model of exactly so many parameters, all in its layers, as round numbers are worked out."""
    each, rest = divmod(parameters, layers)
    if rest:
        raise ValueError(f"{parameters:,} parameters are no multiple of {layers} layers")
    attention = Attention.grouped(weights=each, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    stack = (Layer(attention=attention),) * layers
    return ModelShape(kind="nominal", hidden=0, vocab=0, layers=stack, table_weights=0, output_weights=0)
