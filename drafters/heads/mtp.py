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
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafters.heads.assemble import Names, count_of, fill, loader, named, public_name, section
from drafters.heads.base import FeatureBackbone, FeatureHead
from drafters.heads.bound import move
from drafters.heads.files import OURS, Checkpoint, ServedFor, check_layout, has, write
from specdec.drafting.vocabulary import MOST_PADDING
from specdec.interfaces import Description
from specdec.machine import dtype_name


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

    def join(self, embeds: Tensor, features: Tensor) -> Float[Tensor, "batch node joined"]:
        """Returns embedding and feature, each normed, projected to one width."""
        pair = [self.enorm(embeds), self.hnorm(features)]
        return self.proj(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))


class MTPHead(FeatureHead):
    """A decoder layer of the target's own kind over pairs of its last hidden state and an embedding.

    Embeddings and output layer are borrowed from the target unless it owns them.

    Args:
        target: The target, whose configuration, decoder layer and norm are taken for patterns.
        hidden_first: Whether the hidden state comes before the embedding where the two are joined, as in MiMo's
            modules. DeepSeek's, GLM's and Qwen's have the embedding first.
        before_norm: Whether the hidden state is the one before the target's final norm, as in modules that
            ``speculators`` trains. It is had from the normed one by dividing by the norm's weight: what is left is a
            factor for every position, which the module's own norm removes.
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
        try:
            config: Any = _config_like(target)
            model = _Backbone(config, target, hidden_first=hidden_first, owns_embeddings=owns_embeddings)
        except (AttributeError, KeyError, TypeError) as error:  # layers that are made in a way of their own
            kind = target.config.model_type
            raise ValueError(f"a {kind} model's layers fit no MTP module ({error}): use another drafter") from error
        super().__init__(config)
        self.model, self.hidden_layers = model, (-1,)
        self.captured, self.captured_width, self.before_norm = 1, config.hidden_size, before_norm
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
    return type(layers[-1])(config, 0), type(rotary)(config)


LAYOUTS = ("native", "speculators")

TOKENS = 3
HIDDEN = ("auto", "after_norm", "before_norm")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_OURS = ("model.enorm.", "model.hnorm.", "model.proj.", "model.norm.", "model.embed_tokens.")
_OURS += ("model.layers.0.", "lm_head.")


class Family(NamedTuple):
    """How a family of models calls the parts of a module.

    ``prefixes`` begin all names; ``{layer}`` is the number of the target's layers plus the module's, ``{module}`` the
    module's. ``theirs`` are the names of ``_OURS`` behind it; None for parts that such modules do not have.
    """

    prefixes: tuple[str, ...]
    theirs: tuple[str | None, ...]
    hidden_first: bool = False

    def names_of(self, prefix: str, module: int) -> Names:
        pairs = zip(_OURS, self.theirs, strict=True)
        return [(ours, prefix + theirs.format(module=module)) for ours, theirs in pairs if theirs is not None]


FAMILIES = {
    "deepseek": Family(
        ("model.layers.{layer}.",),
        ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", "embed_tokens.", "", "shared_head.head."),
    ),
    "qwen": Family(
        ("mtp.",),
        ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "embed_tokens.", "layers.{module}.", None),
    ),
    "mimo": Family(
        ("model.mtp_layers.{module}.", "mtp_layers.{module}."),
        ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", None, "", None),
        hidden_first=True,
    ),
}
"""DeepSeek's names are GLM's, too; MiMo's are those of speculators, which joins the two in the other order."""


def holds_module(names: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether files hold a module, by the names of their tensors."""
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    prefixes = [prefix.format(layer=layers, module=0) for family in FAMILIES.values() for prefix in family.prefixes]
    return has(names, *(prefix.removeprefix("model.") for prefix in prefixes)) and not has(names, "fc.weight")


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


@partial(loader, whole_file=False)  # it is the target's, as a rule
def load_mtp(
    checkpoint: Checkpoint, *, target: PreTrainedModel, module: int = 0, hidden_state: str = "auto"
) -> MTPHead:
    """Load one of the modules of the target's own checkpoint, or of one with modules alone.

    Args:
        hidden_state: Which state of the target the module reads first: ``"after_norm"`` or ``"before_norm"`` (its final
            norm). ``"auto"`` is what ``specdec.json`` says, else before the norm for checkpoints that ``speculators``
            wrote, and after it for others.
    """
    check_layout(hidden_state, HIDDEN, "hidden_state")
    name, stored, text = checkpoint.name, checkpoint.config, target.config.get_text_config(decoder=True)
    numbers = {"layer": text.num_hidden_layers + module, "module": module}
    tried = [(family, prefix.format(**numbers)) for family in FAMILIES.values() for prefix in family.prefixes]
    every = checkpoint.tensors(lambda key: key.startswith(tuple(prefix for _, prefix in tried)))
    every = {key: tensor for key, tensor in every.items() if not key.endswith("rotary_emb.inv_freq")}
    family, prefix = next((pair for pair in tried if has([*every], pair[1])), (None, ""))
    if family is None:
        raise ValueError(
            f"{name} has no MTP module {module} for a target of {text.num_hidden_layers} layers: no tensor "
            f"begins with {', '.join(prefix for _, prefix in tried)}; give a checkpoint that has one"
        )
    described = [stored, section(name, stored, "text_config"), section(name, stored, "transformer_layer_config")]
    stated = next((count for count in (count_of(name, part, "vocab_size") for part in described) if count), None)
    if stated is not None and abs(stated - text.vocab_size) > MOST_PADDING:
        raise ValueError(
            f"the MTP module {name} is for a vocabulary of {stated} tokens and the target's has {text.vocab_size}: "
            f"give a module that was trained on this target"
        )
    # Where a family stores all modules under one prefix, those of others are left out.
    owners = {key: int(match[1]) for key in every if (match := _LAYER.match(key.removeprefix(prefix)))}
    if owners and module not in owners.values():
        raise ValueError(f"{name} has no MTP module {module}: it has {sorted(set(owners.values()))}, give one of them")
    tensors = _stacked({key: tensor for key, tensor in every.items() if owners.get(key, module) == module})
    names = family.names_of(prefix, module)
    norm, proj, table, output = (
        tensors.get(public_name(f"{part}weight", names)) for part in ("model.norm.", "model.proj.", *_OURS[4::2])
    )
    sizes = {len(part) for part in (norm, proj) if part is not None}
    if len(sizes) == 1 and sizes != {text.hidden_size}:  # all of it is of another width, not one tensor
        raise ValueError(
            f"the MTP module {name} is {sizes.pop()} wide and the target's hidden states are {text.hidden_size} wide: "
            f"give a module that was trained on this target"
        )
    speculators = stored.get("speculators_model_type") is not None
    said = (checkpoint.json(OURS) or {}).get("hidden_state") if hidden_state == "auto" else hidden_state
    with torch.device("meta"):
        head = MTPHead(
            target,
            hidden_first=family.hidden_first and not speculators,
            before_norm=speculators if said is None else said == "before_norm",
            owns_embeddings=table is not None,
            owns_output=output is not None,
        )
    return fill(name, head, tensors, names)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those of single experts put together as transformers keeps them."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        gate, up, down = ([part for _, part in sorted(parts.get(kind, {}).items())] for kind in ("gate", "up", "down"))
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
    """Write a module by itself, with ``notes`` in ``specdec.json``, and return it as it was written.

    Natively, a head with the hidden state first gets MiMo's names, which imply it, the others Qwen's. speculators joins
    the embedding and the hidden state in this order, under the names of MiMo; its layout needs the target's
    configuration, and its name in ``served``.
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
        dtype = dtype_name(head.dtype)
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
