"""A plan for a checked configuration: what it asks, and what is printed and written about it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.app.config import plain
from experiments.planning.drafting import plan_drafter
from experiments.planning.formats import choose_formats
from experiments.planning.plan import Plan, Question
from experiments.planning.sources import read_config, shape_of
from experiments.reporting import terminal
from experiments.reporting.plan import figures_of, head_lines, tables, tail_lines
from specdec.roofline.devices import TABLE, Device, find_device, read_devices
from specdec.roofline.shape import ModelShape

CONTEXT = 4096
"""Positions per row where nobody says."""


def print_plan(config: DictConfig) -> Plan:
    """Plan, print the tables, write ``plan.json`` and the pictures, and return the plan."""
    made = Plan(question_of(config))
    console = terminal.console()
    terminal.say(console, *head_lines(made))
    for table in tables(made):
        console.print(terminal.render(table, terminal.Frame.NARROW))
    terminal.say(console, *tail_lines(made))
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.json"
    path.write_text(json.dumps(figures_of(made), indent=1) + "\n", encoding="utf-8")
    written = [path]
    if config.pictures:
        from experiments.reporting.plan_plot import draw  # it imports matplotlib

        written += draw(made, out)
    terminal.list_written(console, written)
    return made


def question_of(config: DictConfig) -> Question:
    """Returns what a configuration asks.

    Raises:
        ValueError: The target is no decoder, the device is not in the table, or a value does not fit.
    """
    device = find_device(config.device, _devices(config.devices))
    target, engine = plain(config, "target"), plain(config, "engine")
    name = str(target["name"])
    given = read_config(name)
    shape = shape_of(given, f"target.name={name}")
    context = _context(config.context, shape)
    if config.output >= context:
        raise ValueError(
            f"output={config.output} leaves no prompt in a context of {context}: raise context or lower output"
        )
    formats = choose_formats(
        given, dtype=str(target["dtype"]), quantization=target["quantization"], kv_cache=engine["kv_cache"]
    )
    if config.measured and device.measured is None:
        raise ValueError(f"measured=true: the row of {device.name} has no measured figures")
    return Question(
        name=name,
        shape=shape,
        precision=formats.precision,
        formats=formats.words,
        device=device,
        roof=device.roof(formats.computes, measured=config.measured),
        measured=config.measured,
        batches=_listed(config.batch),
        context=context,
        output=config.output,
        drafter=plan_drafter(plain(config, "drafter"), shape, formats, target_name=name),
        acceptance=_acceptance(config.acceptance),
        longest=config.longest,
        usable=config.usable * (device.memory if config.memory is None else config.memory),
        prefill_chunk=engine["prefill_chunk"],
        page=config.page,
        overhead=config.overhead,
        price=config.price,
    )


def _devices(file: str | None) -> Mapping[str, Device]:
    return read_devices(TABLE) | ({} if file is None else read_devices(Path(file)))


def _context(asked: int | None, shape: ModelShape) -> int:
    longest = shape.max_length
    if asked is None:
        return min(CONTEXT, longest or CONTEXT)
    if longest is not None and asked > longest:
        raise ValueError(f"context={asked}: the model has {longest} positions, give at most so many")
    return asked


def _listed(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else [int(each) for each in value]


def _acceptance(value: Any) -> float | list[float]:
    return float(value) if isinstance(value, int | float) else [float(each) for each in value]
