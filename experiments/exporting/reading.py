"""A trained drafter, read from its files for another layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafters.heads.block_files import load_block
from drafters.heads.eagle_files import load_eagle
from drafters.heads.files import OURS, Checkpoint
from drafters.heads.mtp_files import load_mtp
from drafters.medusa_heads import MedusaHeads
from experiments.exporting.kinds import DFLASH, DSPARK, EAGLE, EAGLE3, KINDS, LM, MEDUSA, MTP
from specdec import bundled
from specdec.target.loading import load_model, load_tokenizer, resolve_dtype

TRAINING = "training.json"
"""The file that the trainer writes beside a head's weights."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a drafter comes from, and what is to hold in place of what its files say.

    Attributes:
        name: A folder, a name on the hub, or ``bundled/…``.
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``.
        mask_token_id: The mask token.
        embeddings: See ``load_eagle``.
        dtype: What to cast the weights to; None keeps the files' own.
    """

    name: str
    hidden_layers: Sequence[int] | None = None
    mask_token_id: int | None = None
    embeddings: str = "auto"
    dtype: str | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """A drafter that was read.

    Attributes:
        kind: One of ``KINDS``.
        module: Its weights.
        notes: What its files say of its training: target, head, seeds, …
        tokenizer: That of a small LM, if it has one.
    """

    kind: str
    module: nn.Module
    notes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None


def read(source: Source, kind: str, target: PreTrainedConfig | None = None) -> Found:
    """A drafter, on the CPU.

    Args:
        source: Where it is.
        kind: What it is, as ``kind_of`` says; it takes DSpark heads for DFlash heads, which is all the same here.
        target: The configuration of its target, whose layers an MTP module's is like; None for the one that is stored
            with the module.

    Raises:
        ValueError: It is incomplete, or the source says what this kind has no use for.
    """
    given = {"hidden_layers": source.hidden_layers, "mask_token_id": source.mask_token_id}
    given["embeddings"] = None if source.embeddings == "auto" else source.embeddings
    for setting, value in given.items():
        if value is not None and setting not in KINDS[kind].takes:
            raise ValueError(
                f"drafter.{setting}: {source.name} holds {KINDS[kind].title}, which has none; leave it out"
            )
    resolved = None if source.dtype is None else resolve_dtype(source.dtype)
    dtype = resolved if isinstance(resolved, torch.dtype) else None
    layers = None if source.hidden_layers is None else tuple(source.hidden_layers)
    name, notes = source.name, notes_of(source.name)
    if kind == MEDUSA:
        heads = MedusaHeads.from_pretrained(bundled.resolve(name), dtype=dtype)
        return Found(kind, heads, {"target": heads.base_model, **notes})
    if kind == LM:
        stored = AutoConfig.from_pretrained(bundled.resolve(name)).dtype
        model = load_model(name, dtype=dtype or stored or "auto", device="cpu")
        return Found(kind, model, notes, _tokenizer(name))
    if kind == MTP:
        module: Any = load_mtp(name, like_target(name, target))
        return Found(kind, module if dtype is None else module.to(dtype), notes)
    if kind in (EAGLE, EAGLE3):
        eagle = load_eagle(name, hidden_layers=layers, embeddings=source.embeddings, dtype=dtype)
        return Found(kind, eagle, notes)
    block = load_block(name, hidden_layers=layers, mask_token_id=source.mask_token_id, dtype=dtype)
    return Found(DSPARK if block.config.shifted else DFLASH, block, notes)


def notes_of(name: str) -> dict[str, Any]:
    """The facts that were written beside a drafter's weights when it was trained or exported, if any were."""
    try:
        checkpoint = Checkpoint(name)
    except ValueError:  # Medusa's heads need no config.json
        return {}
    return {**(checkpoint.json(TRAINING) or {}), **(checkpoint.json(OURS) or {})}


def like_target(name: str, target: PreTrainedConfig | None) -> PreTrainedModel:
    """A model without weights whose layers an MTP module's is like.

    Args:
        name: The module's folder.
        target: The target's configuration; None for the module's own, which is that of a target with one layer.

    Raises:
        ValueError: Nothing says what the target is.
    """
    config = target
    if config is None:
        stored = dict(Checkpoint(name).config)
        kind = stored.pop("model_type", None)
        if kind is None:
            raise ValueError(f"{name} does not say what its target's layers are: give target.name=FOLDER")
        config = AutoConfig.for_model(kind, **stored)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def config_of(target: str) -> PreTrainedConfig | None:
    """A target's configuration; None if it has no name, or is neither here nor to be had."""
    if not target:
        return None
    try:
        return AutoConfig.from_pretrained(bundled.resolve(target))
    except (OSError, ValueError):
        return None


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(name)
    except ValueError:
        return None  # many drafters ship without one
