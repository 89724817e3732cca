"""What a drafter is, by its files and its modules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drafters.block import BlockDrafter
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.files import INDICES, OURS, WEIGHTS, Checkpoint
from drafters.heads.mtp import MTPHead
from experiments.inspecting.block import BlockFamily
from experiments.inspecting.families import kind_of
from experiments.inspecting.feature import FeatureFamily
from experiments.inspecting.medusa import MedusaFamily
from experiments.inspecting.search import Inspection
from experiments.inspecting.wiring import Family
from specdec.interfaces import Drafter
from specdec.machine import dtype_name

_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_TRAINING = "training.json"


def facts_of(family: Family, drafter: Drafter, found: Inspection, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Returns what is known of a head, by what it is about.

    Args:
        family: The head.
        drafter: Its drafter.
        found: What it predicts.
        checkpoint: Its files; None if it was not loaded from any.
    """
    facts = {"kind": f"{kind_of(family)}, {_size(family)}"}
    if checkpoint is not None:
        facts |= {"layout": layout_of(family, checkpoint), "files": _files(checkpoint)}
        trained = trained_on(checkpoint)
        if trained:
            same = named_alike(trained, family.target.name)
            facts["trained on"] = f"{trained}, as its files say" + ("" if same else f"; here: {family.target.name}")
    if isinstance(family, FeatureFamily):
        facts |= _of_pairs(family, found)
    elif isinstance(family, BlockFamily):
        assert isinstance(drafter, BlockDrafter)
        facts |= _of_blocks(family, drafter, found)
    elif isinstance(family, MedusaFamily):
        facts |= {
            "reads": "the last hidden state, after the final norm",
            "heads": f"{family.heads.num_heads}, of {family.heads.num_layers} residual layers each",
            "vocabulary": f"{family.heads.vocab_size:,} tokens",
        }
    rope = _rope(family)
    return facts | ({"RoPE": rope} if rope else {})


def layout_of(family: Family, checkpoint: Checkpoint) -> str:
    """Returns which public layout a checkpoint has, and what tells."""
    config = checkpoint.config
    ours = f", with this project's {OURS}" if checkpoint.find(OURS) is not None else ""
    theirs = config.get("speculators_model_type")
    if theirs is not None:
        return f"speculators, of the type {theirs}{ours}"
    if isinstance(family, BlockFamily):
        if config.get("model_type") == family.head.config.model_type:
            return "this project's"
        if config.get("dflash_config"):
            return "z-lab's or SpecForge's (dflash_config)"
        return "DeepSpec's (target_layer_ids at the top)" if "target_layer_ids" in config else "z-lab's older one"
    if isinstance(family, MedusaFamily):
        return "FasterDecoding's, first version"
    if not isinstance(family, FeatureFamily):
        return "a model of transformers"
    names = checkpoint.names()
    if isinstance(family.loaded, MTPHead):
        tells = {"enorm": "DeepSeek's or GLM's", "pre_fc_norm": "Qwen's (mtp.*)", "token_layernorm": "MiMo's"}
        found = (text for sign, text in tells.items() if any(sign in name for name in names))
        return f"{next(found, 'unknown')} names{ours}"
    if not isinstance(family.loaded, Eagle3Head):
        return f"EAGLE-1's and 2's (fc and layers.0.*){ours}"
    if "target_layer_ids" in config:
        return f"DeepSpec's (target_layer_ids){ours}"
    first = "midlayer.*" if any("midlayer." in name for name in names) else "layers.0.*"
    return f"EAGLE-3's ({first}){ours}"


def trained_on(checkpoint: Checkpoint) -> str | None:
    """Returns the target's name, where a checkpoint says what it was trained on."""
    for file in (OURS, _TRAINING):
        named = (checkpoint.json(file) or {}).get("target")
        if isinstance(named, str) and named:
            return named
    verifier: Mapping[str, Any] = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def named_alike(one: str, other: str) -> bool:
    """Returns whether two names of models end alike: a folder may hold a copy of what the hub has."""
    return one.rstrip("/").rpartition("/")[2].lower() == other.rstrip("/").rpartition("/")[2].lower()


def _files(checkpoint: Checkpoint) -> str:
    wanted = ("config.json", *WEIGHTS, *INDICES, *_MEDUSA, OURS, _TRAINING)
    there = [path for path in map(checkpoint.find, wanted) if path is not None]
    return ", ".join(f"{path.name}{_bytes(path)}" for path in there)


def _bytes(path: Path) -> str:
    size = path.stat().st_size
    return f" ({size / 1e6:.1f} MB)" if size > 1e5 else ""


def _size(family: Family) -> str:
    head: nn.Module
    if isinstance(family, FeatureFamily):
        head = family.loaded
    elif isinstance(family, BlockFamily):
        head = family.head
    else:
        head = family.wiring.head
    weights = list(head.parameters())
    layers: Any = getattr(getattr(head, "model", head), "layers", None)
    deep = "" if layers is None else f"{len(layers)} decoder layer{'' if len(layers) == 1 else 's'}, "
    return f"{deep}{sum(each.numel() for each in weights):,} parameters, {dtype_name(weights[0].dtype)}"


def _of_pairs(family: FeatureFamily, found: Inspection) -> dict[str, str]:
    head = family.loaded
    facts = {"reads": _states(family.wiring.layers, family)}
    if isinstance(head, MTPHead):
        facts["reads"] = f"the last hidden state, {'before' if head.before_norm else 'after'} the final norm"
        first, second = ("hidden state", "embedding") if head.model.hidden_first else ("embedding", "hidden state")
        facts["joins"] = f"the {first} before the {second}"
    if isinstance(head, Eagle3Head):
        norms = "one over all" if head.norm_joined else "one for each" if head.norm_each else "none"
        facts["norms"] = (
            f"of captured states: {norms}; residual stream: {'normed' if head.norm_before_residual else 'un-normed'}; "
            f"fed back: {'normed' if head.feeds_normed else 'un-normed'}"
        )
    return facts | _ends(family, found, head.model.embed_tokens is not None, head.lm_head is not None)


def _of_blocks(family: BlockFamily, drafter: BlockDrafter, found: Inspection) -> dict[str, str]:
    config = family.head.config
    tokenizer = family.target.tokenizer
    text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(drafter.mask_token_id)
    form = "every place predicts the next one's token" if config.shifted else "every place predicts its own token"
    sight = "sees those before it" if config.causal else "sees all others"
    extra = [f"Markov head ({config.markov_head_type}, rank {config.markov_rank})"] if config.markov_rank else []
    extra += ["confidence head"] if config.confidence else []
    facts = {
        "reads": _states(family.wiring.layers, family),
        "block": f"{drafter.block_size} places, {drafter.tokens} tokens: {form}, and {sight}",
        "mask token": f"{drafter.mask_token_id}" + (f" ({text})" if isinstance(text, str) else ""),
    }
    if extra:
        facts["besides"] = ", ".join(extra)
    return facts | _ends(family, found, config.owns_embeddings, config.owns_output)


def _ends(family: Family, found: Inspection, embeddings: bool, output: bool) -> dict[str, str]:
    ids: Tensor | None = family.wiring.columns
    total = family.target.vocab_size
    covered = "" if ids is None else f" (d2t), which are {found.loaded.coverage:.1%} of what the target finds likeliest"
    owner = {True: "its own", False: "the target's"}
    return {
        "vocabulary": f"{total if ids is None else len(ids):,} of the target's {total:,} tokens{covered}",
        "embeddings": f"{owner[embeddings]}; output layer: {owner[output]}",
    }


def _states(layers: tuple[int, ...], family: Family) -> str:
    count = family.target.num_layers
    if layers == (-1,):
        return "the last hidden state, after the final norm"
    numbers = ", ".join("the last one" if layer == -1 else str(layer) for layer in layers)
    return f"hidden states {numbers} (l is the input of layer l) of a target of {count} layers"


def _rope(family: Family) -> str | None:
    config = getattr(family.wiring.head, "config", None)
    own = getattr(config, "rope_parameters", None) or {}
    text: Any = family.target.model.config.get_text_config(decoder=True)
    theirs = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in own:
        return None
    shown = [
        f"theta {each['rope_theta']:,.0f}, {each.get('rope_type', 'default')}" if "rope_theta" in each else "other"
        for each in (own, theirs)
    ]
    return shown[0] + (" (as the target's)" if shown[0] == shown[1] else f" (the target's: {shown[1]})")
