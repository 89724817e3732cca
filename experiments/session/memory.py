"""The memory of a run from its configuration: planned, printed and checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import AutoConfig, PreTrainedConfig

from drafters.heads.eagle_files import TOKENS
from drafters.heads.last_state import DEFAULT_SHAPE
from experiments.config.job import in_sweep
from experiments.config.sections import build, plain
from experiments.planning.drafting import PARTS, class_of, drafter_class, plan_drafter
from experiments.planning.formats import Formats, choose_formats, inflated
from experiments.planning.memory import RunMemory
from experiments.planning.sources import shape_of
from experiments.reporting import terminal
from experiments.reporting.device import memory_table
from experiments.results.manifest import device_name
from experiments.session.methods import methods_of
from specdec import bundled
from specdec.cache.pages import Paging
from specdec.drafting.builders import ExpansionTree, StaticTree, TreeBuilder, tree_of
from specdec.engine.engine import DEFAULT_MAX_LENGTH
from specdec.engine.recording import as_on_gpu, records_rounds
from specdec.execution.packing import can_pack
from specdec.machine import choose_dtype, dtype_name
from specdec.memory import free_memory
from specdec.native import native_library
from specdec.physics.capacity import Served
from specdec.physics.precision import Precision
from specdec.physics.reading import COUNTED
from specdec.physics.shape import ModelShape
from specdec.quantization.checkpoint import stored_scheme
from specdec.target.loading import hub_options, resolve_device, resolve_dtype

_SHARE = 0.5
"""The share of the free memory that copies of the weights may take (``specdec.execution.packing``)."""


def plan_memory(config: DictConfig, methods: Mapping[str, str | None]) -> RunMemory | str:
    """Returns what a run will take; a sentence that says why not if that cannot be told."""
    options = plain(config, "target")
    for setting in ("device_map", "tensor_parallel"):
        if options.get(setting):
            return f"memory is not planned with target.{setting}: the model is on several devices"
    if not str(options.get("_target_")).endswith("Target.from_pretrained"):
        return f"memory is not planned for target._target_={options.get('_target_')}"
    try:
        return _planned(config, methods)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        # Loading says what is wrong, if anything is: a plan is no reason to refuse what it does not understand.
        return f"memory is not planned: {' '.join(str(error).split())}"


def show_planned(planned: RunMemory | str, *, shown: bool = True) -> None:
    """Print what a run will take, if that is to be shown, and refuse it if there is no room."""
    if isinstance(planned, str):
        return
    planned.check()
    if shown and not in_sweep():
        terminal.show(terminal.console(), memory_table(planned))


def _planned(config: DictConfig, methods: Mapping[str, str | None]) -> RunMemory:
    served: dict[str, Served] = {}
    copies: dict[object, float] = {}
    unknown, weights_of, own_rows, padded = [], {}, {}, set[str]()
    engine, shared = plain(config, "engine"), _Here.of(config)
    plainly, *others = methods_of(config, methods)
    for each in others if plainly.setup == others[0].setup else [*others, plainly]:
        name = each.name
        here = _Here.of(each.config) if each.is_set_up else shared
        rows = each.config.engine.max_batch_size
        weights_of[name] = each.target
        own_rows |= {name: rows} if rows != engine["max_batch_size"] else {}
        padded |= {name} if _pads(each.config.engine, here.device) else set()
        served[name], known = here.served(each.config, each.drafter)
        unknown += [] if known else [name]
        if each.config.engine.optimize:
            copies[each.target] = here.copies(here.shape, here.formats.precision)
            # Weights that are the target's have its copies.
            parts = [each for each in served[name].drafting if each.weights is None]
            copies[name] = sum(here.copies(each.shape, each.precision) for each in parts)
    limit = min(shared.shape.max_length or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    memory = RunMemory(
        target=shared.name,
        methods=served,
        rows=engine["max_batch_size"],
        length=engine["max_length"] or limit,
        free=shared.free,
        place=f"{shared.device} ({device_name(shared.device)})",
        copies=sum(copies.values()),
        unknown=tuple(unknown),
        is_sure=shared.shape.kind in COUNTED,
        weights_of=weights_of,
        own_rows=own_rows,
        padded=frozenset(padded),
    )
    if memory.planned.total <= memory.free:
        return memory
    # Where not every node can have states of recurrent layers, accepted tokens go through these again.
    return replace(memory, methods={name: replace(each, again=True) for name, each in served.items()})


def _pads(engine: DictConfig, device: torch.device) -> bool:
    """Returns whether an engine's rounds are padded with rows whose slots take memory, as rows of pages do not."""
    paged = engine.cache is not None and engine.cache.get("page_size") is not None
    recorded = engine.optimize and records_rounds(engine.recording, device.type, invariant=engine.invariant)
    return recorded and as_on_gpu(engine.recording, device.type) and not paged


@dataclass(frozen=True, kw_only=True)
class _Here:
    """A target as it will be on this machine.

    Attributes:
        half: Whether float32 weights are numbers that 16 bits hold, which are then copied in 16 bits.
    """

    name: str
    device: torch.device
    free: int
    shape: ModelShape
    formats: Formats
    half: bool

    @classmethod
    def of(cls, config: DictConfig) -> "_Here":
        """Returns the target of a configuration."""
        options = plain(config, "target")
        name, device = str(options["name"]), resolve_device(options["device"])
        stored: PreTrainedConfig = AutoConfig.from_pretrained(bundled.resolve(name), **hub_options(options))
        given = inflated(stored.to_dict(), options.get("inflate"))
        scheme = stored_scheme(stored)
        formats = choose_formats(
            {key: value for key, value in given.items() if key != "quantization_config" or scheme is None},
            dtype=_dtype(options["dtype"], stored, device),
            quantization=options.get("quantization") or scheme,
            kv_cache=plain(config, "engine")["kv_cache"],
        )
        sixteen = str(getattr(stored, "dtype", None) or "").endswith("float16")
        return cls(
            name=name,
            device=device,
            free=free_memory(device),
            shape=shape_of(given, name),
            formats=formats,
            half=sixteen and options.get("inflate") is None and native_library() is not None,
        )

    def served(self, config: DictConfig, section: str | None) -> tuple[Served, bool]:
        """Returns what a method's engine serves, and whether its drafter is known.

        Args:
            section: That of its drafter; None for plain decoding.
        """
        drafter = {} if section is None else plain(config, section)
        planned, known = None, True
        try:
            planned = plan_drafter(drafter, self.shape, self.formats, target_name=self.name)
        except ValueError:
            known = False
        longest = (planned.longest if planned is not None else None) or 0
        nodes, shown = (0, []) if section is None else _nodes(config, section, drafter, longest or None)
        models = () if planned is None else planned.memory_of(shown)
        cache = plain(config, "engine")["cache"] or {}
        served = Served(
            shape=self.shape,
            precision=self.formats.precision,
            drafting=models,
            drafted=nodes if nodes >= 0 else longest,
            states=cache.get("states", Paging.states) if cache.get("shared") else 0,
            prefill_chunk=plain(config, "engine")["prefill_chunk"],
        )
        return served, known

    def copies(self, shape: ModelShape | None, precision: Precision | None) -> float:
        """Returns the bytes of a model's copies in the layout of the processor's products; 0 where none are made."""
        dtype = getattr(torch, self.formats.computes)
        if shape is None or precision is None or self.device.type != "cpu" or dtype is torch.float16:
            return 0.0
        output = 0 if shape.borrowed else shape.output_weights
        weights = shape.layer_weights - shape.expert_weights + shape.other_weights + output
        stored = weights * precision.weights
        packed = precision.weights == precision.tables and can_pack(torch.empty(1, dtype=dtype))
        if not packed or stored > _SHARE * self.free:
            return 0.0
        return 2.0 * weights if self.half else stored


def _nodes(config: DictConfig, section: str, options: Mapping[str, Any], heads: int | None) -> tuple[int, list[int]]:
    """Returns how many nodes a drafter may draft, and the positions for nodes of every cache of its models.

    The first is below 0 where that follows from a head's files.

    Args:
        heads: How many tokens the files of its head can draft, as far as they say.
    """
    owner = drafter_class(options)
    if owner is None:
        return 0, []
    kind = class_of(options)

    def places(tree: TreeBuilder) -> list[int]:
        return [] if kind.runs == "nothing" else [kind.shown(tree) if hasattr(kind, "shown") else 0]

    parts = [f"{section}.{part}" for part in PARTS if isinstance(options.get(part), Mapping)]
    if parts:
        found = [_nodes(config, part, plain(config, part), heads) for part in parts]
        shown = [places for _, own in found for places in own]
        counts = [nodes for nodes, _ in found]
        if owner == "StagedDrafter":  # all stages draft as deep as the first one
            return counts[0], [StaticTree(counts[0]).max_shown + 1 for _ in shown]
        return (max(counts) if owner == "ChoiceDrafter" else sum(counts)), shown
    if not str(options["_target_"]).endswith(".from_pretrained"):
        made = build(config, section)  # a look-up, or the target itself: nothing is loaded
        return made.max_nodes, places(made.tree) if hasattr(made, "tree") else []
    shape = options.get("shape")
    if owner == "BlockDrafter" and shape is None:
        return -1, [0]
    usual: Any = {"EagleDrafter": ExpansionTree(), "PEagleDrafter": heads or TOKENS}.get(owner, DEFAULT_SHAPE)
    if hasattr(kind, "usual_tree"):
        usual = kind.usual_tree(SimpleNamespace(num_heads=heads or DEFAULT_SHAPE.max_depth))
    tree: TreeBuilder = tree_of(usual if shape is None else instantiate(shape) if isinstance(shape, Mapping) else shape)
    return tree.max_nodes, places(tree)


def _dtype(asked: Any, stored: PreTrainedConfig, device: torch.device) -> str:
    """Returns the type that the target will compute in."""
    found = resolve_dtype(asked)
    if isinstance(found, torch.dtype):
        return dtype_name(found)
    own = getattr(stored.get_text_config(decoder=True), "dtype", None) or getattr(stored, "dtype", None)
    own = getattr(torch, own.removeprefix("torch."), None) if isinstance(own, str) else own
    return dtype_name(choose_dtype(own, device).dtype if isinstance(own, torch.dtype) else torch.float32)
