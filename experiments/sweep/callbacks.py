"""A sweep ends with reports over its jobs: Hydra callbacks, named in the configuration.

Hydra makes a callback before any job starts, so what its end needs is imported there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra.experimental.callback import Callback
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import ERROR, show

Result = TypeVar("Result")


class SweepReport(Callback, ABC):
    """Reports on a sweep when all its jobs have ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report into the sweep's folder."""
        try:
            self.report(Path(config.hydra.sweep.dir), config)
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)

    @abstractmethod
    def report(self, folder: Path, config: DictConfig) -> None:
        """Report on the jobs below a sweep's folder. Raises ValueError: there is nothing to report on."""


class CompareJobs(SweepReport):
    """Compares a sweep's jobs, and lists those that left no result.

    A sweep over targets, datasets or dtypes is compared all the same, because the user asked for just that.

    Args:
        loads: The jobs are studies of load, whose runs come into one table.
    """

    def __init__(self, *, loads: bool = False):
        self.loads = loads

    def report(self, folder: Path, config: DictConfig) -> None:
        from experiments.load.studies import Study
        from experiments.reporting.comparison import report_comparison
        from experiments.reporting.load import report_studies
        from experiments.results.runs import load_run

        read, report = cast(
            tuple[Callable[[Path], Any], Callable[..., object]],
            (Study.read, report_studies) if self.loads else (load_run, report_comparison),
        )
        found, missing = collect(folder, read)
        _show_failed(folder)
        if found:
            report(found, folder, allow_mixed=True, missing=missing)
        else:
            print("\n".join([*missing, f"no job of the sweep in {folder} has results, so there is nothing to compare"]))


def _show_failed(folder: Path) -> None:
    """Say as an error which jobs of a sweep have failed, if any have."""
    jobs = [path.parent.parent for path, _ in job_folders(folder)]
    failed = [job.name for job in jobs if (job / ERROR).exists()]
    if failed:
        message = f"{len(failed)} of {len(jobs)} jobs failed: {ERROR} of {', '.join(failed)} in {folder} says why"
        show(ValueError(message))


class RunsReport(SweepReport):
    """Gives the runs of a sweep's jobs to a function.

    Args:
        function: Its dotted name. It takes the runs, the sweep's folder, and a sentence on each job without a result.
    """

    def __init__(self, function: str):
        self.function = function

    def report(self, folder: Path, config: DictConfig) -> None:
        from experiments.results.runs import load_run

        runs, missing = collect(folder, load_run)
        get_method(self.function)(runs, folder, missing)


class Lengths(SweepReport):
    """Puts the tokens per round of a run's methods, or of a sweep's jobs, into one table and one picture.

    Args:
        rows, about, columns: As ``report_lengths`` takes them.
    """

    def __init__(self, rows: str, about: str, columns: Mapping[str, str] | None = None):
        self.rows, self.about, self.columns = rows, about, columns or {}

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the report of a single run beside its results."""
        self.report(Path(config.hydra.run.dir), config, single=True)

    def report(self, folder: Path, config: DictConfig, *, single: bool = False) -> None:
        from experiments.reporting.studies.lengths import report_lengths
        from experiments.results.runs import load_run

        runs, missing = collect(folder, load_run)
        if runs:
            out = runs[0].folder if single else folder
            report_lengths(runs, out, rows=self.rows, about=self.about, columns=self.columns, missing=missing)


class ReplayJobs(SweepReport):
    """Asks every rule about the drafts of all jobs of a sweep that left a trace.

    Args:
        verifiers: Names of ``conf/verifier``; None for all.
        baseline: The rule that differences are over.
    """

    def __init__(self, verifiers: list[Any] | None = None, baseline: str = "rejection"):
        self.verifiers, self.baseline = verifiers, baseline

    def report(self, folder: Path, config: DictConfig) -> None:
        from experiments.commands.replay import named_verifiers, replay_runs
        from experiments.results.statistics import Bootstrap
        from experiments.tracing.trace import FOLDER, shards

        given = None if self.verifiers is None else list(self.verifiers)
        rules = named_verifiers(given, list(config.hydra.searchpath))
        traced = [found for _, found in job_folders(folder) if shards(found / FOLDER)]
        if not traced:
            raise ValueError(f"no job of the sweep in {folder} left a trace: give trace=true")
        replay_runs(traced, rules, folder, baseline=self.baseline, bootstrap=Bootstrap())


def job_folders(sweep: Path) -> list[tuple[Path, Path]]:
    """Each job's configuration file, by the job's number, and the folder that has its results."""
    from experiments.results.runs import by_number

    found = sorted(sweep.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent))
    return [(path, _out(path, path.parent.parent)) for path in found]


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


def _out(settings: Path, job: Path) -> Path:
    """The folder that a job wrote its results to: its own, unless the user gave another."""
    config: Any = OmegaConf.load(settings)
    given = OmegaConf.to_container(config, resolve=False)
    assert isinstance(given, dict)
    return job if "${hydra:" in str(given.get("out", "${hydra:}")) else Path(str(config.out))
