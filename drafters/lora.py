"""LoRA adapters that are trained (Hu et al. 2021, arXiv 2106.09685): their weights, their files, and small models.

A small causal LM whose own weights stay as they are learns what a target says through an adapter. It is served with the
adapter merged: ``drafter=model drafter.name=… drafter.adapter=FOLDER``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from drafters.heads.training import frozen_copy, masks_suffice, output_of
from drafters.model import ModelDrafter, TrainedLM
from specdec import Drafter, Target
from specdec.arguments import whole
from specdec.target.adapters import Matrices

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(nn.Module):
    """The weights of an adapter: for every layer, ``down`` to the rank and ``up`` from there."""

    def __init__(self, widths: Mapping[str, tuple[int, int]], rank: int):
        super().__init__()
        self.layers, self.rank = list(widths), rank
        self.down = nn.ParameterList(nn.Parameter(torch.empty(rank, width)) for width, _ in widths.values())
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(width, rank)) for _, width in widths.values())
        for down in self.down:
            nn.init.kaiming_uniform_(down, a=5**0.5)

    @property
    def matrices(self) -> Matrices:
        """The weights by layer."""
        pairs: list[Any] = list(zip(self.down, self.up, strict=True))
        return dict(zip(self.layers, pairs, strict=True))

    def changed(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the weights of a model's adapted layers by name, with the products added."""
        return {
            f"{layer}.weight": model.get_parameter(f"{layer}.weight").detach() + up @ down
            for layer, (down, up) in self.matrices.items()
        }

    @torch.no_grad()
    def merge(self, model: nn.Module) -> None:
        """Add the products to a model's weights."""
        for name, weight in self.changed(model).items():
            model.get_parameter(name).copy_(weight)


def widths(model: PreTrainedModel, names: Iterable[str], of: str) -> dict[str, tuple[int, int]]:
    """The widths of the input and the output of a model's linear layers, but the output layer, whose names end so."""
    ends, output = tuple(names), model.get_output_embeddings()
    found = {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith(ends) and layer is not output
    }
    if not found:
        raise ValueError(f"{of} has no linear layers named {', '.join(ends)}: give layers that it has")
    return found


def write_adapter(folder: Path, adapter: Matrices, *, base: str) -> None:
    """Write an adapter of the model ``base`` in bfloat16, in peft's layout."""
    rank = max(len(down) for down, _ in adapter.values())
    names = sorted({layer.rpartition(".")[2] for layer in adapter})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tensors = {
        f"base_model.model.{layer}.lora_{side}.weight": tensor.detach().to(torch.bfloat16).contiguous().cpu()
        for layer, pair in adapter.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")


class TrainedLora(TrainedLM):
    """An adapter of a small model, of linear layers whose names end so; the model's own weights stay as they are."""

    title = "adapter of a causal LM (LoRA)"
    head: Lora

    def __init__(self, *, name: str, rank: int = 16, layers: Iterable[str] = LAYERS, depths: int = 4):
        super().__init__(name=name, depths=depths)
        self.rank, self.names = whole("head.rank", rank, least=1), tuple(layers)

    def begin(self, target: Target, counts: Int[Tensor, " vocab"] | None) -> None:
        """Load the model in float32, and make an adapter that changes nothing yet."""
        model: Any = self._made(target).requires_grad_(False)
        # In a tuple, or it would be moved and saved.
        self._model = (model.to(target.device),)
        self.head = Lora(widths(model, self.names, f"the model {self.name}"), self.rank).to(target.device)
        self.packs = masks_suffice(model, self._hidden)

    def _states(self, **inputs: Any) -> Float[Tensor, "row position width"]:
        (model,) = self._model
        changed = self.head.changed(model)
        inner = {name.removeprefix(f"{model.base_model_prefix}."): weight for name, weight in changed.items()}
        return functional_call(model.base_model, inner, (), inputs).last_hidden_state

    def logits(self, states: Tensor, previous: Int[Tensor, " place"], depth: int) -> Float[Tensor, "place column"]:
        return output_of(self._model[0])(states).float()

    def drafter(self) -> Drafter:
        model = frozen_copy(self._model[0])
        self.head.merge(model)
        return ModelDrafter(model, self.depths, optimize=False)

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        write_adapter(folder, self.head.matrices, base=str(self.name))
