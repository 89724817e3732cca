"""What a drafter of the configuration costs: the shape of what it runs, from its files or from its target's."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.planning.formats import Formats, choose_formats
from experiments.planning.sources import downloaded, read_config, shape_of, stored_sizes
from specdec import bundled
from specdec.physics import heads
from specdec.physics.capacity import Drafting
from specdec.physics.precision import Precision
from specdec.physics.rounds import DraftModel
from specdec.physics.shape import Attention, Layer, Mlp, ModelShape

PARTS = ("lookup", "model", "helper")
"""The sections of drafters in that of one that is made of several."""
_OTHER_VOCABULARY = ("TLIDrafter", "SLEMDrafter")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A drafter as far as a plan needs it.

    Attributes:
        model: What runs when it drafts; None for a look-up, whose time is not counted.
        weights: Bytes of weights that nobody else has; None for all of the model's.
        helpers: Further drafters, whose memory counts, and whose time is not counted.
        keeps: Whether it has keys and values of its own.
        longest: How many tokens it can draft; None if there is no limit.
        shown: Positions that its own cache has for nodes, where its files say so.
    """

    title: str
    model: DraftModel | None = None
    weights: float | None = None
    helpers: "tuple[Planned, ...]" = ()
    keeps: bool = True
    longest: int | None = None
    shown: int | None = None

    def memory_of(self, shown: int) -> tuple[Drafting, ...]:
        """Return it and its helpers, as far as they run a model; ``shown`` counts where their files do not say it."""
        found = []
        for part in (self, *self.helpers):
            if part.model is not None:
                shape = part.model.shape if part.keeps else replace(part.model.shape, layers=())
                places = shown if part.shown is None else part.shown
                found.append(Drafting(shape=shape, precision=part.model.precision, shown=places, weights=part.weights))
        return tuple(found)


def plan_drafter(
    options: Mapping[str, Any], target: ModelShape, formats: Formats, *, target_name: str
) -> Planned | None:
    """Return what a drafter costs; None without one.

    A drafter says what it runs (``Drafter.runs``); one with parts runs these. A head's sizes are read from its files if
    they are on this machine. Otherwise they are those that such heads usually have for this target, if that is known.

    Args:
        options: The section ``drafter`` of the configuration.
        formats: The target's. A head computes in the same type, and may use its output layer; it is not quantized.
        target_name: Name of the target, whose files may hold an MTP module.

    Raises:
        ValueError: Nothing is known about what such a drafter costs.
    """
    owner = drafter_class(options)
    if owner is None:
        return None
    parts = [options[part] for part in PARTS if isinstance(options.get(part), Mapping)]
    if parts:
        return _several([plan_drafter(each, target, formats, target_name=target_name) for each in parts])
    name, kv_cache = options.get("name"), options.get("kv_cache")
    if kv_cache is not None:
        from specdec.cache.formats import check_format  # which imports PyTorch

        check_format(kv_cache)
    usual = _usual_sizes(options)
    kind: Any = None if usual else class_of(options)  # which imports PyTorch
    usual = usual or getattr(kind, "usual", None)
    runs, at_once = getattr(kind, "runs", None), bool(getattr(kind, "at_once", False))
    if runs == "nothing":
        return Planned(title=f"{owner}, which looks drafts up: its time is not counted")
    if runs == "model":
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
        own_model = DraftModel(shape=shape, precision=own_formats.precision, at_once=at_once, catches_up=at_once)
        return Planned(title=title + ", which fills masks" * at_once, model=own_model)
    if runs == "target":
        scheme, skip = options.get("quantization"), options.get("skip")
        precision = choose_formats({}, dtype=formats.computes, quantization=scheme, kv_cache=kv_cache).precision
        kept, exits = _kept(target.layers, skip)
        shape = replace(target, layers=kept, table_weights=0, tied=False)  # the target's tables serve both
        files = options.get("adapter", name)
        adapter = 0 if files is None else sum(stored_sizes(str(files)).values())
        title = f"the target in {scheme}" if scheme else "the target" + " without some parts" * (skip is not None)
        return Planned(
            title=title + f" with {short_count(adapter)} parameters of its own" * (adapter > 0),
            model=DraftModel(shape=shape, precision=precision, at_once=at_once, catches_up=at_once),
            weights=None if scheme else adapter * precision.activations,
            keeps=not exits or scheme is not None or kv_cache is not None,
        )
    precision = Precision.of(formats.computes, kv=kv_cache)
    if usual is None and runs != "head":
        raise ValueError(
            f"drafter._target_={options['_target_']}: it does not say what it runs (Drafter.runs), so that its cost "
            f"cannot be told"
        )
    found = None if name is None else _own_config(str(name))
    width = target.hidden if found is None else found.get("backbone_hidden_size") or found.get("hidden_size")
    if usual is not None and width not in (None, target.hidden) and str(name).startswith(bundled.PREFIX):
        found = width = None  # the default of the option, which was trained for the bundled target
    if width not in (None, target.hidden):
        raise ValueError(
            f"drafter.name={name} is a head for hidden states of {width} numbers, and target.name={target_name} has "
            f"{target.hidden}: give a head of this target"
        )
    own = found or {}
    if usual is None:
        return _from_files(owner, str(name), own, target, precision, at_once=at_once)
    given = {**own, "block_size": options.get("block_size") or own.get("block_size")}
    more = {key: value for key, value in usual.items() if key != "family"}
    head = FAMILIES[usual["family"]](
        given, target, _layer_of(own, str(name)) if "num_attention_heads" in own else None, **more
    )
    shape = head.shape
    if found is not None:  # it may have embeddings of its own
        tables = sum(stored_sizes(str(name), r"embed_tokens\.weight", least=0).values())
        shape = replace(shape, table_weights=shape.table_weights + tables)
    if shape.borrowed:
        precision = replace(precision, output=formats.precision.output)
    source = f"sizes from {name}" if found is not None else "with the sizes that such heads usually have"
    model = DraftModel(shape=shape, precision=precision, at_once=head.at_once, catches_up=head.catches_up)
    return Planned(title=f"{head.title}, {source}", model=model, longest=head.longest, shown=head.shown)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head by its sizes; attributes as in ``Planned`` and ``DraftModel``."""

    title: str
    shape: ModelShape
    longest: int | None = None
    shown: int | None = None
    at_once: bool = False
    catches_up: bool = False


Own = Mapping[str, Any]
"""What the files of a head say; empty where they are not here."""


def _eagle(
    own: Own, target: ModelShape, layer: Layer | None, *, title: str = "", layers: int = 1, at_once: bool = False
) -> Head:
    first = str((own.get("architectures") or [""])[0]).lower()
    if first and "eagle3" not in first and "draft_vocab_size" not in own and not title:
        return Head(title="EAGLE head", shape=heads.eagle(target, layer=layer))
    if layers > 1:  # else what files say of it is often the target's number
        layers = int((own.get("transformer_layer_config") or own).get("num_hidden_layers") or layers)
        title = f"{title} of {layers} layers"
    shape = heads.eagle3(target, layers=layers, layer=layer, draft_vocab=own.get("draft_vocab_size"))
    longest = own.get("tokens") if at_once else None
    return Head(title=title or "EAGLE-3 head", shape=shape, longest=longest, at_once=at_once, catches_up=at_once)


def _block(own: Own, target: ModelShape, layer: Layer | None) -> Head:
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
    places = int(own.get("block_size") or 16)
    longest = places if own.get("shifted") else places - 1  # the first place holds the root
    return Head(title=f"block drafter of {count} layers", shape=shape, longest=longest, shown=places - 1, at_once=True)


def _medusa(own: Own, target: ModelShape, layer: Layer | None) -> Head:
    count = int(own.get("medusa_num_heads") or 4)
    shape = heads.medusa(target, heads=count, layers=int(own.get("medusa_num_layers") or 1))
    return Head(title=f"{count} Medusa heads", shape=shape, longest=count, at_once=True)


def _mtp(own: Own, target: ModelShape, layer: Layer | None) -> Head:
    return Head(title="MTP module, a layer like the target's last", shape=heads.mtp(target))


FAMILIES: Mapping[str, Callable[..., Head]] = {"block": _block, "eagle": _eagle, "medusa": _medusa, "mtp": _mtp}
"""Shapes of heads by their usual sizes (``Drafter.usual``), for which no files are needed; those of others are."""


def _usual_sizes(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``Drafter.usual`` of a class as its source says, for importing it imports PyTorch; None if it is none."""
    module, _, owner = str(options["_target_"]).removesuffix(".from_pretrained").rpartition(".")
    try:
        source = getattr(find_spec(module), "origin", None)
    except (ImportError, ValueError):
        return None  # whoever imports it says so
    for node in ast.walk(ast.parse(Path(source).read_text(encoding="utf-8"))) if source else ():
        if isinstance(node, ast.ClassDef) and node.name == owner:
            said = [
                each for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "usual"
            ]
            return ast.literal_eval(said[0].value) if said and said[0].value else None
    return None


def drafter_class(options: Mapping[str, Any]) -> str | None:
    """Return the name of the class that a section ``drafter`` makes; None without a drafter."""
    kind = options.get("_target_")
    return None if kind is None else str(kind).removesuffix(".from_pretrained").rpartition(".")[2]


def class_of(options: Mapping[str, Any]) -> Any:
    """Return the class that a section ``drafter`` makes, imported. Raises ValueError: there is none."""
    module, _, name = str(options["_target_"]).removesuffix(".from_pretrained").rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"drafter._target_={options['_target_']} cannot be imported: {error}") from error


def _several(parts: Sequence[Planned | None]) -> Planned:
    """Return the plan of a drafter with parts: the time is that of the first one that runs a model."""
    found = [part for part in parts if part is not None]
    first, *helpers = sorted(found, key=lambda part: part.model is None)
    further = [each for helper in helpers for each in (helper, *helper.helpers)]
    return replace(first, title=" and ".join(part.title for part in found), helpers=(*first.helpers, *further))


def _kept(layers: tuple[Layer, ...], skip: Any) -> tuple[tuple[Layer, ...], bool]:
    """Return the layers that stay where some of them, or of their parts, are left out (``drafters.layers``).

    Of a search that has yet to be made all of them. The second result is whether these are the first ones as they are.
    """
    if isinstance(skip, str):
        skip = json.loads(Path(skip).expanduser().read_text(encoding="utf-8"))["skip"] if Path(skip).is_file() else None
    found: list[Layer | None] = list(layers)
    for entry in map(str, skip or ()):
        number, _, part = entry.partition(".")
        first, to, last = number.partition("-")
        end = len(layers) - 1 if to and not last else int(last or first)
        for index in range(int(first), min(end, len(layers) - 1) + 1):
            layer = found[index]
            if layer is None or not part:
                found[index] = None
            elif re.search("att|mixer|mamba", part):
                found[index] = replace(layer, attention=None, indexer=None, recurrence=None)
            else:
                found[index] = replace(layer, mlp=Mlp(weights=0))
    stay = [index for index, layer in enumerate(found) if layer is not None and layer != Layer()]
    exits = len(stay) < len(layers) and all(found[index] is layers[index] for index in range(len(stay)))
    return tuple(layer for layer in found if layer is not None and layer != Layer()), exits


def _from_files(
    owner: str, name: str, own: Mapping[str, Any], target: ModelShape, precision: Precision, *, at_once: bool
) -> Planned:
    """Return the plan of any head: every number in its files, and keys and values of every projection of keys."""
    sizes, keys = stored_sizes(name), stored_sizes(name, r"(?:k_proj|key_proj)\.weight", axis=0)
    layers = tuple(
        Layer(attention=Attention.grouped(weights=0, heads=1, kv_heads=1, head_dim=width)) for width in keys.values()
    )
    shape = ModelShape(
        kind=owner, hidden=target.hidden, vocab=target.vocab, layers=layers, table_weights=0, output_weights=0,
        tied=True, borrowed=True, other_weights=sum(sizes.values()), max_length=target.max_length,
    )  # fmt: skip
    count = next((int(value) for key, value in own.items() if key.endswith("_num_heads")), None)
    title = f"{owner} of {short_count(shape.weights)} parameters, sizes from {name}"
    return Planned(title=title, model=DraftModel(shape=shape, precision=precision, at_once=at_once), longest=count)


def _layer_of(own: Mapping[str, Any], name: str) -> Any:
    config = {"tie_word_embeddings": False, "vocab_size": 1, **own}
    # A head's configuration may name a type of its own; its layers are the usual ones.
    return shape_of({**config, "model_type": config.get("layer_kind") or "llama"}, f"drafter.name={name}").layers[0]


def _own_config(name: str) -> dict[str, Any] | None:
    """Return a head's configuration and our notes if it is on this machine; None if it is not, which is no error."""
    if (place := Path(bundled.resolve(name))).exists():
        notes = place / "specdec.json"
        return (json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}) | read_config(name)
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
