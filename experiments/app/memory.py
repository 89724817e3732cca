"""The memory of a run from its configuration: planned, printed and checked before anything is loaded."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import AutoConfig, PreTrainedConfig

from drafters.medusa import DEFAULT_SHAPE
from experiments.app.config import build, plain
from experiments.app.job_lines import in_sweep
from experiments.planning.drafting import Planned, drafter_class, plan_drafter
from experiments.planning.formats import Formats, choose_formats, inflated
from experiments.planning.memory import RunMemory
from experiments.planning.sources import shape_of
from experiments.reporting import terminal
from experiments.reporting.memory import memory_table
from experiments.results.manifest import device_name
from specdec import bundled
from specdec.drafting.builders import ExpansionTree, TreeBuilder, tree_of
from specdec.engine.engine import DEFAULT_MAX_LENGTH
from specdec.execution.half_weights import half_products
from specdec.machine import choose_dtype, dtype_name, prefers_packed
from specdec.memory import free_memory
from specdec.modeling.loading import hub_options, resolve_device, resolve_dtype
from specdec.quantization.checkpoint import stored_scheme
from specdec.roofline.capacity import Served
from specdec.roofline.precision import Precision
from specdec.roofline.shape import ModelShape

_SHARE = 0.5
"""The share of the free memory that copies of the weights may take (``specdec.execution.packing``)."""


def plan_memory(config: DictConfig, methods: Mapping[str, str]) -> RunMemory | str:
    """Returns what a run will take; a sentence that says why not if that cannot be told.

    Args:
        config: The whole configuration.
        methods: Names, and the configuration sections of their drafters.
    """
    options = plain(config, "target")
    if config.get("setups"):
        return "memory is not planned with setups: methods have targets and engines of their own"
    for setting in ("device_map", "tensor_parallel"):
        if options.get(setting):
            return f"memory is not planned with target.{setting}: the model is on several devices"
    if not str(options.get("_target_")).endswith("Target.from_pretrained"):
        return f"memory is not planned for target._target_={options.get('_target_')}"
    try:
        return _planned(config, methods, options)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        # Loading says what is wrong, if anything is: a plan is no reason to refuse what it does not understand.
        return f"memory is not planned: {' '.join(str(error).split())}"


def show_planned(planned: RunMemory | str) -> None:
    """Print what a run will take, and refuse it if there is no room.

    Raises:
        ValueError: Says what takes how much, how much there is, and what would fit.
    """
    if isinstance(planned, str):
        return
    planned.check()
    if not in_sweep():
        console = terminal.console()
        console.print(terminal.render(memory_table(planned), terminal.Frame.NARROW))


def _planned(config: DictConfig, methods: Mapping[str, str], options: Mapping[str, Any]) -> RunMemory:
    name, device = str(options["name"]), resolve_device(options["device"])
    stored: PreTrainedConfig = AutoConfig.from_pretrained(bundled.resolve(name), **hub_options(options))
    given = inflated(stored.to_dict(), options.get("inflate"))
    shape = shape_of(given, name)
    engine = plain(config, "engine")
    own_scheme = stored_scheme(stored)
    formats = choose_formats(
        {key: value for key, value in given.items() if key != "quantization_config" or own_scheme is None},
        dtype=_dtype(options["dtype"], stored, device),
        quantization=options.get("quantization") or own_scheme,
        kv_cache=engine["kv_cache"],
    )
    served: dict[str, Served] = {}
    unknown = []
    for method, section in methods.items():
        drafter = plain(config, section)
        nodes, shown = _nodes(config, section, drafter)
        planned = None
        try:
            planned = _planned_drafter(drafter, shape, formats, name)
        except ValueError:
            unknown.append(method)
        model = None if planned is None else planned.model
        served[method] = Served(
            shape=shape,
            precision=formats.precision,
            drafter=None if model is None else model.shape,
            drafter_precision=None if model is None else model.precision,
            drafted=nodes if nodes >= 0 else (planned.longest if planned is not None else None) or 0,
            shown=shown if planned is None or planned.shown is None else planned.shown,
            prefill_chunk=engine["prefill_chunk"],
        )
    free = free_memory(device)
    return RunMemory(
        target=name,
        methods=served,
        rows=engine["max_batch_size"],
        length=engine["max_length"] or min(shape.max_length or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH),
        free=free,
        place=f"{device} ({device_name(device)})",
        copies=sum(
            _copies(each, precision, formats.computes, device, free, half=_is_half(stored, options))
            for each, precision in _models(served.values())
        )
        if engine["optimize"]
        else 0.0,
        unknown=tuple(unknown),
        is_sure=shape.is_counted,
    )


def _planned_drafter(
    options: Mapping[str, Any], shape: ModelShape, formats: Formats, target_name: str
) -> Planned | None:
    """Returns what a drafter takes; of one that is made of two, its model does."""
    if isinstance(options.get("model"), Mapping):
        return plan_drafter(options["model"], shape, formats, target_name=target_name)
    return plan_drafter(options, shape, formats, target_name=target_name)


def _nodes(config: DictConfig, section: str, options: Mapping[str, Any]) -> tuple[int, int | None]:
    """Returns how many nodes a drafter may draft, and how many positions its own cache has for nodes.

    The first is below 0 where that follows from a head's files.
    """
    owner = drafter_class(options)
    if owner is None:
        return 0, None
    if not str(options["_target_"]).endswith(".from_pretrained"):
        parts = [f"{section}.{part}" for part in ("lookup", "model") if isinstance(options.get(part), Mapping)]
        if not parts:
            return build(config, section).max_nodes, None  # a look-up: nothing is loaded
        found = [_nodes(config, part, plain(config, part)) for part in parts]
        counts = [nodes for nodes, _ in found]
        return (max(counts) if owner == "ChoiceDrafter" else sum(counts)), found[-1][1]
    shape = options.get("shape")
    if owner == "BlockDrafter" and shape is None:
        return -1, None
    usual = ExpansionTree() if owner == "EagleDrafter" else DEFAULT_SHAPE
    tree: TreeBuilder = tree_of(usual if shape is None else instantiate(shape) if isinstance(shape, Mapping) else shape)
    if owner in ("EagleDrafter", "MTPDrafter"):
        return tree.max_nodes, max(tree.max_shown, tree.max_depth + 1)
    return tree.max_nodes, tree.max_shown


def _dtype(asked: Any, stored: PreTrainedConfig, device: torch.device) -> str:
    """Returns the type that the target will compute in."""
    found = resolve_dtype(asked)
    if isinstance(found, torch.dtype):
        return dtype_name(found)
    own = getattr(stored.get_text_config(decoder=True), "dtype", None) or getattr(stored, "dtype", None)
    own = getattr(torch, own.removeprefix("torch."), None) if isinstance(own, str) else own
    return dtype_name(choose_dtype(own, device).dtype if isinstance(own, torch.dtype) else torch.float32)


def _is_half(stored: PreTrainedConfig, options: Mapping[str, Any]) -> bool:
    """Returns whether float32 weights are numbers that 16 bits hold, which are then copied in 16 bits."""
    own = str(getattr(stored, "dtype", None) or "")
    return own.endswith("float16") and options.get("inflate") is None and half_products()


def _models(served: Iterable[Served]) -> list[tuple[ModelShape, Precision]]:
    """Returns the target once, and every drafting model."""
    listed = list(served)
    drafting = [(each.drafter, each.drafter_precision or each.precision) for each in listed if each.drafter is not None]
    return [(listed[0].shape, listed[0].precision), *drafting]


def _copies(
    shape: ModelShape, precision: Precision, computes: str, device: torch.device, free: float, *, half: bool
) -> float:
    """Returns the bytes of copies in the layout of the processor's products; none where they are not made."""
    dtype = getattr(torch, computes)
    if device.type != "cpu" or precision.weights != precision.tables or dtype is torch.float16:
        return 0.0
    output = 0 if shape.borrowed else shape.output_weights
    weights = shape.layer_weights - shape.expert_weights + shape.other_weights + output
    stored = weights * precision.weights
    if not prefers_packed(dtype) or stored > _SHARE * free:
        return 0.0
    return 2.0 * weights if half else stored
