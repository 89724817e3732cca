"""What a drafter of the configuration costs: the shape of what it runs, from its files or from its target's."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.planning.sources import Formats, choose_formats, downloaded, read_config, shape_of, stored_sizes
from specdec import bundled
from specdec.physics import heads
from specdec.physics.capacity import Drafting
from specdec.physics.precision import Precision
from specdec.physics.rounds import DraftModel
from specdec.physics.shape import Attention, Layer, Mlp, ModelShape

PARTS = ("lookup", "model", "helper")
"""The sections of drafters in that of one that is made of several."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A drafter as far as a plan needs it.

    ``model`` is what runs (None: a look-up), ``weights`` bytes that nobody else has (None: all of its), ``helpers`` are
    drafters of which only the memory counts; ``keeps``: it has keys and values; ``longest``: draft, None: any.
    """

    title: str
    model: DraftModel | None = None
    weights: float | None = None
    helpers: "tuple[Planned, ...]" = ()
    keeps: bool = True
    longest: int | None = None

    def memory_of(self, shown: int) -> tuple[Drafting, ...]:
        """It and its helpers, as far as they run a model, with ``shown`` positions for nodes in their caches."""
        found = []
        for part in (self, *self.helpers):
            if part.model is not None:
                shape = part.model.shape if part.keeps else replace(part.model.shape, layers=())
                found.append(Drafting(shape=shape, precision=part.model.precision, shown=shown, weights=part.weights))
        return tuple(found)


def plan_drafter(
    options: Mapping[str, Any], target: ModelShape, formats: Formats, *, beside: Mapping[str, Any] | None = None
) -> Planned | None:
    """What a drafter costs; None without one.

    A drafter says what it runs (``Drafter.runs``); one with parts runs these. A head's sizes are read from its files if
    they are on this machine. Otherwise they are those that such heads usually have for this target, if that is known.

    Args:
        options: The section ``drafter`` of the configuration.
        formats: The target's. A head computes in the same type, and may use its output layer; it is not quantized.
        beside: The section ``target``, to compare vocabularies with; None if they were.

    Raises ValueError: nothing is known about what such a drafter costs, or it is of another vocabulary.
    """
    owner = drafter_class(options)
    if owner is None:
        return None
    parts = [options[part] for part in PARTS if isinstance(options.get(part), Mapping)]
    if parts:
        found = [plan_drafter(each, target, formats, beside=beside) for each in parts]
        # The time is that of the first one that runs a model.
        first, *others = sorted((part for part in found if part is not None), key=lambda part: part.model is None)
        helpers = [each for other in others for each in (other, *other.helpers)]
        title = " and ".join(part.title for part in found if part is not None)
        return replace(first, title=title, helpers=(*first.helpers, *helpers))
    usual = _usual_sizes(options)
    if usual is not None:
        return _head(owner, options, usual, target, formats, at_once=bool(usual.get("at_once")))
    try:
        kind: Any = getattr(import_module(_class(options)[0]), owner)  # which imports PyTorch
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"drafter._target_={options['_target_']} cannot be imported: {error}") from error
    runs, at_once = getattr(kind, "runs", None), bool(getattr(kind, "at_once", False))
    if runs == "nothing":
        return Planned(title=f"{owner}, which looks drafts up: its time is not counted")
    if runs == "head":
        return _head(owner, options, getattr(kind, "usual", None), target, formats, at_once=at_once)
    if runs == "model":
        beside = beside if getattr(kind, "same_vocabulary", False) else None
        return _model(options, target, formats, beside, at_once=at_once)
    if runs == "target":
        return _target(options, target, formats, at_once=at_once)
    raise ValueError(f"drafter._target_={options['_target_']} does not say what it runs (Drafter.runs): unknown cost")


def _model(options: Any, target: ModelShape, formats: Formats, beside: Any, *, at_once: bool) -> Planned:
    """The plan of a model of its own, whose vocabulary has to be that of the target ``beside`` it."""
    name, scheme = str(options.get("name")), options.get("quantization")  # "auto" is as loaded, until it is measured
    config, dtype = read_config(name, options.get("gguf_file")), str(options.get("dtype") or "auto")
    more = {"quantization": None if scheme == "auto" else scheme, "kv_cache": options.get("kv_cache")}
    found = choose_formats(config, dtype=formats.computes if dtype == "auto" else dtype, **more)
    shape = shape_of(config, f"drafter.name={name}")
    title = f"{name}, a model of {short_count(shape.weights)} parameters, {found.words}" + ", fills masks" * at_once
    if beside is not None:
        from specdec.drafting.vocabulary import shared_tokens  # imports PyTorch, as its class has

        own, other = vocabulary_of(options, shape.vocab), vocabulary_of(beside, target.vocab)
        ids = shared_tokens(name, own.tokenizer, shape.vocab, other)
        compared = "vocabulary" if own.tokenizer and other.tokenizer else "width of vocabulary"
        title += f", with the target's {compared}" + ("" if ids is None else f" in {len(ids):,} tokens")
    model = DraftModel(shape=shape.reduced(options.get("vocabulary")), precision=found.precision, at_once=at_once)
    return Planned(title=title, model=replace(model, catches_up=at_once))


def vocabulary_of(options: Mapping[str, Any], size: int | None = None) -> Any:
    """A model's name, tokenizer and number of tokens; if files don't say, the ``size`` alone; without it None."""
    from specdec.target.loading import find_tokenizer, load_config  # imports PyTorch

    name: Any = options.get("name")
    try:
        tokens = load_config(name, **options).get_text_config(decoder=True).vocab_size
        tokenizer = find_tokenizer(options.get("tokenizer") or name, **options)
    except (OSError, ValueError, TypeError, AttributeError):
        return None if size is None else SimpleNamespace(name=name, tokenizer=None, vocab_size=size)
    return SimpleNamespace(name=name, tokenizer=tokenizer, vocab_size=tokens)


def _target(options: Mapping[str, Any], target: ModelShape, formats: Formats, *, at_once: bool) -> Planned:
    """The plan of the target itself, with fewer layers, in another format, or with parameters of its own."""
    scheme, kv_cache = options.get("quantization"), options.get("kv_cache")
    precision = choose_formats({}, dtype=formats.computes, quantization=scheme, kv_cache=kv_cache).precision
    kept, exits = _kept(target.layers, options.get("skip"))
    shape = replace(target, layers=kept, table_weights=0, tied=False).reduced(options.get("vocabulary"))
    files = options.get("adapter", options.get("name"))
    adapter = 0 if files is None else sum(stored_sizes(str(files)).values())
    own = shape.output_weights * precision.output if options.get("vocabulary") else 0  # the target's tables serve both
    title = f"the target in {scheme}" if scheme else "the target" + " without some parts" * (kept != target.layers)
    return Planned(
        title=title + f" with {short_count(adapter)} parameters of its own" * (adapter > 0),
        model=DraftModel(shape=shape, precision=precision, at_once=at_once, catches_up=at_once),
        weights=None if scheme else adapter * precision.activations + own,
        keeps=not exits or scheme is not None or kv_cache is not None,
    )


# ---------------------------------------------------------------- heads

USUAL: Mapping[str, tuple[str, int | None, bool]] = {
    "block": ("block drafter of 5 layers", 15, True),
    "eagle": ("EAGLE-3 head", None, False),
    "medusa": ("4 Medusa heads", 4, True),
    "mtp": ("MTP module, a layer like the target's last", None, False),
}
"""By the families of usual heads (``Drafter.usual``, functions of ``heads``): their title, how many tokens they draft,
and whether one forward drafts all."""


def _head(
    owner: str, options: Mapping[str, Any], usual: Mapping[str, Any] | None, target: ModelShape, formats: Formats, *,
    at_once: bool,
) -> Planned:  # fmt: skip
    """The plan of a head: by its files, else by the usual sizes."""
    name, precision = options.get("name"), Precision.of(formats.computes, kv=options.get("kv_cache"))
    config = None if name is None else _config_of(str(name))
    width = None if config is None else config.get("backbone_hidden_size") or config.get("hidden_size")
    if usual is not None and width not in (None, target.hidden) and str(name).startswith(bundled.PREFIX):
        config = width = None  # the default of the option, which was trained for the bundled target
    if width not in (None, target.hidden):
        raise ValueError(
            f"drafter.name={name} is a head for hidden states of {width} numbers, and target.name has "
            f"{target.hidden}: give a head of this target"
        )
    title, longest, together = USUAL[usual["family"]] if usual else ("", None, False)
    masks = at_once and usual is not None  # what became final is read in as many places again (P-EAGLE)
    if usual is None or config is not None:
        told = (config or {}) | ({"block_size": options["block_size"]} if options.get("block_size") else {})
        own = usual is not None and usual["family"] == "medusa"
        shape, longest = _from_files(owner, str(name), told, target, owns_output=own)
        title = f"{owner} of {short_count(shape.weights)} parameters, sizes from {name}"
    else:
        layers = {"layers": usual["layers"]} if "layers" in usual else {}
        shape = getattr(heads, usual["family"])(target, **layers)
        title = f"{usual.get('title', title)}, with the sizes that such heads usually have"
    if shape.borrowed:
        precision = replace(precision, output=formats.precision.output)
    shape = shape.reduced(options.get("vocabulary"))
    model = DraftModel(shape=shape, precision=precision, at_once=at_once or together, catches_up=masks)
    return Planned(title=title, model=model, longest=longest)


def _from_files(
    owner: str, name: str, config: Mapping[str, Any], target: ModelShape, *, owns_output: bool
) -> tuple[ModelShape, int | None]:
    """The shape of a head by its files: every number in them, and keys and values of every projection of keys.

    Without an output layer of its own it reads the target's. The second result is how many tokens it can draft.
    """
    sizes, keys = stored_sizes(name), stored_sizes(name, r"(?:k_proj|key_proj)\.weight", axis=0)
    tables = sum(size for tensor, size in sizes.items() if tensor.endswith("embed_tokens.weight"))
    borrowed = not owns_output and not any("lm_head" in tensor for tensor in sizes)
    keeping = partial(Attention.grouped, weights=0, heads=1, kv_heads=1)
    shape = ModelShape(
        kind=owner,
        hidden=target.hidden,
        vocab=min(config.get("draft_vocab_size") or target.vocab, target.vocab),
        layers=tuple(Layer(attention=keeping(head_dim=width)) for width in keys.values()),
        table_weights=tables,
        output_weights=target.output_weights if borrowed else 0,
        tied=True,
        borrowed=borrowed,
        other_weights=sum(sizes.values()) - tables,
        max_length=target.max_length,
    )
    places = config.get("tokens") or next((n for key, n in config.items() if key.endswith("_num_heads")), None)
    if config.get("block_size"):
        places = config["block_size"] - (not config.get("shifted"))  # the first place holds the root
    return shape, places


def _usual_sizes(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``Drafter.usual`` of a class as its source says, for importing it imports PyTorch; None if it is none."""
    module, owner = _class(options)
    source = None
    with suppress(ImportError, ValueError):  # whoever imports it says so
        source = getattr(find_spec(module), "origin", None)
    nodes = ast.walk(ast.parse(Path(source).read_text(encoding="utf-8"))) if source else ()
    owners = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner]
    for line in owners[0].body if owners else ():
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "usual" and line.value:
            return ast.literal_eval(line.value)
    return None


def drafter_class(options: Mapping[str, Any]) -> str | None:
    """The name of the class that a section ``drafter`` makes; None without a drafter."""
    return None if options.get("_target_") is None else _class(options)[1]


def _class(options: Mapping[str, Any]) -> tuple[str, str]:
    """The module and the name of a drafter's class."""
    module, _, name = str(options["_target_"]).removesuffix(".from_pretrained").rpartition(".")
    return module, name


def _kept(layers: tuple[Layer, ...], skip: Any) -> tuple[tuple[Layer, ...], bool]:
    """The layers that stay where some of them, or of their parts, are left out (``drafters.itself``).

    Of a search that has yet to be made all of them. The second result is whether these are the first ones as they are.
    """
    if isinstance(skip, str):
        skip = json.loads(Path(skip).expanduser().read_text(encoding="utf-8"))["skip"] if Path(skip).is_file() else None
    left = list(layers)
    for entry in map(str, skip or ()):
        number, _, part = entry.partition(".")
        first, to, last = number.partition("-")
        for index in range(int(first), int(last or (len(layers) - 1 if to else first)) + 1):
            if part and re.search("att|mixer|mamba", part):
                left[index] = replace(left[index], attention=None, indexer=None, recurrence=None)
            else:
                left[index] = replace(left[index], mlp=Mlp(weights=0)) if part else Layer()
    stay = tuple(layer for layer in left if layer != Layer())
    return stay, len(stay) < len(layers) and stay == layers[: len(stay)]


def _config_of(name: str) -> dict[str, Any] | None:
    """Return a head's configuration and our notes if it is on this machine; None if it is not, which is no error."""
    if (place := Path(bundled.resolve(name))).exists():
        notes = place / "specdec.json"
        return (json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}) | read_config(name)
    with suppress(ValueError):
        return None if (found := downloaded(name)) is None else read_config(str(found))


def short_count(count: float) -> str:
    """Return a number of parameters in words: ``"8.03 billion"``."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,.0f}"
