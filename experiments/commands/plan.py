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
from specdec.physics.shape import ModelShape

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
    given = inflated(read_config(name), target["inflate"])
    name += f" inflated to {target['inflate']}" if target["inflate"] is not None else ""
    shape = shape_of(given, f"target.name={name}")
    context = _context(config.context, shape, costs)
    if config.output >= context:
        raise ValueError(
            f"output={config.output} leaves no prompt in a context of {context}: raise context or lower output"
        )
    dtype = str(target["dtype"])
    formats = choose_formats(
        given,
        dtype=costs.conditions.dtype if costs is not None and dtype == "auto" else dtype,
        quantization=target["quantization"],
        kv_cache=engine["kv_cache"],
    )
    if config.measured and device.measured is None:
        raise ValueError(f"measured=true: the row of {device.name} has no measured figures")
    if costs is not None:
        check_file(
            costs,
            str(config.costs),
            device=device,
            own=device_of(costs, devices, memory=device.memory),
            dtype=formats.computes,
            quantization=target["quantization"],
            kv_cache=engine["kv_cache"],
            model=name,
            shape=shape,
            drafter=drafter_class(plain(config, "drafter")),
        )
    return Question(
        name=name,
        shape=shape,
        precision=formats.precision,
        formats=formats.words,
        device=device,
        roof=device.roof(formats.computes, measured=config.measured),
        measured=config.measured or device.name not in devices,
        batches=listed(config, "batch") if config.batch is not None else [1, 8, 32],
        context=context,
        output=config.output,
        drafter=plan_drafter(plain(config, "drafter"), shape, formats, target_name=name),
        acceptance=plain(config, "acceptance"),
        longest=config.longest,
        usable=config.usable * (device.memory if config.memory is None else config.memory),
        prefill_chunk=engine["prefill_chunk"],
        overhead=config.overhead,
        price=config.price,
        costs=None if costs is None else replace(costs, depths=()),  # a chain has a level for every node
    )


def _device(config: DictConfig, costs: CalibratedRounds | None, devices: Mapping[str, Device]) -> Device:
    """The device that was asked for; by default the one of the cost file, or ``DEVICE``."""
    if costs is None or config.device not in (None, costs.conditions.device):
        return find_device(config.device or DEVICE, devices)
    import psutil  # only where a file is of a processor, whose memory it may not say

    return device_of(costs, devices, memory=psutil.virtual_memory().total)


def _context(asked: int | None, shape: ModelShape, costs: CalibratedRounds | None) -> int:
    longest = shape.max_length
    if asked is None:
        known = CONTEXT if costs is None else costs.box.context[1]
        return min(known, longest or known)
    if longest is not None and asked > longest:
        raise ValueError(f"context={asked}: the model has {longest} positions, give at most so many")
    return asked
