"""What a user feels of one method: latencies, rates, goodput, cost. docs/measurements.md defines the figures.

The latencies of single requests are columns of the frame (``frame.py``).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas

from experiments.results.frame import Figures, Frame, Outputs, frame_of
from experiments.results.limits import Limits, Terms
from experiments.results.records import MEMORY
from experiments.results.rows import ends
from experiments.results.statistics import Bootstrap
from experiments.results.timing import STAGES, calls_of

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "chunk_gap", "token_gap", "e2e")
"""The columns of the frame, and figures of requests, that are distributions over requests."""
GAPS = ("chunk_gap", "token_gap")
"""Those of which a request has several values."""
LEVELS = (50, 90, 95, 99)
"""The percentiles of a distribution."""
LITTLE_TOLERANCE = 0.01
"""The largest share by which the two sides of Little's law may differ: the clocks are read at different moments."""
LEAST_SECONDS = 10.0
"""Energy of a shorter time is not told: counters move in steps of up to 100 ms, and devices warm up."""
_POINTS = 300
"""Values that are looked at between the smallest and the largest for an interval; with fewer distinct ones, all."""


def request_figures(outputs: Outputs, terms: Terms, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return the figures of one method at one temperature as columns of its row; empty if nothing was timed.

    Args:
        outputs: The method's. One that failed counts as arrived, and in no latency.

    Returns:
        ``LATENCIES`` (``ttft.p50``, see ``spread``; ``chunk_gap`` over deliveries, ``token_gap`` over tokens),
        ``requests`` that ended well, rates over the time of all calls, what one user sees (1 / TPOT at the median),
        requests in slots (``concurrency``), ``waiting`` and expected by Little's law, ``disordered`` requests, whose
        timestamps are in an impossible order, ``goodput``, hours of the device, price and energy of tokens,
        ``phase_share`` of e2e (queue, prefill, decode), ``stage_share`` of the calls' time and of ingestion before
        them, and what caches and preemption did (``memory.hit_rate``).
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna()]
    calls, good = calls_of(timed), timed[~timed.failed]
    seconds = float(calls.seconds.sum())
    if good.empty or not seconds:
        return {}
    told = good[good.told]
    figures: dict[str, Any] = {}
    for name in LATENCIES:
        values = told[["prompt", name]]
        spread_of = spread((values.explode(name) if name in GAPS else values).dropna(), bootstrap)
        for part, value in (spread_of or {}).items():
            short = part.removesuffix("_interval")
            figures |= ends(f"{name}.{short}", value) if part != short else {f"{name}.{part}": value}
    tokens = int(good.tokens.sum())
    hours = 1e6 / (3600 * tokens / seconds) if tokens else None
    joules = calls.joules.sum() if calls.joules.notna().all() and tokens and seconds >= LEAST_SECONDS else None
    tpot, ended = figures.get("tpot.p50"), told[told.e2e.notna()]
    in_flight = concurrency(timed) if len(told) == len(good) else None
    if terms.limits is not None and len(told):
        kept = goodput(told, terms.limits, arrived=len(frame), seconds=seconds)
        figures |= {"limits": kept.limits, "attainment": kept.attainment, "goodput": kept.per_second}
    if in_flight is not None:
        figures |= {"concurrency": in_flight.running, "waiting": in_flight.waiting}
        figures["concurrency_expected"] = in_flight.expected
    phases = {
        "queue": ended.queue.sum(),
        "prefill": (ended.prefilled - ended.admitted).sum(),
        "decode": (ended.finished - ended.prefilled).sum(),
    }
    return {
        **figures,
        "requests": len(good),
        "disordered": int((~told.in_order).sum()),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + int(good.prompt_tokens.sum())) / seconds,
        "user_tokens_per_second": 1 / tpot if tpot else None,
        "device_hours_per_million_tokens": hours,
        "price_per_million_tokens": None if hours is None or terms.price is None else hours * terms.price,
        "joules_per_token": None if joules is None else float(joules / tokens),
        **{f"phase_share.{name}": share for name, share in _shares(phases).items()},
        **{f"stage_share.{name}": share for name, share in _stage_shares(calls).items()},
        **{f"memory.{name}": value for name, value in memory_of(good).items()},
    }


def memory_of(outputs: Frame) -> Figures:
    """Return the sums of ``MEMORY`` over outputs, and the share of their prompts found in caches (``hit_rate``)."""
    sums = {name: sum(each.get(name, 0) for each in outputs.memory) for name in MEMORY}
    queried = int((outputs.prompt_tokens - 1).sum())
    return Figures(**sums, hit_rate=sums["reused"] / queried if queried else None)


def broken_timestamps(row: Mapping[str, Any]) -> str | None:
    """Return why a row's timestamps cannot be right; None if nothing speaks against them."""
    if row["disordered"]:
        requests = f"{row['disordered']} of {row['requests']} requests"
        return f"BROKEN TIMESTAMPS: moments of {requests} are in an impossible order"
    if row["concurrency"] is None:
        return None
    found, expected = row["concurrency"] + row["waiting"], row["concurrency_expected"]
    if abs(found - expected) <= LITTLE_TOLERANCE * expected:
        return None
    return f"BROKEN TIMESTAMPS: {found:.3f} requests were in flight on average, and Little's law expects {expected:.3f}"


def goodput(requests: Frame, limits: Limits | None, *, arrived: int, seconds: float) -> Figures:
    """Return the goodput of requests: ``attainment`` (the share that keeps all limits) and those ``per_second``.

    Ten requests in 5 s, of which seven keep all limits: attainment 0.7, goodput 1.4 requests/s.

    Args:
        requests: Those whose timestamps are known. One without an end keeps no limit; one of a single token has no
            TPOT, and keeps that limit.
        seconds: How long all of them took together.
    """
    kept = requests.ttft.notna() & requests.e2e.notna()
    for name in ("ttft", "tpot", "e2e"):
        limit = getattr(limits, name)
        kept &= True if limit is None else ~(requests[name] > limit)
    good = int(kept.sum())
    return Figures(
        limits=str(limits),
        good=good,
        arrived=arrived,
        attainment=good / arrived if arrived else None,
        per_second=good / seconds if seconds else None,
    )


class InFlight(NamedTuple):
    """Requests in slots (``running``) and in the queue (``waiting``), as averages over time.

    Little's law has ``expected`` of both together: requests per second times the mean time that one is there. It holds
    where all that arrived have left, unless timestamps are wrong.
    """

    running: float
    waiting: float
    expected: float


def concurrency(frame: Frame) -> InFlight | None:
    """Return the requests in flight over all calls, one call after another; None if nothing is known.

    A request's moments are seconds since its call began. What lies outside of its call is not counted.
    """
    ended = frame[frame.told & frame.e2e.notna()]
    total = float(ended.groupby(["batch", "turn"], sort=False).seconds.first().sum())
    if not total:
        return None
    arrived, admitted, finished = (ended[name].clip(0.0, ended.seconds) for name in ("arrived", "admitted", "finished"))
    running, waiting = ((finished - admitted).clip(lower=0.0).sum(), (admitted - arrived).clip(lower=0.0).sum())
    return InFlight(float(running / total), float(waiting / total), float(ended.e2e.sum() / total))


def spread(values: Frame, bootstrap: Bootstrap) -> Figures | None:
    """Return how a figure is distributed; None without any value.

    A percentile is a value that occurred: the smallest one that at least so many percent of all values do not exceed.
    Of 1, 2, 3, 4 the median is 2 and the 90th percentile 4. Turns, samples and gaps of one prompt depend on each
    other, so prompts are drawn again with all that is theirs. Intervals are None with a single prompt.

    Args:
        values: A row per value: the prompt, and the value.

    Returns:
        ``count``, ``mean``, ``p50`` to ``p99``, and their intervals (``p50_interval``).
    """
    if values.empty:
        return None
    pooled = values.iloc[:, 1].to_numpy(dtype=np.float64)
    by_prompt = values.groupby("prompt", sort=False)[values.columns[1]]
    groups = [np.sort(own.to_numpy(dtype=np.float64)) for _, own in by_prompt]
    points = np.unique(pooled)
    if len(points) > _POINTS:  # half of them among the largest tenth, where three of the four percentiles are
        places = np.concatenate([np.linspace(0, 0.9, _POINTS // 2), np.linspace(0.9, 1, _POINTS // 2)])
        points = np.unique(np.quantile(pooled, places, method="inverted_cdf"))
    below = np.array([np.searchsorted(own, points, side="right") for own in groups], dtype=np.float64)

    def percentiles(counts: np.ndarray) -> np.ndarray:  # how many values do not exceed each point
        return np.stack([points[(100 * counts < level * counts[:, -1:]).sum(1)] for level in LEVELS])

    ends = bootstrap.over_tables(percentiles, below) or [None] * len(LEVELS)
    return Figures(
        count=len(pooled),
        mean=float(pooled.mean()),
        **{f"p{level}": percentile(pooled, level) for level in LEVELS},
        **{f"p{level}_interval": own for level, own in zip(LEVELS, ends, strict=True)},
    )


def percentile(values: np.ndarray, level: int) -> float:
    """Return the smallest value that at least ``level`` percent of all values do not exceed."""
    ordered = np.sort(values)
    return float(ordered[-(-level * len(ordered) // 100) - 1])


def _stage_shares(calls: Frame) -> dict[str, float]:
    """The stages' shares; ``other`` is the rest. Empty where stages were not timed.

    The prompts' texts became tokens before the call: that time is added to the whole.
    """
    if not all(calls.stages):
        return {}
    stages = pandas.DataFrame(list(calls.stages), index=calls.index).fillna(0.0)
    # Stages of the host may overlap with the device's, so that nothing is left.
    other = (calls.seconds - stages.sum(axis=1)).clip(lower=0.0).sum()
    found = {**dict.fromkeys(STAGES, 0.0), **stages.sum().to_dict()}
    return _shares({**found, "ingestion": found["ingestion"] + calls.ingestion.sum(), "other": other})


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: float(value / whole) for name, value in parts.items()} if whole > 0 else {}
