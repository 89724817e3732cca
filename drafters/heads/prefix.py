"""Prefix attention: one decoder layer over the target's last states, whose output takes their place (Hydra++).

Ankner et al. 2024 (arXiv 2402.05109), section 4. The published code runs a Llama model of one layer, its final norm
included, with the target's configuration.
"""

import copy
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.heads.assemble import config_of, needed
from drafters.heads.base import FeatureBackbone, FeatureHead, config_for
from drafters.heads.bound import beside, lengthen, widened, wider_config
from specdec.target.target import Target

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")


class PrefixAttention(FeatureHead):
    """A decoder layer and a norm over the target's last states, which are given as embeddings.

    ``stated`` says whether attention heads, rotary embedding and norm are known: the published files leave them to the
    target's configuration.
    """

    draft_ids = None

    def __init__(self, config: LlamaConfig, *, stated: bool = True):
        super().__init__(config)
        self.hidden_layers, self.captured, self.captured_width = (-1,), 1, config.hidden_size
        self.model, self.lm_head, self.fed_back, self.stated = _Backbone(config), None, 2, stated

    @classmethod
    def for_target(cls, target: PreTrainedModel, *, intermediate_size: int | None = None) -> "PrefixAttention":
        """A new layer of the target's sizes, which changes nothing but the states' length."""
        layer = cls(_config_like(target, intermediate_size))
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            nn.init.zeros_(layer.get_parameter(f"model.layers.0.{part}.weight"))
        weight = getattr(getattr(target.get_decoder(), "norm", None), "weight", None)
        if weight is not None:  # the states' usual length
            length = float(weight.detach().float().square().mean().sqrt())
            nn.init.constant_(layer.get_parameter("model.norm.weight"), length)
        return layer

    def widened(self, width: int) -> "PrefixAttention":
        factor = width / self.captured_width
        return widened(self, PrefixAttention(wider_config(self.config, factor), stated=self.stated), factor)

    def stated_for(self, target: Target) -> "PrefixAttention":
        """The same layer with the target's attention heads, rotary embedding and norm, unless it has its own."""
        if self.stated:
            return self
        config: Any = _config_like(target.model, self.config.intermediate_size)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            found = self.get_parameter(f"model.layers.0.self_attn.{part}.weight").shape[0]
            if found != heads * config.head_dim:
                raise ValueError(
                    f"the prefix attention's {part} has {found} channels and the configuration of {target.name} calls "
                    f"for {heads * config.head_dim}: give Hydra++ heads that were trained on this target"
                )
        twin = PrefixAttention(config)
        twin.load_state_dict(self.state_dict(), assign=True)
        return twin

    def beside(self, target: Target, max_length: int) -> "PrefixAttention":
        placed = beside(copy.deepcopy(self.stated_for(target)), target.device, target.dtype).requires_grad_(False)
        twin = placed.bound(target.model)
        lengthen(twin, max_length)
        return twin

    def stated_sizes(self) -> dict[str, Any]:
        """What the tensors do not say, for ``config.json``."""
        return {name: getattr(self.config, name) for name in _SIZES} if self.stated else {}

    @classmethod
    def of(cls, name: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> "PrefixAttention":
        """A layer without weights for the tensors of a checkpoint; arguments as for ``config_of``."""
        stated = bool(stored.get("num_attention_heads"))
        keys = needed(name, tensors, f"{layer}self_attn.k_proj.weight").shape[0]
        config: Any = config_of(name, stored if stated else {"head_dim": keys}, tensors, layer)
        return cls(config, stated=stated)


class _Backbone(FeatureBackbone):
    def __init__(self, config: Any):
        super().__init__(config, owns_embeddings=False)
        self.layers, self.fusion = nn.ModuleList([LlamaDecoderLayer(config, 0)]), nn.Identity()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def join(
        self, embeds: Float[Tensor, "batch node hidden"], features: Float[Tensor, "batch node width"]
    ) -> Float[Tensor, "batch node joined"]:
        """The states alone."""
        return embeds


def _config_like(target: PreTrainedModel, intermediate_size: int | None) -> LlamaConfig:
    """The configuration of a layer that turns positions as its target does, where that has one way for all layers."""
    config = config_for(target, layers=1, intermediate_size=intermediate_size)
    known = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if "rope_type" in known and "rope_theta" in known:
        config.rope_parameters = dict(known)
    return config
