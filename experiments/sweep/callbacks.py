"""A sweep says a line per finished job and ends with reports over its jobs: Hydra callbacks, named in configurations.

Hydra makes a callback before any job starts, so what its end needs is imported there.
"""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf, read_write

from experiments.config.launch import ERROR, RESULTS, show
from experiments.config.sections import in_sweep
from experiments.reporting.table import three_digits

_FORMS: dict[str, Callable[[float], str]] = {
    "mean_acceptance_length": "length {:.2f}".format,
    "speedup": "speedup {:.2f}x".format,
    "tokens_per_second": lambda value: f"{three_digits(value)} tokens/s",
    "rate": "rate {:.3g}".format,
    "ttft.p50": "TTFT {:.3g} s".format,
    "goodput": "goodput {:.3g}/s".format,
}
"""The figures in a job's line."""


class JobLines(Callback):
    """Says a line about every job of a sweep when it has ended, and at the end which ones failed."""

    def __init__(self) -> None:
        self._fixed: set[str] = set()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say where the jobs go."""
        # The launchers log a line or two per job, which say what these lines say.
        for name in ("hydra", "hydra_plugins"):
            logging.getLogger(name).setLevel(logging.WARNING)
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        written: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # a job resolves what it has
        given = OverridesParser.create().parse_overrides([*params, *written])
        last = {override.get_key_element(): override for override in given}.values()  # later ones win
        self._fixed = {override.input_line or "" for override in last if not override.is_sweep_override()}
        for out in self._fixed.intersection(written):
            if out.startswith("out=") and "${" not in out:  # one folder for all jobs, whatever they are: the sweep's
                with read_write(config):
                    config.hydra.overrides.task.remove(out)
                    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={out.removeprefix('out=')}")
                    config.hydra.sweep.dir = str(OverridesParser.create().parse_override(out).value())
        print(f"a sweep into {config.hydra.sweep.dir}", flush=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._began, self._started = time.monotonic(), time.time()

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        if not in_sweep():
            return
        from experiments.reporting.progress import duration

        label = " ".join(text for text in config.hydra.overrides.task if text not in self._fixed)
        failed = (Path(str(config.hydra.runtime.output_dir)) / ERROR).exists()
        figures = _figures(Path(str(config.out)), failed_since=self._started if failed else 0.0)
        took = duration(time.monotonic() - self._began)
        print(f"job {int(config.hydra.job.num) + 1}, {label}: {figures}; {took}", flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [path.parent.parent for path, _ in _job_folders(folder)]
        failed = [job.name for job in jobs if (job / ERROR).exists()]
        if failed:
            which = f"{len(failed)} of {len(jobs)} jobs failed"
            show(ValueError(f"{which}: {ERROR} of {', '.join(failed)} in {folder} says why"))


def _figures(folder: Path, *, failed_since: float) -> str:
    """The main figures of a job; a summary from before it failed is that of another job with the same folder."""
    file = next((folder / name for name in reversed(RESULTS) if (folder / name).exists()), None)
    if file is None or file.stat().st_mtime < failed_since:
        return "NO RESULT"
    from experiments.results.lossless import promises_exact  # it imports pandas, and a callback is made before any job

    summary = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in summary.get("rows") or summary["runs"] if row.get("category", row.get("group")) == "all"]
    drafted = [row for row in rows if row["method"] != "plain"] or rows
    parts = []
    for row in drafted:
        figures = [form(row[name]) for name, form in _FORMS.items() if row.get(name) is not None]
        figures += ["NOT LOSSLESS"] * (row.get("lossless") == "not lossless")
        figures += [] if promises_exact(row.get("exactness") or "exact") else [row["exactness"]]
        figures += [f"{row['failed']} prompts FAILED"] * bool(row.get("failed"))
        parts.append(f"{row['method']}: " * (len(drafted) > 1) + ", ".join(figures))
    return "; ".join([*parts, *(["INCOMPLETE"] * (not summary.get("complete", True)))])


class Report(Callback):
    """Gives the results of a sweep's jobs to a function when all have ended.

    Args:
        function: Its dotted name. It takes the results, the sweep's folder, and ``missing``: a sentence on each job
            without a result.
        read: Dotted name of what reads a job's result from its folder, or raises ValueError; by default ``load_run``.
        single: Whether a run that is no job of a sweep is reported on, too.
        options: More arguments of the function.
    """

    def __init__(
        self, function: str, read: str = "experiments.results.runs.load_run", *, single: bool = False, **options: Any
    ):
        self.function, self.read, self.single = function, read, single
        self.options: Any = OmegaConf.to_container(OmegaConf.create(options))

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Report on a single run."""
        if self.single:
            self._report(config, Path(config.hydra.run.dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report into the sweep's folder."""
        self._report(config, Path(config.hydra.sweep.dir))

    def _report(self, config: DictConfig, folder: Path) -> None:
        job: Any = HydraConfig.instance()
        before, job.cfg = job.cfg, config  # which has the sweep's search path
        try:
            results, missing = _collect(folder, get_method(self.read))
            if results:
                get_method(self.function)(results, folder, missing=missing, **self.options)
            else:
                print("\n".join([*missing, f"no job in {folder} has results, so there is nothing to report"]))
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)
        finally:
            job.cfg = before


def _job_folders(sweep: Path) -> list[tuple[Path, Path]]:
    """Each job's configuration file, by the job's number, and the folder that has its results."""
    from experiments.results.runs import by_number

    found = []
    for path in sorted(sweep.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent)):
        config: Any = OmegaConf.load(path)
        given: Any = OmegaConf.to_container(config, resolve=False)
        own = "${hydra:" in str(given.get("out", "${hydra:}"))  # else the user has given another folder
        found.append((path, path.parent.parent if own else Path(str(config.out))))
    return found


def _collect(sweep: Path, read: Callable[[Path], Any]) -> tuple[list[Any], list[str]]:
    """The results of a sweep's jobs as they are read from their folders, and a sentence on each job that has none."""
    results, missing = [], []
    folders = _job_folders(sweep)
    typed = ((path, path.with_name("overrides.yaml").read_text(encoding="utf-8")) for path, _ in folders)
    given = {path: list(map(str, yaml.safe_load(texts))) for path, texts in typed}
    shared = set.intersection(*map(set, given.values())) if len(given) > 1 else set()
    for path, folder in folders:
        try:
            results.append(read(folder))
        except ValueError as error:
            own = " ".join(text for text in given[path] if text not in shared)
            note = path.parent.parent / ERROR
            reason = note.read_text(encoding="utf-8").splitlines()[0] if note.exists() else error
            missing.append(f"NO RESULT of job {path.parent.parent.name} ({own}): {reason}")
    return results, missing
