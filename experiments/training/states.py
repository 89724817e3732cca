"""The frozen target's hidden states, which a head reads: computed batch by batch, or once and kept on disk."""

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.heads.bound import OutputLayer
from drafters.heads.training import TargetStates, TextBatch, additive, facts_of, masks_suffice
from experiments.training.data.packing import Rows
from specdec.target.target import Target

_CLOSE = 2e-2
"""How far logits may be from the model's own, in units of their spread: rounding in bfloat16, not another formula."""

NAME, STATES, THERE = "states.json", "states.bin", "there.bin"
"""Files: the origin of the states; the states, row by row; and a byte per row, 1 where they are there."""


class FrozenTarget:
    """A target whose states heads are trained on. Nothing is kept from batch to batch.

    Args:
        target: The model; its weights get no gradient.
        layers: The states that are wanted, besides the last one.

    Attributes:
        noted: Its name and ``facts_of`` it, for the file beside a head's weights.

    Raises:
        ValueError: A layer is none of the model's, or its logits cannot be computed from its last state.
    """

    def __init__(self, target: Target, layers: Sequence[int] = ()):
        self.model = target.model.eval().requires_grad_(False)
        count = target.num_layers
        for layer in layers:
            if count is not None and not -1 <= layer < count:
                raise ValueError(
                    f"the head reads the state before layer {layer} and the target {target.name} has layers 0 to "
                    f"{count - 1}: give layers of this target (-1 for its last state)"
                )
        self.layers = tuple(layers)
        self.noted = {"target": target.name, "target_facts": facts_of(self.model)}
        self.windows = _windows(self.model.config)
        self.output = _output_layer(target)
        self.packs = masks_suffice(self.model, lambda batch: self._masked(batch)[-1])

    @torch.no_grad()
    def __call__(self, batch: TextBatch, numbers: Sequence[int] | None = None) -> TargetStates:
        """The states at every position of a batch, whatever the numbers of its rows."""
        with torch.autocast(batch.tokens.device.type, enabled=False):
            return TargetStates(self._hidden(batch), self.output)

    def _hidden(self, batch: TextBatch) -> dict[int, Float[Tensor, "row position hidden"]]:
        if not batch.packed or self.packs:
            return self._masked(batch)
        apart, places = batch.apart()
        return {layer: found.flatten(0, 1)[places] for layer, found in self._masked(apart).items()}

    def _masked(self, batch: TextBatch) -> dict[int, Float[Tensor, "row position hidden"]]:
        mask: Any = None  # one document per row, from its beginning: the model's own causal mask is right
        if batch.packed:
            dtype = self.model.dtype
            by_window = {window: additive(batch.visible(window), dtype) for window in set(self.windows.values())}
            # One for all is not given to layers without attention.
            mask = {kind: by_window[window] for kind, window in self.windows.items()}
            if len(by_window) == 1:
                (mask,) = by_window.values()
        output = self.model.base_model(
            input_ids=batch.tokens,
            attention_mask=mask,
            position_ids=batch.positions,
            output_hidden_states=any(layer >= 0 for layer in self.layers),
            use_cache=False,
        )
        found = {layer: output.hidden_states[layer] for layer in self.layers if layer >= 0}
        return {**found, -1: output.last_hidden_state}


def _windows(config: Any) -> dict[str, int | None]:
    """The sliding window of every kind of layer that the model has; None for full attention."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return {"all": window}


def _output_layer(target: Target) -> OutputLayer:
    """The way from the last state to the logits, after a trial with a few tokens."""
    if target.model.get_output_embeddings() is None:
        raise ValueError(f"the target {target.name} has no output layer: nothing can be trained for it")
    output = OutputLayer(target.model)
    ids: Int[Tensor, "row position"] = torch.arange(4, device=target.device)[None] % target.vocab_size
    with torch.no_grad():
        wanted = target.model(input_ids=ids, use_cache=False).logits.float()
        found = output(target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(found, wanted, atol=_CLOSE * float(wanted.std()) + 1e-6, rtol=0):
        raise ValueError(
            f"the logits of the target {target.name} are not its output layer applied to its last state: models that "
            f"change them in another way cannot be trained for yet"
        )
    return output


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
