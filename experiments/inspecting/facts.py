"""Facts about a trained drafter, by its description and its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from drafters.heads.files import OURS, TRAINING, Checkpoint
from specdec import bundled
from specdec.interfaces import Description
from specdec.machine import dtype_name
from specdec.target.target import Target


def facts_of(drafter: Description, target: Target, frequencies: Float[Tensor, " vocab"]) -> dict[str, str]:
    """Facts by their subject, of one trained model; ``frequencies`` are those of the target's tokens in its texts."""
    module: Any = drafter.parts[0]
    head = getattr(module, "model", module)
    weights, layers = list(module.parameters()), getattr(head, "layers", ())
    deep = f"{len(layers)} decoder layer{'s' * (len(layers) > 1)}, " if len(layers) else ""
    size = f"{sum(each.numel() for each in weights):,} parameters, {dtype_name(weights[0].dtype)}"
    facts = {"kind": f"{drafter.kind}, {deep}{size}"}
    if drafter.reads == (-1,):
        facts["reads"] = "the last hidden state, after the final norm"
    elif drafter.reads:
        numbers = ", ".join("the last one" if layer == -1 else str(layer) for layer in drafter.reads)
        facts["reads"] = (
            f"hidden states {numbers} (l is the input of layer l) of a target of {target.num_layers} layers"
        )
    facts |= drafter.facts
    ids = None if drafter.tokens is None else list(drafter.tokens)
    columns = target.vocab_size if ids is None else len(ids)
    facts["vocabulary"] = f"{columns:,} of the target's {target.vocab_size:,} tokens"
    if ids is not None:
        facts["vocabulary"] += f", which have {float(frequencies[ids].sum()):.1%} of its probability in these texts"
    if hasattr(head, "embed_tokens"):
        own = {True: "the target's", False: "its own"}
        facts["embeddings"] = f"{own[head.embed_tokens is None]}; output layer: {own[module.lm_head is None]}"
    rope, theirs = (_rope(each) for each in (getattr(module, "config", None), target.model.config.get_text_config()))
    if rope is not None:
        facts["RoPE"] = rope + (" (as the target's)" if rope == theirs else f" (the target's: {theirs})")
    return facts


def trained_on(checkpoint: Checkpoint) -> str | None:
    """The target's name, where a checkpoint says what it was trained on."""
    for file in (OURS, TRAINING):
        named = (checkpoint.json(file) or {}).get("target")
        if isinstance(named, str) and named:
            return named
    verifier: Mapping[str, Any] = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def same_model(one: str, other: str) -> bool:
    """Whether two names surely mean one model: the same name, or the same folder.

    Two folders of one name, or a folder and a repository of one name, may hold different models.
    """
    return one == other or _place(one) == _place(other)


def _place(name: str) -> str:
    path = Path(bundled.resolve(name)).expanduser()
    return str(path.resolve()) if path.is_dir() else name.rstrip("/")


def _rope(config: Any) -> str | None:
    own = getattr(config, "rope_parameters", None) or {}
    return f"theta {own['rope_theta']:,.0f}, {own.get('rope_type', 'default')}" if "rope_theta" in own else None
