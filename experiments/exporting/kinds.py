"""The kinds of drafters that can be exported, as one table; and which kind a folder holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drafters.heads.eagle_export import TOKENS as EAGLE_TOKENS
from drafters.heads.files import Checkpoint
from drafters.heads.mtp_export import TOKENS as MTP_TOKENS
from drafters.heads.mtp_files import FAMILIES
from specdec import bundled
from specdec.target.loading import looks_local

MEDUSA, EAGLE, EAGLE3, MTP, DFLASH, DSPARK, LM = "medusa", "eagle", "eagle3", "mtp", "dflash", "dspark", "lm"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of drafter.

    Attributes:
        title: In words.
        formats: What it is written in: as its authors write it, for vLLM in speculators' layout, for SGLang.
        why_not: Why it is not written in the others.
        takes: Settings of ``Source`` that it has a use for.
        vllm, sglang: Its name in the engines' settings; None where it is not served by itself.
        tokens: How many tokens a server drafts per round if nothing else is said, by the module.
        bounded: Whether that is also the most: it does not go on by reading its own output.
        width: Name of the attribute that says how wide the target's hidden states are; None if it reads none.
        facts: Attributes of the module that decide how it drafts, besides its tensors.
    """

    title: str
    formats: tuple[str, ...]
    tokens: Callable[[Any], int]
    why_not: Mapping[str, str] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    vllm: str | None = None
    sglang: str | None = None
    bounded: bool = False
    width: str | None = None
    facts: tuple[str, ...] = ()

    @property
    def reads_layers(self) -> bool:
        """Whether it reads chosen hidden states of the target."""
        return "hidden_layers" in self.takes


_EAGLE_CONFIG = tuple(
    f"config.{name}" for name in ("rope_parameters", "rms_norm_eps", "hidden_act", "num_hidden_layers", "vocab_size")
)
_BLOCK: dict[str, Any] = {
    "formats": ("native", "speculators", "sglang"),
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
            "confidence",
        )),
    ),
}  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType({
    MEDUSA: Kind(
        title="Medusa heads",
        formats=("native",),
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
        tokens=lambda module: EAGLE_TOKENS,
        takes=("embeddings",),
        vllm="eagle",
        sglang="EAGLE",
        width="captured_width",
        facts=("fusion_bias", "owns_embeddings", "fed_back", *_EAGLE_CONFIG),
    ),
    EAGLE3: Kind(
        title="an EAGLE-3 head",
        formats=("native", "speculators", "sglang"),
        tokens=lambda module: EAGLE_TOKENS,
        takes=("embeddings", "hidden_layers"),
        vllm="eagle3",
        sglang="EAGLE3",
        width="captured_width",
        facts=(
            *("hidden_layers", "captured", "captured_width", "norm_before_residual", "norm_joined", "norm_each"),
            *("feeds_normed", "fusion_bias", "owns_embeddings", "owns_output", *_EAGLE_CONFIG),
        ),
    ),
    MTP: Kind(
        title="an MTP module",
        formats=("native", "speculators"),
        why_not={"sglang": "SGLang reads modules from the target's own folder only"},
        tokens=lambda module: MTP_TOKENS,
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
        vllm="draft_model",
        sglang="STANDALONE",
    ),
})  # fmt: skip

_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_LAYER = ("midlayer.", "layers.0.")


def check_format(kind: str, name: str, given: str) -> None:
    """Refuse a format that a kind of drafter is not written in.

    Raises:
        ValueError: Says why, and which formats there are.
    """
    known = KINDS[kind]
    if given not in known.formats:
        raise ValueError(
            f"format={given}: {name} holds {known.title}, and {known.why_not[given]}; give format="
            f"{' or format='.join(known.formats)}"
        )


def kind_of(name: str) -> str:
    """The kind of drafter that a folder holds, by the names of its tensors. DSpark heads are DFlash heads here.

    Args:
        name: A folder, a name on the hub, or ``bundled/…``.

    Raises:
        ValueError: There is no such folder, or it holds none.
    """
    path = bundled.resolve(name)
    if looks_local(path) and (Path(path).is_file() or any((Path(path) / file).is_file() for file in _MEDUSA_FILES)):
        return MEDUSA
    checkpoint = Checkpoint(name)
    if any(checkpoint.find(file) is not None for file in _MEDUSA_FILES):
        return MEDUSA
    names = [each.removeprefix("model.") for each in checkpoint.names()]

    def has(*prefixes: str) -> bool:
        return any(each.startswith(prefixes) for each in names)

    if has(*(f"{layer}hidden_norm." for layer in _LAYER)):
        return EAGLE3
    if has("fc.weight"):
        return DFLASH if has("hidden_norm.weight") else EAGLE
    config = checkpoint.config
    layers = (config.get("text_config") or config).get("num_hidden_layers", 0)
    prefixes = [each.format(layer=layers, module=0) for family in FAMILIES.values() for each in family.prefixes]
    if has(*(each.removeprefix("model.") for each in prefixes)):
        return MTP
    if config.get("model_type") and has("embed_tokens.", "transformer.wte.", "wte.", "embed_in."):
        return LM
    shown = ", ".join(names[:3]) or "none"
    raise ValueError(
        f"{name} holds no drafter that is known here, its tensors are {shown} …: give the folder of a small model, "
        f"or of Medusa, EAGLE, MTP, DFlash or DSpark heads"
    )
