"""The heads of EAGLE-1 (arXiv 2401.15077), EAGLE-3 (2503.01840) and 3.1 (2605.09992); EAGLE-2 is another tree."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP

from drafters.heads.assemble import mask_of
from drafters.heads.base import FeatureBackbone, FeatureHead, config_for
from drafters.heads.bound import widened, wider_config
from drafters.heads.files import Checkpoint
from specdec.arguments import whole
from specdec.interfaces import Description


class EagleHead(FeatureHead):
    """A decoder layer (``config``: Llama's or Qwen3's) that predicts the target's next last state, normalized."""

    draft_ids = tokens = None

    def __init__(self, config: PreTrainedConfig, *, fusion_bias: bool = True, owns_embeddings: bool = False):
        super().__init__(config)
        self.hidden_layers = (-1,)
        self.captured, self.captured_width = 1, config.hidden_size
        self.fusion_bias, self.owns_embeddings = fusion_bias, owns_embeddings
        self.model = _EagleBackbone(self)
        self.lm_head = None
        self.fed_back = config.num_hidden_layers

    @classmethod
    def for_target(cls, target: PreTrainedModel, *, layers: int = 1, fusion_bias: bool = True) -> "EagleHead":
        """A new head with random weights for a target, of the target's sizes."""
        return cls(config_for(target, layers=layers), fusion_bias=fusion_bias)

    def describe(self) -> Description:
        return Description(kind="EAGLE-1 head", parts=(self,), reads=(-1,), doubts={"rope": self})


class _EagleBackbone(FeatureBackbone):
    def __init__(self, head: EagleHead):
        config: Any = head.config
        super().__init__(config, owns_embeddings=head.owns_embeddings)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=head.fusion_bias)
        self.fusion = nn.Identity()
        self.layers = nn.ModuleList(_decoder_layer(config, index) for index in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()  # what comes out of fc is not normed
        self.norm = nn.Identity()  # the output is meant to be the target's, whose output layer reads it
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def join(self, embeds: Tensor, features: Tensor) -> Float[Tensor, "batch node joined"]:
        """Embedding and feature, projected to one width."""
        return self.fc(torch.cat([embeds, features], dim=-1))


class Eagle3Head(FeatureHead):
    """One decoder layer (or more) over pairs of a fused feature and an embedding, with an output layer of its own.

    Args:
        config: Llama's or Qwen3's, of the head's own sizes. ``vocab_size`` is the target's.
        hidden_layers: The target's hidden states that are fused; None if not known.
        captured: How many they are.
        captured_width: The target's hidden size; None for the head's own.
        draft_ids: The target's id of every column of the output layer, ascending; None for all of the vocabulary.
        norm_before_residual: Whether the residual stream begins with the normed feature.
        norm_joined: Whether one norm goes over all captured states before they are fused.
        norm_each: Whether each captured state has a norm of its own (3.1).
        feeds_normed: Whether the normed output is fed back (3.1), not the output as it is.
        owns_embeddings: Whether the head has embeddings; it borrows the target's otherwise.
        owns_output: Whether the head has an output layer; it borrows the target's otherwise.

    Attributes:
        at_once: Whether it fills masks, and does not read its own output.
        tokens: How many tokens a draft was trained for; None if not known.
    """

    options: ClassVar[tuple[str, ...]] = (
        *("hidden_layers", "captured", "captured_width", "draft_ids", "norm_before_residual", "norm_joined"),
        *("norm_each", "feeds_normed", "fusion_bias", "owns_embeddings", "owns_output"),
    )
    at_once: ClassVar[bool] = False
    in_speculators: ClassVar[tuple[str, str]] = ("eagle3", "Eagle3Speculator")
    tokens: int | None = None

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        hidden_layers: Sequence[int] | None = None,
        captured: int = 3,
        captured_width: int | None = None,
        draft_ids: Sequence[int] | Int[Tensor, " column"] | None = None,
        norm_before_residual: bool = False,
        norm_joined: bool = False,
        norm_each: bool = False,
        feeds_normed: bool = False,
        fusion_bias: bool = False,
        owns_embeddings: bool = False,
        owns_output: bool = True,
    ):
        super().__init__(config)
        self.hidden_layers = None if hidden_layers is None else tuple(hidden_layers)
        self.captured = whole("captured", captured, least=1)
        self.captured_width = captured_width or config.hidden_size
        if self.hidden_layers is not None and len(self.hidden_layers) != captured:
            raise ValueError(
                f"hidden_layers={list(self.hidden_layers)} are {len(self.hidden_layers)} hidden states and the head "
                f"fuses {captured}: give {captured}"
            )
        if norm_joined and norm_each:
            raise ValueError("norm_joined and norm_each exclude each other: give one of the two")
        if draft_ids is not None and not owns_output:
            raise ValueError("a reduced vocabulary needs an output layer of its own: give draft_ids=None or one")
        self.norm_before_residual, self.feeds_normed = norm_before_residual, feeds_normed
        self.norm_joined, self.norm_each, self.fusion_bias = norm_joined, norm_each, fusion_bias
        self.owns_embeddings, self.owns_output = owns_embeddings, owns_output
        self.model = _Eagle3Backbone(self)
        ids = draft_ids if draft_ids is None or isinstance(draft_ids, Tensor) else torch.tensor(list(draft_ids))
        self.register_buffer("draft_ids", ids, persistent=False)
        self.lm_head = nn.Linear(config.hidden_size, self.columns, bias=False) if owns_output else None
        self.fed_back = config.num_hidden_layers + feeds_normed

    @property
    def columns(self) -> int:
        return self.config.vocab_size if self.draft_ids is None else len(self.draft_ids)

    @classmethod
    def stored(cls, checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return further options of a head that files hold; refuse files of another kind."""
        if mask_of(checkpoint.name, checkpoint.config) is not None:
            raise ValueError(
                f"{checkpoint.name} holds a head that fills masks and was not trained to read its own output: give the "
                f"drafter of such heads"
            )
        return {}

    def said(self) -> dict[str, Any]:
        """Return further keys of ``config.json``."""
        return {}

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        hidden_layers: Sequence[int] | None = None,
        layers: int = 1,
        intermediate_size: int | None = None,
        **options: Any,
    ) -> "Eagle3Head":
        """A new head with random weights for a target; by default it fuses an early, a middle and a late state."""
        text = target.config.get_text_config(decoder=True)
        chosen = default_layers(text.num_hidden_layers) if hidden_layers is None else tuple(hidden_layers)
        config = config_for(target, layers=layers, intermediate_size=intermediate_size)
        return cls(config, hidden_layers=chosen, captured=len(chosen), **options)

    def describe(self) -> Description:
        norms = "one over all" if self.norm_joined else "one for each" if self.norm_each else "none"
        words = {True: "normed", False: "un-normed"}
        ids, first = self.draft_ids, self.model.layers[0]
        return Description(
            kind="EAGLE-3 head",
            parts=(self,),
            reads=self.hidden_layers or (),
            tokens=None if ids is None else ids.tolist(),
            facts={
                "norms": f"of captured states: {norms}; residual stream: {words[self.norm_before_residual]}; fed back: "
                f"{words[self.feeds_normed]}"
            },
            doubts={"layers": self.hidden_layers, "residual": first, "rope": self},
        )

    def widened(self, width: int) -> "Eagle3Head":
        factor = width / self.captured_width
        options: dict[str, Any] = {name: getattr(self, name) for name in self.options} | {"captured_width": width}
        larger = type(self)(wider_config(self.config, factor), **options)
        return widened(self, larger, factor, self.parts)

    def parts(self, name: str) -> tuple[int, int]:
        """See ``bound.widened``."""
        pairs = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"}
        fuses = name.startswith(("model.fusion.linear.weight", "model.fusion.norm.weight"))
        return self.captured if fuses else 2 if name in pairs else 1, 0


class _Eagle3Backbone(FeatureBackbone):
    def __init__(self, head: Eagle3Head):
        config: Any = head.config
        super().__init__(config, owns_embeddings=head.owns_embeddings)
        total = head.captured * head.captured_width
        norm: nn.Module = nn.Identity()
        if head.norm_each:
            norm = _NormEach(config, head.captured, head.captured_width)
        elif head.norm_joined:
            norm = _rms_norm(config, total)
        linear = nn.Linear(total, config.hidden_size, bias=head.fusion_bias)
        self.fusion = nn.Sequential(OrderedDict(norm=norm, linear=linear))
        first = PairLayer(config, 0, norm_before_residual=head.norm_before_residual)
        rest = [_decoder_layer(config, index) for index in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *rest])
        self.norm = _rms_norm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def join(self, embeds: Tensor, features: Tensor) -> Float[Tensor, "batch node joined"]:
        """The two side by side, un-normed: the first layer norms each, and needs the feature as it came."""
        return torch.cat([embeds, features], dim=-1)


class PairLayer(nn.Module):
    """EAGLE-3's first layer: a decoder layer whose attention reads embedding and feature side by side."""

    def __init__(self, config: Any, index: int, *, norm_before_residual: bool):
        super().__init__()
        kind: Any = Qwen3Attention if isinstance(config, Qwen3Config) else LlamaAttention
        self.self_attn: Any = kind(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        _with_biases(self, config)
        self.mlp = (Qwen3MLP if isinstance(config, Qwen3Config) else LlamaMLP)(config)
        self.input_layernorm = _rms_norm(config)
        self.hidden_norm = _rms_norm(config)
        self.post_attention_layernorm = _rms_norm(config)
        self.norm_before_residual = norm_before_residual

    def forward(self, joined: Float[Tensor, "batch node joined"], **kwargs: Any) -> Float[Tensor, "batch node hidden"]:
        """The layer's output, un-normed, for embeddings and features side by side."""
        embeds, features = joined.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended, _ = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embeds), normed], dim=-1), **kwargs)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _NormEach(nn.Module):
    """Norms each of several hidden states, which lie side by side, by itself (EAGLE-3.1)."""

    def __init__(self, config: Any, count: int, width: int):
        super().__init__()
        self.norms = nn.ModuleList(_rms_norm(config, width) for _ in range(count))

    def forward(self, states: Float[Tensor, "*rows joined"]) -> Float[Tensor, "*rows joined"]:
        parts = states.chunk(len(self.norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)


def default_layers(layers: int) -> tuple[int, ...]:
    """The hidden states that published heads fuse for a target of so many layers: 2, N/2 and N-3, if they are three."""
    if layers < 7:
        raise ValueError(
            f"the usual hidden states 2, N/2 and N-3 of a target with N={layers} layers are not three: "
            f"give hidden_layers"
        )
    return 2, layers // 2, layers - 3


def _rms_norm(config: Any, width: int | None = None) -> nn.Module:
    return LlamaRMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)


def _decoder_layer(config: Any, index: int) -> nn.Module:
    """An ordinary decoder layer: Qwen3's, which norms queries and keys, for a configuration of its kind."""
    kind: Any = Qwen3DecoderLayer if isinstance(config, Qwen3Config) else LlamaDecoderLayer
    return _with_biases(kind(config, index), config)


def _with_biases(layer: nn.Module, config: Any) -> nn.Module:
    """Take the bias off a layer's output projection unless ``config.output_bias``: Qwen2's has none there."""
    attention: Any = layer.self_attn
    if attention.o_proj.bias is not None and not getattr(config, "output_bias", True):
        attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features, bias=False)
    return layer
