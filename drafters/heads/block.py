"""The head of a block drafter: a small transformer that fills the places of a block in one forward.

It reads the target through injected keys and values: some of the target's hidden states at every committed position,
made into one feature per position, become keys and values of *every* layer (DFlash, arXiv 2602.06036). A further part
(``block_parts``) may make a place depend on the tokens drawn before it.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotated
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from drafters.heads.block_config import BlockConfig
from drafters.heads.block_parts import (
    CandidateSelector,
    ConfidenceHead,
    GroupedConvolution,
    MarkovHead,
    PlaceHead,
    PrefixHead,
    Refiner,
    convolved_layer,
)
from drafters.heads.bound import DraftHead, sizes_like, widened, wider_config
from specdec.cache.storage import Cache
from specdec.cache.transformers_cache import CACHE
from specdec.interfaces import Description

_MANY_LAYERS = 8


class BlockHead(DraftHead):
    """A block drafter's head, in two kinds of forwards over one cache.

    *Context*: ``forward(features=…)`` writes keys and values of committed positions, and returns nothing else.
    *Places*: ``forward(input_ids=…)`` runs tokens (the root, and mask tokens) through all layers, behind the context
    that is in the cache. Convolutions go along ``inputs_embeds``, which are one block; a token of ``input_ids`` is a
    block of its own to them.

    The names of the parameters are those of the published checkpoints. Embeddings and output layer may be borrowed
    (``bound``).
    """

    config_class = BlockConfig
    config: BlockConfig
    base_model_prefix = ""

    embed_tokens: nn.Module | None
    lm_head: nn.Module | None

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        width = config.hidden_size
        self.captured, self.captured_width = len(self.hidden_layers), config.target_hidden_size or width
        kind: Any = {"qwen3": Qwen3DecoderLayer, "llama": LlamaDecoderLayer}[config.layer_kind]
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.owns_embeddings else None
        self.fc = nn.Linear(self.feature_width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([kind(config, index) for index in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.lm_head = nn.Linear(width, config.columns, bias=False) if config.owns_output else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.prefix_head = PrefixHead(config) if config.gru_hidden_dim else None
        self.refiner_head = Refiner(config) if config.xpress_rank else None
        parts = [self.markov_head, self.candidate_selector, self.prefix_head, self.refiner_head]
        if sum(part is not None for part in parts) > 1:
            raise ValueError(
                "a block drafter's head has a Markov head, a selector, a recurrent network or a refiner, not several: "
                "set all but one of markov_rank, selector_rank, gru_hidden_dim and xpress_rank to 0"
            )
        for layer in self.layers if config.conv_kernel_size else ():
            for part in ("attention_conv", "mlp_conv"):
                setattr(layer, part, GroupedConvolution(config))
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        reduced = config.columns != config.vocab_size
        self.register_buffer("draft_ids", torch.arange(config.columns) if reduced else None)
        self.scales_itself = config.output_multiplier != 1 or config.final_logit_softcapping is not None
        self.post_init()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return tuple(self.config.hidden_layers or ())

    @property
    def feature_width(self) -> int:
        return self.captured * self.captured_width

    @property
    def place_head(self) -> PlaceHead | None:
        """The part that makes a place depend on the tokens drawn before it; None if nothing does."""
        return self.markov_head or self.candidate_selector or self.prefix_head or self.refiner_head

    def describe(self) -> Description:
        config, ids = self.config, self.draft_ids
        form = "every place predicts the next one's token" if config.shifted else "every place predicts its own token"
        sight = "sees those before it" if config.causal else "sees all others"
        if config.causal_in_windows not in (None, config.causal):
            sight += ", in sliding layers " + ("those before it" if config.causal_in_windows else "all others")
        parts = {
            f"{config.markov_head_type} Markov head of rank {config.markov_rank}": config.markov_rank,
            f"selector among {config.selector_top_k} candidates of rank {config.selector_rank}": config.selector_rank,
            f"recurrent network down the tokens, {config.gru_hidden_dim} wide": config.gru_hidden_dim,
            f"refiner of rank {config.xpress_rank}": config.xpress_rank,
            f"convolutions over {config.conv_kernel_size} places": config.conv_kernel_size,
        }
        return Description(
            kind=f"block head ({'DSpark' if config.shifted else 'DFlash'})",
            parts=(self,),
            at_once=True,
            reads=self.hidden_layers,
            tokens=None if ids is None else ids.tolist(),
            facts={
                "block": f"{config.block_size} places, {config.tokens} tokens: {form}, and {sight}",
                "mask token": str(config.mask_token_id),
                "besides": "; ".join(name for name, there in parts.items() if there) or "nothing",
            },
            doubts={"layers": self.hidden_layers, "mask": config.mask_token_id},
        )

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        layers: int = 2,
        block_size: int = 8,
        mask_token_id: int | None = None,
        hidden_layers: tuple[int, ...] | None = None,
        draft_ids: Int[Tensor, " column"] | None = None,
        **settings: Any,
    ) -> "BlockHead":
        """Returns a head with random weights, of a target's widths, in float32 on the CPU.

        By default the mask token is the last id, and of the hidden states as many as ``layers`` are read, spread
        evenly, or all between the target's layers if it has few. ``settings`` are further fields of ``BlockConfig``.
        """
        text: Any = target.config.get_text_config(decoder=True)
        vocab = target.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
        total = text.num_hidden_layers
        if hidden_layers is None:  # in a shallow target the usual ones would coincide
            few = total < _MANY_LAYERS
            hidden_layers = tuple(range(1, total)) if few else tuple(id + 1 for id in default_layers(total, layers))
        theta = (getattr(text, "rope_parameters", None) or {}).get("rope_theta") or 1e4  # RoPE without its scaling
        given: dict[str, Any] = {
            **sizes_like(text),
            "vocab_size": vocab,
            "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
            "num_hidden_layers": layers,
            "block_size": block_size,
            "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
            "hidden_layers": list(hidden_layers),
            "target_hidden_size": text.hidden_size,
            "target_layers": total,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        }
        if draft_ids is not None:
            given |= {"draft_vocab_size": len(draft_ids), "owns_output": True}
        head = cls(BlockConfig(**given | settings)).float()
        for module in head.modules():
            if isinstance(module, GroupedConvolution):
                module.begin()  # the model's own initialization makes its projection random
        if draft_ids is not None and head.draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        return head

    def forward(
        self,
        input_ids: Int[Tensor, "batch node"] | None = None,
        features: Float[Tensor, "batch node width"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#batch node"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch node hidden"] | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Reads context if ``features`` are given, and otherwise runs places; logits lack a Markov head's part."""
        given = features if features is not None else inputs_embeds if input_ids is None else input_ids
        assert given is not None, "give features, tokens or embeddings"
        if past_key_values is None and (kwargs.get("use_cache") or features is not None):
            past_key_values = DynamicCache()
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(start, start + given.shape[1], device=given.device)[None]
        if features is not None:
            self._read(features, position_ids, past_key_values)
            return CausalLMOutputWithPast(**{CACHE: past_key_values})
        embeds: Any = inputs_embeds
        if embeds is None:
            if self.embed_tokens is None:
                raise ValueError("this head has no embeddings: it borrows the target's, call BlockHead.bound first")
            embeds = self.embed_tokens(input_ids)
        states = self.run(
            embeds,
            places=1 if inputs_embeds is None else embeds.shape[1],
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values,
            **kwargs,
        )
        return CausalLMOutputWithPast(
            logits=self.logits_of(states[-1][:, -logits_to_keep:] if logits_to_keep else states[-1]),
            **{CACHE: past_key_values},
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def run(
        self,
        inputs_embeds: Float[Tensor, "batch node hidden"],
        *,
        places: int,
        attention_mask: Any,
        cache: Any,
        **kwargs: Any,
    ) -> list[Float[Tensor, "batch node hidden"]]:
        """Returns the inputs of all layers and, last, the normed output of blocks of so many places, side by side."""
        config = self.config
        hidden = inputs_embeds
        if config.input_embedding_scale != 1:
            hidden = hidden * config.input_embedding_scale
        masks, positions = attention_mask, kwargs["position_ids"]
        if not isinstance(masks, dict):
            wanted: dict[str, Any] = {
                "config": config,
                "inputs_embeds": hidden,
                "attention_mask": attention_mask,
                CACHE: cache,
                "position_ids": positions,
            }
            make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
            masks = {kind: make[kind](**wanted) for kind in dict.fromkeys(config.layer_types or ())}
        rotary = self.rotary_emb(hidden, positions)
        states: list[Tensor] = []
        for layer, kind in zip(self.layers, config.layer_types or (), strict=True):
            states.append(hidden)
            given = {"attention_mask": masks[kind], "position_embeddings": rotary, CACHE: cache, **kwargs}
            plain = not config.conv_kernel_size
            hidden = layer(hidden, **given) if plain else convolved_layer(layer, hidden, places, **given)
        return [*states, self.norm(hidden)]

    def _read(self, features: Float[Tensor, "batch node width"], positions: Tensor, cache: Any) -> None:
        """Write the keys and values of context to the cache."""
        feature = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary_emb(feature, positions)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            keys = attention.k_proj(feature).unflatten(-1, (-1, attention.head_dim))
            values = attention.v_proj(feature).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            keys = (attention.k_norm(keys) if self.config.layer_kind == "qwen3" else keys).transpose(1, 2)
            _, keys = rotated(keys[:, :0], keys, cos, sin)  # no queries
            if isinstance(cache, Cache):
                cache.write(index, keys, values)  # without reading what nobody attends to
            else:
                cache.update(keys, values, index)

    def logits_of(self, hidden: Float[Tensor, "*some hidden"], output: nn.Module | None = None) -> Tensor:
        """Returns the logits of normed hidden states, by the head's own output layer unless another one is given."""
        layer = output or self.lm_head
        if layer is None:
            raise ValueError("this head has no output layer: it borrows the target's, call BlockHead.bound first")
        logits = layer(hidden)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def widened(self, width: int) -> "BlockHead":
        if self.config.conv_kernel_size:  # whose rows are counted by groups of channels
            return self
        factor = width / self.captured_width
        config = wider_config(self.config, factor)
        config.target_hidden_size, rank = width, self.config.markov_rank

        def parts(name: str) -> tuple[int, int]:
            if name == "fc.weight":
                return len(self.hidden_layers), 0
            if name == "confidence_head.proj.weight":
                return 1, rank if self.config.confidence_with_markov else 0
            behind = {"markov_head.gate_proj.weight": rank, "prefix_head.joined.weight": config.gru_hidden_dim}
            return 1, behind.get(name, 0)  # the hidden state comes first

        larger = BlockHead(config)
        larger.draft_ids = self.draft_ids
        return widened(self, larger, factor, parts)


def default_layers(target_layers: int, count: int) -> list[int]:
    """Returns the usual ids of target layers whose *outputs* are read, spread evenly (z-lab's default)."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (count - 1)) for index in range(count)]
