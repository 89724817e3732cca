"""Modules for multi-token prediction that models ship with: DeepSeek-V3's (arXiv 2412.19437), GLM's, Qwen's, MiMo's.

They are read from a model's own checkpoint, under the names of several families, and written. transformers leaves these
tensors out when it loads a model; they are found by their prefix.
"""

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafters.heads.assemble import Names, count_of, fill, named, public_name, section
from drafters.heads.base import FeatureBackbone, FeatureHead
from drafters.heads.bound import move
from drafters.heads.files import OURS, Checkpoint, ServedFor, Where, check_layout, has, write
from specdec.drafting.vocabulary import MOST_PADDING
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


LAYOUTS = ("native", "speculators")
"""MiMo's or Qwen's names; speculators'."""

TOKENS = 3
HIDDEN = ("auto", "after_norm", "before_norm")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Family(NamedTuple):
    """How a family of models calls the parts of a module.

    Attributes:
        prefixes: What all names of a module begin with; ``{layer}`` is the number of the target's layers plus the
            module's, ``{module}`` the module's.
        names: The table of names behind the prefix.
    """

    prefixes: tuple[str, ...]
    names: Names
    hidden_first: bool = False

    def names_of(self, prefix: str, module: int) -> Names:
        """The table of names of one module."""
        return [(ours, prefix + theirs.format(module=module)) for ours, theirs in self.names]


FAMILIES = {
    "deepseek": Family(
        prefixes=("model.layers.{layer}.",),
        names=(
            ("model.enorm.", "enorm."),
            ("model.hnorm.", "hnorm."),
            ("model.proj.", "eh_proj."),
            ("model.norm.", "shared_head.norm."),
            ("lm_head.", "shared_head.head."),
            ("model.embed_tokens.", "embed_tokens."),
            ("model.layers.0.", ""),
        ),
    ),
    "qwen": Family(
        prefixes=("mtp.",),
        names=(
            ("model.enorm.", "pre_fc_norm_embedding."),
            ("model.hnorm.", "pre_fc_norm_hidden."),
            ("model.proj.", "fc."),
            ("model.norm.", "norm."),
            ("model.embed_tokens.", "embed_tokens."),
            ("model.layers.0.", "layers.{module}."),
        ),
    ),
    "mimo": Family(
        prefixes=("model.mtp_layers.{module}.", "mtp_layers.{module}."),
        names=(
            ("model.enorm.", "token_layernorm."),
            ("model.hnorm.", "hidden_layernorm."),
            ("model.proj.", "input_proj."),
            ("model.norm.", "final_layernorm."),
            ("model.layers.0.", ""),
        ),
        hidden_first=True,
    ),
}
"""DeepSeek's names are GLM's, too; MiMo's are those of speculators, which joins the two in the other order."""


def holds_module(names: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether files hold a module, by the names of their tensors without ``model.``."""
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    prefixes = [each.format(layer=layers, module=0) for family in FAMILIES.values() for each in family.prefixes]
    return has(names, *(each.removeprefix("model.") for each in prefixes)) and not has(names, "fc.weight")


def model_like(path: str, target: PreTrainedConfig | None) -> PreTrainedModel:
    """A model without weights whose layers a module's is like: the target's, or what the module's files say."""
    if target is None:
        stored = dict(Checkpoint(path).config)
        kind = stored.pop("model_type", None)
        if kind is None:
            raise ValueError(f"{path} does not say what its target's layers are: give target.name=FOLDER")
        target = AutoConfig.for_model(kind, **stored)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(target)


def check_hidden(hidden_state: str) -> str:
    """Refuse a hidden state that there is not."""
    if hidden_state not in HIDDEN:
        raise ValueError(f"hidden_state={hidden_state!r}: give one of {', '.join(HIDDEN)}")
    return hidden_state


def load_mtp(
    path: str | Path, target: PreTrainedModel, *, module: int = 0, hidden_state: str = "auto", **where: Unpack[Where]
) -> MTPHead:
    """Load one of the modules of a checkpoint.

    Args:
        path: The target's own checkpoint, or one with the modules alone: a folder or a name on the hub.
        hidden_state: Which state of the target the module reads first: ``"after_norm"`` or ``"before_norm"`` (its final
            norm). ``"auto"`` is what ``specdec.json`` says, else before the norm for checkpoints that ``speculators``
            wrote, and after it for others.

    Raises:
        ValueError: There is no such module, or it is incomplete, or it does not fit the target.
    """
    check_hidden(hidden_state)
    checkpoint = Checkpoint(path, **where)
    text = target.config.get_text_config(decoder=True)
    tried = []
    for family in FAMILIES.values():
        for pattern in family.prefixes:
            prefix = pattern.format(layer=text.num_hidden_layers + module, module=module)
            tried.append(prefix)
            found = checkpoint.tensors(lambda name, prefix=prefix: name.startswith(prefix))
            if found:
                _check_vocabulary(checkpoint, text.vocab_size)
                found = _of_module(checkpoint.name, found, prefix, module)
                return _assembled(checkpoint, target, family, family.names_of(prefix, module), found, hidden_state)
    raise ValueError(
        f"{checkpoint.name} has no MTP module {module} for a target of {text.num_hidden_layers} layers: no tensor "
        f"begins with {', '.join(tried)}; give a checkpoint that has one"
    )


def _check_vocabulary(checkpoint: Checkpoint, tokens: int) -> None:
    """Compare the vocabulary that a checkpoint states with the target's, from which modules borrow nearly always."""
    name, stored = checkpoint.name, checkpoint.config
    parts = [stored, section(name, stored, "text_config"), section(name, stored, "transformer_layer_config")]
    stated = next((count for count in (count_of(name, part, "vocab_size") for part in parts) if count), None)
    if stated is not None and abs(stated - tokens) > MOST_PADDING:
        raise ValueError(
            f"the MTP module {name} is for a vocabulary of {stated} tokens and the target's has {tokens}: give a "
            f"module that was trained on this target"
        )


def _of_module(name: str, found: Mapping[str, Tensor], prefix: str, module: int) -> dict[str, Tensor]:
    """A module's tensors, where a family stores all modules under one prefix: without the others' layers."""
    modules = {key: int(match[1]) for key in found if (match := _LAYER.match(key.removeprefix(prefix)))}
    if modules and module not in modules.values():
        there = sorted(set(modules.values()))
        raise ValueError(
            f"{name} has no MTP module {module}: it has {there[0] if len(there) == 1 else there}, give module="
            f"{there[0]} or another checkpoint"
        )
    return {key: tensor for key, tensor in found.items() if modules.get(key, module) == module}


def _assembled(
    checkpoint: Checkpoint,
    target: PreTrainedModel,
    family: Family,
    names: Names,
    found: Mapping[str, Tensor],
    hidden_state: str,
) -> MTPHead:
    name, speculators = checkpoint.name, checkpoint.config.get("speculators_model_type") is not None
    said = (checkpoint.json(OURS) or {}).get("hidden_state") if hidden_state == "auto" else hidden_state
    tensors = _stacked({key: tensor for key, tensor in found.items() if not key.endswith("rotary_emb.inv_freq")})

    def stored(ours: str) -> Tensor | None:
        return tensors.get(public_name(ours, names))

    width = target.config.get_text_config(decoder=True).hidden_size
    sizes = {len(part) for part in (stored("model.norm.weight"), stored("model.proj.weight")) if part is not None}
    if len(sizes) == 1 and sizes != {width}:  # all of it is of another width, not one tensor
        raise ValueError(
            f"the MTP module {name} is {sizes.pop()} wide and the target's hidden states are {width} wide: give a "
            f"module that was trained on this target"
        )
    with torch.device("meta"):
        head = MTPHead(
            target,
            hidden_first=family.hidden_first and not speculators,
            before_norm=speculators if said is None else said == "before_norm",
            owns_embeddings=stored("model.embed_tokens.weight") is not None,
            owns_output=stored("lm_head.weight") is not None,
        )
    return move(fill(name, head, tensors, names), "cpu", None)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of single experts put together, as transformers keeps them."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        gate, up, down = ([each for _, each in sorted(parts.get(kind, {}).items())] for kind in ("gate", "up", "down"))
        if not len(gate) == len(up) == len(down):
            continue  # what is missing is then named
        found[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        found[f"{name}.down_proj"] = torch.stack(down)
    return found


def save_mtp(
    head: MTPHead,
    folder: str | Path,
    target: PreTrainedConfig | None = None,
    *,
    layout: str = "native",
    served: ServedFor | None = None,
    notes: Mapping[str, Any] | None = None,
) -> MTPHead:
    """Write a module by itself: ``config.json``, ``model.safetensors`` and ``specdec.json``.

    Natively, a head with the hidden state first gets MiMo's names, which imply it, the others Qwen's. speculators joins
    the embedding and the hidden state in this order, under the names of MiMo.

    Args:
        folder: Where to; it is made if it is not there.
        layout: One of ``LAYOUTS``.
        served: The target, which speculators' layout has to name.
        target: The target's configuration, for speculators' layout.
        notes: More to keep in ``specdec.json``.

    Returns:
        The module as it was written: speculators' have the embedding first.

    Raises:
        ValueError: There is no such layout, or it cannot say what this module is.
    """
    check_layout(layout, LAYOUTS)
    config: dict[str, Any] = head.config.to_dict()
    family, prefix = ("mimo", "mtp_layers.0.") if head.model.hidden_first else ("qwen", "mtp.")
    if layout == "speculators":
        if head.model.embed_tokens is not None or head.lm_head is not None:
            raise ValueError(
                "speculators' MTP modules borrow the target's embeddings and output layer, and this one has its own: "
                "give native"
            )
        if target is None:
            raise ValueError("speculators' layout describes the target's layers: its config.json is needed")
        dtype = str(head.dtype).removeprefix("torch.")
        config = {
            **(served or ServedFor(target="")).speculators("mtp", "MTPDraftModel", TOKENS),
            "dtype": dtype,
            "num_nextn_predict_layers": 1,
            "transformer_layer_config": target.get_text_config(decoder=True).to_dict() | {"dtype": dtype},
        }
        head, family, prefix = embedding_first(head), "mimo", "mtp_layers.0."
    ours = {"family": "mtp", "hidden_state": "before_norm" if head.before_norm else "after_norm", **(notes or {})}
    write(folder, named(head.state_dict(), FAMILIES[family].names_of(prefix, 0)), config, ours=ours)

    return head


def embedding_first(head: MTPHead) -> MTPHead:
    """The same module with the embedding before the hidden state; the head itself if it is so already."""
    if not head.model.hidden_first:
        return head
    twin: Any = copy.deepcopy(head)
    twin.model.hidden_first = False
    twin.model.proj.weight.data = twin.model.proj.weight.data.roll(head.captured_width, dims=1)
    return twin
