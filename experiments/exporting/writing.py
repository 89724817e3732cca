"""A drafter written in another layout, and read back before it takes its place."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from drafters.heads.eagle import default_layers
from drafters.heads.files import INDICES, OURS, TRAINING, WEIGHTS, ServedFor
from experiments.exporting.kinds import KINDS, Found, Source, read
from specdec import bundled


def check_folder(folder: Path, source: str, *, overwrite: bool) -> None:
    """Refuse a folder that holds something which may not be replaced, or from which the drafter is read."""
    here = Path(bundled.resolve(source))
    if here.is_dir() and folder.is_dir() and here.samefile(folder):
        raise ValueError(f"out={folder} is the folder that the drafter is read from: give another one")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ValueError(f"out={folder} is not empty: give another folder, or replace its drafter with overwrite=true")


def write(
    found: Found,
    folder: Path,
    layout: str,
    served: ServedFor,
    *,
    target: PreTrainedConfig | None = None,
    notes: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write a drafter, read it back, compare, and put it into its folder.

    Args:
        layout: ``"native"``, ``"speculators"`` or ``"sglang"``.
        served: The target that it is for.
        target: The target's configuration; None if it is not known.
        notes: More to keep in ``specdec.json``.

    Returns:
        The files.

    Raises:
        ValueError: The layout cannot say what the drafter is, or the drafter does not fit the target.
        RuntimeError: What was written is not what was read back.
    """
    kind = KINDS[found.kind]
    head: Any = found.module
    reads = "hidden_layers" in kind.takes
    if reads and getattr(head, "hidden_layers", None) is None and target is not None:
        head.hidden_layers = default_layers(target.get_text_config(decoder=True).num_hidden_layers)
    if target is not None:
        check_fit(found, target, served.target)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        as_written = kind.write(head, unfinished, target, layout=layout, served=served) or head
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(unfinished)
        own = unfinished / OURS
        written = json.loads(own.read_text()) if own.is_file() else {"family": found.kind}
        told = {**found.notes, **written, **(notes or {}), "format": layout}
        if told.get("hidden_layers") is None and reads:
            told["hidden_layers"] = list(getattr(head, "hidden_layers", None) or ())
        told["hidden_layers_are"] = "inputs of layers"
        own.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        again = read(Source(name=str(unfinished)), found.kind, target)
        compare(replace(found, module=as_written), again)
        names = sorted(path.name for path in unfinished.iterdir())
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*INDICES, *WEIGHTS, TRAINING):  # what other layouts have left there would be read first
            (folder / stale).unlink(missing_ok=True)
        for name in names:
            os.replace(unfinished / name, folder / name)
        return [folder / name for name in names]
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_fit(found: Found, target: PreTrainedConfig, name: str) -> None:
    """Refuse a target, of that name, for which a drafter was not made."""
    module: Any = found.module
    text, known = target.get_text_config(decoder=True), KINDS[found.kind]
    layers = getattr(module, "hidden_layers", None) or () if "hidden_layers" in known.takes else ()
    if any(not -1 <= layer < text.num_hidden_layers for layer in layers):
        raise ValueError(
            f"{known.title} that reads the hidden states {list(layers)} does not fit the target {name} of "
            f"{text.num_hidden_layers} layers: give export.hidden_layers, or the target that it was trained on"
        )
    width = text.hidden_size if known.width is None else attrgetter(known.width)(module)
    if (width or module.config.hidden_size) != text.hidden_size:  # a block head's is its own, unless it says otherwise
        raise ValueError(
            f"{known.title} for hidden states of width {width} does not fit the target {name}, whose width is "
            f"{text.hidden_size}: give the target that it was trained on"
        )
    tokens = (module if known.width == "hidden_size" else module.config).vocab_size
    if tokens > text.vocab_size:
        raise ValueError(
            f"{known.title} of {tokens} tokens does not fit the target {name}, which has {text.vocab_size}: "
            f"give the target that it was trained on"
        )
    mask = module.config.mask_token_id if "mask_token_id" in known.takes else 0
    if mask >= text.vocab_size:
        raise ValueError(
            f"the mask token {mask} is outside of the vocabulary of the target {name}, which has {text.vocab_size} "
            f"tokens: give export.mask_token_id"
        )


def compare(found: Found, again: Found) -> None:
    """Compare a drafter with what was read back: every tensor, and what decides how it drafts."""
    module: Any = found.module
    wanted, got = _state(module), _state(again.module)
    different = [name for name in wanted.keys() | got.keys() if not _equal(wanted.get(name), got.get(name))]
    for name in KINDS[found.kind].decides:
        values = [attrgetter(name)(each) for each in (module, again.module)]
        first, second = (list(value) if isinstance(value, tuple) else value for value in values)
        different += [name] if first != second else []
    if different:
        raise RuntimeError(f"what was written is not what was read back: {', '.join(sorted(different)[:5])}")


def _state(module: Any) -> dict[str, torch.Tensor]:
    ids = getattr(module, "draft_ids", None)
    return {**module.state_dict(), **({} if ids is None else {"draft_ids": ids})}


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype is other.dtype and torch.equal(one, other)
