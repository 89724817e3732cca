"""The kinds of drafters that can be exported, as one table: how each is recognized, read, written and served."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafters.heads import eagle_files, mtp_files
from drafters.heads.block_files import load_block, save_block
from drafters.heads.files import OURS, Checkpoint, ServedFor
from drafters.heads.trained_on import TRAINING
from drafters.medusa import FILES as MEDUSA_FILES
from drafters.medusa import MedusaHeads
from drafters.pard import TOKENS
from specdec import bundled
from specdec.target.loading import load_model, load_tokenizer, looks_local, resolve_dtype

MEDUSA, EAGLE, EAGLE3, PEAGLE, MTP = "medusa", "eagle", "eagle3", "peagle", "mtp"
DFLASH, DSPARK, LM, PARD = "dflash", "dspark", "lm", "pard"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a drafter comes from, and what is to hold in place of what its files say.

    Attributes:
        name: A folder, a name on the hub, or ``bundled/…``.
        hidden_layers: The target's hidden states that it reads, numbered as in ``Drafter.hidden_layers``.
        embeddings: See ``load_eagle``.
        adapter: A LoRA of a small model, which is merged into its weights.
        dtype: What to cast the weights to; None keeps the files' own.
    """

    name: str
    hidden_layers: Sequence[int] | None = None
    mask_token_id: int | None = None
    embeddings: str = "auto"
    adapter: str | None = None
    dtype: str | None = None

    @property
    def layers(self) -> tuple[int, ...] | None:
        """``hidden_layers`` as a tuple."""
        return None if self.hidden_layers is None else tuple(self.hidden_layers)


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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of drafter.

    Attributes:
        formats: What it is written in: as its authors write it, for vLLM in speculators' layout, for SGLang.
        read: Loads its module, in a dtype, for a target.
        write: Writes its module to a folder in a format, for a target that serves it.
        why_not: Why it is not written in the others.
        takes: Settings of ``Source`` that it has a use for.
        vllm, sglang: Its name in the engines' settings; None where it is not served by itself.
        tokens: How many tokens a server drafts per round if nothing else is said, by the module.
        parallel: Whether vLLM is to be told that one forward drafts all tokens.
        bounded: Whether that is also the most: it does not go on by reading its own output.
        width: Name of the attribute that says how wide the target's hidden states are; None if it reads none.
        facts: Attributes of the module that decide how it drafts, besides its tensors.
    """

    title: str
    formats: tuple[str, ...]
    read: Callable[[Source, torch.dtype | None, PreTrainedConfig | None], Any]
    write: Callable[[Any, Path, str, ServedFor, PreTrainedConfig | None], None]
    tokens: Callable[[Any], int]
    why_not: Mapping[str, str] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    vllm: str | None = None
    sglang: str | None = None
    parallel: bool = False
    bounded: bool = False
    width: str | None = None
    facts: tuple[str, ...] = ()


def _write_medusa(heads: MedusaHeads, folder: Path, layout: str, served: ServedFor, target: Any) -> None:
    heads.base_model = served.target or heads.base_model
    heads.save_pretrained(folder)


def _read_mtp(source: Source, dtype: torch.dtype | None, target: PreTrainedConfig | None) -> Any:
    module: Any = mtp_files.load_mtp(source.name, _like_target(source.name, target))
    return module.to(dtype)


def _write_mtp(module: Any, folder: Path, layout: str, served: ServedFor, target: PreTrainedConfig | None) -> None:
    decoder = None if target is None else target.get_text_config(decoder=True).to_dict()
    mtp_files.save_mtp(module, folder, layout=layout, served=served, target_config=decoder)


def _write_block(head: Any, folder: Path, layout: str, served: ServedFor, target: Any) -> None:
    save_block(head, folder, layout=layout, served=served)


def _read_lm(source: Source, dtype: torch.dtype | None, target: Any) -> Any:
    stored = AutoConfig.from_pretrained(bundled.resolve(source.name)).dtype
    return load_model(source.name, dtype=dtype or stored or "auto", device="cpu", adapter=source.adapter)


_EAGLE: dict[str, Any] = {
    "read": lambda source, dtype, target: eagle_files.load_eagle(
        source.name, hidden_layers=source.layers, embeddings=source.embeddings, dtype=dtype
    ),
    "write": lambda head, folder, layout, served, target: eagle_files.save_eagle(
        head, folder, layout=layout, served=served
    ),
    "tokens": lambda module: eagle_files.TOKENS,
    "width": "captured_width",
}
_EAGLE_FACTS = (
    *("fusion_bias", "owns_embeddings", "fed_back", "config.rope_parameters", "config.rms_norm_eps"),
    *("config.hidden_act", "config.num_hidden_layers", "config.vocab_size"),
)
_EAGLE3_FACTS = (
    *("hidden_layers", "captured", "captured_width", "norm_before_residual", "norm_joined", "norm_each"),
    *("feeds_normed", "owns_output", "mask_token_id", *_EAGLE_FACTS),
)
_LM: dict[str, Any] = {
    "read": _read_lm,
    "write": lambda model, folder, layout, served, target: model.save_pretrained(folder),
    "takes": ("adapter",),
    "vllm": "draft_model",
}
_BLOCK: dict[str, Any] = {
    "formats": ("native", "speculators", "sglang"),
    "read": lambda source, dtype, target: load_block(
        source.name, hidden_layers=source.layers, mask_token_id=source.mask_token_id, dtype=dtype
    ),
    "write": _write_block,
    "tokens": lambda module: module.config.tokens,
    "bounded": True,
    "takes": ("hidden_layers", "mask_token_id"),
    "width": "config.target_hidden_size",
    "facts": (
        "hidden_layers",
        *(f"config.{name}" for name in (
            *("shifted", "causal", "block_size", "mask_token_id", "layer_kind", "columns", "tokens", "vocab_size"),
            *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "rope_parameters"),
            *("layer_types", "sliding_window", "hidden_act", "rms_norm_eps", "markov_rank", "markov_head_type"),
            *("causal_in_windows", "window_from_root", "conv_kernel_size", "selector_rank", "selector_top_k"),
            *("gru_hidden_dim", "pure_draft_prefix_len", "xpress_rank", "confidence"),
        )),
    ),
}  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType({
    MEDUSA: Kind(
        title="Medusa heads",
        formats=("native",),
        read=lambda source, dtype, target: MedusaHeads.from_pretrained(source.name, dtype=dtype),
        write=_write_medusa,
        why_not={"speculators": "speculators has no layout for them", "sglang": "SGLang does not serve them"},
        tokens=lambda module: module.num_heads,
        bounded=True,
        width="hidden_size",
        facts=("num_heads", "num_layers", "hidden_size", "vocab_size"),
    ),
    EAGLE: Kind(
        title="an EAGLE-1 head",
        formats=("native", "sglang"),
        why_not={"speculators": "speculators has no layout for it"},
        takes=("embeddings",),
        vllm="eagle",
        sglang="EAGLE",
        facts=_EAGLE_FACTS,
        **_EAGLE,
    ),
    EAGLE3: Kind(
        title="an EAGLE-3 head",
        formats=("native", "speculators", "sglang"),
        takes=("embeddings", "hidden_layers"),
        vllm="eagle3",
        sglang="EAGLE3",
        facts=_EAGLE3_FACTS,
        **_EAGLE,
    ),
    PEAGLE: Kind(
        title="a P-EAGLE head",
        formats=("native", "speculators"),
        why_not={"sglang": "SGLang has no heads that fill masks"},
        takes=("embeddings", "hidden_layers"),
        vllm="eagle3",
        parallel=True,
        facts=_EAGLE3_FACTS,
        **{**_EAGLE, "tokens": lambda module: module.tokens or eagle_files.TOKENS},
    ),
    MTP: Kind(
        title="an MTP module",
        formats=("native", "speculators"),
        read=_read_mtp,
        write=_write_mtp,
        why_not={"sglang": "SGLang reads modules from the target's own folder only"},
        tokens=lambda module: mtp_files.TOKENS,
        width="captured_width",
        facts=("before_norm", "model.hidden_first"),
    ),
    DFLASH: Kind(title="a DFlash head", vllm="dflash", sglang="DFLASH", **_BLOCK),
    DSPARK: Kind(title="a DSpark head", vllm="dspark", sglang="DSPARK", **_BLOCK),
    LM: Kind(
        title="a small causal LM",
        formats=("native", "sglang"),
        why_not={"speculators": "speculators has no layout for it, and vLLM serves its own folder"},
        tokens=lambda module: 4,
        sglang="STANDALONE",
        **_LM,
    ),
    PARD: Kind(
        title="a small causal LM that fills masks (PARD)",
        formats=("native",),
        why_not={
            "speculators": "speculators has no layout for it, and vLLM serves its own folder",
            "sglang": "SGLang has no models that fill masks",
        },
        tokens=lambda module: TOKENS,
        parallel=True,
        facts=("config.pard_token",),
        **_LM,
    ),
})  # fmt: skip

_LAYER = ("midlayer.", "layers.0.")


def check_format(kind: str, name: str, given: str) -> None:
    """Refuse a format that a kind of drafter is not written in."""
    known = KINDS[kind]
    if given not in known.formats:
        raise ValueError(
            f"format={given}: {name} holds {known.title}, and {known.why_not[given]}; give format="
            f"{' or format='.join(known.formats)}"
        )


def kind_of(name: str) -> str:
    """The kind of drafter that a folder holds, by the names of its tensors. DSpark heads are DFlash heads here.

    Raises:
        ValueError: There is no such folder, or it holds none.
    """
    path = bundled.resolve(name)
    if looks_local(path) and (Path(path).is_file() or any((Path(path) / file).is_file() for file in MEDUSA_FILES)):
        return MEDUSA
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"{name} holds an adapter: to export it merged, give drafter.name=MODEL drafter.adapter={name}"
        )
    checkpoint = Checkpoint(name)
    if any(checkpoint.find(file) is not None for file in MEDUSA_FILES):
        return MEDUSA
    names = [each.removeprefix("model.") for each in checkpoint.names()]

    def has(*prefixes: str) -> bool:
        return any(each.startswith(prefixes) for each in names)

    if has("medusa_heads.", "medusa_head.", "blocks.0.layers."):
        return MEDUSA
    if has(*(f"{layer}hidden_norm." for layer in _LAYER)):
        return EAGLE3 if eagle_files.mask_of(name, checkpoint.config) is None else PEAGLE
    if has("fc.weight"):
        return DFLASH if has("hidden_norm.weight") else EAGLE
    config = checkpoint.config
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    families = mtp_files.FAMILIES.values()
    prefixes = [each.format(layer=layers, module=0) for family in families for each in family.prefixes]
    if has(*(each.removeprefix("model.") for each in prefixes)):
        return MTP
    if config.get("model_type") and has("embed_tokens.", "transformer.wte.", "wte.", "embed_in."):
        return LM if eagle_files.mask_of(name, config) is None else PARD
    shown = ", ".join(names[:3]) or "none"
    raise ValueError(
        f"{name} holds no drafter that is known here, its tensors are {shown} …: give the folder of a small model, "
        f"or of Medusa, EAGLE, P-EAGLE, MTP, DFlash or DSpark heads"
    )


def read(source: Source, kind: str, target: PreTrainedConfig | None = None) -> Found:
    """A drafter, on the CPU.

    Args:
        kind: What it is, as ``kind_of`` says; it takes DSpark heads for DFlash heads, which is all the same here.
        target: The configuration of its target, whose layers an MTP module's is like; None for the one that is stored
            with the module.

    Raises:
        ValueError: It is incomplete, or the source says what this kind has no use for.
    """
    given = {"hidden_layers": source.hidden_layers, "mask_token_id": source.mask_token_id}
    given["adapter"] = source.adapter
    given["embeddings"] = None if source.embeddings == "auto" else source.embeddings
    for setting, value in given.items():
        if value is not None and setting not in KINDS[kind].takes:
            raise ValueError(
                f"drafter.{setting}: {source.name} holds {KINDS[kind].title}, which has none; leave it out"
            )
    dtype = None if source.dtype is None else resolve_dtype(source.dtype)
    module = KINDS[kind].read(source, dtype if isinstance(dtype, torch.dtype) else None, target)
    if kind in (DFLASH, DSPARK):
        kind = DSPARK if module.config.shifted else DFLASH
    notes = ({"target": module.base_model} if kind == MEDUSA else {}) | notes_of(source.name)
    return Found(kind, module, notes, _tokenizer(source.name) if kind in (LM, PARD) else None)


def notes_of(name: str) -> dict[str, Any]:
    """The facts that were written beside a drafter's weights when it was trained or exported, if any were."""
    try:
        checkpoint = Checkpoint(name)
    except ValueError:  # Medusa's heads need no config.json
        return {}
    return {**(checkpoint.json(TRAINING) or {}), **(checkpoint.json(OURS) or {})}


def _like_target(name: str, target: PreTrainedConfig | None) -> PreTrainedModel:
    """A model without weights whose layers an MTP module's is like: the target's, or what the module's files say."""
    config = target
    if config is None:
        stored = dict(Checkpoint(name).config)
        kind = stored.pop("model_type", None)
        if kind is None:
            raise ValueError(f"{name} does not say what its target's layers are: give target.name=FOLDER")
        config = AutoConfig.for_model(kind, **stored)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(name)
    except ValueError:
        return None  # many drafters ship without one
