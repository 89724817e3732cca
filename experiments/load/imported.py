"""Results of ``vllm bench serve`` and of GuideLLM as a study of ours; rounds, slots and the queue stay unknown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas

from experiments.load.run import CLOSED, DONE, FAILED, MOMENTS, OPEN, REQUESTS, TURNS, UNFINISHED, Frame, LoadRun, typed
from experiments.results.origin import MANIFEST

_OUTCOMES = {"successful": DONE, "errored": FAILED, "incomplete": UNFINISHED}


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
    names = {
        "start_times": "arrived",
        "input_lens": "prompt_tokens",
        "output_lens": "output_tokens",
        "errors": "reason",
    }
    frame: Frame = pandas.DataFrame({name: told[name] for name in (*names, "ttfts")}).rename(columns=names)
    frame["outcome"] = [FAILED if error else DONE for error in frame.reason]
    frame["first_token"] = frame.arrived + frame.ttfts
    frame["finished"] = frame.first_token + [sum(gaps) for gaps in told["itls"]]
    users = told.get("max_concurrency") if float(told["request_rate"]) == float("inf") else None
    return told["model_id"], [_run(method, frame, users or told["request_rate"], CLOSED if users else OPEN)]


def _guidellm(told: Mapping[str, Any], method: str) -> tuple[str, list[LoadRun]]:
    runs = []
    for benchmark in told["benchmarks"]:
        requests = benchmark["requests"]
        rows = [{**row, "outcome": mine} for theirs, mine in _OUTCOMES.items() for row in requests[theirs]]
        frame: Frame = pandas.DataFrame(rows).sort_values("request_start_time", ignore_index=True)
        frame["arrived"] = frame.request_start_time
        frame["first_token"] = frame.arrived + frame.time_to_first_token_ms.astype(float) / 1000
        frame["finished"] = frame.request_end_time.where(frame.outcome != UNFINISHED)
        strategy = benchmark["config"]["strategy"]
        rate, users = strategy.get("rate"), strategy.get("streams") or strategy.get("max_concurrency")
        runs.append(_run(method, frame, rate or users or float("inf"), CLOSED if users and not rate else OPEN))
    return (told.get("args") or {}).get("model") or "unknown", runs


def _run(method: str, frame: Frame, rate: Any, loop: str) -> LoadRun:
    frame = frame.assign(request=range(len(frame)), klass="all", submitted=frame.arrived, admitted=frame.arrived)
    requests = typed(frame.fillna({"prompt_tokens": 0, "output_tokens": 0}), REQUESTS)
    requests[list(MOMENTS)] -= requests.arrived.min()
    return LoadRun(
        method=method,
        rate=float(rate),
        loop=loop,
        seconds=float(requests.finished.max()),
        requests=requests,
        turns=typed([], TURNS),
        facts={"complete": True, "planned": len(requests)},
    )
