"""The turns of an engine and the lives of requests in Chrome's trace format, for chrome://tracing or Perfetto."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.load.run import LoadRun

_ENGINE, _REQUESTS = 1, 2
"""The rows of the viewer: processes."""
_PHASES = {
    "queue": ("arrived", "admitted"),
    "prefill": ("admitted", "first_token"),
    "decode": ("first_token", "finished"),
}


def write_timeline(run: LoadRun, path: Path) -> Path:
    """Write what can be opened in chrome://tracing: turns, counters, and the phases of every request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"method": run.method, "rate": str(run.rate), "loop": f"{run.loop} loop"}
    document = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": list(_events(run))}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _events(run: LoadRun) -> Iterator[dict[str, Any]]:
    for process, name in ((_ENGINE, f"{run.method}, {run.loop} loop"), (_REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for turn in run.turns.to_dict("records"):
        begin = 1e6 * turn.pop("begin")
        seconds = turn.pop("seconds")
        parts = {"prefill": turn["prefill_tokens"], "round": turn["rows"]}
        name = " and ".join(part for part, count in parts.items() if count) or "nothing"
        yield {"ph": "X", "name": name, "pid": _ENGINE, "tid": 0, "ts": begin, "dur": 1e6 * seconds, "args": turn}
        counted = {"running": turn["running"], "waiting": turn["waiting"]}
        yield {"ph": "C", "name": "requests", "pid": _ENGINE, "ts": begin, "args": counted}
    for row in run.requests.drop(columns=["emissions", "tokens"], errors="ignore").to_dict("records"):
        for name, (since, until) in _PHASES.items():
            if row[until] == row[until] and row[since] == row[since]:
                place = {"pid": _REQUESTS, "tid": row["request"], "ts": 1e6 * row[since]}
                asked = {key: row[key] for key in ("klass", "prompt_tokens", "output_tokens", "outcome")}
                yield {"ph": "X", "name": name, "dur": 1e6 * (row[until] - row[since]), "args": asked, **place}
