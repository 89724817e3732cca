"""Latencies, rates, goodput and cost of one method, over requests. docs/measurements.md defines the figures."""

import numpy as np

from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.limits import Limits, Terms
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap
from experiments.results.timing import CALL, calls_of

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "chunk_gap", "token_gap", "e2e")
"""The columns of the frame, and figures of requests, that are distributions over requests."""
LEVELS = (50, 90, 95, 99)
"""The percentiles of a distribution."""
LEAST_SECONDS = 10.0
"""Energy of a shorter time is not told: counters move in steps of up to 100 ms, and devices warm up."""
_POINTS = 300
"""Values that are looked at between the smallest and the largest for an interval; with fewer distinct ones, all."""


def request_figures(outputs: Outputs, terms: Terms, bootstrap: Bootstrap) -> Row:
    """Return the figures of one method at one temperature as columns of its row; empty if nothing was timed.

    ``outputs`` are the method's. One that failed counts as arrived, and in no latency.
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna()]
    calls, good = calls_of(timed), timed[~timed.failed]
    seconds, tokens = float(calls.seconds.sum()), int(good.tokens.sum())
    if good.empty or not seconds:
        return {}
    told = good[good.told]
    row: Row = {}
    for name in LATENCIES:
        parts = spread(told[["prompt", name]].explode(name).dropna(), bootstrap)
        row |= {f"{name}.{part}": value for part, value in parts.items()}
    if terms.limits is not None and len(told):
        kept, attainment = goodput(told, terms.limits, arrived=len(frame), seconds=seconds)
        row |= {"limits": str(terms.limits), "attainment": attainment, "goodput": kept}
    if len(told) == len(good) and (in_flight := concurrency(timed)) is not None:
        row["concurrency"], row["waiting"] = in_flight
    ended = told[told.e2e.notna()]
    if whole := ended.e2e.sum():
        row["phase_share.queue"] = float(ended.queue.sum() / whole)
        row["phase_share.prefill"] = float((ended.prefilled - ended.admitted).sum() / whole)
        row["phase_share.decode"] = float((ended.finished - ended.prefilled).sum() / whole)
    hours = 1e6 / (3600 * tokens / seconds) if tokens else None
    measured = calls.joules.notna().all() and tokens and seconds >= LEAST_SECONDS
    return {
        **row,
        "requests": len(good),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + int(good.prompt_tokens.sum())) / seconds,
        "user_tokens_per_second": 1 / row["tpot.p50"] if row.get("tpot.p50") else None,
        "device_hours_per_million_tokens": hours,
        "price_per_million_tokens": None if hours is None or terms.price is None else hours * terms.price,
        "joules_per_token": float(calls.joules.sum() / tokens) if measured else None,
    }


def goodput(requests: Frame, limits: Limits, *, arrived: int, seconds: float) -> tuple[float, float]:
    """Return how many requests per second keep all limits, and which share of those that arrived.

    Ten requests in 5 s, of which seven keep all limits: 1.4 requests/s, and 0.7.

    Args:
        requests: Those whose timestamps are known. One without an end keeps no limit; one of a single token has no
            TPOT, and keeps that limit.
        seconds: How long all of them took together.
    """
    kept = requests.ttft.notna() & requests.e2e.notna()
    for name, limit in vars(limits).items():
        if limit is not None:
            kept &= ~(requests[name] > limit)
    return (int(kept.sum()) / seconds if seconds else 0.0), int(kept.sum()) / arrived


def concurrency(frame: Frame) -> tuple[float, float] | None:
    """Return how many requests were in slots and in the queue, as averages over all calls; None if nothing is known.

    A request's moments are seconds since its call began. What lies outside of its call is not counted.
    """
    ended = frame[frame.told & frame.e2e.notna()]
    total = float(ended.groupby(CALL, sort=False).seconds.first().sum())
    if not total:
        return None
    arrived, admitted, finished = (ended[name].clip(0.0, ended.seconds) for name in ("arrived", "admitted", "finished"))
    running, waiting = ((finished - admitted).clip(lower=0.0).sum(), (admitted - arrived).clip(lower=0.0).sum())
    return float(running / total), float(waiting / total)


def spread(values: Frame, bootstrap: Bootstrap) -> Row:
    """Return how a figure is distributed; empty without any value.

    A percentile is a value that occurred: the smallest one that at least so many percent of all values do not exceed.
    Of 1, 2, 3, 4 the median is 2 and the 90th percentile 4. Turns, samples and gaps of one prompt depend on each
    other, so prompts are drawn again with all that is theirs. There are no intervals with a single prompt.

    Args:
        values: A row per value: the prompt, and the value.
    """
    if values.empty:
        return {}
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

    row: Row = {"count": len(pooled), "mean": float(pooled.mean())}
    bounds = bootstrap.over_tables(percentiles, below) or [None] * len(LEVELS)
    for level, own in zip(LEVELS, bounds, strict=True):
        row[f"p{level}"] = float(np.quantile(pooled, level / 100, method="inverted_cdf"))
        row |= ends(f"p{level}", own)
    return row
