"""LoRA adapters of a target (Hu et al. 2021, arXiv 2106.09685), in the layout of peft.

One adapter can be merged into the weights. Several can stand beside them, and every request, or even every token of a
forward, chooses among them: all low-rank products are computed in one, and those of other adapters multiplied by zero.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import text
from specdec.origin import first_sentence

_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")

Matrices = Mapping[str, tuple[Tensor, Tensor]]
"""For the name of every layer, two matrices: from its input to the rank, and from there to its output."""


class Choice:
    """Which adapter each token of a forward goes through (``now``), 0 for none; captured ones read it in place."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):
            self._none = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._places: dict[tuple[int, ...], Tensor] = {}
        self.now: Int[Tensor, "rows tokens"] = self._none

    def set(self, numbers: Int[Tensor, "rows tokens"]) -> None:
        """Choose for the next forward."""
        shape = tuple(numbers.shape)
        if shape not in self._places:
            with torch.inference_mode(False):
                self._places[shape] = torch.zeros_like(numbers)
        self.now = self._places[shape]
        self.now.copy_(numbers)

    def clear(self) -> None:
        """Choose none, as for forwards of the model by itself."""
        self.now = self._none


class AdaptedLinear(nn.Module):
    """A linear layer, and the products of all adapters that change it: their numbers, and two matrices of each."""

    def __init__(self, base: nn.Module, parts: list[tuple[int, Tensor, Tensor]], choice: Choice):
        super().__init__()
        self.base, self._choice = base, choice
        like = next(base.parameters(), None)
        like = next(base.buffers()) if like is None else like
        dtype = like.dtype if like.is_floating_point() else parts[0][1].dtype
        down = torch.cat([down for _, down, _ in parts]).to(like.device, dtype)
        up = torch.cat([up for _, _, up in parts], dim=1).to(like.device, dtype)
        owner = [number for number, down, _ in parts for _ in range(len(down))]
        self.down, self.up = (nn.Parameter(each.contiguous(), requires_grad=False) for each in (down, up))
        self.register_buffer("owner", torch.tensor(owner, device=like.device), persistent=False)

    def forward(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows output"]:
        """Return the layer's output, with the chosen adapter's for each token."""
        chosen = self._choice.now
        if inputs.dim() != 3 and chosen.numel() > 1:
            raise ValueError("requests choose no adapters where layers take lists of tokens: merge one (adapter=…)")
        low = torch.nn.functional.linear(inputs.to(self.down.dtype), self.down) * (chosen[..., None] == self.owner)
        return self.base(inputs) + torch.nn.functional.linear(low, self.up).to(inputs.dtype)


class Adapters:
    """Adapters beside a model's weights. They change the model: its linear layers become ``AdaptedLinear``.

    Args:
        given: A folder or a name on the hub for every adapter's name, or both matrices for every layer (``matrices``).

    Attributes:
        choice: Which adapter each token of the current forward goes through.

    Raises:
        ValueError: peft is missing, or an adapter is no LoRA of linear layers of this model.
    """

    def __init__(self, model: PreTrainedModel, given: Mapping[str, str | Matrices]):
        self.choice = Choice(model.device)
        self._numbers = {name: 1 + place for place, name in enumerate(given)}
        parts: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        for name, adapter in given.items():
            if not isinstance(adapter, Mapping):
                adapter = matrices(model, text(f"the folder of adapter {name!r}", adapter))
            for layer, (down, up) in adapter.items():
                parts.setdefault(layer, []).append((self._numbers[name], down, up))
        for layer, several in parts.items():
            parent, _, own = layer.rpartition(".")
            setattr(model.get_submodule(parent), own, AdaptedLinear(model.get_submodule(layer), several, self.choice))

    def number(self, name: str | None) -> int:
        """Return the number of an adapter by its name, 0 for None; refuses an unknown name."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise ValueError(f"adapter={name!r}: the target has {', '.join(map(repr, self._numbers))}")
        return self._numbers[name]


def merge(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return the model with an adapter added to its weights."""
    _read(model, folder)
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what it will rename
        merged: Any = PeftModel.from_pretrained(model, folder)
    return merged.merge_and_unload()


def matrices(model: PreTrainedModel, folder: str) -> Matrices:
    """Return both matrices of every linear layer that an adapter changes, the second one scaled."""
    config, tensors = _read(model, folder)
    output: Any = model.get_output_embeddings()  # drafters read its weight, too
    heads = tuple(f"{_PREFIX}{name}." for name, module in model.named_modules() if module is output)
    others = [name for name in tensors if not name.endswith(_SIDES) or name.startswith(heads)]
    if others or config.use_dora or config.fan_in_fan_out or config.bias != "none":
        what = f"has {others[0]}" if others else "changes more than linear layers"
        raise ValueError(f"the adapter {folder!r} {what}, which no request can choose: merge it with adapter=")
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in (name.removesuffix(_SIDES[0]) for name in tensors if name.endswith(_SIDES[0])):
        layer, (down, up) = name.removeprefix(_PREFIX), (tensors[name + side] for side in _SIDES)
        named = (alpha for key, alpha in config.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", layer))
        alpha, rank = next(named, config.lora_alpha), len(down)
        found[layer] = down, up * (alpha / (rank**0.5 if config.use_rslora else rank))
    return found


def config_of(folder: str) -> Any:
    """Return an adapter's configuration. Raises ValueError: peft is missing, or there is no LoRA."""
    try:
        from peft import PeftConfig, PeftType
    except ImportError as error:
        raise ValueError("adapters need peft: pip install 'specdec-research[peft]'") from error
    folder = text("adapter", folder)
    config = _from(folder, PeftConfig.from_pretrained)
    if config.peft_type != PeftType.LORA:
        raise ValueError(f"the adapter {folder!r} is of type {config.peft_type}: give a LoRA")
    return config


def _from(folder: str, read: Callable[..., Any], **options: Any) -> Any:
    try:
        return read(folder, **options)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no adapter at {folder!r}: {first_sentence(error).rstrip('.')}") from error


def _read(model: PreTrainedModel, folder: str) -> tuple[Any, dict[str, Tensor]]:
    """Return an adapter's configuration and tensors, which fit the model."""
    config = config_of(folder)
    from peft.utils import load_peft_weights

    tensors = _from(folder, load_peft_weights, device="cpu")
    layers = dict(model.named_modules())
    for name, tensor in tensors.items():
        layer, side = next(((name.removesuffix(side), side) for side in _SIDES if name.endswith(side)), (name, ""))
        if not side:
            continue
        there = layers.get(layer.removeprefix(_PREFIX))
        widths = None if there is None else _widths(there)
        if widths is None or tensor.shape[1 if side is _SIDES[0] else 0] != widths[side is _SIDES[1]]:
            found = "no such layer" if widths is None else f"a layer of {widths[0]} to {widths[1]}"
            raise ValueError(
                f"the adapter {folder!r} is of another base ({config.base_model_name_or_path}): its {name} is "
                f"{list(tensor.shape)}, and this model has {found} there; give an adapter of this model"
            )
        other = name.removesuffix(side) + _SIDES[side is _SIDES[0]]
        if other not in tensors:
            raise ValueError(f"the adapter {folder!r} is incomplete: the tensor {other} is missing")
    return config, tensors


def _widths(layer: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a linear layer's input and output; None for other layers."""
    if isinstance(layer, AdaptedLinear):
        return _widths(layer.base)
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features  # pyright: ignore[reportReturnType]
    weight = getattr(layer, "weight", None)
    is_table = isinstance(weight, Tensor) and weight.dim() == 2 and type(layer).__name__ == "Conv1D"
    return (weight.shape[0], weight.shape[1]) if is_table and weight is not None else None
