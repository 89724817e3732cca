"""A sweep says a line per finished job and ends with reports over its jobs: Hydra callbacks, named in configurations.

Hydra makes a callback before any job starts, so what its end needs is imported there.
"""

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.experimental.callback import Callback
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf, read_write

from experiments.config.launch import ERROR, RESULTS, show
from experiments.config.sections import in_sweep

Result = TypeVar("Result")
_COUNTED = (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP)


# ---------------------------------------------------------------- a line per job


class JobLines(Callback):
    """Says a line about every job of a sweep when it has ended: its main figures, its time, and that of the rest.

    A job's tables are in its folder, which is below ``out`` if the sweep was given one.
    """

    def __init__(self) -> None:
        self._first = self._began = time.monotonic()
        self._started = time.time()
        self._total: int | None = None
        self._fixed: set[str] = set()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how many jobs there are, if that is known before, and where they go."""
        # The launchers log a line or two per job, which say what these lines say.
        for name in ("hydra", "hydra_plugins"):
            logging.getLogger(name).setLevel(logging.WARNING)
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        given = OverridesParser.create().parse_overrides([*params, *config.hydra.overrides.task])
        last = {override.get_key_element(): override for override in given}.values()  # later ones win
        self._fixed = {override.input_line or "" for override in last if not override.is_sweep_override()}
        swept = [override for override in last if override.is_sweep_override()]
        if all(override.value_type in _COUNTED for override in swept):
            self._total = math.prod(len(list(override.sweep_iterator())) for override in swept)
        self._total, self._first = config.hydra.sweeper.get("n_trials", self._total), time.monotonic()
        written: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        for out in self._fixed.intersection(written):
            if out.startswith("out="):  # one folder for all jobs, whatever they are: the sweep's
                with read_write(config):
                    config.hydra.overrides.task.remove(out)
                    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={out.removeprefix('out=')}")
                    config.hydra.sweep.dir = str(OverridesParser.create().parse_override(out).value())
        count = "a sweep" if self._total is None else f"{self._total} jobs"
        print(f"{count} into {config.hydra.sweep.dir}", flush=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._began, self._started = time.monotonic(), time.time()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        if not in_sweep():
            return
        from experiments.reporting.progress import duration

        label = " ".join(text for text in config.hydra.overrides.task if text not in self._fixed)
        failed = (Path(str(config.hydra.runtime.output_dir)) / ERROR).exists()
        figures = _figures(Path(str(config.out)), failed_since=self._started if failed else 0.0)
        now, done = time.monotonic(), int(config.hydra.job.num) + 1
        rest = 0 if self._total is None else self._total - done
        of = "" if self._total is None else f" of {self._total}"
        left = f", about {duration((now - self._first) / done * rest)} left" if rest > 0 else ""
        print(f"job {done}{of}, {label}: {figures}; {duration(now - self._began)}{left}", flush=True)


def _figures(folder: Path, *, failed_since: float) -> str:
    """The main figures of a job; a summary from before it failed is that of another job with the same folder."""
    try:
        file = next(folder / name for name in reversed(RESULTS) if (folder / name).exists())
        if file.stat().st_mtime < failed_since:
            return "NO RESULT"
        summary = json.loads(file.read_text(encoding="utf-8"))
        if "runs" in summary:
            return "; ".join(_under_load(run) for run in summary["runs"] if run["group"] == "all")
        plain, *methods = [row for row in summary["rows"] if row["category"] == "all"]
        parts = [_method(method, several=len(methods) > 1) for method in methods]
        parts = parts or [f"{plain['tokens_per_second']:.1f} tokens/s"]
    except (StopIteration, KeyError, TypeError, ValueError):
        return "NO RESULT"
    failed = sum(method["failed"] for method in (plain, *methods))
    parts += [f"{failed} prompts FAILED"] if failed else []
    parts += [] if summary["complete"] else ["INCOMPLETE"]
    parts += ["NOISY TIMINGS"] if plain.get("noisy") else []
    return "; ".join(parts)


def _under_load(run: Mapping[str, Any]) -> str:
    """The goodput of a method at a rate, or where there are no limits its median time to first token."""
    good, ttft = run.get("goodput"), run.get("ttft.p50")
    figure = "no figures" if ttft is None else f"TTFT {1000 * ttft:.3g} ms"
    return f"{run['method']} at {run['rate']:.3g}: {figure if good is None else f'goodput {good:.3g}/s'}"


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


# ---------------------------------------------------------------- reports over all jobs


class SweepReport(Callback, ABC):
    """Reports on a sweep when all its jobs have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report into the sweep's folder."""
        job: Any = HydraConfig.instance()
        before, job.cfg = job.cfg, config  # which has the sweep's search path
        try:
            self.report(Path(config.hydra.sweep.dir))
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)
        finally:
            job.cfg = before

    @abstractmethod
    def report(self, folder: Path) -> None:
        """Report on the jobs below a sweep's folder. Raises ValueError: there is nothing to report on."""


class CompareJobs(SweepReport):
    """Compares a sweep's jobs, and lists those that left no result.

    A sweep over targets, datasets or dtypes is compared all the same, because the user asked for just that.

    Args:
        loads: The jobs are studies of load, whose runs come into one table.
    """

    def __init__(self, *, loads: bool = False):
        self.loads = loads

    def report(self, folder: Path) -> None:
        from experiments.load.studies import Study
        from experiments.reporting.comparison import report_comparison
        from experiments.reporting.load import report_studies
        from experiments.results.runs import load_run

        read: Callable[[Path], Any] = Study.read if self.loads else load_run
        report: Callable[..., object] = report_studies if self.loads else report_comparison
        found: list[Any]
        found, missing = collect(folder, read)
        jobs = [path.parent.parent for path, _ in job_folders(folder)]
        failed = [job.name for job in jobs if (job / ERROR).exists()]
        if failed:
            which = f"{len(failed)} of {len(jobs)} jobs failed"
            show(ValueError(f"{which}: {ERROR} of {', '.join(failed)} in {folder} says why"))
        if found:
            report(found, folder, allow_mixed=True, missing=missing)
        else:
            print("\n".join([*missing, f"no job of the sweep in {folder} has results, so there is nothing to compare"]))


class RunsReport(SweepReport):
    """Gives the runs of a sweep's jobs to a function.

    Args:
        function: Its dotted name. It takes the runs, the sweep's folder, and a sentence on each job without a result.
    """

    def __init__(self, function: str):
        self.function = function

    def report(self, folder: Path) -> None:
        from experiments.results.runs import load_run

        runs, missing = collect(folder, load_run)
        get_method(self.function)(runs, folder, missing)


class Lengths(SweepReport):
    """Puts the tokens per round of a run's methods, or of a sweep's jobs, into one table and one picture.

    Args:
        rows, about, columns: As ``report_lengths`` takes them.
    """

    def __init__(self, rows: str, about: str, columns: Mapping[str, str] | None = None):
        self.options = {"rows": rows, "about": about, "columns": columns or {}}

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report of a single run beside its results."""
        self.report(Path(config.hydra.run.dir), single=True)

    def report(self, folder: Path, *, single: bool = False) -> None:
        from experiments.reporting.studies.lengths import report_lengths
        from experiments.results.runs import load_run

        runs, missing = collect(folder, load_run)
        if runs:
            report_lengths(runs, runs[0].folder if single else folder, missing=missing, **self.options)


class ReplayJobs(SweepReport):
    """Asks every rule about the drafts of all jobs of a sweep that left a trace.

    Args:
        verifiers: Names of ``conf/verifier``; None for all.
        baseline: The rule that differences are over.
    """

    def __init__(self, verifiers: Sequence[Any] | None = None, baseline: str = "rejection"):
        self.verifiers, self.baseline = verifiers, baseline

    def report(self, folder: Path) -> None:
        from experiments.commands.replay import named_verifiers, replay_runs
        from experiments.results.statistics import Bootstrap
        from experiments.tracing.trace import FOLDER, shards

        rules = named_verifiers(None if self.verifiers is None else list(self.verifiers))
        traced = [found for _, found in job_folders(folder) if shards(found / FOLDER)]
        if not traced:
            raise ValueError(f"no job of the sweep in {folder} left a trace: give trace=true")
        replay_runs(traced, rules, folder, baseline=self.baseline, bootstrap=Bootstrap())


def job_folders(sweep: Path) -> list[tuple[Path, Path]]:
    """Each job's configuration file, by the job's number, and the folder that has its results."""
    from experiments.results.runs import by_number

    found = []
    for path in sorted(sweep.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent)):
        config: Any = OmegaConf.load(path)
        given: Any = OmegaConf.to_container(config, resolve=False)
        own = "${hydra:" in str(given.get("out", "${hydra:}"))  # else the user has given another folder
        found.append((path, path.parent.parent if own else Path(str(config.out))))
    return found


def collect(sweep: Path, read: Callable[[Path], Result]) -> tuple[list[Result], list[str]]:
    """The results of a sweep's jobs as they are read from their folders, and a sentence on each job that has none."""
    runs: list[Result] = []
    missing: list[str] = []
    folders = job_folders(sweep)
    given = {path: [str(text) for text in OmegaConf.load(path.with_name("overrides.yaml"))] for path, _ in folders}
    shared = set.intersection(*map(set, given.values())) if len(given) > 1 else set()
    for path, folder in folders:
        try:
            runs.append(read(folder))
        except ValueError as error:
            own = " ".join(text for text in given[path] if text not in shared)
            note = path.parent.parent / ERROR
            reason = note.read_text(encoding="utf-8").splitlines()[0] if note.exists() else error
            missing.append(f"NO RESULT of job {path.parent.parent.name} ({own}): {reason}")
    return runs, missing
