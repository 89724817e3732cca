"""A drafter written in another layout, and read back before it takes its place."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from drafters.heads.block_export import save_block
from drafters.heads.eagle3 import Eagle3Head, default_layers
from drafters.heads.eagle_export import export_eagle
from drafters.heads.files import INDICES, OURS, WEIGHTS
from drafters.heads.mtp_export import embedding_first, export_mtp
from drafters.heads.served_for import ServedFor
from experiments.exporting.kinds import DFLASH, DSPARK, EAGLE, EAGLE3, KINDS, LM, MEDUSA, MTP
from experiments.exporting.reading import TRAINING, Found, Source, read
from specdec import bundled


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a drafter goes.

    Attributes:
        folder: The folder.
        format: ``"native"``, ``"speculators"`` or ``"sglang"``.
        overwrite: Whether files in the folder may be replaced.
    """

    folder: Path
    format: str
    overwrite: bool = False

    def check(self, source: str) -> None:
        """Refuse a folder that holds something, or from which the drafter is read.

        Args:
            source: Where the drafter is.

        Raises:
            ValueError: It does, and nothing may be replaced.
        """
        here = Path(bundled.resolve(source))
        if here.is_dir() and self.folder.is_dir() and here.samefile(self.folder):
            raise ValueError(f"out={self.folder} is the folder that the drafter is read from: give another one")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self.overwrite:
            raise ValueError(
                f"out={self.folder} is not empty: give another folder, or replace its drafter with overwrite=true"
            )


def write(
    found: Found,
    to: Destination,
    served: ServedFor,
    *,
    target: PreTrainedConfig | None = None,
    notes: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write a drafter, read it back, compare, and put it into its folder.

    Args:
        found: The drafter.
        to: Where to, and how.
        served: The target that it is for.
        target: The target's configuration; None if it is not known.
        notes: More to keep in ``specdec.json``.

    Returns:
        The files.

    Raises:
        ValueError: The layout cannot say what the drafter is, or the drafter does not fit the target.
        RuntimeError: What was written is not what was read back.
    """
    name_layers(found, target)
    if target is not None:
        check_fit(found, target, served.target)
    unfinished = to.folder.with_name(f".{to.folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write(found, unfinished, to.format, served, target)
        _note(found, unfinished, {**(notes or {}), "format": to.format})
        again = read(Source(name=str(unfinished)), found.kind, target)
        compare(found, again, swapped=found.kind == MTP and to.format == "speculators")
        return _put(unfinished, to.folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(found: Found, folder: Path, layout: str, served: ServedFor, target: PreTrainedConfig | None) -> None:
    module: Any = found.module
    if found.kind == MEDUSA:
        module.base_model = served.target or module.base_model
        module.save_pretrained(folder)
    elif found.kind == LM:
        module.save_pretrained(folder)
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(folder)
    elif found.kind == MTP:
        decoder = None if target is None else target.get_text_config(decoder=True).to_dict()
        export_mtp(module, folder, layout=layout, served=served, target_config=decoder)
    elif found.kind in (EAGLE, EAGLE3):
        export_eagle(module, folder, layout=layout, served=served)
    else:
        native = "deepspec" if found.kind == DSPARK else "z-lab"
        save_block(module, folder, layout=native if layout == "native" else layout, served=served)


def _note(found: Found, folder: Path, more: Mapping[str, Any]) -> None:
    """Keep what is known of the training beside the weights."""
    written = json.loads((folder / OURS).read_text()) if (folder / OURS).is_file() else {"family": found.kind}
    told = {**found.notes, **written, **more}
    if told.get("hidden_layers") is None and found.kind in (DFLASH, DSPARK):
        told["hidden_layers"] = list(getattr(found.module, "hidden_layers", ()))
    told["hidden_layers_are"] = "inputs of layers"
    (folder / OURS).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _put(unfinished: Path, folder: Path) -> list[Path]:
    """Move the finished files to their folder. Weights that other layouts have left there would be read first."""
    names = sorted(path.name for path in unfinished.iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*INDICES, *WEIGHTS, TRAINING):
        (folder / stale).unlink(missing_ok=True)
    for name in names:
        os.replace(unfinished / name, folder / name)
    return [folder / name for name in names]


def name_layers(found: Found, target: PreTrainedConfig | None) -> None:
    """Let an EAGLE-3 head whose files do not name its hidden states name the usual ones of its target."""
    head = found.module
    if isinstance(head, Eagle3Head) and head.hidden_layers is None and target is not None:
        head.hidden_layers = default_layers(target.get_text_config(decoder=True).num_hidden_layers)


def check_fit(found: Found, target: PreTrainedConfig, name: str) -> None:
    """Refuse a target that a drafter was not made for.

    Args:
        found: The drafter.
        target: The target's configuration.
        name: The target's name.

    Raises:
        ValueError: Says what does not fit.
    """
    module: Any = found.module
    text, known = target.get_text_config(decoder=True), KINDS[found.kind]
    layers = getattr(module, "hidden_layers", None) or () if known.reads_layers else ()
    if any(not -1 <= layer < text.num_hidden_layers for layer in layers):
        raise ValueError(
            f"{known.title} that reads the hidden states {list(layers)} does not fit the target {name} of "
            f"{text.num_hidden_layers} layers: give drafter.hidden_layers, or the target that it was trained on"
        )
    width = text.hidden_size if known.width is None else attrgetter(known.width)(module)
    if (width or module.config.hidden_size) != text.hidden_size:  # a block head's is its own, unless it says otherwise
        raise ValueError(
            f"{known.title} for hidden states of width {width} does not fit the target {name}, whose width is "
            f"{text.hidden_size}: give the target that it was trained on"
        )
    tokens = module.vocab_size if found.kind == MEDUSA else module.config.vocab_size
    if tokens > text.vocab_size:
        raise ValueError(
            f"{known.title} of {tokens} tokens does not fit the target {name}, which has {text.vocab_size}: "
            f"give the target that it was trained on"
        )
    mask = module.config.mask_token_id if found.kind in (DFLASH, DSPARK) else 0
    if mask >= text.vocab_size:
        raise ValueError(
            f"the mask token {mask} is outside of the vocabulary of the target {name}, which has {text.vocab_size} "
            f"tokens: give drafter.mask_token_id"
        )


def compare(found: Found, again: Found, *, swapped: bool = False) -> None:
    """Compare a drafter with what was read back: every tensor, and what decides how it drafts.

    Args:
        found: The drafter.
        again: What was read back.
        swapped: Whether the layout has the other order of embedding and hidden state (``embedding_first``).

    Raises:
        RuntimeError: They differ.
    """
    module: Any = embedding_first(found.module) if swapped else found.module  # pyright: ignore[reportArgumentType]
    wanted, got = _state(module), _state(again.module)
    different = [name for name in wanted.keys() | got.keys() if not _equal(wanted.get(name), got.get(name))]
    facts, read_back = _facts(found.kind, module), _facts(again.kind, again.module)
    different += [name for name in facts if facts[name] != read_back.get(name)]
    if different:
        raise RuntimeError(f"what was written is not what was read back: {', '.join(sorted(different)[:5])}")


def _state(module: Any) -> dict[str, torch.Tensor]:
    state = dict(module.state_dict())
    ids = getattr(module, "draft_ids", None)
    return state if ids is None else state | {"draft_ids": ids}


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype is other.dtype and torch.equal(one, other)


def _facts(kind: str, module: Any) -> dict[str, Any]:
    """The attributes that decide how a drafter drafts, besides its tensors."""
    found = {name: attrgetter(name)(module) for name in KINDS[kind].facts}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
