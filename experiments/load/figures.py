"""The figures of load runs as a frame: a row per rate, method and group of requests. Functions of ``LoadRun`` alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas

from experiments.load.run import DONE, DROPPED, FAILED, OPEN, UNFINISHED, LoadRun
from experiments.results.frame import Frame
from experiments.results.limits import Terms
from experiments.results.records import PLAIN
from experiments.results.requests import goodput, spread
from experiments.results.rows import ends
from experiments.results.statistics import Bootstrap, ratio_of_sums

LATENCIES = ("ttft", "queue", "tpot", "e2e")
ALL = "all"
"""The group of all requests; the others are classes, where there are several."""
LATE = 0.005
"""Seconds: a generator of load whose own delays have a 99th percentile above this is late, and what it measures is not
the load that was planned."""
ORACLE = "OracleLength"
"""The policy that others are compared with (``LoadRun.facts``)."""
SPANS = {"tokens": ("first_token", "finished"), "whole": ("arrived", "finished")}
"""The spans of a request's life that are compared with plain decoding's."""


def latencies(run: LoadRun) -> Frame:
    """Return the requests with their latencies in seconds.

    ``ttft`` is first token - arrived, ``queue`` admitted - arrived, ``tpot`` (finished - first token) / (tokens - 1)
    and empty with one token, ``e2e`` finished - arrived. Of requests that did not end well all are empty.
    """
    asked = run.requests
    done = asked.outcome == DONE
    return asked.assign(
        ttft=(asked.first_token - asked.arrived).where(done),
        queue=(asked.admitted - asked.arrived).where(done),
        tpot=((asked.finished - asked.first_token) / (asked.output_tokens - 1)).where(done & (asked.output_tokens > 1)),
        e2e=(asked.finished - asked.arrived).where(done),
    )


def figures_of(runs: Sequence[LoadRun], terms: Terms, bootstrap: Bootstrap) -> Frame:
    """Return a row per run with the group ``ALL``, and one per class of requests where there are several.

    Every row has percentiles of ``LATENCIES`` (seconds; ``ttft.p50``, ``ttft.p50_low`` …), ``goodput`` (requests within
    all limits per second) and ``attained`` (their share of those that arrived). The rows of all requests have the
    requests ``running`` and ``waiting`` on average over time, ``unused``, the share of slots and time that nothing
    used, what was computed for nothing, and ``times_tokens``, ``times_whole`` and ``times_throughput``: how many times
    as fast as plain decoding the spans of ``SPANS`` are, total over total of the requests that both have served.
    ``regret`` is the oracle's speed of tokens that is missed.
    """
    rows = []
    for run in runs:
        frame = latencies(run)
        beside = [one for one in runs if one.rate == run.rate and one.facts.get("study") == run.facts.get("study")]
        compared = _compared(run, beside, bootstrap)
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
    done, turns, slots = frame[frame.outcome == DONE], run.turns, run.facts.get("slots")
    seconds, rounds, accepted = run.seconds or np.nan, int(frame.rounds.sum()), int(frame.accepted.sum())
    running, waiting = (float((turns[name] * turns.seconds).sum() / seconds) for name in ("running", "waiting"))
    return {
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": _tokens_per_second(run),
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "running": running,
        "waiting": waiting,
        "unused": max(0.0, 1 - running / slots) if slots and run.seconds else None,
        "preemptions": int(frame.preemptions.sum()),
        "dropped_tokens": int(frame.output_tokens[frame.outcome != DONE].sum()),
        "recomputed_tokens": int(frame.recomputed_tokens.sum()),
        "swapped_tokens": run.totals.swapped_out,
        "swap_seconds": run.totals.swap_seconds,
        "rejected_nodes": int(frame.nodes.sum()) - accepted,
        "saved_tokens": run.totals.reused,
        "hit_rate": run.totals.hit_rate,
        "late": run.late,
    }


def _compared(run: LoadRun, others: Sequence[LoadRun], bootstrap: Bootstrap) -> dict[str, Any]:
    """Compare a run with plain decoding under the same load."""
    plain = next((other for other in others if other.facts.get("called", other.method) == PLAIN), None)
    if plain is None or plain is run:
        return {}
    row: dict[str, Any] = {"times_throughput": _tokens_per_second(run) / _tokens_per_second(plain)}
    for name, span in SPANS.items():
        row[f"times_{name}"], interval = _times(run, plain, span, bootstrap)
        row |= ends(f"times_{name}", interval)
    oracle = next((other for other in others if other.facts.get("policy") == ORACLE), None)
    best = None if oracle is None else _times(run, oracle, SPANS["tokens"], None)[0]
    return {**row, "regret": None if best is None else 1 - best}


def _tokens_per_second(run: LoadRun) -> float:
    return float(run.requests.output_tokens[run.requests.outcome == DONE].sum() / np.float64(run.seconds or np.nan))


def _times(run: LoadRun, other: LoadRun, span: tuple[str, str], bootstrap: Bootstrap | None) -> tuple[Any, Any]:
    """Return how many times as fast a span of a run is as that of another run, and the interval."""
    both = run.requests.merge(other.requests, on="request", suffixes=("", "_other"))
    both = both[(both.outcome == DONE) & (both.outcome_other == DONE)]
    spans = [(both[span[1] + which] - both[span[0] + which]).to_numpy() for which in ("_other", "")]
    if not len(both) or not spans[1].sum() > 0:
        return None, None
    return float(np.asarray(ratio_of_sums(*spans))), bootstrap and bootstrap.interval(ratio_of_sums, spans)


def knee(frame: Frame, least: float = 0.9) -> float | None:
    """Return the highest rate of one method at which it keeps the limits for at least this share of what arrives.

    Lower rates have to do the same. None where no rate does.
    """
    kept = frame.sort_values("rate").set_index("rate").attained.fillna(0.0) >= least
    rates = kept.index[kept.cummin()]
    return float(rates[-1]) if len(rates) else None


def warnings_of(run: LoadRun) -> list[str]:
    """Return the sentences about a run that a reader must not miss."""
    sentences = []
    if not run.facts.get("complete", True):
        sentences.append(f"BROKEN OFF: {len(run.requests)} of {run.facts['planned']} requests had arrived")
    if run.loop == OPEN and run.late > LATE:
        sentences.append(
            f"LATE: the generator itself was late by {1000 * run.late:.1f} ms (99th percentile; {1000 * LATE:g} ms "
            f"are allowed), so the load is not the one that was planned"
        )
    reasons = run.requests.reason[run.requests.outcome == FAILED].value_counts().head(3)
    sentences += [f"{count} of {len(run.requests)} requests failed: {why}" for why, count in reasons.items()]
    return sentences
