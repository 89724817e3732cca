"""The common part of real and virtual studies of load: arrivals at every rate, requests, and the report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from experiments.config import job
from experiments.config.sections import build
from experiments.load.arrivals import Arrivals, Times, arriving
from experiments.load.recorded import Trace
from experiments.load.run import LoadRun
from experiments.load.workloads import Planned, Workload
from experiments.reporting.load import LoadReport, report_load
from experiments.reporting.load_validation import report_validation
from experiments.results.origin import flatten
from experiments.tracking.base import Tracker


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


def asked_for(config: DictConfig, planned: Sequence[Planned], *groups: str, times: str = "") -> str:
    """Return what was chosen of some groups, and the sizes of the requests, for tables and pictures."""
    words = [f"{name} {job.choice(name) or type(build(config, name)).__name__}" for name in groups]
    sizes = [np.mean([getattr(each, name) for each in planned]) for name in ("prompt_tokens", "output_tokens")]
    return (
        f"{', '.join(words)}; {len(planned)} requests{times} of {sizes[0]:.0f} tokens in and {sizes[1]:.0f} out on "
        f"average"
    )


@contextmanager
def reported(
    runs: Sequence[LoadRun], report: LoadReport, tracker: Tracker, virtual: Sequence[LoadRun] = ()
) -> Iterator[None]:
    """Report at the end of the ``with`` block, however it ends, the runs that are there by then.

    Args:
        virtual: The same in virtual time, to be compared.
    """
    exit_code = 1
    try:
        yield
        exit_code = 0
    except KeyboardInterrupt:
        exit_code = 130
        raise
    finally:
        if runs:
            figures, written = report_load(runs, report)
            written += report_validation(runs, virtual, report) if virtual else []
            found = {f"{each.method}/{each.rate:g}": flatten(each, joint="/") for each in figures}
            single = {f"{run}/{name}": value for run, own in found.items() for name, value in own.items()}
            tracker.summary({name: value for name, value in single.items() if isinstance(value, int | float)})
            tracker.files("results", [path for path in written if path.parent == report.folder])
        tracker.finish(exit_code)
