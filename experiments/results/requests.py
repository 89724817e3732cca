"""What a user feels of one method: latencies, rates, goodput, cost. docs/measurements.md defines the figures.

The latencies of single requests are columns of the frame (``frame.py``).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas

from experiments.results.frame import Frame, Outputs, frame_of
from experiments.results.limits import Limits, Terms
from experiments.results.statistics import Bootstrap, Interval
from experiments.results.timing import STAGES, calls_of

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "chunk_gap", "token_gap", "e2e")
"""The columns of the frame, and figures of ``RequestFigures``, that are distributions over requests."""

LEVELS = (50, 90, 95, 99)
"""The percentiles of a ``Spread``."""
PARTS = 60
"""Equal parts of a run's time for which the requests in flight are kept."""
LITTLE_TOLERANCE = 0.01
"""The largest share by which the two sides of Little's law may differ: the clocks are read at different moments."""
LEAST_SECONDS = 10.0
"""Energy of a shorter time is not told: counters move in steps of up to 100 ms, and devices warm up."""

_POINTS = 300
"""Values that are looked at between the smallest and the largest for an interval; with fewer distinct ones, all."""
_BLOCK = 250
"""Resamples at a time, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a figure is distributed over requests.

    A percentile is a value that occurred: the smallest one that at least so many percent of all values do not exceed.
    Of 1, 2, 3, 4 the median is 2 and the 90th percentile 4. Intervals are None with a single prompt.

    Attributes:
        count: The number of values.
        mean: Their mean.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p50_interval: Interval | None = None
    p90_interval: Interval | None = None
    p95_interval: Interval | None = None
    p99_interval: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Requests in flight, as averages over time.

    Attributes:
        running: Requests in slots.
        waiting: Requests in the queue.
        expected: What Little's law expects of both together: requests per second times the mean time that one is there.
        seconds: The time of all calls, one after another.
        running_over_time: Requests in slots, averages over equal parts of that time.
        waiting_over_time: Requests in the queue likewise.
    """

    running: float
    waiting: float
    expected: float
    seconds: float = 0.0
    running_over_time: tuple[float, ...] = ()
    waiting_over_time: tuple[float, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether Little's law does. It always holds where all that arrived have left, unless timestamps are wrong."""
        return abs(self.running + self.waiting - self.expected) <= LITTLE_TOLERANCE * max(self.expected, 1e-12)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How many requests keep every limit.

    Attributes:
        limits: The limits in words.
        good: Those that do.
        arrived: All that arrived. Those that failed or never ended count as missed.
        attainment: Good over arrived.
        per_second: Good over the time that all took.
    """

    limits: str
    good: int
    arrived: int
    attainment: float | None
    per_second: float | None


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """What the users of one method felt, at one temperature. Times are in seconds.

    Attributes:
        requests: Requests that ended well.
        ttft, engine_ttft, queue, tpot, e2e: See ``frame.py``; their distributions over requests.
        chunk_gap: Gaps between deliveries of a request (inter-token latency by chunk), over deliveries.
        token_gap: The same by token, over tokens. The two are different figures.
        seconds: Time of all calls of the engine.
        requests_per_second: Requests over that time.
        output_tokens_per_second: Output tokens over that time.
        total_tokens_per_second: The same with the tokens of prompts.
        user_tokens_per_second: What one user sees, 1 / TPOT at the median.
        concurrency: Requests in flight; None where timestamps are not known.
        disordered: Requests whose timestamps are in an impossible order.
        goodput: Requests that kept all limits; None without limits.
        device_hours_per_million_tokens: Hours of the device for a million output tokens: 11.57 at 24 tokens/s.
        price_per_million_tokens: What they cost, 23.15 at 2 per hour; None without a price.
        joules_per_token: Energy per output token; None if it was not measured, or not for long enough.
        phase_shares: How e2e is divided into queue, prefill and decode, over all requests.
        stage_shares: How the time of the calls, and of ingestion before them, is divided into stages; ``other`` is the
            rest. Empty where stages were not timed.
    """

    requests: int
    ttft: Spread | None
    engine_ttft: Spread | None
    queue: Spread | None
    tpot: Spread | None
    chunk_gap: Spread | None
    token_gap: Spread | None
    e2e: Spread | None
    seconds: float
    requests_per_second: float | None
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    user_tokens_per_second: float | None
    concurrency: Concurrency | None
    disordered: int
    goodput: Goodput | None
    device_hours_per_million_tokens: float | None
    price_per_million_tokens: float | None
    joules_per_token: float | None
    phase_shares: dict[str, float]
    stage_shares: dict[str, float]

    @property
    def warning(self) -> str | None:
        """Why the timestamps cannot be right; None if nothing speaks against them."""
        if self.disordered:
            broken = f"{self.disordered} of {self.requests} requests"
            return f"BROKEN TIMESTAMPS: moments of {broken} are in an impossible order"
        found = self.concurrency
        if found is not None and not found.holds:
            return (
                f"BROKEN TIMESTAMPS: {found.running + found.waiting:.3f} requests were in flight on average, and "
                f"Little's law expects {found.expected:.3f}"
            )
        return None


def request_figures(outputs: Outputs, terms: Terms, bootstrap: Bootstrap) -> RequestFigures | None:
    """Return the figures of one method at one temperature; None if no request ended well and was timed.

    Args:
        outputs: The method's. One that failed counts as arrived, and in no latency.
        terms: Limits and price.
        bootstrap: Settings of the intervals.
    """
    frame = frame_of(outputs)
    timed = frame[frame.seconds.notna()]
    calls, good = calls_of(timed), timed[~timed.failed]
    seconds = float(calls.seconds.sum())
    if good.empty or not seconds:
        return None
    told = good[good.told]
    spread = spreads({name: _by_prompt(told, name) for name in LATENCIES}, bootstrap)
    tokens = int(good.tokens.sum())
    hours = 1e6 / (3600 * tokens / seconds) if tokens else None
    joules = calls.joules.sum() if calls.joules.notna().all() and tokens and seconds >= LEAST_SECONDS else None
    tpot = spread["tpot"]
    return RequestFigures(
        requests=len(good),
        **spread,
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=tokens / seconds,
        total_tokens_per_second=(tokens + int(good.prompt_tokens.sum())) / seconds,
        user_tokens_per_second=1 / tpot.p50 if tpot is not None and tpot.p50 else None,
        concurrency=concurrency(timed) if len(told) == len(good) else None,
        disordered=int((~told.in_order).sum()),
        goodput=goodput(told, terms.limits, arrived=len(frame), seconds=seconds)
        if terms.limits is not None and len(told)
        else None,
        device_hours_per_million_tokens=hours,
        price_per_million_tokens=None if hours is None or terms.price is None else hours * terms.price,
        joules_per_token=None if joules is None else float(joules / tokens),
        phase_shares=_phase_shares(told),
        stage_shares=_stage_shares(calls),
    )


def goodput(requests: Frame, limits: Limits, *, arrived: int, seconds: float) -> Goodput:
    """Return the goodput of requests.

    Ten requests in 5 s, of which seven keep all limits: attainment 0.7, goodput 1.4 requests/s.

    Args:
        requests: Those whose timestamps are known. One without an end keeps no limit; one of a single token has no
            TPOT, and keeps that limit.
        limits: What each has to keep.
        arrived: How many arrived in all.
        seconds: How long all of them took together.
    """
    kept = requests.ttft.notna() & requests.e2e.notna()
    for name in ("ttft", "tpot", "e2e"):
        limit = getattr(limits, name)
        kept &= True if limit is None else ~(requests[name] > limit)
    good = int(kept.sum())
    return Goodput(
        limits=str(limits),
        good=good,
        arrived=arrived,
        attainment=good / arrived if arrived else None,
        per_second=good / seconds if seconds else None,
    )


def concurrency(frame: Frame) -> Concurrency | None:
    """Return the requests in flight over all calls, one call after another; None if nothing is known.

    A request's moments are seconds since its call began. What lies outside of its call is not counted.
    """
    ended = frame[frame.told & frame.e2e.notna()]
    calls = ended.groupby(["batch", "turn"], sort=False).seconds.first()
    total = float(calls.sum())
    if not total:
        return None
    begin = pandas.MultiIndex.from_frame(ended[["batch", "turn"]]).map(calls.cumsum() - calls).to_numpy(dtype=float)
    edges = np.linspace(0.0, total, PARTS + 1)

    def in_parts(since: str, until: str) -> np.ndarray:
        starts, ends = (begin + ended[name].clip(0.0, ended.seconds).to_numpy() for name in (since, until))
        shared = np.minimum(ends[:, None], edges[1:]) - np.maximum(starts[:, None], edges[:-1])
        return shared.clip(min=0.0).sum(0) / np.diff(edges)

    running, waiting = in_parts("admitted", "finished"), in_parts("arrived", "admitted")
    return Concurrency(
        running=float(running.mean()),
        waiting=float(waiting.mean()),
        expected=float(ended.e2e.sum() / total),
        seconds=total,
        running_over_time=tuple(running.round(4).tolist()),
        waiting_over_time=tuple(waiting.round(4).tolist()),
    )


Groups = Mapping[Hashable, Sequence[float]]
"""Values by prompt: what is drawn again together."""


def spreads(figures: Mapping[str, Groups], bootstrap: Bootstrap) -> dict[str, Spread | None]:
    """Return the distribution of every figure; None of one without any value.

    Turns, samples and gaps of one prompt depend on each other, so prompts are drawn again with all that is theirs, and
    the same prompts for all figures.

    Args:
        figures: Values by prompt, by the name of the figure.
        bootstrap: Settings of the intervals.
    """
    prompts = list(dict.fromkeys(prompt for groups in figures.values() for prompt in groups))
    known = {name: groups for name, groups in figures.items() if any(map(len, groups.values()))}
    tables = {name: _counts_up_to(groups, prompts) for name, groups in known.items()}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in tables}
    rng = np.random.default_rng(bootstrap.seed)
    for start in range(0, bootstrap.resamples if len(prompts) > 1 else 0, _BLOCK):  # one prompt says nothing of others
        times = _draw(rng, min(_BLOCK, bootstrap.resamples - start), len(prompts))
        for name, (points, below) in tables.items():
            drawn[name].append(_percentiles(points, times @ below))
    return {name: _spread(known[name], drawn[name], bootstrap) if name in known else None for name in figures}


def percentile(values: np.ndarray, level: int) -> float:
    """Return the smallest value that at least ``level`` percent of all values do not exceed."""
    ordered = np.sort(values)
    return float(ordered[-(-level * len(ordered) // 100) - 1])


def _spread(groups: Groups, drawn: Sequence[np.ndarray], bootstrap: Bootstrap) -> Spread:
    values = np.concatenate([np.asarray(each, dtype=np.float64) for each in groups.values()])
    found = {f"p{level}": percentile(values, level) for level in LEVELS}
    intervals: dict[str, Interval] = {}
    resampled = np.concatenate(drawn) if drawn else np.empty((0, len(LEVELS)))
    if len(resampled):
        ends = np.quantile(resampled, [(1 - bootstrap.confidence) / 2, (1 + bootstrap.confidence) / 2], axis=0)
        intervals = {f"p{level}_interval": (float(a), float(b)) for level, (a, b) in zip(LEVELS, ends.T, strict=True)}
    return Spread(count=len(values), mean=float(values.mean()), **found, **intervals)  # type: ignore[arg-type]


def _draw(rng: np.random.Generator, resamples: int, prompts: int) -> np.ndarray:
    """How often each prompt occurs in every resample: [resample, prompt]."""
    chosen = rng.integers(prompts, size=(resamples, prompts)) + prompts * np.arange(resamples)[:, None]
    return np.bincount(chosen.ravel(), minlength=resamples * prompts).reshape(resamples, prompts).astype(np.float32)


def _counts_up_to(groups: Groups, prompts: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Some points among the values, and how many of each prompt's values do not exceed each: [prompt, point]."""
    own = [np.sort(np.asarray(groups.get(prompt, ()), dtype=np.float64)) for prompt in prompts]
    points = np.unique(np.concatenate(own))
    if len(points) > _POINTS:  # half of them among the largest tenth, where three of the four percentiles are
        places = np.concatenate([np.linspace(0, 0.9, _POINTS // 2), np.linspace(0.9, 1, _POINTS // 2)])
        points = np.unique(np.quantile(np.concatenate(own), places, method="inverted_cdf"))
    return points, np.array([np.searchsorted(each, points, side="right") for each in own], dtype=np.float32)


def _percentiles(points: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The percentiles in resamples: [resample, level]; resamples without a value are left out."""
    below = below[below[:, -1] > 0].astype(np.float64)
    places = [(100 * below < level * below[:, -1:]).sum(1) for level in LEVELS]
    return points[np.stack(places, axis=1)]


def _by_prompt(told: Frame, name: str) -> Groups:
    """One latency's values by prompt."""
    values = told[["prompt", name]].explode(name).dropna()
    return {prompt: own.to_numpy(dtype=np.float64) for prompt, own in values.groupby("prompt", sort=False)[name]}


def _phase_shares(told: Frame) -> dict[str, float]:
    ended = told[told.e2e.notna()]
    return _shares(
        {
            "queue": ended.queue.sum(),
            "prefill": (ended.prefilled - ended.admitted).sum(),
            "decode": (ended.finished - ended.prefilled).sum(),
        }
    )


def _stage_shares(calls: Frame) -> dict[str, float]:
    """The stages' shares. The prompts' texts became tokens before the call: that time is added to the whole."""
    if not all(calls.stages):
        return {}
    stages = pandas.DataFrame(list(calls.stages), index=calls.index).fillna(0.0)
    # Stages of the host may overlap with the device's, so that nothing is left.
    other = (calls.seconds - stages.sum(axis=1)).clip(lower=0.0).sum()
    totals = {**dict.fromkeys(STAGES, 0.0), **stages.sum().to_dict()}
    return _shares({**totals, "ingestion": totals["ingestion"] + calls.ingestion.sum(), "other": other})


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts as shares of their whole."""
    whole = sum(parts.values())
    return {name: float(value / whole) for name, value in parts.items()} if whole > 0 else {}
