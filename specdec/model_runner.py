"""Runs any Hugging Face causal LM over the slot cache: prefill of prompt chunks, and one forward over draft trees.

The model's own code is used as it is. It is given a cache object that stores what it computes in our layout, a
complete additive mask, and explicit position ids; nothing of it is copied or patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.attention import grouped
from specdec.attention.mask import tree_mask
from specdec.cache import ShapeProbe, SlotCache
from specdec.quantization.base import weights_read
from specdec.tree import DraftTree
from specdec.types import TargetOutput

ATTENTION = ("auto", "grouped", "eager")


class ModelRunner:
    """A model, its KV cache, and the two forwards that decoding needs.

    Args:
        model: A loaded causal LM. Its attention implementation is switched during our forwards only.
        max_batch_size: Slots of the cache.
        max_length: Committed positions per slot; at most what the model's positions allow.
        max_nodes: Drafted nodes per tree at most.
        attention: ``"grouped"`` (our function, where the model takes one), ``"eager"`` (the model's own), or
            ``"auto"`` for the first of them that the model supports.
        hidden_layers: Hidden states to return (``Drafter.hidden_layers``).

    Attributes:
        cache: The KV cache.
        vocab_size: Width of the logits.

    Raises:
        ValueError: The model cannot be supported (with its type and the reason), the length is beyond it, or the
            cache does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch_size: int,
        max_length: int,
        max_nodes: int = 0,
        attention: str = "auto",
        hidden_layers: tuple[int, ...] = (),
    ):
        config = model.config.get_text_config(decoder=True)
        check_supported(model)
        check_length(config, max_length)
        self.model = model
        self.config = config
        self.device = model.device
        self.dtype = model.dtype
        self.max_length = max_length
        self.max_nodes = max_nodes
        self.hidden_layers = hidden_layers
        self.attention = _choose_attention(model, attention)
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self._windows = _windows(config)
        self._groups = 1
        if self.attention == grouped.NAME:
            heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
            self._groups = heads // (kv_heads or heads)
        self.cache = SlotCache(
            self._probe(config.num_hidden_layers),
            max_batch_size=max_batch_size,
            max_length=max_length,
            max_nodes=max_nodes,
            device=self.device,
        )
        # Reused by every verify: the output layer's input is the normalized last hidden state.
        self._last_hidden: Tensor | None = None
        if -1 in hidden_layers:
            model.get_output_embeddings().register_forward_pre_hook(self._catch_last_hidden)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV cache per position and slot."""
        return self.cache.bytes_per_position

    def weight_bytes(self, rows: int = 1) -> int:
        """Bytes of weights that a forward of this many tokens reads at least once (``weights_read``)."""
        return weights_read(self.model, rows).bytes

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Int[Tensor, "batch query"],
        starts: np.ndarray,
        counts: np.ndarray,
        *,
        first_slot: int = 0,
    ) -> dict[int, Float[Tensor, "batch query hidden"]]:
        """Append pieces of prompts to consecutive slots; returns the hidden states that were asked for.

        Args:
            tokens: Padded at the end.
            starts: Tokens that each row has in the cache already.
            counts: How many of the tokens are real. Padding is written behind them and never read.
            first_slot: Slot of row 0.
        """
        batch, queries = tokens.shape
        start = torch.from_numpy(starts).to(self.device, non_blocking=True)
        offsets = torch.arange(queries, device=self.device)
        visible = (offsets[:, None] >= offsets).expand(batch, -1, -1)
        output = self._forward(
            tokens,
            slots=slice(first_slot, first_slot + batch),
            starts=start,
            host_starts=starts,
            cells=offsets.expand(batch, -1),
            visible=visible,
            cell_positions=start[:, None] + offsets,
            query_positions=start[:, None] + offsets,
            with_logits=False,
        )
        return output.hidden_states  # type: ignore[return-value]

    @torch.inference_mode()
    def verify(
        self, tree: DraftTree, lengths: Int[Tensor, " batch"], host_lengths: np.ndarray, *, first_slot: int = 0
    ) -> TargetOutput:
        """One forward over all nodes of a batch of trees; their keys and values go behind each row's prefix.

        Args:
            tree: Row b belongs to slot ``first_slot + b``.
            lengths: Tokens that each row has in the cache: the root's position.
            host_lengths: The same on the host.
            first_slot: Slot of row 0.
        """
        batch, nodes = tree.tokens.shape
        positions = lengths[:, None] + tree.depth
        return self._forward(
            tree.tokens,
            slots=slice(first_slot, first_slot + batch),
            starts=lengths,
            host_starts=host_lengths,
            cells=torch.arange(nodes, device=self.device).expand(batch, -1),
            visible=tree.ancestors,
            cell_positions=positions,
            query_positions=positions,
        )

    @torch.inference_mode()
    def verify_level(
        self,
        tokens: Int[Tensor, "batch query"],
        lengths: Int[Tensor, " batch"],
        host_lengths: np.ndarray,
        *,
        cells: Int[Tensor, " query"],
        depths: Int[Tensor, " cell"],
        ancestors: Bool[Tensor, "query cell"],
    ) -> Float[Tensor, "batch query vocab"]:
        """A forward over some nodes of trees whose nodes above are in the cache already; returns logits.

        How a model that drafts a tree of a static shape goes down it level by level.

        Args:
            tokens: Tokens of the nodes.
            lengths: The root's position in each row.
            host_lengths: The same on the host.
            cells: The nodes' indices in the tree (consecutive).
            depths: Depths of all nodes up to the last of these.
            ancestors: Which nodes each of these sees, itself included.
        """
        batch = tokens.shape[0]
        positions = lengths[:, None] + depths
        return self._forward(
            tokens,
            slots=slice(0, batch),
            starts=lengths,
            host_starts=host_lengths,
            cells=cells.expand(batch, -1),
            visible=ancestors.expand(batch, -1, -1),
            cell_positions=positions,
            query_positions=positions[:, cells],
        ).logits

    def _forward(
        self,
        tokens: Int[Tensor, "batch query"],
        *,
        slots: slice,
        starts: Int[Tensor, " batch"],
        host_starts: np.ndarray,
        cells: Int[Tensor, "batch query"],
        visible: Bool[Tensor, "batch query cell"],
        cell_positions: Int[Tensor, "batch cell"],
        query_positions: Int[Tensor, "batch query"],
        with_logits: bool = True,
    ) -> TargetOutput:
        batch, queries = tokens.shape
        num_cells = visible.shape[2]
        # Prefill pads short prompts beside long ones: padding that would fall off the row's end stays at its end.
        length = min(int(host_starts.max()) + num_cells, self.cache.positions)
        first_cell = num_cells - queries  # of the queries: they are the last cells, in order
        self.cache.aim(
            slots,
            (starts[:, None] + cells).clamp(max=self.cache.positions - 1),
            start=int(host_starts[0]) + first_cell if batch == 1 else -1,
            length=length,
        )
        masks: dict[int | None, Tensor] = {}
        for window in set(self._windows.values()):
            mask = tree_mask(
                starts,
                visible,
                length,
                self.dtype,
                query_positions=query_positions,
                cell_positions=cell_positions,
                window=window,
            )
            masks[window] = mask.repeat(1, 1, self._groups, 1) if self._groups > 1 else mask
        by_type = {layer_type: masks[window] for layer_type, window in self._windows.items()}
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            # A dict where layers differ, as such models expect it; the one mask otherwise.
            "attention_mask": by_type if len(by_type) > 1 else next(iter(by_type.values())),
            # Padding and invalid nodes may stand past the last position, where learned embeddings have no row.
            "position_ids": query_positions.clamp(max=self.max_length - 1),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        middle = [layer for layer in self.hidden_layers if layer != -1]
        if middle:
            inputs["output_hidden_states"] = True
        with _attention_implementation(self.config, self.attention):
            output = self.model(**inputs) if with_logits else self.model.base_model(**inputs)
        hidden = {layer: output.hidden_states[layer] for layer in middle}
        if -1 in self.hidden_layers:
            hidden[-1] = self._last_hidden if with_logits else output.last_hidden_state
        return TargetOutput(logits=output.logits if with_logits else output.last_hidden_state[..., :0], hidden_states=hidden)

    def _catch_last_hidden(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._last_hidden = inputs[0]

    @torch.inference_mode()
    def _probe(self, num_layers: int) -> list[Any]:
        """One token through the model, to read every layer's shapes off its first cache update."""
        probe = ShapeProbe(num_layers)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, self._groups, 1, dtype=self.dtype, device=self.device)
        types = list(self._windows)
        with _attention_implementation(self.config, self.attention):
            self.model(
                input_ids=token,
                attention_mask=dict.fromkeys(types, mask) if len(types) > 1 else mask,
                position_ids=token,
                past_key_values=probe,
                use_cache=True,
            )
        missing = [layer for layer in range(num_layers) if layer not in probe.shapes]
        if missing:
            raise ValueError(
                f"{self.config.model_type}: layers {missing} keep no keys and values in a transformers cache, so their "
                f"state cannot be rolled back after a rejection; this model type is not supported"
            )
        return [probe.shapes[layer] for layer in range(num_layers)]


def check_supported(model: PreTrainedModel) -> None:
    """Refuse models whose state or positions do not allow trees.

    Raises:
        ValueError: Names the model type and the reason.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind}: encoder-decoder models are not supported; give a decoder-only causal LM")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind}: {type(model).__name__} has no output layer; load it with AutoModelForCausalLM")
    recurrent = [t for t in getattr(text, "layer_types", None) or [] if "attention" not in t or t == "linear_attention"]
    if getattr(model, "_is_stateful", False) or recurrent:
        raise ValueError(
            f"{kind}: its recurrent state ({', '.join(sorted(set(recurrent))) or 'state space'}) cannot be rolled back "
            f"after a rejection; give a model whose layers are all attention"
        )
    other = sorted(set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    if other:
        raise ValueError(f"{kind}: no tree mask for layers of type {', '.join(other)}; full and sliding attention are supported")
    if getattr(text, "alibi", False) or kind in ("bloom", "mpt"):
        raise ValueError(f"{kind}: ALiBi derives positions from the mask's columns, which a tree's nodes do not follow; not supported")


def check_length(config: Any, max_length: int) -> None:
    """Refuse a length beyond the model's positions, or one at which its RoPE would depend on batch mates.

    Raises:
        ValueError: Names both lengths.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"max_length={max_length} is beyond the {limit} positions of this {config.model_type} model: lower max_length"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]:
        kind = parameters.get("rope_type", "default")
        original = parameters.get("original_max_position_embeddings") or limit
        if kind in ("longrope", "dynamic") and original is not None and max_length > original:
            raise ValueError(
                f"max_length={max_length} is beyond the {original} positions that this {config.model_type} model was "
                f"trained on, where its {kind} RoPE scales with the longest row of the batch: lower max_length to {original}"
            )


def _windows(config: Any) -> dict[str, int | None]:
    """Attention window of every layer type that occurs: None sees everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types:
        return {t: window if t == "sliding_attention" else None for t in dict.fromkeys(types)}
    if window is not None and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": window}
    return {"full_attention": None}


def _choose_attention(model: PreTrainedModel, attention: str) -> str:
    if attention not in ATTENTION:
        raise ValueError(f"attention={attention!r}: give one of {', '.join(ATTENTION)}")
    takes_ours = getattr(model, "_supports_attention_backend", False)
    if attention == "grouped" and not takes_ours:
        raise ValueError(f"{model.config.model_type} does not take an attention function: use attention='auto'")
    return grouped.NAME if takes_ours and attention != "eager" else "eager"


@contextmanager
def _attention_implementation(config: Any, name: str) -> Iterator[None]:
    """Switch a model's attention for the time of a forward."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
