"""A model without some of its layers, or parts of them (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916)."""

import re
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.execution.executor import configs_of

_RANGE = re.compile(r"(\d+)-(\d*)")


class Absent(nn.Module):
    """Stands where an attention or an MLP was, and adds nothing to the residual stream; see ``returned_by``."""

    def __init__(self, others: int | None):
        super().__init__()
        self.others = others

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Zeros."""
        nothing = torch.zeros_like(inputs[0] if inputs else more["hidden_states"])
        return nothing if self.others is None else (nothing, *[None] * self.others)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Returns a model's decoder layers; refuses a model whose layers stand in no list."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"the {model.config.model_type} model has no list of {count} layers of which some can be left out")


def parts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the parts that can be left out, by name: the children of layers that hold matrices (``3.self_attn``)."""
    return {
        f"{number}.{name}": part
        for number, layer in enumerate(layers_of(model))
        for name, part in layer.named_children()
        if any(parameter.ndim > 1 for parameter in part.parameters())
    }


def chosen_parts(model: PreTrainedModel, given: Collection[object]) -> list[str]:
    """Returns the names of parts by what is given: a layer (``4``), some (``4-7``, ``4-``), or names (``2.mlp``).

    Raises:
        ValueError: There is no such part, or none would be left.
    """
    parts, last = parts_of(model), len(layers_of(model)) - 1
    found = dict[str, None]()
    for entry in map(str, given):
        ends = _RANGE.fullmatch(entry)
        end = int(ends[2] or last) if ends else last
        layers = range(int(ends[1]), end + 1) if ends else [entry]
        some = [name for each in layers for name in parts if name == str(each) or name.startswith(f"{each}.")]
        if not some or end > last:
            known = ", ".join(name.partition(".")[2] for name in parts if name.startswith("0."))
            raise ValueError(
                f"skip: the {model.config.model_type} model has no {entry}: give layers from 0 to {last}, such as 2 or "
                f"{max(last - 1, 0)}-{last}, or parts of them ({known}), such as {next(iter(parts), '')}"
            )
        found |= dict.fromkeys(some)
    if len(found) == len(parts):
        raise ValueError(f"skip={list(given)} leaves nothing of the {last + 1} layers: keep a part of one at least")
    return list(found)


def exits_early(model: PreTrainedModel, names: Collection[str]) -> bool:
    """Returns whether the parts that are left out are those of the last layers, and nothing else."""
    every = list(parts_of(model))
    left = len(every) - len(names)
    layers = [name.partition(".")[0] for name in every[left - 1 :]]
    return {*every[left:]} == {*names} and layers[0] not in layers[1:]


def leave_out(twin: PreTrainedModel, names: Collection[str]) -> None:
    """Take parts out of a model, whose modules are nobody else's; a layer of which nothing stays goes as a whole."""
    layers, parts, returned = layers_of(twin), parts_of(twin), returned_by(twin)
    for name in names:
        number, _, child = name.partition(".")
        setattr(layers[int(number)], child, Absent(returned[name]))
    kept = sorted({int(name.partition(".")[0]) for name in parts.keys() - set(names)})
    count = len(layers)
    for number in reversed([number for number in range(count) if number not in kept]):
        del layers[number]
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if "layer_idx" in vars(module):  # where it finds its keys and values in a cache
                module.layer_idx = number  # pyright: ignore[reportArgumentType]
    for config in configs_of(twin):
        if getattr(config, "num_hidden_layers", None) == count:
            for key, value in list(vars(config).items()):
                if "layer" in key and isinstance(value, list) and len(value) == count:
                    setattr(config, key, [value[number] for number in kept])
            config.num_hidden_layers = len(kept)


@torch.inference_mode()
def returned_by(model: PreTrainedModel) -> dict[str, int | None]:
    """Returns how many things each part returns besides hidden states, by a trial; None if these by themselves."""
    found: dict[str, int | None] = {}
    with ExitStack() as stack:
        for name, part in parts_of(model).items():

            def note(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                found[name] = len(output) - 1 if isinstance(output, tuple) else None

            stack.callback(part.register_forward_hook(note).remove)
        model(input_ids=torch.ones(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return found
