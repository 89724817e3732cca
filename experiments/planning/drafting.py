"""What a drafter of the configuration costs: the shape of what it runs, from its files or from its target's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.planning.formats import Formats, choose_formats
from experiments.planning.sources import downloaded, read_config, shape_of
from specdec import bundled
from specdec.physics import heads
from specdec.physics.precision import Precision
from specdec.physics.rounds import DraftModel
from specdec.physics.shape import ModelShape

_LOOKUPS = (
    "NGramDrafter", "SuffixDrafter", "TokenRecyclingDrafter", "SamDrafter", "RestDrafter", "LookaheadDrafter",
)  # fmt: skip
_OTHER_VOCABULARY = ("TLIDrafter", "SLEMDrafter")
_PLACES = 16
"""Places of a block where nobody says."""
_PEAGLE_LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A drafter as far as a plan needs it.

    Attributes:
        title: What it is, in words.
        model: What runs when it drafts; None for a look-up, whose time is not counted.
        longest: How many tokens it can draft; None if there is no limit.
        shown: Positions that its own cache has for nodes, where its files say so.
    """

    title: str
    model: DraftModel | None = None
    longest: int | None = None
    shown: int | None = None


def plan_drafter(
    options: Mapping[str, Any], target: ModelShape, formats: Formats, *, target_name: str
) -> Planned | None:
    """Return what a drafter costs; None without one.

    A head's sizes are read from its files if they are on this machine. Otherwise they are those that such heads usually
    have for this target.

    Args:
        options: The section ``drafter`` of the configuration.
        target: The target's shape.
        formats: The target's. A head computes in the same type, and may use its output layer; it is not quantized.
        target_name: Name of the target, whose files may hold an MTP module.

    Raises:
        ValueError: Nothing is known about what such a drafter costs.
    """
    owner = drafter_class(options)
    if owner is None:
        return None
    name = options.get("name")
    if owner in _LOOKUPS:
        return Planned(title=f"{owner}, which looks drafts up: its time is not counted")
    kv_cache = options.get("kv_cache")
    if owner in ("ModelDrafter", "PARDDrafter", *_OTHER_VOCABULARY):
        given = read_config(str(name))
        shape = shape_of(given, f"drafter.name={name}")
        if shape.vocab != target.vocab and owner not in _OTHER_VOCABULARY:
            raise ValueError(
                f"drafter.name={name} has a vocabulary of {shape.vocab:,} tokens and target.name={target_name} one of "
                f"{target.vocab:,}: give a drafter of the same vocabulary, or drafter=tli or slem"
            )
        dtype = str(options.get("dtype") or "auto")
        own_formats = choose_formats(
            given,
            dtype=formats.computes if dtype == "auto" else dtype,
            quantization=options.get("quantization"),
            kv_cache=kv_cache,
        )
        title = f"{name}, a model of {short_count(shape.weights)} parameters"
        parallel = owner == "PARDDrafter"
        own_model = DraftModel(shape=shape, precision=own_formats.precision, at_once=parallel, catches_up=parallel)
        return Planned(title=title + ", which fills masks" * parallel, model=own_model)
    if owner == "SelfDrafter" and options.get("skip") is None:
        scheme = options.get("quantization")
        own_formats = choose_formats({}, dtype=formats.computes, quantization=scheme, kv_cache=kv_cache)
        copied = replace(target, table_weights=0, tied=False)  # tables are the target's own
        return Planned(title=f"the target in {scheme}", model=DraftModel(shape=copied, precision=own_formats.precision))
    precision = Precision.of(formats.computes, kv=kv_cache)
    borrowed = replace(precision, output=formats.precision.output)
    found = None if name is None else _own_config(str(name))
    if found is not None and str(name).startswith(bundled.PREFIX) and found.get("hidden_size") != target.hidden:
        found = None  # the default of the option, which was trained for the bundled target
    if found is not None and found.get("hidden_size", target.hidden) != target.hidden:
        raise ValueError(
            f"drafter.name={name} is a head for hidden states of {found['hidden_size']} numbers, and "
            f"target.name={target_name} has {target.hidden}: give a head of this target"
        )
    source = f"sizes from {name}" if found is not None else "with the sizes that such heads usually have"
    own = found or {}
    layer = None if found is None or "num_attention_heads" not in own else _layer_of(own, str(name))
    if owner == "EagleDrafter":
        first = str((own.get("architectures") or [""])[0]).lower()
        if found is not None and "eagle3" not in first and "draft_vocab_size" not in own:
            return Planned(title=f"EAGLE head, {source}", model=_of(heads.eagle(target, layer=layer), borrowed))
        shape = heads.eagle3(target, layer=layer, draft_vocab=own.get("draft_vocab_size"))
        return Planned(title=f"EAGLE-3 head, {source}", model=_of(shape, precision))
    if owner == "PEagleDrafter":
        count = int((own.get("transformer_layer_config") or own).get("num_hidden_layers") or _PEAGLE_LAYERS)
        shape = heads.eagle3(target, layers=count, layer=layer, draft_vocab=own.get("draft_vocab_size"))
        model = DraftModel(shape=shape, precision=precision, at_once=True, catches_up=True)
        return Planned(title=f"P-EAGLE head of {count} layers, {source}", model=model)
    if owner == "MTPDrafter":
        return Planned(title="MTP module, a layer like the target's last", model=_of(heads.mtp(target), borrowed))
    if owner == "BlockDrafter":
        count, captured = int(own.get("num_hidden_layers") or 5), own.get("hidden_layers")
        shape = heads.block(
            target,
            layers=count,
            layer=layer,
            hidden_layers=len(captured) if isinstance(captured, list) else None,
            **{key: int(own.get(key) or 0) for key in ("markov_rank", "selector_rank")},
            gru=(int(own.get("gru_hidden_dim") or 0), int(own.get("emb_dim") or 0)),
            refiner=(int(own.get("xpress_rank") or 0), int(own.get("xpress_mlp_ratio") or 0)),
            convolution=(int(own.get("conv_kernel_size") or 0), int(own.get("conv_group_size") or 1)),
        )
        places = int(options.get("block_size") or own.get("block_size") or _PLACES)
        longest = places if own.get("shifted") else places - 1  # the first place holds the root
        model = DraftModel(shape=shape, precision=borrowed, at_once=True)
        title = f"block drafter of {count} layers, {source}"
        return Planned(title=title, model=model, longest=longest, shown=places - 1)
    if owner == "MedusaDrafter":
        count = int(own.get("medusa_num_heads") or 4)
        shape = heads.medusa(target, heads=count, layers=int(own.get("medusa_num_layers") or 1))
        model = DraftModel(shape=shape, precision=precision, at_once=True)
        return Planned(title=f"{count} Medusa heads, {source}", model=model, longest=count)
    raise ValueError(
        f"drafter._target_={options['_target_']}: a plan knows model, pard, eagle, peagle, mtp, block, medusa, and "
        f"look-ups such as ngram, not what this one costs"
    )


def drafter_class(options: Mapping[str, Any]) -> str | None:
    """Return the name of the class that a section ``drafter`` makes; None without a drafter."""
    kind = options.get("_target_")
    return None if kind is None else str(kind).removesuffix(".from_pretrained").rpartition(".")[2]


def _of(shape: ModelShape, precision: Precision) -> DraftModel:
    return DraftModel(shape=shape, precision=precision)


def _layer_of(own: Mapping[str, Any], name: str) -> Any:
    config = {"tie_word_embeddings": False, "vocab_size": 1, **own}
    # A head's configuration may name a type of its own; its layers are the usual ones.
    return shape_of({**config, "model_type": config.get("layer_kind") or "llama"}, f"drafter.name={name}").layers[0]


def _own_config(name: str) -> dict[str, Any] | None:
    """Return a head's configuration if it is on this machine; None if it is not, which is no error."""
    if Path(bundled.resolve(name)).exists():
        return read_config(name)
    try:
        found = downloaded(name)
    except ValueError:
        return None
    return None if found is None else read_config(str(found))


def short_count(count: float) -> str:
    """Return a number of parameters in words: ``"8.03 billion"``."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"
