"""Modules for multi-token prediction that models ship with: DeepSeek-V3's (arXiv 2412.19437), GLM's, Qwen's, MiMo's."""

import copy
import inspect
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.heads.base import FeatureBackbone, FeatureHead
from drafters.heads.bound import move
from specdec.interfaces import Description


class _Backbone(FeatureBackbone):
    def __init__(self, config: Any, target: PreTrainedModel, *, hidden_first: bool, owns_embeddings: bool):
        super().__init__(config, owns_embeddings=owns_embeddings)
        width, self.hidden_first = config.hidden_size, hidden_first
        layer, rotary = _like_the_targets(target, config)
        norm = partial(type(layer.input_layernorm), width, eps=config.rms_norm_eps)
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.layers, self.fusion, self.rotary_emb = nn.ModuleList([layer]), nn.Identity(), rotary
        if "layer_type" in inspect.signature(rotary.forward).parameters:  # one kind of layers turns unlike another
            self.rotary_arguments = {"layer_type": "full_attention"}

    def join(
        self, embeds: Float[Tensor, "batch node hidden"], features: Float[Tensor, "batch node width"]
    ) -> Float[Tensor, "batch node joined"]:
        """Returns embedding and feature, each normed, projected to one width."""
        pair = [self.enorm(embeds), self.hnorm(features)]
        return self.proj(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))


class MTPHead(FeatureHead):
    """A decoder layer of the target's own kind over pairs of its last hidden state and an embedding.

    Args:
        target: The target, whose configuration, decoder layer and norm are taken for patterns.
        hidden_first: Whether the hidden state comes before the embedding where the two are joined, as in MiMo's and
            speculators' modules. DeepSeek's, GLM's and Qwen's have the embedding first.
        before_norm: Whether the hidden state is the one before the target's final norm, as in modules that
            ``speculators`` trains. It is had from the normed one by dividing by the norm's weight: what is left is a
            factor for every position, which the module's own norm removes.
        owns_embeddings: Whether the head has embeddings; it borrows the target's otherwise.
        owns_output: Whether the head has an output layer; it borrows the target's otherwise.

    Raises:
        ValueError: The target has no decoder layers of the usual form.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        hidden_first: bool = False,
        before_norm: bool = False,
        owns_embeddings: bool = False,
        owns_output: bool = False,
    ):
        config: Any = _config_like(target)
        super().__init__(config)
        self.hidden_layers = (-1,)
        self.captured, self.captured_width = 1, config.hidden_size
        self.before_norm = before_norm
        self.model = _Backbone(config, target, hidden_first=hidden_first, owns_embeddings=owns_embeddings)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if owns_output else None
        self.draft_ids = None
        self.fed_back = 2  # the output after the norm

    def describe(self) -> Description:
        pair = ["embedding", "hidden state"][:: -1 if self.model.hidden_first else 1]
        state = f"{'before' if self.before_norm else 'after'}_norm"
        return Description(
            kind="MTP module",
            parts=(self,),
            reads=(-1,),
            facts={"last state": state.replace("_", " the final "), "joins": f"the {pair[0]} before the {pair[1]}"},
            doubts={"state": state},
        )

    @classmethod
    def for_target(cls, target: PreTrainedModel, *, hidden_first: bool = False, before_norm: bool = False) -> "MTPHead":
        """Returns a new head with random weights for a target."""
        head = cls(target, hidden_first=hidden_first, before_norm=before_norm)
        for module in head.modules():
            target._init_weights(module)  # some layers of transformers begin with unset memory
        move(head, target.device, target.dtype)
        return head

    def bound(self, target: PreTrainedModel) -> "MTPHead":
        twin = super().bound(target)
        if self.before_norm:
            twin.model.fusion = _Undone(target.get_decoder().norm)
        return twin


class _Undone(nn.Module):
    """Divides by the weight of an RMSNorm."""

    def __init__(self, norm: Any):
        super().__init__()
        self.norm = norm
        # Some norms multiply by 1 + weight. A new one has the weight that changes nothing.
        self.offset = float(1 - type(norm)(1, eps=1e-6).weight.item())

    def forward(self, normed: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return normed / (self.norm.weight + self.offset)


def _config_like(target: PreTrainedModel) -> PreTrainedConfig:
    """Returns the target's configuration, of a model with one layer that attends to everything."""
    config: Any = copy.deepcopy(target.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the module's experts, like those of the last layers
    return config


def _like_the_targets(target: PreTrainedModel, config: PreTrainedConfig) -> tuple[Any, nn.Module]:
    """Returns a new decoder layer of the kind of the target's last one, and a rotary embedding."""
    decoder: Any = target.get_decoder()
    layers, rotary, settings = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None), vars(config)
    usual = layers is not None and hasattr(layers[-1], "input_layernorm") and hasattr(decoder, "norm")
    if layers is None or not usual or rotary is None or "rms_norm_eps" not in settings:
        raise ValueError(
            f"MTP modules are layers with RMSNorm and rotary embeddings, and the target's ({target.config.model_type}) "
            f"are not: use another drafter"
        )
    try:
        return type(layers[-1])(config, 0), type(rotary)(config)
    except Exception as error:  # a layer that is made in a way of its own
        raise ValueError(
            f"no MTP module can be made like the layers of this {target.config.model_type} model "
            f"({type(error).__name__}: {error}): use another drafter"
        ) from error
