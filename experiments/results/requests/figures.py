"""The figures of requests of one method, from its records."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results.records import Record
from experiments.results.requests.concurrency import Concurrency, concurrency
from experiments.results.requests.cost import device_hours_per_million, joules_per_token, price_per_million
from experiments.results.requests.limits import Goodput, Limits, goodput
from experiments.results.requests.spread import Spread, spreads
from experiments.results.requests.timeline import Timeline, timeline_of
from experiments.results.statistics import Bootstrap
from experiments.results.timing import STAGES

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "chunk_gap", "token_gap", "e2e")
"""The figures of ``RequestFigures`` that are distributions over requests."""

RATES = (
    "requests_per_second",
    "total_tokens_per_second",
    "user_tokens_per_second",
    "device_hours_per_million_tokens",
    "price_per_million_tokens",
    "joules_per_token",
)
"""The figures of ``RequestFigures`` that are single numbers, and columns of the frame ``runs`` by these names."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a user asks of requests.

    Attributes:
        limits: Limits on their latencies; None if there are none.
        price: What the device costs per hour, in any currency; None if it is not given.
    """

    limits: Limits | None = None
    price: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Terms":
        """Returns the terms of a run's configuration; one of an older version has none."""
        return cls(limits=Limits.of(config.get("sla")), price=config.get("price"))


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """What the users of one method felt, at one temperature. Times are in seconds.

    Attributes:
        requests: Requests that ended well.
        ttft, engine_ttft, queue, tpot, e2e: See ``Timeline``; their distributions over requests.
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
        device_hours_per_million_tokens: Hours of the device for a million output tokens.
        price_per_million_tokens: What they cost; None without a price.
        joules_per_token: Energy per output token; None if it was not measured.
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


def request_figures(records: Sequence[Record], terms: Terms, bootstrap: Bootstrap) -> RequestFigures | None:
    """Returns the figures of one method at one temperature; None if no request ended well and was timed.

    Args:
        records: The method's records. One that failed counts as arrived, and in no latency.
        terms: Limits and price.
        bootstrap: Settings of the intervals.
    """
    calls = _by_call(records)
    good = [record for rows in calls for record in rows if not record.failed]
    seconds = sum(rows[0].seconds or 0.0 for rows in calls)
    if not good or not seconds:
        return None
    timed = [(record, line) for record in good if (line := timeline_of(record)) is not None]
    lines = [line for _, line in timed]
    in_calls = [
        ([line for row in rows if (line := timeline_of(row)) is not None], rows[0].seconds or 0.0) for rows in calls
    ]
    spread = spreads({name: _groups(timed, name) for name in LATENCIES}, bootstrap)
    tokens = sum(len(record.token_ids) for record in good)
    per_second = tokens / seconds
    tpot = spread["tpot"]
    limits = terms.limits
    joules = [rows[0].joules for rows in calls]
    return RequestFigures(
        requests=len(good),
        **spread,
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=per_second,
        total_tokens_per_second=(tokens + sum(record.prompt_tokens for record in good)) / seconds,
        user_tokens_per_second=1 / tpot.p50 if tpot is not None and tpot.p50 else None,
        concurrency=concurrency(in_calls) if len(lines) == len(good) else None,
        disordered=sum(not line.in_order for line in lines),
        goodput=None if limits is None or not lines else goodput(lines, limits, arrived=len(records), seconds=seconds),
        device_hours_per_million_tokens=device_hours_per_million(per_second),
        price_per_million_tokens=price_per_million(per_second, terms.price),
        joules_per_token=joules_per_token(_sum(joules), tokens, seconds),
        phase_shares=_shares([line.phases for line in lines]),
        stage_shares=_stage_shares(calls),
    )


def _by_call(records: Sequence[Record]) -> list[list[Record]]:
    """The records of every call of the engine that was timed."""
    calls: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.seconds is not None:
            calls.setdefault((record.batch, record.turn), []).append(record)
    return list(calls.values())


def _groups(timed: Sequence[tuple[Record, Timeline]], name: str) -> dict[Hashable, list[float]]:
    """One latency's values by prompt."""
    groups: dict[Hashable, list[float]] = {}
    for record, line in timed:
        own = groups.setdefault(record.prompt, [])
        if name == "chunk_gap":
            own += line.chunk_gaps
        elif name == "token_gap":
            own += line.token_gaps
        elif (value := getattr(line, name)) is not None:
            own.append(value)
    return groups


def _shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What is divided into parts, as shares of the whole."""
    totals: dict[str, float] = {}
    for each in parts:
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()} if whole > 0 else {}


def _stage_shares(calls: Sequence[Sequence[Record]]) -> dict[str, float]:
    """The stages' shares. The prompts' texts became tokens before the call: that time is added to the whole."""
    parts: list[dict[str, float]] = []
    for rows in calls:
        stages = dict(rows[0].stage_seconds)
        if not stages:
            return {}
        # Stages of the host may overlap with the device's, so that nothing is left.
        other = max(0.0, (rows[0].seconds or 0.0) - sum(stages.values()))
        before = sum(record.ingestion or 0.0 for record in rows)
        stages["ingestion"] = stages.get("ingestion", 0.0) + before
        parts.append({**{name: stages.get(name, 0.0) for name in STAGES}, **stages, "other": other})
    return _shares(parts)


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if any value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
