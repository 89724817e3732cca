"""Studies of load read back from their folders, or from other load generators' results, and put together."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

from experiments.load.run import (
    CLOSED,
    DONE,
    FAILED,
    MOMENTS,
    OPEN,
    REQUESTS,
    TURNS,
    UNFINISHED,
    Frame,
    LoadRun,
    load_runs,
    typed,
)  # fmt: skip
from experiments.results.comparison import commit_of, distinguishing
from experiments.results.limits import Terms
from experiments.results.origin import MANIFEST, read_manifest
from experiments.results.statistics import Bootstrap

_BY_COLUMN = ("rates=", "arrival.rate=", "drafter=none", "+drafter@methods.", "+policy@policies.")
"""Overrides that a column says already, or the names of methods."""


@dataclass(frozen=True)
class Study:
    """What one command has measured: its folder, what made it, and its runs, each method's rates in order."""

    folder: Path
    manifest: Mapping[str, Any]
    runs: Sequence[LoadRun]

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """Return the study in a folder. Raises ValueError: the folder holds none, or none of its runs has ended."""
        manifest, runs = read_manifest(folder), load_runs(folder)
        if not runs:
            raise ValueError(f"{folder} has no results: no run of that study has ended")
        place = {name: number for number, name in enumerate(manifest.get("exactness", ()))}
        return cls(folder, manifest, sorted(runs, key=lambda run: (run.rate, place.get(run.method, len(place)))))

    @property
    def machine(self) -> str:
        return str((self.manifest.get("machine") or {}).get("host") or "unknown")

    def fact(self, name: str) -> str:
        """A fact of the manifest in words."""
        return str(self.manifest.get(name, "unknown"))

    def settings(self, *names: str) -> str:
        """Some of the settings in words."""
        return str({name: self.manifest["config"].get(name) for name in names})

    @property
    def target(self) -> str:
        return str((self.manifest.get("target") or self.manifest["config"]["target"]).get("name"))

    @property
    def is_imported(self) -> bool:
        """Whether another load generator has measured it, which knows neither our limits nor our texts."""
        return "imported" in self.manifest["config"]

    @property
    def missing(self) -> int:
        """How many runs were planned and have not ended."""
        rates = self.manifest["config"].get("rates") or [None]
        methods = self.manifest.get("exactness") or {run.method: None for run in self.runs}
        return len(rates) * len(methods) - sum(bool(run.facts.get("complete", True)) for run in self.runs)


def is_study(folder: Path) -> bool:
    """Return whether a folder has a manifest, and it is that of a study of load."""
    return "arrival" in read_manifest(folder)["config"]


LOOP = "loop (open or closed)"
_ALIKE: dict[str, Callable[[Study], str]] = {
    "target": lambda study: study.target,
    "texts": lambda study: study.fact("prompts_hash"),
    "dtype": lambda study: study.fact("dtype"),
    "workload": lambda study: study.settings("workload", "lengths", "requests", "seconds"),
    "clock (real or virtual)": lambda study: str(bool(study.manifest.get("virtual"))),
}
"""What studies should share, unless they are mixed on purpose."""
_NEVER: dict[str, Callable[[Study], str]] = {
    LOOP: lambda study: study.fact("loop"),
    "limits (sla)": lambda study: str(Terms.of(study.manifest["config"])),
    "intervals": lambda study: study.settings("bootstrap"),
}
"""What a table has one of."""


def check_alike(studies: Sequence[Study], *, allow_mixed: bool = False) -> list[str]:
    """Return in words what studies should share and do not.

    Raises:
        ValueError: They cannot stand in one table, or should not and were not mixed on purpose.
    """
    ours = [study for study in studies if not study.is_imported]
    for what, value in _NEVER.items():
        if len({value(study) for study in (studies if what == LOOP else ours)}) > 1:
            raise ValueError(f"the studies differ in their {what}, and a table has one: compare them apart")
    mixed = [what for what, value in _ALIKE.items() if len({value(study) for study in ours}) > 1]
    if mixed and not allow_mixed:
        names = " and ".join(f"in their {what}" for what in mixed)
        raise ValueError(f"the studies differ {names}: allow_mixed=true compares them all the same")
    return [f"MIXED: the studies differ in their {what}" for what in mixed]


def terms_of(studies: Sequence[Study]) -> tuple[Terms, Bootstrap]:
    """Return the limits and the settings of intervals that checked studies share; none and ours if all are imported."""
    config = next((each.manifest["config"] for each in studies if not each.is_imported), {})
    return Terms.of(config), Bootstrap(**config.get("bootstrap", {}))


def merged(studies: Sequence[Study]) -> list[LoadRun]:
    """Return the runs of all studies by rate; a method is also called by settings and device, where studies differ.

    What has the same name at the same rate all the same is also called by its folder.
    """
    devices = len({study.fact("device") for study in studies}) > 1
    named: list[LoadRun] = []
    for study, settings in zip(studies, distinguishing([study.manifest for study in studies]), strict=True):
        parts = [text for text in settings if not text.startswith(_BY_COLUMN)]
        parts += [study.fact("device")] if devices else []
        for run in study.runs:
            # The drafter is what a method is called by.
            name = ", ".join([run.method, *(text for text in parts if text != f"drafter={run.method}")])
            facts = {**run.facts, "study": str(study.folder), "called": run.method}
            named.append(replace(run, method=name, facts=facts))
    often = Counter((run.method, run.rate) for run in named)
    twice = {method for (method, _), count in often.items() if count > 1}
    top = os.path.commonpath([study.folder.absolute() for study in studies])
    for number, run in enumerate(named):
        if run.method in twice:
            folder = Path(run.facts["study"]).absolute().relative_to(top)
            named[number] = replace(run, method=f"{run.method}, {folder}")
    return sorted(named, key=lambda run: run.rate)


def title_of(studies: Sequence[Study]) -> str:
    """Return the conditions that all studies share, in words; the target first."""
    titles = [each.fact("title").split("; ") for each in studies]
    shared = [part for part in titles[0] if all(part in other for other in titles)]
    targets = {study.target for study in studies}
    return "; ".join(shared if titles[0][0] in shared or len(targets) > 1 else [*targets, *shared])


def remarks(studies: Sequence[Study]) -> list[str]:
    """Return what a reader of the table has to know: unfinished studies, other devices, other code."""
    said = [
        f"INCOMPLETE: {each.missing} runs of {each.folder} have not ended (resume=true goes on)"
        for each in studies
        if each.missing
    ]
    said += [f"{each.folder.name} was measured by another load generator" for each in studies if each.is_imported]
    devices = sorted({each.fact("device") for each in studies})
    if len(devices) > 1:
        said.append(f"The studies were made on different devices ({', '.join(devices)}): compare no times across them.")
    commits = sorted({commit_of(each.manifest) for each in studies})
    if len(commits) > 1:
        said.append(f"The studies were made by different code (commits {', '.join(commits)}).")
    return said


# ---------------------------------------------------------------- results of other load generators

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
