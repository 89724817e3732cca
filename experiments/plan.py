"""The cost of a model on a device, before it is there: ``python -m experiments.plan target.name=… device=h100``.

``costs=timed`` times the target's forwards here and says from which acceptance on speculation pays; ``costs=fit`` fits
the costs of steps on this machine, for runs, policies and plans (``costs=FILE``).
"""

from dataclasses import dataclass
from typing import Annotated

from experiments.config.kinds import (
    Count,
    EngineSettings,
    Natural,
    OneOrMore,
    Options,
    Positive,
    Price,
    Seconds,
    Section,
    Settings,
    Several,
    Text,
    Two,
    number,
)
from experiments.config.launch import Command

Probability = Annotated[float, number("a probability from 0 to 1", lambda value: 0 <= value <= 1)]


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The sizes that a fit measures: the sections ``grid`` and ``held_out``."""

    batch: Several[Count]
    context: Several[Count]
    drafted: Several[Natural]
    chunk: list[Count]


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """What ``conf/plan.yaml`` holds."""

    seed: Natural
    target: Section
    drafter: Section
    verifier: Section
    sampling: Section
    engine: EngineSettings
    device: Text | None
    devices: Text | None
    costs: Text | None
    measured: bool
    batch: OneOrMore[Count] | None
    context: Two | None
    output: Count
    acceptance: OneOrMore[Probability]
    longest: Count
    price: Price | None
    memory: Positive | None
    usable: Annotated[float, number("a share above 0, at most 1", lambda value: 0 < value <= 1)]
    page: Count
    overhead: Seconds
    pictures: bool
    nodes: Several[Two]
    draft_costs: Several[Annotated[float, number("a share of a plain step, 0 or above", lambda value: value >= 0)]]
    grid: GridSettings
    held_out: GridSettings
    ranges: list[Count] | None
    seconds: Seconds | None
    rounds: Natural
    chat_template: Options
    title: bool = True


plan = Command(
    "plan", PlanSettings, work=lambda config: {"timed": "pays", "fit": "calibrate"}.get(config.costs, "plan")
)
main = plan.main

if __name__ == "__main__":
    main()
