"""The target's states on disk: every row is computed when it is first trained on, and read from then on."""

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.training import TargetStates, TextBatch
from experiments.training.data.packing import Rows
from experiments.training.states import FrozenTarget

NAME, STATES, THERE = "states.json", "states.bin", "there.bin"
"""What the states are of; the states, row by row; and a byte per row that says whether they are there."""


class StoredTarget:
    """A frozen target whose states of the training rows are kept in a folder.

    A row takes ``(layers + 1) · length`` states, in the target's own dtype, so that what is read is what was computed.
    Processes on one machine share a folder, and so do trainings with the same target, text, row length and layers.

    Args:
        folder: Where the states are kept; it is made if need be.
        main: Whether this process makes the files, and says how large they are. It must come first.

    Raises:
        ValueError: The folder holds other states, or the disk has no room for all rows.
    """

    def __init__(self, frozen: FrozenTarget, rows: Rows, folder: Path, *, main: bool = True):
        self.frozen, self.layers = frozen, tuple(dict.fromkeys((*frozen.layers, -1)))
        model: Any = frozen.model
        width, dtype = model.config.get_text_config(decoder=True).hidden_size, model.dtype
        shape = (len(rows), len(self.layers), rows.length, width)
        size = math.prod(shape) * dtype.itemsize
        self._check(rows, folder, dtype)
        if main:
            _make(folder, {STATES: size, THERE: len(rows)}, size, len(rows))
        (folder / NAME).write_text(json.dumps(self.of, indent=2) + "\n", encoding="utf-8")
        self._states = torch.from_file(str(folder / STATES), shared=True, size=math.prod(shape), dtype=dtype)
        self._states = self._states.view(shape)
        self._there = torch.from_file(str(folder / THERE), shared=True, size=len(rows), dtype=torch.uint8)

    def __call__(self, batch: TextBatch, numbers: Sequence[int] | None = None) -> TargetStates:
        """The states of some rows; of other text than the training's if they have no numbers."""
        if numbers is None:
            return self.frozen(batch)
        index, device = torch.tensor(numbers), batch.tokens.device
        missing = (self._there[index] == 0).nonzero()[:, 0]
        if len(missing):
            parts = (batch.tokens, batch.supervised, batch.documents, batch.positions)
            found = self.frozen(TextBatch(*(part[missing.to(device)] for part in parts))).hidden
            self._states[index[missing]] = torch.stack([found[layer] for layer in self.layers], 1).cpu()
            self._there[index[missing]] = 1  # behind the states: who dies here computes the row again
        states: Tensor = self._states[index].to(device)
        return TargetStates(dict(zip(self.layers, states.unbind(1), strict=True)), self.frozen.output)

    def _check(self, rows: Rows, folder: Path, dtype: torch.dtype) -> None:
        """Compare what the folder's states are of with what is wanted."""
        text = hashlib.sha256()
        for number in range(len(rows)):
            batch = rows.batch([number])
            text.update(batch.tokens.numpy().tobytes() + batch.documents.numpy().tobytes())
        self.of = {
            **json.loads(json.dumps(self.frozen.noted["target_facts"])),
            "layers": list(self.layers),
            "length": rows.length,
            "dtype": str(dtype),
            "text": text.hexdigest(),
        }
        path = folder / NAME
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else self.of
        other = [key for key in self.of if held.get(key) != self.of[key]]
        if other:
            raise ValueError(
                f"states={folder} holds the states of another training (other {', '.join(other)}): give another folder"
            )


def _make(folder: Path, sizes: dict[str, int], size: int, rows: int) -> None:
    """Make files that take room as rows are written, after a look at the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    free, held = shutil.disk_usage(folder).free, 0
    if (folder / STATES).is_file():
        held = (folder / STATES).stat().st_blocks * 512
    said = (
        f"the target's states of {rows:,} rows take {size / 1e9:.3g} GB in {folder}, {held / 1e9:.3g} of them are there"
    )
    if size - held > free:
        raise ValueError(
            f"{said}, and the disk has {free / 1e9:.3g} GB left: give states=FOLDER on another disk, fewer layers or "
            f"less text, or leave states out"
        )
    print(said, file=sys.stderr, flush=True)
    for name, length in sizes.items():
        with (folder / name).open("ab") as file:
            file.truncate(length)
