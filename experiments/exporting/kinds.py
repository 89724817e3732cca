"""What a folder of a trained drafter holds, by the layouts in which drafters say that they are published."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

import drafters
from drafters.heads.files import OURS, TRAINING, Checkpoint, Public
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
    """A drafter that was read.

    Attributes:
        kind: One of ``KINDS``.
        notes: What its files say of its training: target, head, seeds, …
        tokenizer: That of a small LM, if it has one.
    """

    kind: str
    module: nn.Module
    notes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None


def check_format(kind: str, name: str, given: str) -> None:
    """Refuse a format that a kind of drafter is not written in."""
    known = KINDS[kind]
    if given not in known.formats:
        raise ValueError(
            f"format={given}: {name} holds {known.title}, and {known.why_not[given]}; give format="
            f"{' or format='.join(known.formats)}"
        )


def kind_of(name: str) -> str:
    """The kind of drafter that a folder holds, by its files and the names of its tensors.

    Raises:
        ValueError: There is no such folder, or it holds none.
    """
    path = Path(bundled.resolve(name))
    for kind in KINDS.values():
        local = looks_local(str(path)) and kind.files
        if local and (path.is_file() or any((path / file).is_file() for file in kind.files)):
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
    """A drafter, on the CPU.

    Args:
        kind: What it is, as ``kind_of`` says.
        target: The configuration of its target, whose layers an MTP module's is like; None for the one that is stored
            with the module.

    Raises:
        ValueError: It is incomplete, or the source says what this kind has no use for.
    """
    known, layers = KINDS[kind], source.hidden_layers
    given: dict[str, Any] = {"mask_token_id": source.mask_token_id, "adapter": source.adapter}
    given |= {"hidden_layers": None if layers is None else tuple(layers)}
    given |= {"embeddings": None if source.embeddings == "auto" else source.embeddings}
    given = {setting: value for setting, value in given.items() if value is not None}
    for setting in given:
        if setting not in known.takes:
            raise ValueError(f"export.{setting}: {source.name} holds {known.title}, which has none; leave it out")
    dtype = None if source.dtype is None else resolve_dtype(source.dtype)
    module = known.read(source.name, target, dtype=dtype if isinstance(dtype, torch.dtype) else None, **given)
    notes = {"target": getattr(module, "base_model", None)} if known.files else {}
    tokenizer = _tokenizer(source.name) if "adapter" in known.takes else None
    return Found(kind, module, notes | notes_of(source.name), tokenizer)


def notes_of(name: str) -> dict[str, Any]:
    """The facts that were written beside a drafter's weights when it was trained or exported, if any were."""
    try:
        checkpoint = Checkpoint(name)
    except ValueError:  # Medusa's heads need no config.json
        return {}
    return {**(checkpoint.json(TRAINING) or {}), **(checkpoint.json(OURS) or {})}


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(name)
    except ValueError:
        return None  # many drafters ship without one
