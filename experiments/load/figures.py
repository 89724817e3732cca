"""The figures of a load run: latencies, goodput, concurrency, what was wasted. Functions of a ``LoadRun`` alone."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas

from experiments.load.run import DONE, DROPPED, FAILED, OPEN, UNFINISHED, Frame, LoadRun
from experiments.results.frame import Figures
from experiments.results.limits import Terms
from experiments.results.requests import goodput, spread
from experiments.results.statistics import Bootstrap

LATENCIES = ("ttft", "engine_ttft", "queue", "tpot", "e2e")
LATE = 0.005
"""Seconds: a generator of load whose own delays have a 99th percentile above this is late, and what it measures is not
the load that was planned."""
CLOCKS = 1e-3
"""Seconds by which the two records of a request's stay may differ, because they are read at different moments."""
LITTLE_TOLERANCE = 0.05
"""The largest share by which the two sides of Little's law may differ: one is counted, the other timed."""
_PARTS = 80
_REASONS = 3


def latencies(run: LoadRun) -> Frame:
    """Return the requests with their latencies in seconds, as SERVING's definitions have them.

    ``ttft`` is first token - arrived, ``engine_ttft`` first token - admitted, ``queue`` admitted - arrived, ``tpot``
    (finished - first token) / (tokens - 1) and empty with one token, ``e2e`` finished - arrived. Of requests that did
    not end well all are empty.
    """
    asked = run.requests
    done = asked.outcome == DONE
    several = done & (asked.output_tokens > 1)
    return asked.assign(
        ttft=(asked.first_token - asked.arrived).where(done),
        engine_ttft=(asked.first_token - asked.admitted).where(done),
        queue=(asked.admitted - asked.arrived).where(done),
        tpot=((asked.finished - asked.first_token) / (asked.output_tokens - 1)).where(several),
        e2e=(asked.finished - asked.arrived).where(done),
    )


def figures_of(run: LoadRun, terms: Terms, bootstrap: Bootstrap, *, slots: int | None = None) -> Figures:
    """Return the figures of a run.

    Args:
        slots: Requests that the engine decodes together; None where nobody knows.

    Returns:
        ``arrived`` requests and what became of them; ``LATENCIES`` (``experiments.results.requests.spread``); rates
        over the run's time; ``goodput``; ``running`` and ``waiting`` as averages over time; ``in_engine`` and what
        Little's law has ``expected`` of it; ``unused``, the share of slots and time that nothing used; tokens that
        were computed for nothing (``wasted``); ``hit_rate`` of the caches, ``late``, ``outputs``
        (``experiments.load.agreement``), and ``warnings``.
    """
    frame = latencies(run)
    outcomes = frame.outcome.value_counts()
    done, seconds = frame[frame.outcome == DONE], run.seconds
    balance, totals = little(run), run.totals
    tokens, rounds = int(done.output_tokens.sum()), int(frame.rounds.sum())
    accepted = int(frame.accepted.sum())
    lost = frame[frame.outcome != DONE]
    found = Figures(
        method=run.method,
        rate=run.rate,
        loop=run.loop,
        seconds=seconds,
        arrived=len(frame),
        done=int(outcomes.get(DONE, 0)),
        dropped=int(outcomes.get(DROPPED, 0)),
        failed=int(outcomes.get(FAILED, 0)),
        unfinished=int(outcomes.get(UNFINISHED, 0)),
        **_spreads(done, bootstrap),
        requests_per_second=len(done) / seconds if seconds else None,
        output_tokens_per_second=tokens / seconds if seconds else None,
        total_tokens_per_second=(tokens + int(done.prompt_tokens.sum())) / seconds if seconds else None,
        mean_acceptance_length=1 + accepted / rounds if rounds else None,
        goodput=_goodput(frame, terms, seconds),
        running=balance.running,
        waiting=balance.waiting,
        in_engine=balance.counted,
        expected=balance.expected,
        unused=None if not slots or not seconds else max(0.0, 1 - balance.running / slots),
        preemptions=int(frame.preemptions.sum()),
        wasted=Figures(
            dropped_tokens=int(lost.output_tokens.sum()),
            recomputed_tokens=int(frame.recomputed_tokens.sum()),
            swapped_tokens=totals.swapped_out,
            swap_seconds=totals.swap_seconds,
            preempted_seconds=float(frame.preempted_seconds.sum()),
            rejected_nodes=int(frame.nodes.sum()) - accepted,
        ),
        saved_tokens=totals.reused,
        hit_rate=totals.reused / totals.queried if totals.queried else None,
        late=run.late,
        outputs=Figures(run.facts["outputs"]) if run.facts.get("outputs") else None,
        warnings=[],
    )
    whole = run.facts.get("complete", True)
    broken_off = [] if whole else [f"BROKEN OFF: {len(frame)} of {run.facts['planned']} requests had arrived"]
    return Figures(**{**found, "warnings": [*broken_off, *_warnings(found), *_failures(frame)]})


def by_class(run: LoadRun, terms: Terms, bootstrap: Bootstrap) -> Mapping[str, Figures]:
    """Return arrived requests, latencies and goodput of every class, as long requests delay short ones."""
    frame = latencies(run)
    return {
        str(name): Figures(
            arrived=len(own),
            done=int((own.outcome == DONE).sum()),
            **_spreads(own[own.outcome == DONE], bootstrap),
            goodput=_goodput(own, terms, run.seconds),
        )
        for name, own in frame.groupby("klass")
    }


def _goodput(frame: Frame, terms: Terms, seconds: float) -> Figures | None:
    return None if terms.limits is None else goodput(frame, terms.limits, arrived=len(frame), seconds=seconds)


def _spreads(done: Frame, bootstrap: Bootstrap) -> dict[str, Figures | None]:
    named = done.rename(columns={"request": "prompt"})
    return {name: spread(named[["prompt", name]].dropna(), bootstrap) for name in LATENCIES}


def little(run: LoadRun) -> Figures:
    """Return the requests in the engine as averages over time, and what Little's law expects.

    ``counted`` is what the engine had in every turn (``running`` with a slot, ``waiting`` without one), weighted by
    time. ``expected`` is the sum of all stays (finished - submitted) over the time. They come from different records,
    so a difference means that one of them is wrong.
    """
    turns, asked = run.turns, run.requests
    if not run.seconds or turns.empty:
        return Figures(running=0.0, waiting=0.0, counted=0.0, expected=0.0)
    begin, seconds = turns.begin.to_numpy(), turns.seconds.to_numpy()
    inside = (turns.running + turns.waiting).to_numpy()
    # Between two turns are those that neither came there nor had left; behind the last one, those that never ended.
    came = np.sort(asked.submitted.dropna())
    fresh = np.searchsorted(came, begin[1:], "right") - np.searchsorted(came, (begin + seconds)[:-1], "right")
    left = np.append((inside[1:] - fresh).clip(min=0), asked.finished.isna().sum())
    present = inside * seconds + left * (np.append(begin[1:], run.seconds) - begin - seconds).clip(min=0)
    shares = (turns[name].to_numpy() / np.maximum(inside, 1) for name in ("running", "waiting"))
    running, waiting = ((share * present).sum() / run.seconds for share in shares)
    stays = asked.finished.fillna(run.seconds) - asked.submitted
    return Figures(
        running=float(running),
        waiting=float(waiting),
        counted=float(running + waiting),
        expected=float(stays.sum() / run.seconds),
    )


def in_flight(run: LoadRun, parts: int = _PARTS) -> Frame:
    """Return the requests with and without a slot, as averages over equal parts of the run's time."""
    edges = np.linspace(0.0, run.seconds, parts + 1)
    end = run.requests.finished.fillna(run.seconds)

    def level(since: Frame, until: Frame) -> np.ndarray:
        starts, ends = since.to_numpy()[:, None], until.to_numpy()[:, None]
        return np.nan_to_num((np.minimum(ends, edges[1:]) - np.maximum(starts, edges[:-1])).clip(min=0)).sum(0)

    asked, width = run.requests, run.seconds / parts
    entered = asked.admitted.fillna(end)
    return pandas.DataFrame(
        {
            "time": (edges[:-1] + edges[1:]) / 2,
            "running": level(asked.admitted, end) / width,
            "waiting": level(asked.arrived, entered) / width,
        }
    )


def knee(figures: Sequence[Figures], least: float = 0.9) -> float | None:
    """Return the highest rate of one method at which it keeps the limits for at least this share of what arrives.

    Lower rates have to do the same. None where no rate does, or where there are no limits.
    """
    best = None
    for each in sorted(figures, key=lambda found: found.rate):
        if each.goodput is None or (each.goodput.attainment or 0.0) < least:
            break
        best = each.rate
    return best


def _warnings(found: Figures) -> list[str]:
    said = []
    if found.loop == OPEN and found.late > LATE:
        said.append(
            f"LATE: the generator itself was late by {1000 * found.late:.1f} ms (99th percentile; {1000 * LATE:g} ms "
            f"are allowed), so the load is not the one that was planned"
        )
    counted, expected = found.in_engine, found.expected
    apart = LITTLE_TOLERANCE * max(counted, expected) + CLOCKS * found.arrived / (found.seconds or 1.0)
    if abs(counted - expected) > apart:
        said.append(
            f"BROKEN TIMESTAMPS: {counted:.3f} requests were in the engine on average, and Little's law expects "
            f"{expected:.3f}"
        )
    return said


def _failures(frame: Frame) -> list[str]:
    """Return why requests failed, the most frequent reasons first."""
    reasons = frame.reason[frame.outcome == FAILED].value_counts()
    more = [f"{reasons[_REASONS:].sum()} requests failed for other reasons"] if len(reasons) > _REASONS else []
    return [f"{count} of {len(frame)} requests failed: {why}" for why, count in reasons[:_REASONS].items()] + more
