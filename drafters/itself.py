"""The target as its own drafter: without some of its layers or parts of them, or with weights in fewer bits.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168), SWIFT (Xia et al. 2024, arXiv 2410.06916).
"""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from drafters.own_model import CausalDrafter, Settings
from drafters.reduced import twin_of
from specdec import ModelRunner, Sizes, Target
from specdec.arguments import flag, shown
from specdec.attention.call import configs_of
from specdec.drafting.builders import AnyTree, tree_of
from specdec.drafting.model_scorer import ExitScorer
from specdec.drafting.scored import ScoredSession
from specdec.quantization import check_quantization, quantize

SEARCH = "python examples/skip_search.py TARGET FILE searches for one, and writes it"


class SelfDrafter(CausalDrafter):
    """Drafts with the target itself, without some of its layers, in fewer bits, or both.

    It shares all weights with the target but those that are quantized, which every engine has a copy of. Where only the
    last layers are left out, it reads and writes the target's cache (early exit: LayerSkip, Elhoushi et al. 2024, arXiv
    2404.16710); otherwise it has one of its own.

    Args:
        skip: The layers and parts of layers that are left out: ``[4, 2.mlp, 8-31]``; layers are counted from 0. Or a
            JSON file with such a list under ``skip``. None for none.
        quantization: The name of a quantization (``specdec.quantization``); None for the target's own weights.
    """

    runs = "target"

    def __init__(
        self,
        skip: Sequence[str | int] | str | Path | None = None,
        shape: AnyTree = 4,
        *,
        quantization: str | None = None,
        quantization_check: bool = True,
        **options: Unpack[Settings],
    ):
        self.file = Path(skip).expanduser() if isinstance(skip, str | Path) else None
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"skip={skip}: there is no such file; {SEARCH}")
        check_quantization(quantization)
        if not (isinstance(skip, str | Path | Sequence) and skip) and (skip is not None or quantization is None):
            raise ValueError(f"skip={shown(skip)}: give layers or parts of them, such as [4, 2.mlp, 8-31], or a file")
        without = "" if skip is None else f" without {shown(skip)}"
        super().__init__(tree_of(shape), name=f"{quantization or 'the'} target{without}", **options)
        self.skip, self.quantization = skip, quantization
        self.quantization_check = flag("quantization_check", quantization_check)

    def model_for(self, target: Target) -> PreTrainedModel:
        twin = twin_of(target.model)
        if self.skip is not None:
            leave_out(twin, self._left_out(target))
        if self.quantization is not None:
            quantize(twin, self.quantization, check=self.quantization_check)
        return twin

    def bind(self, target: Target, sizes: Sizes) -> ScoredSession:
        """Draft over the target's cache if it has all that is needed; else allocate one."""
        if not self._shares_cache(target, sizes.runner):
            return super().bind(target, sizes)
        assert sizes.runner is not None
        model, ids = self.reduced(self.model_for(target), target)
        runner = self.runner_for(model, "drafter", sizes, max_nodes=0, cache=sizes.runner.cache)
        return ScoredSession(self, ExitScorer(runner), target, sizes, ids=ids)

    def _shares_cache(self, target: Target, runner: ModelRunner | None) -> bool:
        """Whether what the model would store is what the target does, at places that its cache has."""
        as_it_is = self.quantization is None and self.kv_cache is None and self.tree.max_shown <= self.max_nodes
        stores_alike = as_it_is and runner is not None and runner.cache.states is None
        return stores_alike and exits_early(target.model, self._left_out(target))

    def _left_out(self, target: Target) -> list[str]:
        return chosen_parts(target.model, self._chosen(target))

    def _chosen(self, target: Target) -> Sequence[str | int]:
        if self.file is None:
            return list(self.skip)  # pyright: ignore[reportArgumentType] (no file, so a list)
        layers = len(layers_of(target.model))
        try:
            said = json.loads(self.file.read_text(encoding="utf-8"))
            skip, count = said["skip"], said.get("layers", layers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"skip={self.file}: this is no JSON object with a list skip; {SEARCH}") from error
        if count != layers:
            raise ValueError(
                f"skip={self.file} was found for {said.get('target')} of {count} layers, and the target {target.name} "
                f"has {layers}: give another file, or another target"
            )
        return skip


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
    """Returns the names of parts by what is given: a layer (``4``), some (``4-7``, ``4-``), or names (``2.mlp``)."""
    parts, last = parts_of(model), len(layers_of(model)) - 1
    found = dict[str, None]()
    for entry in map(str, given):
        ends = _RANGE.fullmatch(entry)
        end = int(ends[2] or last) if ends else last
        layers = range(int(ends[1]), end + 1) if ends else [entry]
        some = [name for layer in layers for name in parts if name == str(layer) or name.startswith(f"{layer}.")]
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
