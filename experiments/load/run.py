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
    """Write the runs of a result file into ``folder`` as a study, and return it.

    Raises ValueError: the file is none of theirs, or says nothing of single requests.
    """
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        model, runs = (_guidellm if "benchmarks" in told else _vllm)(told, file.stem)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is no result of another load generator ({type(error).__name__}: {error}): give the JSON of "
            f"vllm bench serve --save-result --save-detailed, or GuideLLM's benchmarks.json"
        ) from error
    for run in runs:
        run.save(folder / f"{run.method}_{run.rate:g}")
    facts = {"loop": runs[0].loop, "target": {"name": model}, "device": f"as in {file.name}", "title": model}
    config = {"arrival": {}, "imported": str(file)}
    (folder / MANIFEST).write_text(json.dumps({"config": config, **facts}), encoding="utf-8")
    return folder


def _vllm(told: Mapping[str, Any], method: str) -> tuple[str, list[LoadRun]]:
    names = {"start_times": "arrived", "input_lens": "prompt_tokens", "output_lens": "output_tokens"}
    frame: Frame = pandas.DataFrame({name: told[name] for name in (*names, "errors", "ttfts")}).rename(columns=names)
    frame = frame.assign(reason=frame.errors, outcome=[FAILED if error else DONE for error in frame.errors])
    frame["first_token"] = frame.arrived + frame.ttfts
    frame["finished"] = frame.first_token + [sum(gaps) for gaps in told["itls"]]
    rate = float(told["request_rate"])
    return told["model_id"], [_run(method, frame, rate, told.get("max_concurrency") if rate == float("inf") else None)]


def _guidellm(told: Mapping[str, Any], method: str) -> tuple[str, list[LoadRun]]:
    runs = []
    for benchmark in told["benchmarks"]:
        outcomes = {"successful": DONE, "errored": FAILED, "incomplete": UNFINISHED}
        rows = [{**row, "outcome": ours} for name, ours in outcomes.items() for row in benchmark["requests"][name]]
        frame: Frame = pandas.DataFrame(rows).sort_values("request_start_time", ignore_index=True)
        frame["arrived"] = frame.request_start_time
        frame["first_token"] = frame.arrived + frame.time_to_first_token_ms.astype(float) / 1000
        frame["finished"] = frame.request_end_time.where(frame.outcome != UNFINISHED)
        strategy = benchmark["config"]["strategy"]
        users = None if strategy.get("rate") else strategy.get("streams") or strategy.get("max_concurrency")
        runs.append(_run(method, frame, strategy.get("rate") or float("inf"), users))
    return (told.get("args") or {}).get("model") or "unknown", runs


def _run(method: str, frame: Frame, rate: float, users: int | None) -> LoadRun:
    frame = frame.assign(request=range(len(frame)), klass="all", admitted=frame.arrived)
    requests = typed(frame.fillna({"prompt_tokens": 0, "output_tokens": 0}), REQUESTS)
    requests[list(MOMENTS)] -= requests.arrived.min()
    return LoadRun(
        method=method,
        rate=float(users or rate),
        loop=CLOSED if users else OPEN,
        seconds=float(requests.finished.max()),
        requests=requests,
        turns=typed([], TURNS),
        facts={"complete": True, "planned": len(requests)},
    )
