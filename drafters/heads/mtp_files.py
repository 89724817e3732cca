"""Reads MTP modules from a model's own checkpoint, under the names of several families, and writes them.

transformers leaves these tensors out when it loads a model. They are found by their prefix.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafters.heads.assemble import count_of, fill, section
from drafters.heads.files import OURS, Checkpoint
from drafters.heads.mtp import MTPHead
from specdec.arguments import whole
from specdec.drafting.vocabulary import MOST_PADDING


class Family(NamedTuple):
    """How a family of models calls the parts of a module.

    Attributes:
        prefixes: What all names of a module begin with; ``{layer}`` is the number of the target's layers plus the
            module's, ``{module}`` the module's.
        parts: Our names by theirs, without the prefix; the rest of a module is a decoder layer.
        block: What the names of the decoder layer begin with, after the prefix.
        hidden_first: See ``MTPHead``.
    """

    prefixes: tuple[str, ...]
    parts: Mapping[str, str]
    block: str = ""
    hidden_first: bool = False


FAMILIES = {
    "deepseek": Family(
        prefixes=("model.layers.{layer}.",),
        parts={
            "enorm.": "model.enorm.",
            "hnorm.": "model.hnorm.",
            "eh_proj.": "model.proj.",
            "shared_head.norm.": "model.norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "model.embed_tokens.",
        },
    ),
    "qwen": Family(
        prefixes=("mtp.",),
        parts={
            "pre_fc_norm_embedding.": "model.enorm.",
            "pre_fc_norm_hidden.": "model.hnorm.",
            "fc.": "model.proj.",
            "norm.": "model.norm.",
            "embed_tokens.": "model.embed_tokens.",
        },
        block="layers.{module}.",
    ),
    "mimo": Family(
        prefixes=("model.mtp_layers.{module}.", "mtp_layers.{module}."),
        parts={
            "token_layernorm.": "model.enorm.",
            "hidden_layernorm.": "model.hnorm.",
            "input_proj.": "model.proj.",
            "final_layernorm.": "model.norm.",
        },
        hidden_first=True,
    ),
}
"""DeepSeek's names are GLM's, too; MiMo's are those of speculators, which joins the two in the other order."""

HIDDEN = ("auto", "after_norm", "before_norm")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MTPFiles:
    """Where a module is found, once its target is known.

    Args:
        path: A folder or a name on the hub; None for the target's own checkpoint.
        module: Which of its modules, from 0.
        hidden_state: See ``load_mtp``.
        where: See ``Checkpoint``.

    Raises:
        ValueError: An argument is of the wrong type or out of its range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        module: int = 0,
        hidden_state: str = "auto",
        where: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.name = "" if path is None else str(path)
        self.module, self.hidden_state = whole("module", module, least=0), _checked(hidden_state)
        self._where = dict(where)

    def load(self, target: PreTrainedModel) -> MTPHead:
        """Returns the module.

        Raises:
            ValueError: It is not found, or does not fit.
        """
        path = self.name or target.config.name_or_path
        if not path:
            raise ValueError(
                "the target was not loaded from files, so its MTP module cannot be found: give the folder that it is in"
            )
        return load_mtp(path, target, module=self.module, hidden_state=self.hidden_state, **self._where)


def _checked(hidden_state: str) -> str:
    if hidden_state not in HIDDEN:
        raise ValueError(f"hidden_state={hidden_state!r}: give one of {', '.join(HIDDEN)}")
    return hidden_state


def load_mtp(
    path: str | Path, target: PreTrainedModel, *, module: int = 0, hidden_state: str = "auto", **where: Any
) -> MTPHead:
    """Load one of the modules of a checkpoint.

    Args:
        path: The target's own checkpoint, or one with the modules alone: a folder or a name on the hub.
        target: The target.
        module: Which module, from 0.
        hidden_state: Which state of the target the module reads first: ``"after_norm"`` or ``"before_norm"`` (its final
            norm). ``"auto"`` is what ``specdec.json`` says, else before the norm for checkpoints that ``speculators``
            wrote, and after it for others.
        **where: See ``Checkpoint``.

    Raises:
        ValueError: There is no such module, or it is incomplete, or it does not fit the target.
    """
    _checked(hidden_state)
    checkpoint = Checkpoint(path, **where)
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    for family in FAMILIES.values():
        for pattern in family.prefixes:
            prefix = pattern.format(layer=layers + module, module=module)
            found = checkpoint.tensors(lambda name, prefix=prefix: name.startswith(prefix))
            if found:
                _check_vocabulary(checkpoint, target)
                found = _of_module(checkpoint.name, found, prefix, family, module)
                speculators = checkpoint.config.get("speculators_model_type") is not None
                state = (checkpoint.json(OURS) or {}).get("hidden_state") if hidden_state == "auto" else hidden_state
                return _assembled(
                    checkpoint.name,
                    target,
                    family,
                    prefix,
                    {name.removeprefix(prefix): tensor for name, tensor in found.items()},
                    module=module,
                    hidden_first=family.hidden_first and not speculators,
                    before_norm=speculators if state is None else state == "before_norm",
                )
    shown = ", ".join(p.format(layer=layers + module, module=module) for f in FAMILIES.values() for p in f.prefixes)
    raise ValueError(
        f"{checkpoint.name} has no MTP module {module} for a target of {layers} layers: no tensor begins with "
        f"{shown}; give a checkpoint that has one"
    )


def _check_vocabulary(checkpoint: Checkpoint, target: PreTrainedModel) -> None:
    """Compare the vocabulary that a checkpoint states with the target's, from which modules borrow nearly always.

    Raises:
        ValueError: They differ by more than padding.
    """
    name, stored = checkpoint.name, checkpoint.config
    parts = [stored, section(name, stored, "text_config"), section(name, stored, "transformer_layer_config")]
    stated = next((count for count in (count_of(name, part, "vocab_size") for part in parts) if count), None)
    tokens = target.config.get_text_config(decoder=True).vocab_size
    if stated is not None and abs(stated - tokens) > MOST_PADDING:
        raise ValueError(
            f"the MTP module {name} is for a vocabulary of {stated} tokens and the target's has {tokens}: give a "
            f"module that was trained on this target"
        )


def _of_module(
    name: str, found: Mapping[str, Tensor], prefix: str, family: Family, module: int
) -> Mapping[str, Tensor]:
    """Returns a module's tensors, where a family stores all modules under one prefix: without the others' layers.

    Raises:
        ValueError: There are layers of other modules, and none of this one.
    """
    if not family.block:
        return found
    modules = {key: int(match[1]) for key in found if (match := _LAYER.match(key.removeprefix(prefix)))}
    if modules and module not in modules.values():
        there = sorted(set(modules.values()))
        raise ValueError(
            f"{name} has no MTP module {module}: it has {there[0] if len(there) == 1 else there}, give module="
            f"{there[0]} or another checkpoint"
        )
    return {key: tensor for key, tensor in found.items() if modules.get(key, module) == module}


def _assembled(
    name: str,
    target: PreTrainedModel,
    family: Family,
    prefix: str,
    found: Mapping[str, Tensor],
    *,
    module: int,
    hidden_first: bool,
    before_norm: bool,
) -> MTPHead:
    block = family.block.format(module=module)
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for theirs, tensor in found.items():
        if theirs.endswith("rotary_emb.inv_freq"):
            continue
        part = next((part for part in family.parts if theirs.startswith(part)), None)
        if part is not None:
            mine = family.parts[part] + theirs.removeprefix(part)
        else:
            mine = f"model.layers.0.{theirs.removeprefix(block)}"
        tensors[mine], names[mine] = tensor, prefix + theirs
    tensors = _stacked(tensors)
    width = target.config.get_text_config(decoder=True).hidden_size
    sizes = {tensors[key].shape[0] for key in ("model.norm.weight", "model.proj.weight") if key in tensors}
    if len(sizes) == 1 and sizes != {width}:  # all of it is of another width, not one tensor
        raise ValueError(
            f"the MTP module {name} is {sizes.pop()} wide and the target's hidden states are {width} wide: give a "
            f"module that was trained on this target"
        )
    with torch.device("meta"):
        head = MTPHead(
            target,
            hidden_first=hidden_first,
            before_norm=before_norm,
            owns_embeddings="model.embed_tokens.weight" in tensors,
            owns_output="lm_head.weight" in tensors,
        )
    theirs_of = {mine: theirs for theirs, mine in family.parts.items()}
    for mine in head.state_dict():
        part = next((part for part in theirs_of if mine.startswith(part)), None)
        inner = mine.removeprefix("model.layers.0.")
        default = block + inner if part is None else theirs_of[part] + mine.removeprefix(part)
        names.setdefault(mine, prefix + default)
    fill(name, head, tensors, names)
    return head


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with those of single experts put together, as transformers keeps them."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, parts in experts.items():
        gate, up, down = (
            [parts.get(kind, {})[i] for i in sorted(parts.get(kind, {}))] for kind in ("gate", "up", "down")
        )
        if not len(gate) == len(up) == len(down):
            continue  # what is missing is then named
        found[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        found[f"{name}.down_proj"] = torch.stack(down)
    return found


def save_mtp(head: MTPHead, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a module by itself, under the names of MiMo or Qwen, and ``specdec.json`` beside it.

    Args:
        head: The head. One with the hidden state first gets MiMo's names, which imply it, the others Qwen's.
        path: A folder, which is made if need be.
        notes: More to keep in ``specdec.json``.
    """
    family, prefix = ("mimo", "mtp_layers.0.") if head.model.hidden_first else ("qwen", "mtp.")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named_as(family, head, prefix), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config.to_dict(), indent=2, default=str) + "\n")
    (folder / OURS).write_text(json.dumps(told_of(head, notes), indent=2) + "\n")


def named_as(family: str, head: MTPHead, prefix: str) -> dict[str, Tensor]:
    """Returns a module's tensors under a family's names.

    Args:
        family: One of ``FAMILIES``.
        head: The head.
        prefix: What all names begin with.
    """
    parts, block = FAMILIES[family].parts, FAMILIES[family].block.format(module=0)
    theirs = {mine: theirs for theirs, mine in parts.items()}
    tensors = {}
    for name, value in head.state_dict().items():
        part = next((part for part in theirs if name.startswith(part)), None)
        inner = name.removeprefix("model.layers.0.")
        inner = block + inner if part is None else theirs[part] + name.removeprefix(part)
        tensors[prefix + inner] = value.detach().clone().contiguous()
    return tensors


def told_of(head: MTPHead, notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what ``specdec.json`` says of a module."""
    state = "before_norm" if head.before_norm else "after_norm"
    return {"family": "mtp", "hidden_state": state, **(notes or {})}
