"""What happened to requests that arrived over time, on a real engine or in virtual time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from specdec.cache.pages import PageCounts

LOAD = "load.json"
Frame = Any
"""A ``pandas.DataFrame``: any object to the type checker, which cannot know its columns."""

DONE, DROPPED, FAILED, UNFINISHED = "done", "dropped", "failed", "unfinished"
"""How a request can end; an unfinished one was still there when the run was broken off."""
OPEN, CLOSED = "open", "closed"
"""Whether requests come whatever the engine does, or a user's next one only after the answer."""
MOMENTS = ("arrived", "submitted", "admitted", "prefilled", "first_token", "finished")
COUNTS = (
    *("prompt_tokens", "reused_tokens", "output_tokens", "recomputed_tokens"),
    *("rounds", "drafted", "nodes", "accepted", "preemptions"),
)
REQUESTS = {
    "request": "int64",
    **dict.fromkeys(("klass", "user", "outcome", "reason"), "object"),
    "priority": "int64",
    **dict.fromkeys(MOMENTS, "float64"),
    **dict.fromkeys(COUNTS, "int64"),
    "preempted_seconds": "float64",
}
"""The columns of ``LoadRun.requests`` and their types."""
TURNS = {
    **dict.fromkeys(("begin", "seconds"), "float64"),
    **dict.fromkeys(("prefill_tokens", "rows", "nodes", "depth", "committed"), "int64"),
    **dict.fromkeys(("running", "waiting", "free_pages", "preempted"), "int64"),
}
"""The columns of ``LoadRun.turns`` and their types."""


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """One method under one load.

    Attributes:
        rate: Requests per second that were planned; in a closed loop the number of users.
        loop: ``OPEN`` or ``CLOSED``.
        seconds: From the first planned arrival to the last token.
        requests: A row per request that arrived (``REQUESTS``), times in seconds since the run began, NaN for what
            never happened; of a real engine also its ``tokens``.
        turns: A row per turn of the engine (``TURNS``); ``running`` requests have a slot during it, and
            ``waiting`` ones none; ``free_pages`` is -1 where every slot has its own row.
        totals: What the caches and preemption did.
        late: The 99th percentile of the delays that the generator of load has caused itself, in seconds: how much later
            than planned a request was submitted, while no turn was running.
        facts: What else should be known: slots, pages, how many were planned, what is virtual.
    """

    method: str
    rate: float
    loop: str
    seconds: float
    requests: Frame
    turns: Frame
    totals: PageCounts = field(default_factory=PageCounts)
    late: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into a folder: two tables as Parquet, the rest as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOAD).unlink(missing_ok=True)  # it comes last: without it there is no run
        rest = {**vars(self), "totals": asdict(self.totals)}
        for name in ("requests", "turns"):
            rest.pop(name).to_parquet(folder / f"{name}.parquet", index=False)
        (folder / LOAD).write_text(json.dumps(rest, indent=1, default=str) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "LoadRun":
        """Return what ``save`` has written."""
        rest = json.loads((folder / LOAD).read_text(encoding="utf-8"))
        tables = {name: pandas.read_parquet(folder / f"{name}.parquet") for name in ("requests", "turns")}
        return cls(**{**rest, **tables, "totals": PageCounts(**rest["totals"])})


def load_runs(folder: Path) -> list[LoadRun]:
    """Return the runs that a study has written into its folder, by rate and method; none where it is no such folder."""
    runs = [LoadRun.load(path.parent) for path in folder.glob(f"*/{LOAD}")]
    return sorted(runs, key=lambda run: (run.rate, run.method))


def typed(rows: Any, kinds: Mapping[str, str]) -> Frame:
    """Return rows, or columns, as a table with these columns; what is missing is 0, and a moment that is, NaN."""
    frame: Frame = pandas.DataFrame(rows)
    for name, kind in kinds.items():
        if name not in frame:
            frame[name] = np.nan if name in MOMENTS else "" if kind == "object" else 0
    return frame[list(kinds)].astype({name: kind for name, kind in kinds.items() if kind != "object"})


def pooled(runs: Sequence[LoadRun]) -> LoadRun:
    """Return the runs of one method at one rate with several seeds as one, each behind the one before."""
    if len(runs) == 1:
        return runs[0]
    requests, turns, since, count = [], [], 0.0, 0
    for run in runs:
        moved = {name: run.requests[name] + since for name in MOMENTS}
        requests.append(run.requests.assign(**moved, request=run.requests.request + count))
        turns.append(run.turns.assign(begin=run.turns.begin + since))
        since, count = since + run.seconds, int(requests[-1].request.max()) + 1
    totals = {one.name: sum(getattr(run.totals, one.name) for run in runs) for one in fields(PageCounts)}
    return replace(
        runs[0],
        seconds=since,
        requests=pandas.concat(requests, ignore_index=True),
        turns=pandas.concat(turns, ignore_index=True),
        totals=PageCounts(**totals),
        facts={**runs[0].facts, "seeds": len(runs)},
    )
