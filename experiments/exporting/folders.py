"""A trained drafter's folder: what it holds, by the layouts of published drafters, and the same in another layout."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import drafters
from drafters.heads.eagle import default_layers
from drafters.heads.files import INDICES, OURS, TRAINING, WEIGHTS, Checkpoint, Public, ServedFor
from specdec import bundled
from specdec.target.loading import load_tokenizer, looks_local, resolve_dtype

KINDS: Mapping[str, Public] = {
    kind.name: kind for name in dir(drafters) for kind in getattr(getattr(drafters, name), "public", ())
}
"""By name. The first one that holds what is there counts."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a drafter comes from, and what is to hold in place of what its files say.

    Attributes:
        name: A folder, a name on the hub, or ``bundled/…``.
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``.
        adapter: A LoRA of a small model, which is merged into its weights.
        dtype: What to cast the weights to; None keeps the files' own.
    """

    name: str
    hidden_layers: Sequence[int] | None = None
    mask_token_id: int | None = None
    embeddings: str = "auto"
    adapter: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """A drafter of one of ``KINDS`` that was read, what its files say of its training, and a small LM's tokenizer."""

    kind: str
    module: nn.Module
    notes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None


def check_format(kind: str, name: str, given: str) -> None:
    """Refuse a format that a kind of drafter is not written in."""
    known = KINDS[kind]
    if given not in known.formats:
        raise ValueError(
            f"format={given}: {name} holds {known.title}, which {given} has no layout for; give format="
            f"{' or format='.join(known.formats)}"
        )


def kind_of(name: str) -> str:
    """The kind of drafter that a folder holds, by its files and the names of its tensors.

    Raises:
        ValueError: There is no such folder, or it holds none.
    """
    path = Path(bundled.resolve(name))
    for kind in KINDS.values() if looks_local(str(path)) else ():
        if kind.files and (path.is_file() or any((path / file).is_file() for file in kind.files)):
            return kind.name
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"{name} holds an adapter: to export it merged, give 'export={{name: MODEL, adapter: {name}}}'"
        )
    checkpoint = Checkpoint(name)
    for kind in KINDS.values():
        if any(checkpoint.find(file) is not None for file in kind.files):
            return kind.name
    names = [key.removeprefix("model.") for key in checkpoint.names()]
    found = next((kind.name for kind in KINDS.values() if kind.holds(names, checkpoint.config)), None)
    if found is None:
        raise ValueError(
            f"{name} holds no drafter that is known here, its tensors are {', '.join(names[:3]) or 'none'} …: give the "
            f"folder of {', '.join(kind.title for kind in KINDS.values())}"
        )
    return found


def read(source: Source, kind: str, target: PreTrainedConfig | None = None) -> Found:
    """A drafter of a kind (``kind_of``), on the CPU.

    Args:
        target: The configuration of its target, whose layers an MTP module's is like; None for the one that is stored
            with the module.

    Raises:
        ValueError: It is incomplete, or the source says what this kind has no use for.
    """
    known, layers = KINDS[kind], source.hidden_layers
    settings: dict[str, Any] = {"mask_token_id": source.mask_token_id, "adapter": source.adapter}
    settings["hidden_layers"] = None if layers is None else tuple(layers)
    settings["embeddings"] = None if source.embeddings == "auto" else source.embeddings
    settings = {setting: value for setting, value in settings.items() if value is not None}
    for setting in settings:
        if setting not in known.takes:
            raise ValueError(f"export.{setting}: {source.name} holds {known.title}, which has none; leave it out")
    dtype = None if source.dtype is None else resolve_dtype(source.dtype)
    module = known.read(source.name, target, dtype=dtype if isinstance(dtype, torch.dtype) else None, **settings)
    notes = {"target": getattr(module, "base_model", None)} if known.files else {}
    tokenizer = None
    if "adapter" in known.takes:
        with suppress(ValueError):  # many drafters ship without one
            tokenizer = load_tokenizer(source.name)
    return Found(kind, module, notes | notes_of(source.name), tokenizer)


def notes_of(name: str) -> dict[str, Any]:
    """The facts that were written beside a drafter's weights when it was trained or exported, if any were."""
    with suppress(ValueError):  # Medusa's heads need no config.json
        checkpoint = Checkpoint(name)
        return {**(checkpoint.json(TRAINING) or {}), **(checkpoint.json(OURS) or {})}
    return {}


# ---------------------------------------------------------------- in another layout


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
    """Write a drafter, read it back, compare, put it into its folder, and return the files.

    Args:
        layout: ``"native"``, ``"speculators"`` or ``"sglang"``.
        served: The target that it is for.
        target: The target's configuration; None if it is not known.
        notes: More to keep in ``specdec.json``.

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
        _check_fit(found, target, served.target)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        as_written = kind.write(head, unfinished, target, layout=layout, served=served) or head
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(unfinished)
        ours = unfinished / OURS
        written = json.loads(ours.read_text()) if ours.is_file() else {"family": found.kind}
        told = {**found.notes, **written, **(notes or {}), "format": layout, "hidden_layers_are": "inputs of layers"}
        if told.get("hidden_layers") is None and reads:
            told["hidden_layers"] = list(getattr(head, "hidden_layers", None) or ())
        ours.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        compare(replace(found, module=as_written), read(Source(name=str(unfinished)), found.kind, target))
        names = sorted(path.name for path in unfinished.iterdir())
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*INDICES, *WEIGHTS, TRAINING):  # what other layouts have left there would be read first
            (folder / stale).unlink(missing_ok=True)
        for name in names:
            os.replace(unfinished / name, folder / name)
        return [folder / name for name in names]
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_fit(found: Found, target: PreTrainedConfig, name: str) -> None:
    """Refuse a target, of that name, for which a drafter was not made."""
    module: Any = found.module
    text, known = target.get_text_config(decoder=True), KINDS[found.kind]
    count, width, vocab = text.num_hidden_layers, text.hidden_size, text.vocab_size
    layers = list(getattr(module, "hidden_layers", None) or ()) if "hidden_layers" in known.takes else []
    # A block head's width is its own, unless it says otherwise.
    own = width if known.width is None else attrgetter(known.width)(module) or module.config.hidden_size
    tokens = (module if known.width == "hidden_size" else module.config).vocab_size
    mask = module.config.mask_token_id if "mask_token_id" in known.takes else 0
    for wrong, has, its, remedy in (
        (any(not -1 <= layer < count for layer in layers), f"that reads the hidden states {layers}", f"{count} layers",
         "give export.hidden_layers, or the target that it was trained on"),
        (own != width, f"for hidden states of width {own}", f"width {width}", "give the target that it was trained on"),
        (tokens > vocab, f"of {tokens} tokens", f"{vocab} tokens", "give the target that it was trained on"),
        (mask >= vocab, f"with the mask token {mask}", f"{vocab} tokens", "give export.mask_token_id"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{known.title} {has} does not fit the target {name} of {its}: {remedy}")


def compare(found: Found, again: Found) -> None:
    """Compare a drafter with what was read back: every tensor, and what decides how it drafts."""
    module: Any = found.module
    wanted, got = _state(module), _state(again.module)
    shared = wanted.keys() & got.keys()
    equal = {n for n in shared if wanted[n].dtype is got[n].dtype and torch.equal(wanted[n], got[n])}
    different = list((wanted.keys() | got.keys()) - equal)
    for name in KINDS[found.kind].decides:
        values = [attrgetter(name)(each) for each in (module, again.module)]
        first, second = (list(value) if isinstance(value, tuple) else value for value in values)
        different += [name] if first != second else []
    if different:
        raise RuntimeError(f"what was written is not what was read back: {', '.join(sorted(different)[:5])}")


def _state(module: Any) -> dict[str, torch.Tensor]:
    ids = getattr(module, "draft_ids", None)
    return {**module.state_dict(), **({} if ids is None else {"draft_ids": ids})}
