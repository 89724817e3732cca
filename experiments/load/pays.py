"""Whether speculation pays under load: every method against plain decoding, and against the oracle, request by request.

All play the same requests at the same moments, so they are compared in pairs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.load.figures import latencies
from experiments.load.run import DONE, LoadRun
from experiments.results.frame import Figures
from experiments.results.records import PLAIN
from experiments.results.statistics import Bootstrap, ratio_of_sums

ORACLE = "OracleLength"
"""The policy that others are compared with (``LoadRun.facts``)."""
SPANS = {"tokens": ("first_token", "finished"), "whole": ("arrived", "finished")}
"""The spans of a request's life that are compared: its tokens behind the first one, and all of it."""


def pays(runs: Sequence[LoadRun], bootstrap: Bootstrap) -> list[Figures]:
    """Return a row per rate and method beside plain decoding; none where that was not played.

    Returns:
        ``method``, ``rate``; ``tokens`` and ``whole``, how many times as fast as plain decoding those spans are, total
        over total of the requests that both have served, with ``..._interval`` over requests; ``throughput``, of output
        tokens per second; ``regret``, the share of the oracle's speed of tokens that is missed, None without one.
    """
    played: dict[tuple[float, str | None], dict[str, LoadRun]] = {}
    for run in runs:
        place = (run.rate, run.facts.get("study"))  # where studies are merged, beside plain decoding of the same one
        played.setdefault(place, {})[run.facts.get("called", run.method)] = run
    found = []
    for (rate, _), own in played.items():
        oracle = next((run for run in own.values() if run.facts.get("policy") == ORACLE), None)
        for name, run in own.items() if PLAIN in own else ():
            if name == PLAIN:
                continue
            speeds = _speeds(run, own[PLAIN], bootstrap)
            best = None if oracle is None else _speeds(run, oracle, None)["tokens"]
            rates = [_tokens(each) / each.seconds for each in (run, own[PLAIN])]
            regret = None if best is None else 1 - best
            found.append(Figures(method=run.method, rate=rate, **speeds, throughput=rates[0] / rates[1], regret=regret))
    return found


def _tokens(run: LoadRun) -> int:
    return int(run.requests.output_tokens[run.requests.outcome == DONE].sum())


def _speeds(run: LoadRun, other: LoadRun, bootstrap: Bootstrap | None) -> dict[str, Any]:
    """Return how many times as fast a run is as another one."""
    both = latencies(run).merge(latencies(other), on="request", suffixes=("", "_other"))
    both = both[(both.outcome == DONE) & (both.outcome_other == DONE)]
    found: dict[str, Any] = {}
    for name, (begin, end) in SPANS.items():
        spans = [(both[end + which] - both[begin + which]).to_numpy() for which in ("_other", "")]
        known = bool(len(both)) and spans[1].sum() > 0
        found[name] = float(np.asarray(ratio_of_sums(*spans))) if known else None
        if bootstrap is not None:
            found[f"{name}_interval"] = bootstrap.interval(ratio_of_sums, spans) if known else None
    return found
