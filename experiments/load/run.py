"""What happened to requests that arrived over time: on our engine, in virtual time, or by another load generator."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from experiments.results.frame import Frame
from experiments.results.origin import MANIFEST
from specdec.cache.pages import PageCounts

LOAD = "load.json"
DONE, DROPPED, FAILED, UNFINISHED = "done", "dropped", "failed", "unfinished"
"""How a request can end; an unfinished one was still there when the run was broken off."""
OPEN, CLOSED = "open", "closed"
"""Whether requests come whatever the engine does, or a user's next one only after the answer."""
MOMENTS = ("arrived", "admitted", "first_token", "finished")
COUNTS = (
    *("prompt_tokens", "reused_tokens", "output_tokens", "recomputed_tokens"),
    *("rounds", "drafted", "nodes", "accepted", "preemptions"),
)
REQUESTS = {
    "request": "int64",
    **dict.fromkeys(("klass", "outcome", "reason"), "object"),
    "priority": "int64",
    **dict.fromkeys(MOMENTS, "float64"),
    **dict.fromkeys(COUNTS, "int64"),
}
"""The columns of ``LoadRun.requests`` and their types."""
TURNS = {
    **dict.fromkeys(("begin", "seconds"), "float64"),
    **dict.fromkeys(("prefill_tokens", "rows", "running", "waiting"), "int64"),
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
        turns: A row per turn of the engine (``TURNS``): tokens that it planned to prefill, rows of its round, and the
            requests ``running`` with a slot and ``waiting`` without one.
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
    """Return the runs that a study has written into its folder; none where it is no such folder."""
    return [LoadRun.load(path.parent) for path in sorted(folder.glob(f"*/{LOAD}"))]


def typed(rows: Any, kinds: Mapping[str, str]) -> Frame:
    """Return rows, or columns, as a table with these columns; what is missing is 0, and a moment that is, NaN."""
    frame: Frame = pandas.DataFrame(rows)
    for name, kind in kinds.items():
        if name not in frame:
            frame[name] = np.nan if name in MOMENTS else "" if kind == "object" else 0
    return frame[list(kinds)].astype({name: kind for name, kind in kinds.items() if kind != "object"})


# ---------------------------------------------------------------- results of other load generators


def import_results(file: Path, folder: Path) -> Path:
    """Write the result of ``vllm bench serve --save-detailed`` into ``folder`` as a study, and return it.

    Raises ValueError: the file is none, or says nothing of single requests.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        model, run = result["model_id"], _imported(result, file.stem)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is no result of another load generator ({type(error).__name__}: {error}): give the JSON of "
            f"vllm bench serve --save-result --save-detailed"
        ) from error
    run.save(folder / f"{run.method}_{run.rate:g}")
    facts = {"loop": run.loop, "target": {"name": model}, "device": f"as in {file.name}", "title": model}
    config = {"arrival": {}, "imported": str(file)}
    (folder / MANIFEST).write_text(json.dumps({"config": config, **facts}), encoding="utf-8")
    return folder


def _imported(result: Mapping[str, Any], method: str) -> LoadRun:
    names = {"start_times": "arrived", "input_lens": "prompt_tokens", "output_lens": "output_tokens"}
    frame: Frame = pandas.DataFrame({name: result[name] for name in (*names, "errors", "ttfts")}).rename(columns=names)
    first = frame.arrived + frame.ttfts
    frame = frame.assign(
        request=range(len(frame)),
        klass="all",
        outcome=np.where(frame.errors.astype(bool), FAILED, DONE),
        reason=frame.errors,
        admitted=frame.arrived,
        first_token=first,
        finished=first + [sum(gaps) for gaps in result["itls"]],
    )
    requests = typed(frame, REQUESTS)
    requests[list(MOMENTS)] -= requests.arrived.min()
    rate = float(result["request_rate"])
    users = result.get("max_concurrency") if rate == float("inf") else None
    return LoadRun(
        method=method,
        rate=float(users or rate),
        loop=CLOSED if users else OPEN,
        seconds=float(requests.finished.max()),
        requests=requests,
        turns=typed([], TURNS),
        facts={"complete": True, "planned": len(requests)},
    )
