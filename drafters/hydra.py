"""Hydra: like Medusa, but a head also reads the tokens drafted above it (Ankner et al. 2024, arXiv 2402.05109).

Hydra++ has prefix attention besides (section 4): a decoder layer over the target's last states, whose output the heads
read. The published code runs a Llama model of one layer, its final norm included, with the target's configuration.
"""

import copy
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.heads.assemble import config_of, fill, named, needed
from drafters.heads.base import FeatureBackbone, FeatureHead, config_for
from drafters.heads.bound import beside, lengthen, move, rows_of, widened, wider_config
from drafters.heads.files import Checkpoint, write
from drafters.heads.last_state import Heads, LastStateDrafter, PathScorer, TrainedHeads
from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, additive
from drafters.reduced import with_parts
from specdec import Batch, ForwardBatch, ModelRunner, Outcome, Sizes, Target, Topology, Wants

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
PREFIX = "prefix_embeding_layer."  # its authors' spelling
NAMES = [("mlp.", "hydra_mlp."), ("lm_head.", "hydra_lm_head."), ("prefix.model.", PREFIX)]
_UNUSED = ("input_embed_fn.weight", f"{PREFIX}embed_tokens.weight")
"""The target's embeddings, and some that are never read: published files hold both."""
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")


class PrefixAttention(FeatureHead):
    """A decoder layer and a norm over the target's last states, which are given as embeddings.

    ``stated`` says whether attention heads, rotary embedding and norm are known: the published files leave them to the
    target's configuration.
    """

    draft_ids = None
    theta: float | None = None  # of the rotary embedding that published files hold

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
        if self.theta is not None:
            config.rope_parameters = {"rope_type": "default", "rope_theta": self.theta}
        twin = PrefixAttention(config)
        twin.load_state_dict(self.state_dict(), assign=True)
        return twin

    def beside(self, target: Target, max_length: int) -> "PrefixAttention":
        placed = beside(copy.deepcopy(self.stated_for(target)), target.device, target.dtype).requires_grad_(False)
        twin = placed.bound(target.model)
        lengthen(twin, max_length)
        return twin

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

    def join(self, embeds: Tensor, features: Tensor) -> Float[Tensor, "batch node joined"]:
        """The states alone."""
        return embeds


def _config_like(target: PreTrainedModel, intermediate_size: int | None) -> LlamaConfig:
    """The configuration of a layer that turns positions as its target does, where that has one way for all layers."""
    config = config_for(target, layers=1, intermediate_size=intermediate_size)
    known = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if "rope_type" in known and "rope_theta" in known:
        config.rope_parameters = dict(known)
    return config


class HydraBlock(nn.Module):
    """Computes ``R x + SiLU(W x + b)``; R is the identity where the width stays."""

    def __init__(self, width: int, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Identity() if width == hidden_size else nn.Linear(width, hidden_size)

    def forward(self, joined: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows hidden"]:
        return self.res_connection(joined) + nn.functional.silu(self.linear(joined))


class HydraHeads(Heads):
    """Heads that predict one token each, from the target's last hidden state and the embeddings of the tokens between.

    With the last committed position at t, head ``i`` reads the hidden state at t and the target's embeddings of the
    root and of the ``i`` tokens drafted below it, side by side, and predicts token t+2+i (section 3). ``num_layers``
    counts its residual blocks; the published code repeats *one* block behind the first one.

    Args:
        prefix: Hydra++'s layer, whose output takes the place of the hidden state; None for plain Hydra.
        dropout: Hydra++'s dropout before every linear layer of a head, while it is trained.
    """

    files = FILES
    sizes = (*Heads.sizes, "dropout")

    def __init__(self, *, prefix: PrefixAttention | None = None, dropout: float = 0.0, **sizes: Any):
        super().__init__(**sizes)
        width = self.hidden_size
        self.mlp, self.lm_head, self.prefix, self.dropout = nn.ModuleList(), nn.ModuleList(), prefix, dropout
        before = [] if prefix is None else [nn.Dropout(dropout)]  # in the published names, it takes a number
        for index in range(self.num_heads):
            inner = [*before, HydraBlock(width, width)] * (self.num_layers - 1)
            self.mlp.append(nn.Sequential(*before, HydraBlock((index + 2) * width, width), *inner))
            output = nn.Linear(width, self.vocab_size)
            self.lm_head.append(nn.Sequential(*before, output) if before else output)

    def output(self, depth: int) -> Any:
        layers: Any = self.lm_head
        return layers[depth - 1]

    def begin_as(self, output: nn.Linear) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("prefix."):  # see ``PrefixAttention.for_target``
                continue
            parameter.zero_()
            if name.endswith("res_connection.weight"):
                parameter[:, : self.hidden_size].fill_diagonal_(1.0)
            elif name.startswith("lm_head.") and name.endswith("weight"):
                parameter.copy_(rows_of(output))

    def parts(self, name: str) -> tuple[int, int]:
        """The first block of head i reads i + 2 states and embeddings side by side."""
        kind, head, layer, *rest = name.split(".")
        first = kind == "mlp" and int(layer) == (self.prefix is not None) and rest[-1] == "weight"
        return (int(head) + 2 if first else 1), 0

    def without_prefix(self) -> "HydraHeads":
        """The heads alone, with the same weights."""
        return self if self.prefix is None else with_parts(self, prefix=None)

    def widened(self, hidden_size: int) -> "HydraHeads":
        prefix = None if self.prefix is None else self.prefix.widened(hidden_size)
        larger = self.like(hidden_size=hidden_size, prefix=prefix)
        factor = hidden_size / self.hidden_size
        widened(self.without_prefix(), larger.without_prefix(), factor, self.parts)
        return larger.requires_grad_(False).eval()

    def forward(self, joined: Float[Tensor, "*rows width"], index: int) -> Float[Tensor, "*rows vocab"]:
        return self.lm_head[index](self.mlp[index](joined))

    def save_pretrained(self, path: str | Path) -> None:
        config = {
            "hydra_num_heads": self.num_heads,
            "hydra_num_layers": self.num_layers,
            "hydra_head_arch": "mlp" if self.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": self.base_model,
        }
        if self.prefix is not None and self.prefix.stated:  # what no tensor says
            config |= {name: getattr(self.prefix.config, name) for name in _SIZES}
        write(path, named(self.state_dict(), NAMES), config, file=FILES[0])

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "HydraHeads":
        name, stored, tensors = checkpoint.name, checkpoint.config, checkpoint.tensors(lambda key: key not in _UNUSED)
        turns = [tensors.pop(key) for key in [*tensors] if key.endswith(".rotary_emb.inv_freq")]
        if stored.get("hidden_state_offset") or stored.get("grounded_heads") is False:
            raise ValueError(
                f"{name} reads a hidden state before the last one (hidden_state_offset), or no tokens (grounded_heads "
                f"false), not supported here"
            )
        prefixed = any(key.startswith(PREFIX) for key in tensors)
        parts = [key.split(".") for key in tensors if key.startswith("hydra_mlp.")]
        last = max((int(part[2]) for part in parts), default=0)
        output = needed(name, tensors, f"hydra_lm_head.0.{'1.' if prefixed else ''}weight")
        with torch.device("meta"):
            heads = cls(
                prefix=PrefixAttention.of(name, stored, tensors, f"{PREFIX}layers.0.") if prefixed else None,
                num_heads=1 + max((int(part[1]) for part in parts), default=0),
                hidden_size=output.shape[1],
                vocab_size=output.shape[0],
                num_layers=(last + 1) // 2 if prefixed else last + 1,
                base_model=stored.get("base_model_name_or_path") or "",
            )
        fill(name, heads, tensors, NAMES)
        if heads.prefix is not None:
            move(heads.prefix, "cpu", None)
            heads.prefix.theta = float(turns[0][1]) ** -len(turns[0]) if turns else None
        return heads


class HydraScorer(PathScorer):
    """Scores a node's children by its depth's head, from state and path; ``runner`` has Hydra++'s attention."""

    def __init__(self, *, runner: ModelRunner | None = None, **places: Any):
        super().__init__(**places)
        self.runner, self.caches = runner, () if runner is None else (runner.cache,)

    @property
    def models(self) -> tuple[ModelRunner | nn.Module, ...]:
        return super().models if self.runner is None else (self.runner, *super().models)

    def prepare(self, batch: Batch) -> Hashable:
        return None if self.runner is None else self.runner.version, super().prepare(batch)

    def states(self, outcome: Outcome) -> Float[Tensor, "batch position hidden"]:
        """Return what prefix attention makes of the states. Padding is written behind a row's end, and never read."""
        states = outcome.hidden_states[-1]
        if self.runner is None:
            return states
        made = self.runner.run(
            ForwardBatch(
                tokens=None,
                embeds=states.to(self.runner.facts.dtype),
                slots=outcome.slots,
                lengths=outcome.starts,
                topology=Topology.chain(states.shape[1], states.device),
                wants=Wants(logits=0, hidden_layers=(-1,)),
            )
        )
        return made.hidden_states[-1]

    def step(self, hidden: Tensor, embeds: Tensor, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        joined, width = above, hidden.shape[2]  # a copy, or the root's own place
        joined[:, :, :width] = hidden
        joined[:, :, (depth + 1) * width : (depth + 2) * width] = embeds
        return self.heads(joined[:, :, : (depth + 2) * width], depth), joined


class HydraDrafter(LastStateDrafter):
    """Drafts level by level: every node's head reads the node's own path. Arguments: see ``LastStateDrafter``."""

    kind, title = HydraHeads, "Hydra"

    def scorer(self, heads: Any, target: Target, sizes: Sizes) -> HydraScorer:
        runner = None
        if heads.prefix is not None:
            layer = heads.prefix.beside(target, sizes.max_length)
            runner = self.runner_for(layer, "head", sizes, max_nodes=self.max_depth + 1)
        return HydraScorer(
            embed=target.model.get_input_embeddings(),
            max_shown=self.tree.max_shown,
            width=(heads.num_heads + 1) * heads.hidden_size,
            runner=runner,
            **self.placed(heads.without_prefix(), target, sizes),
        )


class TrainedHydra(TrainedHeads):
    """Every head also reads the text's tokens from the root on. The other arguments: see ``TrainedHeads``.

    With ``prefix_attention`` new heads are Hydra++'s; ``intermediate_size`` is of that layer, and ``dropout`` stands
    before every linear layer of a head.
    """

    title, made = "Hydra heads", HydraDrafter

    def __init__(
        self,
        *,
        name: str | None = None,
        depths: int = 4,
        num_layers: int = 1,
        prefix_attention: bool = False,
        intermediate_size: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__(name=name, depths=depths, num_layers=num_layers)
        if not 0 <= dropout < 1 or (dropout and not prefix_attention):
            raise ValueError(f"head.dropout={dropout}: give a share below 1, and 0 without head.prefix_attention")
        self.prefix_attention, self.intermediate_size, self.dropout = prefix_attention, intermediate_size, dropout

    def settings(self, target: Target) -> dict[str, Any]:
        settings = super().settings(target)
        if self.prefix_attention:
            layer = PrefixAttention.for_target(target.model, intermediate_size=self.intermediate_size)
            settings |= {"prefix": layer.float(), "dropout": self.dropout}
        return settings

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        super().begin(target, counts)
        if (self.head.prefix is not None) != self.prefix_attention:
            raise ValueError(f"head.name={self.name!r}: give head.prefix_attention={not self.prefix_attention}")
        if self.head.prefix is not None:
            self.head.prefix = self.head.prefix.stated_for(target)

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        previous = batch.tokens.flatten()[anchors.places(batch)]
        joined = [self._before(batch, states, anchors)]
        found = []
        for depth, layers in enumerate(self.head.mlp):
            joined.append(self._embed[0](previous[:, depth]))
            found.append(layers(torch.cat(joined, -1)))
        return Prediction(found)

    def _before(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Float[Tensor, "anchor hidden"]:
        if self.head.prefix is None:
            return states.before(anchors).float()
        made = self.head.prefix.model(
            inputs_embeds=states.hidden[-1].float(),
            attention_mask=additive(batch.visible(), torch.float32),
            position_ids=batch.positions,
        )
        return made.last_hidden_state.flatten(0, 1)[anchors.index - 1]
