"""The figures of load runs as a frame: a row per rate, method and group of requests. Functions of ``LoadRun`` alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from experiments.load.run import DONE, DROPPED, FAILED, OPEN, UNFINISHED, Frame, LoadRun
from experiments.results.limits import Terms
from experiments.results.records import PLAIN
from experiments.results.requests import goodput, spread
from experiments.results.rows import ends
from experiments.results.statistics import Bootstrap, ratio_of_sums

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "e2e")
ALL = "all"
"""The group of all requests; the others are classes, where there are several."""
LATE = 0.005
"""Seconds: a generator of load whose own delays have a 99th percentile above this is late, and what it measures is not
the load that was planned."""
CLOCKS = 1e-3
"""Seconds by which the two records of a request's stay may differ, because they are read at different moments."""
LITTLE_TOLERANCE = 0.05
"""The largest share by which the two sides of Little's law may differ: one is counted, the other timed."""
ORACLE = "OracleLength"
"""The policy that others are compared with (``LoadRun.facts``)."""
SPANS = {"tokens": ("first_token", "finished"), "whole": ("arrived", "finished")}
"""The spans of a request's life that are compared with plain decoding's."""
_REASONS = 3


def latencies(run: LoadRun) -> Frame:
    """Return the requests with their latencies in seconds.

    ``ttft`` is first token - arrived, ``engine_ttft`` first token - admitted, ``queue`` admitted - arrived, ``tpot``
    (finished - first token) / (tokens - 1) and empty with one token, ``e2e`` finished - arrived. Of requests that did
    not end well all are empty.
    """
    asked = run.requests
    done = asked.outcome == DONE
    return asked.assign(
        ttft=(asked.first_token - asked.arrived).where(done),
        engine_ttft=(asked.first_token - asked.admitted).where(done),
        queue=(asked.admitted - asked.arrived).where(done),
        tpot=((asked.finished - asked.first_token) / (asked.output_tokens - 1)).where(done & (asked.output_tokens > 1)),
        e2e=(asked.finished - asked.arrived).where(done),
    )


def figures_of(runs: Sequence[LoadRun], terms: Terms, bootstrap: Bootstrap) -> Frame:
    """Return a row per run with the group ``ALL``, and one per class of requests where there are several.

    Every row has ``method``, ``rate``, ``loop``, ``group``, ``seconds``, the requests that ``arrived`` and what became
    of them, percentiles of ``LATENCIES`` (seconds; ``ttft.p50``, ``ttft.p50_low`` …), and ``goodput`` (requests within
    all limits per second) with the share ``attained``. The rows of all requests have rates over the run's time,
    averages over time of ``running`` and ``waiting``, ``in_engine`` and what Little's law has ``expected`` of it,
    ``unused``, the share of slots and time that nothing used, what was computed for nothing, and ``times_tokens``,
    ``times_whole`` and ``times_throughput``, how many times as fast as plain decoding the spans of ``SPANS`` are, total
    over total of the requests that both have served, and ``regret``, the oracle's speed of tokens that is missed.
    """
    rows = []
    for run, compared in zip(runs, _compared(runs, bootstrap), strict=True):
        frame = latencies(run)
        rows.append({**_asked(run, frame, ALL, terms, bootstrap), **_all(run, frame), **compared})
        groups = list(frame.groupby("klass"))
        for name, part in groups if len(groups) > 1 else ():
            rows.append(_asked(run, part, str(name), terms, bootstrap))
    return pandas.DataFrame(rows)


def _asked(run: LoadRun, frame: Frame, group: str, terms: Terms, bootstrap: Bootstrap) -> dict[str, Any]:
    outcomes = frame.outcome.value_counts()
    row: dict[str, Any] = {"method": run.method, "rate": run.rate, "loop": run.loop, "group": group}
    row |= {"seconds": run.seconds, "arrived": len(frame)}
    row |= {name: int(outcomes.get(name, 0)) for name in (DONE, DROPPED, FAILED, UNFINISHED)}
    for name in LATENCIES:
        values = frame[["request", name]].dropna().rename(columns={"request": "prompt"})
        row |= {f"{name}.{part}": value for part, value in spread(values, bootstrap).items()}
    if terms.limits is not None:
        row["goodput"], row["attained"] = goodput(frame, terms.limits, arrived=len(frame), seconds=run.seconds)
    return row


def _all(run: LoadRun, frame: Frame) -> dict[str, Any]:
    done, seconds, totals = frame[frame.outcome == DONE], run.seconds or np.nan, run.totals
    tokens, rounds, accepted = int(done.output_tokens.sum()), int(frame.rounds.sum()), int(frame.accepted.sum())
    slots = run.facts.get("slots")
    row: dict[str, Any] = {
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "total_tokens_per_second": (tokens + int(done.prompt_tokens.sum())) / seconds,
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        **little(run),
        "preemptions": int(frame.preemptions.sum()),
        "dropped_tokens": int(frame.output_tokens[frame.outcome != DONE].sum()),
        "recomputed_tokens": int(frame.recomputed_tokens.sum()),
        "swapped_tokens": totals.swapped_out,
        "swap_seconds": totals.swap_seconds,
        "preempted_seconds": float(frame.preempted_seconds.sum()),
        "rejected_nodes": int(frame.nodes.sum()) - accepted,
        "saved_tokens": totals.reused,
        "hit_rate": totals.hit_rate,
        "late": run.late,
    }
    row["unused"] = max(0.0, 1 - row["running"] / slots) if slots and run.seconds else None
    return row


def _compared(runs: Sequence[LoadRun], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Compare every run with plain decoding at the same rate, of the same study where several are merged."""
    played: dict[tuple[float, str | None], dict[str, LoadRun]] = {}
    for run in runs:
        played.setdefault((run.rate, run.facts.get("study")), {})[run.facts.get("called", run.method)] = run
    rows = []
    for run in runs:
        others = played[run.rate, run.facts.get("study")]
        plain = others.get(PLAIN)
        if plain is None or plain is run:
            rows.append({})
            continue
        row: dict[str, Any] = {"times_throughput": _tokens_per_second(run) / _tokens_per_second(plain)}
        for name, span in SPANS.items():
            row[f"times_{name}"], interval = _times(run, plain, span, bootstrap)
            row |= ends(f"times_{name}", interval)
        oracle = next((other for other in others.values() if other.facts.get("policy") == ORACLE), None)
        best = None if oracle is None else _times(run, oracle, SPANS["tokens"], None)[0]
        rows.append({**row, "regret": None if best is None else 1 - best})
    return rows


def _tokens_per_second(run: LoadRun) -> float:
    return run.requests.output_tokens[run.requests.outcome == DONE].sum() / np.float64(run.seconds)


def _times(run: LoadRun, other: LoadRun, span: tuple[str, str], bootstrap: Bootstrap | None) -> tuple[Any, Any]:
    """Return how many times as fast a span of a run is as that of another run, and the interval."""
    both = run.requests.merge(other.requests, on="request", suffixes=("", "_other"))
    both = both[(both.outcome == DONE) & (both.outcome_other == DONE)]
    spans = [(both[span[1] + which] - both[span[0] + which]).to_numpy() for which in ("_other", "")]
    if not len(both) or not spans[1].sum() > 0:
        return None, None
    return float(np.asarray(ratio_of_sums(*spans))), bootstrap and bootstrap.interval(ratio_of_sums, spans)


def little(run: LoadRun) -> dict[str, float]:
    """Return the requests in the engine as averages over time, and what Little's law expects.

    ``in_engine`` is what the engine had in every turn (``running`` with a slot, ``waiting`` without one), weighted by
    time. ``expected`` is the sum of all stays (finished - submitted) over the time. They come from different records,
    so a difference means that one of them is wrong.
    """
    turns, asked = run.turns, run.requests
    if not run.seconds or turns.empty:
        return dict.fromkeys(("running", "waiting", "in_engine", "expected"), 0.0)
    begin, seconds = turns.begin.to_numpy(), turns.seconds.to_numpy()
    inside = (turns.running + turns.waiting).to_numpy()
    # Between two turns are those that neither came there nor had left; behind the last one, those that never ended.
    came = np.sort(asked.submitted.dropna())
    fresh = np.searchsorted(came, begin[1:], "right") - np.searchsorted(came, (begin + seconds)[:-1], "right")
    left = np.append((inside[1:] - fresh).clip(min=0), asked.finished.isna().sum())
    present = inside * seconds + left * (np.append(begin[1:], run.seconds) - begin - seconds).clip(min=0)
    shares = (turns[name].to_numpy() / np.maximum(inside, 1) for name in ("running", "waiting"))
    running, waiting = (float((share * present).sum() / run.seconds) for share in shares)
    stays = asked.finished.fillna(run.seconds) - asked.submitted
    expected = float(stays.sum() / run.seconds)
    return {"running": running, "waiting": waiting, "in_engine": running + waiting, "expected": expected}


def knee(frame: Frame, least: float = 0.9) -> float | None:
    """Return the highest rate of one method at which it keeps the limits for at least this share of what arrives.

    Lower rates have to do the same. None where no rate does.
    """
    kept = frame.sort_values("rate").set_index("rate").attained.fillna(0.0) >= least
    rates = kept.index[kept.cummin()]
    return float(rates[-1]) if len(rates) else None


def warnings_of(run: LoadRun, row: Mapping[str, Any]) -> list[str]:
    """Return what a reader must not miss of a run and the row of its figures."""
    said = []
    if not run.facts.get("complete", True):
        said.append(f"BROKEN OFF: {len(run.requests)} of {run.facts['planned']} requests had arrived")
    if run.loop == OPEN and run.late > LATE:
        said.append(
            f"LATE: the generator itself was late by {1000 * run.late:.1f} ms (99th percentile; {1000 * LATE:g} ms "
            f"are allowed), so the load is not the one that was planned"
        )
    counted, expected = row["in_engine"], row["expected"]
    if abs(counted - expected) > LITTLE_TOLERANCE * max(counted, expected) + CLOCKS * row["arrived"] / run.seconds:
        said.append(
            f"BROKEN TIMESTAMPS: {counted:.3f} requests were in the engine on average, and Little's law expects "
            f"{expected:.3f}"
        )
    reasons = run.requests.reason[run.requests.outcome == FAILED].value_counts()
    said += [f"{count} of {len(run.requests)} requests failed: {why}" for why, count in reasons[:_REASONS].items()]
    return said
