"""From a transformers configuration to a model's shape.

A configuration has no schema: every family has names of its own for the same size. What is read here, under all names
that are in use, is enough to count the numbers in the matrices of most decoders exactly; ``tests`` compare the counts
with transformers' own models, type by type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specdec.physics.shape import Attention, Layer, Mlp, ModelShape, Recurrence

_TYPES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("model_types.yaml").read_text(encoding="utf-8"))
COUNTED, ENCODERS, TIED = (frozenset(_TYPES[name]) for name in ("counted", "encoders", "tied"))
"""Model types whose weights have been compared with transformers' own model; encoders; and those with tied tables."""
_UNGATED = frozenset(_TYPES["ungated"]) | ENCODERS

_POSITION_TABLES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", *ENCODERS), 0),
    **dict.fromkeys(("opt", "biogpt"), 2),
}
"""Model types with a learned vector per position, and how many rows their table has beyond the positions."""

_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
DEFAULTS: dict[str, dict[str, int]] = {"gemma3_text": {**_GEMMA3, "max_position_embeddings": 131_072}}
"""Sizes that published files leave out, which a test compares. To ask transformers for them takes seconds."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
"""Where a model for several kinds of input keeps the configuration of its decoder."""
_WITHIN = "tied within another model"
"""Marks a decoder within a model for several kinds of input, whose own default counts."""


class MissingSizeError(ValueError):
    """A configuration leaves out a size, which transformers' class for it may have a default for."""


def read_shape(config: object) -> ModelShape:
    """Return the shape that a transformers configuration, or its content as a mapping, describes.

    Raises ValueError: it does not describe a decoder, or leaves out a size.
    """
    whole = _as_mapping(config)
    given = _decoder_of(whole)
    for each in (whole, given):
        if each.get("is_encoder_decoder"):
            raise ValueError(f"{_title(each)} is an encoder-decoder model: only decoders can be planned")
    kind = str(given.get("model_type") or "")
    if kind in ENCODERS and not given.get("is_decoder"):
        raise ValueError(f"{_title(given)} is an encoder, which writes no text: only decoders can be planned")
    try:
        return _Reader(given, kind).shape()
    except (TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{_title(given)} has a value that is no size: {error}") from error


class _Reader:
    """Reads one configuration."""

    def __init__(self, given: Mapping[str, Any], kind: str):
        self.given, self.kind = {**DEFAULTS.get(kind, {}), **given}, kind
        if not self.find(*_LAYERS):
            raise ValueError(f"{_title(given)} has no layers: give the config.json of a decoder")
        self.count = self.size(*_LAYERS)
        self.hidden = self.size("hidden_size", "n_embd", "d_model", "n_embed")
        self.vocab = self.size("vocab_size")
        self.heads = self.size("num_attention_heads", "n_head", "n_heads", "num_heads")
        self.kv_heads = self._kv_heads()
        head_dim = self.find("head_dim", "attention_head_dim")
        self.head_dim = int(head_dim or self.hidden // self.heads)
        inner = self.find("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "dff")
        self.inner: Any = inner or 4 * self.hidden
        self._matrices = 2 if kind in _UNGATED else 3

    def find(self, *names: str) -> Any:
        """Return the first of some keys that is there and not null; None without one."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), None)

    def size(self, *names: str) -> int:
        """Return the first of some keys that is there. Raises MissingSizeError: none is."""
        found = self.find(*names)
        if type(found) is not int or found < 1:
            told = "has no" if found is None else f"has {names[0]}={found!r} for a"
            raise MissingSizeError(f"{_title(self.given)} {told} {names[0]}: give the config.json of a decoder")
        return found

    def shape(self) -> ModelShape:
        tied = self.given.get("tie_word_embeddings")
        if tied is None and self.kind in TIED and self.given.get(_WITHIN, True):
            tied = True
        if tied is None:
            raise MissingSizeError(f"{_title(self.given)} does not say tie_word_embeddings: true or false")
        width = int(self.find("word_embed_proj_dim") or self.hidden)  # OPT-350m embeds in fewer dimensions
        max_length = self.find(
            "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length"
        )
        positions = _POSITION_TABLES.get(self.kind)
        if positions is not None and type(max_length) is not int:
            raise MissingSizeError(f"{_title(self.given)} has no max_position_embeddings, as long as its table is")
        rows = 0 if positions is None else max_length + positions
        return ModelShape(
            kind=self.kind,
            hidden=self.hidden,
            vocab=self.vocab,
            layers=tuple(self.layer(index) for index in range(self.count)),
            table_weights=self.vocab * width + rows * self.hidden,
            output_weights=self.vocab * width,
            tied=bool(tied),
            other_weights=2 * self.hidden * width if width != self.hidden else 0,
            max_length=max_length if type(max_length) is int else None,
        )

    def layer(self, index: int) -> Layer:
        kind = self._layer_kind(index)
        recurrence = _recurrence(self.given, self.kind, kind, self.hidden)
        attends = recurrence is None or kind in ("hybrid", "parallel")
        window = self._window(index, kind)
        return Layer(
            attention=self.attention(window) if attends else None,
            indexer=self._indexer() if attends else None,
            recurrence=recurrence,
            mlp=self.mlp(index),
        )

    def attention(self, window: int | None) -> Attention:
        latent, rotary = self.find("kv_lora_rank"), self.find("qk_rope_head_dim")
        if latent and rotary:
            return self._latent_attention(int(latent), int(rotary), window)
        queries = self.hidden * self.heads * self.head_dim
        if self.kind in _GATED_ATTENTION:
            queries *= 2
        weights = queries + self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        return Attention.grouped(
            weights=weights, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=window
        )

    def _indexer(self) -> Attention | None:
        """Return what chooses positions in DeepSeek-V3.2's sparse attention; None in other models."""
        heads, dim = self.find("index_n_heads"), self.find("index_head_dim")
        if not heads or not dim or self.kind not in _CHOOSING:
            return None
        weights = self.size("q_lora_rank") * heads * dim + self.hidden * (dim + heads)
        values = {"value_dim": 0, "prefill_value_dim": 0}
        keys = {"key_dim": dim, "prefill_key_dim": dim, "kept": dim, "vectors": 1}
        return Attention(weights=weights, heads=heads, **keys, **values)

    def mlp(self, index: int) -> Mlp:
        if self.kind == "lfm2" and self.find("block_auto_adjust_ff_dim"):  # its width is in another unit
            step = int(self.find("block_multiple_of") or 1)
            width = int((self.find("block_ffn_dim_multiplier") or 1) * int(2 * self.inner / 3))
            return Mlp(weights=3 * self.hidden * -(-width // step) * step)
        experts = self.find("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if not experts or not self._is_sparse(index):
            inner = self.inner[index] if isinstance(self.inner, list | tuple) else self.inner
            if self.kind == "llama4_text":
                inner = self.find("intermediate_size_mlp") or inner
            return Mlp(weights=self._matrices * self.hidden * int(inner))
        chosen = self.find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
        if type(chosen) is not int or not 1 <= chosen <= experts:
            raise MissingSizeError(f"{_title(self.given)} has {experts} experts and num_experts_per_tok={chosen!r}")
        inner = int(self.find("moe_intermediate_size", "expert_ffn_hidden_size") or self.inner)
        shared, each = self._shared_experts(inner), self._matrices * self.hidden * inner
        return Mlp(weights=self.hidden * experts + shared, experts=experts, chosen=chosen, expert_weights=each)

    def _shared_experts(self, inner: int) -> int:
        width = self.find("shared_expert_intermediate_size", "shared_intermediate_size")
        if width:  # Qwen's shared expert has a gate of its own
            return self._matrices * self.hidden * width + (self.hidden if self.kind.startswith("qwen") else 0)
        count = self.find("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
        if self.kind == "llama4_text":
            count = 1
        return self._matrices * self.hidden * inner * int(count or 0)

    def _is_sparse(self, index: int) -> bool:
        kinds = self.find("mlp_layer_types")
        if kinds is not None:
            return kinds[index % len(kinds)] == "sparse"
        if self.find("moe_layers") is not None:
            return index in self.given["moe_layers"]
        if index in (self.find("mlp_only_layers") or ()):
            return False
        step = self.find("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_interval")
        if index < int(self.find("first_k_dense_replace", "moe_layer_start_index") or 0):
            return False
        return type(step) is not int or (index + 1) % step == 0

    def _latent_attention(self, latent: int, rotary: int, window: int | None) -> Attention:
        plain, values = self.size("qk_nope_head_dim"), self.size("v_head_dim")
        rank = self.find("q_lora_rank")
        queries = self.heads * (plain + rotary)
        weights = self.hidden * queries if rank is None else rank * (self.hidden + queries)
        weights += self.hidden * (latent + rotary) + latent * self.heads * (plain + values)
        weights += self.heads * values * self.hidden
        decoding = {"key_dim": latent + rotary, "value_dim": latent, "kept": latent + rotary, "vectors": 2}
        prefill = {"prefill_key_dim": plain + rotary, "prefill_value_dim": values}
        return Attention(weights=weights, heads=self.heads, window=window, **decoding, **prefill)

    def _kv_heads(self) -> int:
        if self.find("multi_query") and not self.find("new_decoder_architecture"):
            return 1
        return int(self.find("num_key_value_heads", "num_kv_heads", "n_head_kv") or self.heads)

    def _layer_kind(self, index: int) -> str:
        if self.kind == "bamba":
            return "full_attention" if index in (self.find("attn_layer_indices") or ()) else "mamba"
        kinds = self.find("layer_types", "layers_block_type", "block_types")
        return "full_attention" if kinds is None else str(kinds[index % len(kinds)])

    def _window(self, index: int, kind: str) -> int | None:
        """Return how many positions a layer sees at most; None for all."""
        if self.kind in _CHOOSING:
            return self.find("index_topk")
        if kind == "chunked_attention":
            return self.find("attention_chunk_size")
        window = self.find("sliding_window", "window_size")
        if type(window) is not int or self.given.get("use_sliding_window") is False:
            return None
        if self.find("layer_types", "layers_block_type") is not None:
            return window if kind == "sliding_attention" else None
        if self.kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
            return window if index >= int(self.find("max_window_layers") or 0) else None
        every = _FULL_EVERY.get(self.kind)
        if every is None:
            raise MissingSizeError(f"{_title(self.given)} has a sliding_window and no layer_types")
        every = every and int(self.find("sliding_window_pattern") or every)
        return None if every and (index + 1) % every == 0 else window


_FULL_EVERY = {
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2", "phimoe", "ministral", "ministral3"), 0),
    "gemma2": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
    "cohere2": 4,
}
"""By model type: every how manieth layer has no window, where an older configuration does not list it; 0: none."""

_CHOOSING = frozenset(("deepseek_v32", "glm_moe_dsa"))
"""Model types whose attention sees only positions that an indexer chooses."""

_GATED_ATTENTION = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
"""Model types whose attention has a gate as wide as its queries."""


def _as_mapping(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ValueError(f"a configuration is a mapping or an object of transformers, not {type(config).__name__}")
    return to_dict()


def _decoder_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the decoder in a model for several kinds of input; a decoder's own as it is."""
    for name in _TEXT:
        inner = given.get(name)
        if isinstance(inner, Mapping) and given.get("num_hidden_layers") is None:
            kept = {"tie_word_embeddings": given["tie_word_embeddings"]} if "tie_word_embeddings" in given else {}
            kept[_WITHIN] = given.get("model_type") in TIED
            return _decoder_of({**kept, **inner})
    return given


def _title(given: Mapping[str, Any]) -> str:
    kind, made = given.get("model_type"), given.get("architectures")
    if isinstance(made, list | tuple) and made:
        return str(made[0])
    return f"the configuration of model_type {kind!r}" if kind else "the configuration"


def _recurrence(given: Mapping[str, Any], kind: str, layer: str, hidden: int) -> Recurrence | None:
    """Return the recurrence of a layer, by its ``model_type`` and its entry in ``layer_types``; None if it has none.

    Raises ValueError: the layer is of a kind whose sizes are not known here.
    """
    if layer == "linear_attention" and given.get("linear_num_value_heads"):
        return _delta_net(given, kind, hidden)
    if layer == "conv" and given.get("conv_L_cache"):
        return _short_convolution(given, hidden)
    if layer in ("mamba", "linear_attention") and kind in ("bamba", "granitemoehybrid"):
        return _mamba2(given, hidden)
    if layer in ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "mamba2", "rwkv"):
        raise ValueError(f"the sizes of a {layer!r} layer of model_type {kind!r} are not known here")
    return None


def _delta_net(given: Mapping[str, Any], kind: str, hidden: int) -> Recurrence:
    """Qwen3-Next's gated delta net: per head a matrix of keys by values."""
    heads = given["linear_num_value_heads"]
    keys = given["linear_num_key_heads"] * given["linear_key_head_dim"]
    values = heads * given["linear_value_head_dim"]
    mixed, kernel = 2 * keys + values, given["linear_conv_kernel_dim"]
    projections = hidden * (mixed + values + 2 * heads) + values * hidden
    matrix = heads * given["linear_key_head_dim"] * given["linear_value_head_dim"]
    # Decay, the product with the key, the rank-one update, and the product with the query: 7 operations per number.
    mixing = mixed * kernel
    return Recurrence(weights=projections + mixing, state=matrix + mixing, flops=7 * matrix, matrix=matrix)


def _mamba2(given: Mapping[str, Any], hidden: int) -> Recurrence:
    """Mamba-2 as in Bamba and Granite: per head a matrix of its width by the state's."""
    heads, groups = given["mamba_n_heads"], given["mamba_n_groups"]
    depth, kernel = given["mamba_d_state"], given["mamba_d_conv"]
    inner = int(given["mamba_expand"] * hidden)
    mixed = inner + 2 * groups * depth
    weights = hidden * (inner + mixed + heads) + mixed * kernel + inner * hidden
    matrix = inner * depth
    return Recurrence(weights=weights, state=matrix + mixed * kernel, flops=5 * matrix, matrix=matrix)


def _short_convolution(given: Mapping[str, Any], hidden: int) -> Recurrence:
    """LFM2's gated convolution over a few positions."""
    kernel = given["conv_L_cache"]
    return Recurrence(weights=hidden * (3 * hidden + kernel + hidden), state=hidden * kernel, flops=2 * hidden * kernel)
