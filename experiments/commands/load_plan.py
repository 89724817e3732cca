"""The arrivals of a study of load by its configuration, at every rate, and what the requests ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from experiments.config.sections import build
from experiments.load.arrivals import Arrivals, Times, arriving
from experiments.load.recorded import Trace
from experiments.load.workloads import Planned, Workload
from experiments.results.frame import Figures
from experiments.results.origin import flatten


@dataclass(frozen=True, kw_only=True)
class Load:
    """The arrivals at one rate.

    Attributes:
        rate: Requests per second; in a closed loop, users.
        loop: ``OPEN`` or ``CLOSED``.
    """

    rate: float
    times: Times
    loop: str


def plan_loads(config: DictConfig, seed: int) -> tuple[list[Load], list[Planned]]:
    """Return the arrivals at every rate, and the requests, of which lower counts take the first."""
    arrival: Arrivals = build(config, "arrival")
    workload: Workload = build(config, "workload")
    recorded = arrival.recorded if isinstance(arrival, Trace) else None
    requests = config.requests
    if recorded is not None:
        requests = min(requests or len(recorded.times), len(recorded.times))
    if len(set(config.rates or ())) < len(config.rates or ()):
        raise ValueError(f"rates={list(config.rates)}: give each rate once")
    asked = [arrival.rate] if config.rates is None else [float(rate) for rate in config.rates]
    rated = [arrival] if config.rates is None else [arrival.at_rate(rate) for rate in asked]
    loads = [
        Load(
            rate=rate,
            times=arriving(each, np.random.default_rng(seed), requests=requests, seconds=config.seconds),
            loop=each.loop,
        )
        for rate, each in zip(asked, rated, strict=True)
    ]
    most = max(len(each.times) for each in loads)
    return loads, workload.plan(np.random.default_rng([seed, 1]), most, recorded)


def summary_of(figures: Sequence[Figures]) -> dict[str, float]:
    """Return single figures by method, rate and name, for a tracker."""
    found = {
        f"{each.method}/{each.rate:g}/{name}": value
        for each in figures
        for name, value in flatten(each, joint="/").items()
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
