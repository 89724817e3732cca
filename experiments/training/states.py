"""The frozen target's hidden states, which a head reads: computed batch by batch, or once and kept on disk."""

import hashlib
import json
import os
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

NAME, ROW = "states.json", "row-{}.pt"
"""Files: the origin of the states, and those of a row."""


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
        self.model, self.layers = target.model.eval().requires_grad_(False), tuple(layers)
        count = target.num_layers
        if count is not None and (others := [layer for layer in layers if not -1 <= layer < count]):
            raise ValueError(
                f"the head reads the state before layer {others[0]} and the target {target.name} has layers 0 to "
                f"{count - 1}: give layers of this target (-1 for its last state)"
            )
        self.noted = {"target": target.name, "target_facts": facts_of(self.model)}
        self.windows = _windows(self.model.config)
        self.output = _output_layer(target)
        self.packs = masks_suffice(self.model, lambda batch: self._masked(batch)[-1])

    @torch.no_grad()
    def __call__(self, batch: TextBatch, numbers: Sequence[int] | None = None) -> TargetStates:
        """The states at every position of a batch, whatever the numbers of its rows."""
        with torch.autocast(batch.tokens.device.type, enabled=False):
            if not batch.packed or self.packs:
                return TargetStates(self._masked(batch), self.output)
            apart, places = batch.apart()
            found = {layer: states.flatten(0, 1)[places] for layer, states in self._masked(apart).items()}
            return TargetStates(found, self.output)

    def _masked(self, batch: TextBatch) -> dict[int, Float[Tensor, "row position hidden"]]:
        mask: Any = None  # one document per row, from its beginning: the model's own causal mask is right
        if batch.packed:
            dtype = self.model.dtype
            by_window = {window: additive(batch.visible(window), dtype) for window in set(self.windows.values())}
            # One for all is not given to layers without attention.
            mask = {kind: by_window[window] for kind, window in self.windows.items()}
            if len(by_window) == 1:
                (mask,) = by_window.values()
        wanted: Any = {"use_cache": False, "output_hidden_states": any(layer >= 0 for layer in self.layers)}
        given = {"input_ids": batch.tokens, "attention_mask": mask, "position_ids": batch.positions}
        output = self.model.base_model(**given, **wanted)
        found = {layer: output.hidden_states[layer] for layer in self.layers if layer >= 0}
        return {**found, -1: output.last_hidden_state}


def _windows(config: Any) -> dict[str, int | None]:
    """The sliding window of every kind of layer that the model has; None for full attention."""
    text = config.get_text_config(decoder=True)
    kinds, window = getattr(text, "layer_types", None) or (), getattr(text, "sliding_window", None)
    found = {kind: window if kind == "sliding_attention" else None for kind in sorted({*kinds})}
    return found or {"all": window}


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
    """A frozen target whose states of the training rows are kept in a folder, a file for each.

    A row takes ``(layers + 1) · length`` states, in the target's own dtype, so that what is read is what was computed.
    Processes on one machine share a folder, and so do trainings with the same target, text, row length and layers.

    Args:
        folder: Where the states are kept; it is made if need be.
        main: Whether this process says how large they are.

    Raises:
        ValueError: The folder holds other states, or the disk has no room for all rows.
    """

    def __init__(self, frozen: FrozenTarget, rows: Rows, folder: Path, *, main: bool = True):
        self.frozen, self.folder, self.layers = frozen, folder, tuple(dict.fromkeys((*frozen.layers, -1)))
        self._check(rows)
        model: Any = frozen.model
        width = model.config.get_text_config(decoder=True).hidden_size * model.dtype.itemsize
        size = len(rows) * len(self.layers) * rows.length * width
        folder.mkdir(parents=True, exist_ok=True)
        free, held = shutil.disk_usage(folder).free, sum(path.stat().st_size for path in folder.glob(ROW.format("*")))
        sizes = f"{size / 1e9:.3g} GB in {folder}, {held / 1e9:.3g} of them are there"
        told = f"the target's states of {len(rows):,} rows take {sizes}"
        if size - held > free:
            raise ValueError(
                f"{told}, and the disk has {free / 1e9:.3g} GB left: give states=FOLDER on another disk, fewer layers "
                f"or less text, or leave states out"
            )
        if main:
            print(told, file=sys.stderr, flush=True)
        (folder / NAME).write_text(json.dumps(self.of, indent=2) + "\n", encoding="utf-8")

    def __call__(self, batch: TextBatch, numbers: Sequence[int] | None = None) -> TargetStates:
        """The states of some rows; of other text than the training's if they have no numbers."""
        if numbers is None:
            return self.frozen(batch)
        paths = [self.folder / ROW.format(number) for number in numbers]
        missing = [at for at, path in enumerate(paths) if not path.exists()]
        if missing:
            found = self.frozen(TextBatch(*(part[missing] for part in vars(batch).values()))).hidden
            for at, states in zip(missing, torch.stack([found[layer] for layer in self.layers], 1).cpu(), strict=True):
                unfinished = paths[at].with_suffix(f".{os.getpid()}")
                torch.save(states.clone(), unfinished)
                os.replace(unfinished, paths[at])  # who dies before this computes the row again
        whole = torch.stack([torch.load(path, weights_only=True) for path in paths]).to(batch.tokens.device)
        return TargetStates(dict(zip(self.layers, whole.unbind(1), strict=True)), self.frozen.output)

    def _check(self, rows: Rows) -> None:
        """Compare what the folder's states are of with what is wanted."""
        text = hashlib.sha256()
        for number in range(len(rows)):
            batch = rows.batch([number])
            text.update(batch.tokens.numpy().tobytes() + batch.documents.numpy().tobytes())
        facts = {"layers": list(self.layers), "length": rows.length, "dtype": str(self.frozen.model.dtype)}
        self.of = json.loads(json.dumps(self.frozen.noted["target_facts"])) | facts | {"text": text.hexdigest()}
        path = self.folder / NAME
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else self.of
        if other := ", ".join(key for key in self.of if held.get(key) != self.of[key]):
            raise ValueError(
                f"states={self.folder} holds the states of another training (other {other}): give another folder"
            )
