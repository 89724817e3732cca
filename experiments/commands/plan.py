"""A plan for a checked configuration: what it asks, and what is printed and written about it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.config.sections import listed, plain
from experiments.planning.drafting import drafter_class, plan_drafter
from experiments.planning.plan import Plan, Question, check_file, device_of
from experiments.planning.sources import choose_formats, inflated, read_config, shape_of
from experiments.reporting import plan as planned
from experiments.reporting import terminal
from experiments.reporting.formats import publish
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.devices import TABLE, Device, find_device, read_devices

CONTEXT, DEVICE = 4096, "h100"
"""Positions per row, and the device, where nobody says."""


def plan(config: DictConfig) -> Any:
    """Plan, print the tables, and write ``plan.json``; or measure costs on this machine."""
    if config.costs in ("timed", "fit"):
        from experiments.commands import costs  # torch, which a plan does without

        return (costs.pays if config.costs == "timed" else costs.calibrate)(config)
    made = Plan(question_of(config))
    terminal.say(terminal.console(), *planned.head_lines(made))
    files = {"tables": planned.tables(made), "figures": planned.figures_of(made), "said": planned.tail_lines(made)}
    publish(Path(config.out), "plan", **files)
    return made


def question_of(config: DictConfig) -> Question:
    """A configuration's question."""
    target, engine = plain(config, "target"), plain(config, "engine")
    costs = None if config.costs is None else CalibratedRounds.load(config.costs)
    devices = read_devices(TABLE) | ({} if config.devices is None else read_devices(Path(config.devices)))
    device = _device(config, costs, devices)
    name = str(target["name"])
    given = inflated(read_config(name, target.get("gguf_file")), target["inflate"])
    name += f" inflated to {target['inflate']}" if target["inflate"] is not None else ""
    shape = shape_of(given, f"target.name={name}")
    known = CONTEXT if costs is None else costs.box.context[1]
    context, longest = config.context or min(known, shape.max_length or known), shape.max_length
    if longest is not None and context > longest:
        raise ValueError(f"context={context}: the model has {longest} positions, give at most so many")
    if config.output >= context:
        raise ValueError(f"output={config.output} leaves no prompt in a context of {context}: lower it")
    stored, dtype = {"quantization": target["quantization"], "kv_cache": engine["kv_cache"]}, str(target["dtype"])
    if costs is not None and dtype == "auto":
        dtype = costs.conditions.dtype
    formats = choose_formats(given, dtype=dtype, **stored)
    if config.measured and device.measured is None:
        raise ValueError(f"measured=true: the row of {device.name} has no measured figures")
    if costs is not None:
        own = device_of(costs, devices, memory=device.memory)
        owner = drafter_class(plain(config, "drafter"))
        about = {"model": name, "shape": shape, "drafter": owner, "dtype": formats.computes, **stored}
        check_file(costs, str(config.costs), device=device, own=own, **about)
    return Question(
        name=name,
        shape=shape,
        precision=formats.precision,
        formats=formats.words,
        device=device,
        roof=device.roof(formats.computes, measured=config.measured),
        measured=config.measured or device.name not in devices,
        batches=[1, 8, 32] if config.batch is None else listed(config, "batch"),
        context=context,
        drafter=plan_drafter(plain(config, "drafter"), shape, formats, beside=target),
        acceptance=plain(config, "acceptance"),
        usable=config.usable * (config.memory or device.memory),
        prefill_chunk=engine["prefill_chunk"],
        costs=None if costs is None else replace(costs, depths=()),  # a chain has a level for every node
        **{setting: config[setting] for setting in ("output", "longest", "overhead", "price")},
    )


def _device(config: DictConfig, costs: CalibratedRounds | None, devices: Mapping[str, Device]) -> Device:
    """The device that was asked for; by default the one of the cost file, or ``DEVICE``."""
    if costs is None or config.device not in (None, costs.conditions.device):
        return find_device(config.device or DEVICE, devices)
    import psutil  # only where a file is of a processor, whose memory it may not say

    return device_of(costs, devices, memory=psutil.virtual_memory().total)
