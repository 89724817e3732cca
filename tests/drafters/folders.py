"""A head's folder as others write it: changes of its files, and whether the head comes back as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def rewritten(folder: Path, tensors: Callable[[dict[str, Tensor]], object] = len, **config: Any) -> Path:
    """Changes the files of a checkpoint, and drops what only this project's say."""
    (folder / "specdec.json").unlink(missing_ok=True)
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


def logits(head: Any, model: Any) -> Tensor:
    """The logits of a head that reads pairs, for random tokens and hidden states."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 5, head.captured_width, generator=generator) for _ in range(head.captured)]
    bound = head.bound(model)
    tokens = torch.randint(0, 64, (2, 5), generator=generator)
    with torch.inference_mode():
        return bound(tokens, features=bound.fuse(states)).logits


def assert_same(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    mine, other = found.state_dict(), wanted.state_dict()
    assert type(found) is type(wanted) and mine.keys() == other.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])] == []
