"""What happened to requests that arrived over time, on a real engine or a virtual one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas

LOAD = "load.json"
Frame = Any
"""A ``pandas.DataFrame``: any object to the type checker, which cannot know its columns."""

DONE, DROPPED, FAILED, UNFINISHED = "done", "dropped", "failed", "unfinished"
"""How a request can end; an unfinished one was still there when the run was broken off."""
OPEN, CLOSED = "open", "closed"
"""Whether requests come whatever the engine does, or a user's next one only after the answer."""
MOMENTS = ("arrived", "submitted", "admitted", "prefilled", "first_token", "finished")
TOKENS = ("prompt_tokens", "reused_tokens", "output_tokens", "recomputed_tokens")
COUNTS = ("rounds", "drafted", "nodes", "accepted", "preemptions")
WORDS = ("klass", "user", "outcome", "reason")


REQUESTS = {
    "request": "int64",
    **dict.fromkeys(WORDS, "object"),
    "priority": "int64",
    **dict.fromkeys(MOMENTS, "float64"),
    **dict.fromkeys((*TOKENS, *COUNTS), "int64"),
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
class Totals:
    """What one run did in all, in tokens unless it says otherwise.

    Attributes:
        queried: Tokens of admitted requests that could have been found in the cache.
        reused: Those that were.
        recomputed: Tokens that were prefilled again after preemptions.
        preempted: Requests that lost their slot, counted as often as they did.
        swapped_out: Tokens whose keys and values went to the host's memory.
        swap_seconds: Seconds of the ways there and back.
    """

    queried: int = 0
    reused: int = 0
    recomputed: int = 0
    preempted: int = 0
    swapped_out: int = 0
    swap_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """One method under one load.

    Attributes:
        rate: Requests per second that were planned; in a closed loop the number of users.
        loop: ``OPEN`` or ``CLOSED``.
        seconds: From the first planned arrival to the last token.
        requests: A row per request that arrived (``REQUESTS``), times in seconds since the run began, NaN for what
            never happened.
        turns: A row per turn of the engine (``TURNS``); ``running`` requests have a slot during it, and
            ``waiting`` ones none; ``free_pages`` is -1 where every slot has its own row.
        totals: What the caches and preemption did.
        late: The 99th percentile of the delays that the generator of load has caused itself, in seconds: how much later
            than planned a request was submitted, while no turn was running.
        facts: What else should be known: machine, model, schedule, what is virtual.
    """

    method: str
    rate: float
    loop: str
    seconds: float
    requests: Frame
    turns: Frame
    totals: Totals = Totals()
    late: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into a folder: two tables as Parquet, the rest as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOAD).unlink(missing_ok=True)  # it comes last: without it there is no run
        self.requests.to_parquet(folder / "requests.parquet", index=False)
        self.turns.to_parquet(folder / "turns.parquet", index=False)
        rest = {name: value for name, value in vars(self).items() if name not in ("requests", "turns")}
        text = json.dumps({**rest, "totals": asdict(self.totals)}, indent=1, default=str)
        (folder / LOAD).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "LoadRun":
        """Return what ``save`` has written."""
        rest = json.loads((folder / LOAD).read_text(encoding="utf-8"))
        tables = {name: pandas.read_parquet(folder / f"{name}.parquet") for name in ("requests", "turns")}
        return cls(**{**rest, **tables, "totals": Totals(**rest["totals"])})


def load_runs(folder: Path) -> list[LoadRun]:
    """Return the runs that a study has written into its folder, by rate and method; none where it is no such folder."""
    found = [LoadRun.load(path.parent) for path in folder.glob(f"*/{LOAD}")]
    return sorted(found, key=lambda run: (run.rate, run.method))


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
    requests, turns, since = [], [], 0.0
    for run in runs:
        moved = run.requests.copy()
        for name in MOMENTS:
            moved[name] += since
        later = run.turns.copy()
        later["begin"] += since
        moved["request"] += 0 if not requests else int(requests[-1].request.max()) + 1
        requests.append(moved)
        turns.append(later)
        since += run.seconds
    totals = Totals(**{name: sum(getattr(run.totals, name) for run in runs) for name in vars(Totals())})
    return replace(
        runs[0],
        seconds=since,
        requests=pandas.concat(requests, ignore_index=True),
        turns=pandas.concat(turns, ignore_index=True),
        totals=totals,
        facts={**runs[0].facts, "seeds": len(runs)},
    )
