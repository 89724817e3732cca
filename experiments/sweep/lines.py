"""One line per finished job of a sweep: a Hydra callback, named in the configuration."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from experiments.config.job import in_sweep
from experiments.config.launch import ERROR

SUMMARY, LOAD = "summary.json", "load.json"
_BASELINE = "plain"
_COUNTED = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP)


class JobLines(Callback):
    """Says a line about every job of a sweep when it has ended: its main figures, and about how long the rest takes.

    A job's tables are in its folder, which is below ``out`` if the sweep was given one.
    """

    def __init__(self) -> None:
        self._began = self._job_began = time.monotonic()
        self._started = time.time()
        self._total: int | None = None
        self._fixed: set[str] = set()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Count the jobs, and say where they go."""
        # The launchers log a line or two per job, which say what these lines say.
        for name in ("hydra", "hydra_plugins"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._began = time.monotonic()
        self._total, self._fixed = jobs_of(config)
        given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        for text in self._fixed.intersection(given):
            if text.startswith("out="):  # one folder for all jobs: the sweep's
                _gather(config, text)
        count = "a sweep" if self._total is None else f"{self._total} jobs"
        print(f"{count} into {config.hydra.sweep.dir}", flush=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._job_began, self._started = time.monotonic(), time.time()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        if not in_sweep():
            return
        from experiments.reporting.progress import duration

        number, now = int(config.hydra.job.num), time.monotonic()
        took = duration(now - self._job_began)
        label = " ".join(text for text in config.hydra.overrides.task if text not in self._fixed)
        of, left = "", ""
        if self._total is not None:
            rest = self._total - number - 1
            of = f" of {self._total}"
            left = f", about {duration((now - self._began) / (number + 1) * rest)} left" if rest > 0 else ""
        failed = (Path(str(config.hydra.runtime.output_dir)) / ERROR).exists()
        said = _figures(Path(str(config.out)), failed_since=self._started if failed else 0.0)
        print(f"job {number + 1}{of}, {label}: {said}; {took}{left}", flush=True)


def _gather(config: DictConfig, out: str) -> None:
    """Put the folders of all jobs into the one that ``out=FOLDER`` names, before Hydra makes the first."""
    with read_write(config):
        config.hydra.overrides.task.remove(out)
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={out.removeprefix('out=')}")
        config.hydra.sweep.dir = str(OverridesParser.create().parse_override(out).value())


def jobs_of(config: DictConfig) -> tuple[int | None, set[str]]:
    """How many jobs a sweep has, if that is known beforehand, and the overrides that all of them share."""
    sweeper = config.hydra.sweeper
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    given = OverridesParser.create().parse_overrides([*params, *config.hydra.overrides.task])
    last = {override.get_key_element(): override for override in given}  # later ones win
    fixed = {override.input_line or "" for override in last.values() if not override.is_sweep_override()}
    total = 1
    for override in last.values():
        if override.value_type in _COUNTED:
            total *= sum(1 for _ in override.sweep_iterator())
        elif override.is_sweep_override():
            return sweeper.get("n_trials"), fixed  # a search, or a pattern over files
    return sweeper.get("n_trials", total), fixed


def _figures(folder: Path, *, failed_since: float) -> str:
    """The main figures of a job; a summary from before it failed is that of another job with the same folder."""
    try:
        file = folder / (LOAD if (folder / LOAD).exists() else SUMMARY)
        if file.stat().st_mtime < failed_since:
            return "NO RESULT"
        summary = json.loads(file.read_text(encoding="utf-8"))
        if file.name == LOAD:
            return _under_load(summary["runs"])
        methods = [row for row in summary["rows"] if row["category"] == "all"]
        said = [_method(method, several=len(methods) > 2) for method in methods if method["method"] != _BASELINE]
        said = said or [f"{method['tokens_per_second']:.1f} tokens/s" for method in methods]
    except (FileNotFoundError, IndexError, KeyError, TypeError, ValueError):
        return "NO RESULT"
    failed = sum(method["failed"] for method in methods)
    warnings = [f"{failed} prompts FAILED"] if failed else []
    warnings += [] if summary["complete"] else ["INCOMPLETE"]
    warnings += ["NOISY TIMINGS"] if methods[0].get("noisy") else []
    return "; ".join([*said, *warnings])


def _under_load(runs: Sequence[Mapping[str, Any]]) -> str:
    """The goodput of every method and rate, or where there are no limits its median time to first token."""
    said = []
    for run in (run for run in runs if run["group"] == "all"):
        good, ttft = run.get("goodput"), run.get("ttft.p50")
        figure = "no figures" if ttft is None else f"TTFT {1000 * ttft:.3g} ms"
        figure = figure if good is None else f"goodput {good:.3g}/s"
        said.append(f"{run['method']} at {run['rate']:.3g}: {figure}")
    return "; ".join(said)


def _method(method: Mapping[str, Any], *, several: bool) -> str:
    from experiments.results.lossless import promises_exact  # it imports pandas, and a callback is made before any job

    forms = {"mean_acceptance_length": "length {:.2f}", "speedup": "speedup {:.2f}x"}
    forms |= {"tokens_per_second": "{:.1f} tokens/s"}
    parts = [form.format(method[name]) for name, form in forms.items() if method[name] is not None]
    if method["exactness"] is not None and not promises_exact(method["exactness"]):
        parts.append(str(method["exactness"]))
    if method["lossless"] == "not lossless":
        parts.append("NOT LOSSLESS")
    name = f"{method['method']} at T={method['temperature']:g}: " if several else ""
    return name + (", ".join(parts) or "no figures")
