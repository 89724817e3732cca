"""Which kind of drafter a folder holds, and the formats that this kind can be written in."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from drafters.heads.files import Checkpoint
from drafters.heads.mtp_files import FAMILIES
from specdec import bundled
from specdec.target.loading import looks_local

MEDUSA, EAGLE, EAGLE3, MTP, DFLASH, DSPARK, LM = "medusa", "eagle", "eagle3", "mtp", "dflash", "dspark", "lm"
TITLES: Mapping[str, str] = MappingProxyType(
    {
        MEDUSA: "Medusa heads",
        EAGLE: "an EAGLE-1 head",
        EAGLE3: "an EAGLE-3 head",
        MTP: "an MTP module",
        DFLASH: "a DFlash head",
        DSPARK: "a DSpark head",
        LM: "a small causal LM",
    }
)
"""All kinds, in words."""

FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        MEDUSA: ("native",),
        EAGLE: ("native", "sglang"),
        EAGLE3: ("native", "speculators", "sglang"),
        MTP: ("native", "speculators"),
        DFLASH: ("native", "speculators", "sglang"),
        DSPARK: ("native", "speculators", "sglang"),
        LM: ("native", "sglang"),
    }
)
"""What each can be written in: as its authors write it, for vLLM in speculators' layout, for SGLang."""

_WHY_NOT = {
    (MEDUSA, "speculators"): "speculators has no layout for them",
    (MEDUSA, "sglang"): "SGLang does not serve them",
    (EAGLE, "speculators"): "speculators has no layout for it",
    (MTP, "sglang"): "SGLang reads modules from the target's own folder only",
    (LM, "speculators"): "speculators has no layout for it, and vLLM serves its own folder",
}
_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_LAYER = ("midlayer.", "layers.0.")


def check_format(kind: str, name: str, given: str) -> None:
    """Refuse a format that a kind of drafter is not written in.

    Raises:
        ValueError: Says why, and which formats there are.
    """
    if given not in FORMATS[kind]:
        raise ValueError(
            f"format={given}: {name} holds {TITLES[kind]}, and {_WHY_NOT[kind, given]}; give format="
            f"{' or format='.join(FORMATS[kind])}"
        )


def kind_of(name: str) -> str:
    """Returns the kind of drafter that a folder holds, by the names of its tensors. DSpark heads are DFlash heads here.

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
