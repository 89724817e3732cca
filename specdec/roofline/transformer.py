"""The bytes and the operations of a decoder's forwards, from its shape."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What the cost of a dense decoder with a gated MLP depends on.

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        heads: Query heads.
        kv_heads: Key (and value) heads; as many as query heads, or fewer.
        head_dim: Width of a head.
        vocab: Width of the logits.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config: Any) -> "DecoderShape":
        """Returns the shape that a transformers configuration of Llama's kind describes."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab=config.vocab_size,
        )

    @property
    def layer_weights(self) -> int:
        """The number of weights in the matrices of all decoder layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output_weights(self) -> int:
        """The number of weights in the output layer's matrix."""
        return self.hidden * self.vocab

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """Returns the bytes of keys and values that one position takes, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element

    def linear_flops(self, tokens: int, *, logits: int) -> int:
        """Returns the operations in matrix products with weights; a multiplication and an addition are two.

        Args:
            tokens: Tokens that go through the layers.
            logits: Tokens that also go through the output layer.
        """
        return 2 * (self.layer_weights * tokens + self.output_weights * logits)

    def attention_flops(self, *, queries: int, context: float) -> float:
        """Returns the operations of attention's two products.

        Args:
            queries: Query tokens, over all rows.
            context: Positions that a query sees, on average.
        """
        return 4 * self.layers * self.heads * self.head_dim * queries * context

    def prefill_flops(self, tokens: int) -> float:
        """Returns the operations of one prompt's causal prefill, which computes no logits."""
        return self.linear_flops(tokens, logits=0) + self.attention_flops(queries=tokens, context=tokens / 2)

    def step_flops(self, *, batch: int, nodes: int, context: int) -> float:
        """Returns the operations of a forward that verifies ``nodes`` nodes behind ``context`` tokens in every row."""
        tokens = batch * nodes
        return self.linear_flops(tokens, logits=tokens) + self.attention_flops(
            queries=tokens, context=context + (nodes + 1) / 2
        )
