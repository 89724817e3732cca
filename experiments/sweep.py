"""A sweep ends with the comparison of its jobs: Hydra callbacks, named in the configuration."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from experiments.cli import show
from experiments.compare import by_number, compare_runs
from experiments.replay import named_verifiers, replay_runs
from experiments.results import Run, load_run
from experiments.summary import Bootstrap
from experiments.trace import FOLDER, shards


class CompareJobs(Callback):
    """Compares a sweep's jobs when all have ended, and lists those that left no result.

    What the user has swept over may well be the target, the dataset or the dtype: they are compared all the same.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the comparison into the sweep's folder."""
        folder = Path(config.hydra.sweep.dir)
        runs, missing = collect(folder)
        if not runs:
            print("\n".join([*missing, f"no job of the sweep in {folder} has results, so there is nothing to compare"]))
            return
        try:
            compare_runs(runs, folder, allow_mixed=True, missing=missing)
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)


class ReplayJobs(Callback):
    """Asks every rule about the drafts of all jobs of a sweep that left a trace.

    Args:
        verifiers: Names of ``conf/verifier``; None for all.
        baseline: The rule that differences are over.
    """

    def __init__(self, verifiers: list[Any] | None = None, baseline: str = "rejection"):
        self.verifiers, self.baseline = verifiers, baseline

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the replay into the sweep's folder."""
        folder = Path(config.hydra.sweep.dir)
        settings = sorted(folder.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent))
        folders = [_out(path, path.parent.parent) for path in settings]
        traced = [job for job in folders if shards(job / FOLDER)]
        try:
            rules = named_verifiers(None if self.verifiers is None else list(self.verifiers))
            if not traced:
                raise ValueError(f"no job of the sweep in {folder} left a trace: give trace=true")
            replay_runs(traced, rules, folder, baseline=self.baseline, bootstrap=Bootstrap())
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)


def collect(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs of a sweep's jobs, and a sentence on each job that has none."""
    runs: list[Run] = []
    missing: list[str] = []
    settings = sorted(folder.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent))
    for path in settings:
        job = path.parent.parent
        try:
            runs.append(load_run(_out(path, job)))
        except ValueError as error:
            overrides = OmegaConf.load(path.with_name("overrides.yaml"))
            missing.append(f"NO RESULT of job {job.name} ({' '.join(map(str, overrides))}): {error}")
    return runs, missing


def _out(settings: Path, job: Path) -> Path:
    """Where a job wrote its results: its own folder, unless the user gave another."""
    config: Any = OmegaConf.load(settings)
    given = OmegaConf.to_container(config, resolve=False)
    assert isinstance(given, dict)
    return job if "${hydra:" in str(given.get("out", "${hydra:}")) else Path(str(config.out))
