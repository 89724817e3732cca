"""Facts about a drafter, by its files and its modules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from drafters.block import BlockDrafter
from drafters.feature import FeatureDrafter
from drafters.heads.eagle import Eagle3Head
from drafters.heads.files import INDICES, OURS, WEIGHTS, Checkpoint
from drafters.heads.mtp import MTPHead
from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.other_vocabulary import TLIDrafter
from experiments.inspecting.kinds import kind_of, layers_of
from specdec import bundled
from specdec.interfaces import Drafter
from specdec.machine import dtype_name
from specdec.target.target import Target

_TRAINING = "training.json"
_FILES = ("config.json", *WEIGHTS, *INDICES, "medusa_lm_head.safetensors", "medusa_lm_head.pt", OURS, _TRAINING)
_LAYOUTS = {
    "dflash_config": "z-lab's or SpecForge's (dflash_config)",
    "target_layer_ids": "DeepSpec's (target_layer_ids)",
    "enorm": "DeepSeek's or GLM's names",
    "pre_fc_norm": "Qwen's names (mtp.*)",
    "token_layernorm": "MiMo's names",
    "midlayer.": "EAGLE-3's (midlayer.*)",
    "fc.": "EAGLE's (fc and layers.0.*)",
}
"""A key of the configuration or a part of a tensor's name, and the public layout that has it; the first one tells."""


def facts_of(
    drafter: Drafter, target: Target, checkpoint: Checkpoint | None, frequencies: Float[Tensor, " vocab"]
) -> dict[str, str]:
    """Returns facts by their subject.

    Args:
        checkpoint: Its files; None if it was not loaded from any.
        frequencies: How probable the target's tokens are in its texts.
    """
    module: Any = module_of(drafter, target)
    reads = layers_of(drafter, target)
    head = getattr(module, "model", module)
    weights, layers = list(module.parameters()), getattr(head, "layers", ())
    size = sum(each.numel() for each in weights)
    deep = f"{len(layers)} decoder layer{'' if len(layers) == 1 else 's'}, " if len(layers) else ""
    facts = {"kind": f"{kind_of(drafter)}, {deep}{size:,} parameters, {dtype_name(weights[0].dtype)}"}
    if checkpoint is not None:
        there = [path for path in map(checkpoint.find, _FILES) if path is not None]
        facts |= {"layout": layout_of(checkpoint), "files": ", ".join(path.name + _bytes(path) for path in there)}
        trained = trained_on(checkpoint)
        if trained:
            other = "" if same_model(trained, target.name) else f"; here: {target.name}"
            facts["trained on"] = f"{trained}, as its files say{other}"
    if reads == (-1,):
        facts["reads"] = "the last hidden state, after the final norm"
    elif reads:
        numbers = ", ".join("the last one" if layer == -1 else str(layer) for layer in reads)
        facts["reads"] = (
            f"hidden states {numbers} (l is the input of layer l) of a target of {target.num_layers} layers"
        )
    if isinstance(module, MTPHead):
        facts["reads"] = f"the last hidden state, {'before' if module.before_norm else 'after'} the final norm"
        pair = ["embedding", "hidden state"][:: -1 if head.hidden_first else 1]
        facts["joins"] = f"the {pair[0]} before the {pair[1]}"
    elif isinstance(module, Eagle3Head):
        norms = "one over all" if module.norm_joined else "one for each" if module.norm_each else "none"
        words = {True: "normed", False: "un-normed"}
        facts["norms"] = (
            f"of captured states: {norms}; residual stream: {words[module.norm_before_residual]}; fed back: "
            f"{words[module.feeds_normed]}"
        )
    elif isinstance(drafter, BlockDrafter):
        config, tokenizer = drafter.head.config, target.tokenizer
        form = "every place predicts the next one's token" if config.shifted else "every place predicts its own token"
        sight = "sees those before it" if config.causal else "sees all others"
        if config.causal_in_windows not in (None, config.causal):
            sight += ", in sliding layers " + ("those before it" if config.causal_in_windows else "all others")
        text = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(drafter.mask_token_id)})"
        facts["block"] = f"{drafter.block_size} places, {drafter.tokens} tokens: {form}, and {sight}"
        facts["mask token"] = f"{drafter.mask_token_id}{text}"
        if config.markov_rank:
            facts["besides"] = f"Markov head ({config.markov_head_type}, rank {config.markov_rank})"
        if config.selector_rank:
            facts["besides"] = f"selector among {config.selector_top_k} candidates (rank {config.selector_rank})"
        if config.gru_hidden_dim:
            facts["besides"] = f"recurrent network down the tokens (width {config.gru_hidden_dim})"
        if config.xpress_rank:
            facts["besides"] = f"refiner (rank {config.xpress_rank}), {drafter.passes or 'no'} passes over a block"
        if config.conv_kernel_size:
            facts["convolutions"] = f"{config.conv_kernel_size} places, {config.conv_group_size} channels in a group"
    elif isinstance(drafter, MedusaDrafter):
        heads = drafter.heads
        facts |= {"heads": f"{heads.num_heads}, of {heads.num_layers} residual layers each"}
    ids = getattr(module, "draft_ids", None)
    if isinstance(drafter, TLIDrafter):
        ids = [token for token, _ in drafter.common(target)]
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


def layout_of(checkpoint: Checkpoint) -> str:
    """Returns the public layout that a checkpoint has, and the sign of it."""
    ours = f", with this project's {OURS}" if checkpoint.find(OURS) is not None else ""
    theirs = checkpoint.config.get("speculators_model_type")
    if theirs is not None:
        return f"speculators, of the type {theirs}{ours}"
    if any(name.startswith("medusa") for name in checkpoint.config):
        return f"FasterDecoding's, first version{ours}"
    try:
        names = checkpoint.names()
    except ValueError:
        names = []
    signs = [sign for sign in _LAYOUTS if sign in checkpoint.config or any(sign in name for name in names)]
    return (_LAYOUTS[signs[0]] if signs else "a model of transformers") + ours


def trained_on(checkpoint: Checkpoint) -> str | None:
    """Returns the target's name, where a checkpoint says what it was trained on."""
    for file in (OURS, _TRAINING):
        named = (checkpoint.json(file) or {}).get("target")
        if isinstance(named, str) and named:
            return named
    verifier: Mapping[str, Any] = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    named = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def same_model(one: str, other: str) -> bool:
    """Returns whether two names surely mean one model: the same name, or the same folder.

    Two folders of one name, or a folder and a repository of one name, may hold different models.
    """
    return one == other or _place(one) == _place(other)


def _place(name: str) -> str:
    path = Path(bundled.resolve(name)).expanduser()
    return str(path.resolve()) if path.is_dir() else name.rstrip("/")


def module_of(drafter: Drafter, target: Target) -> nn.Module:
    """Returns the module whose weights were trained."""
    if isinstance(drafter, MedusaDrafter):
        return drafter.heads
    if isinstance(drafter, ModelDrafter):
        return drafter.model
    if isinstance(drafter, FeatureDrafter):
        return drafter.head_for(target)
    assert isinstance(drafter, BlockDrafter)
    return drafter.head


def _bytes(path: Path) -> str:
    size = path.stat().st_size
    return f" ({size / 1e6:.1f} MB)" if size > 1e5 else ""


def _rope(config: Any) -> str | None:
    own = getattr(config, "rope_parameters", None) or {}
    return f"theta {own['rope_theta']:,.0f}, {own.get('rope_type', 'default')}" if "rope_theta" in own else None
