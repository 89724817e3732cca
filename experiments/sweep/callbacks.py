"""A sweep ends with the comparison of its jobs: Hydra callbacks, named in the configuration.

Hydra makes a callback before any job starts, so what its end needs is imported there.
"""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.config.launch import ERROR, show


class CompareJobs(Callback):
    """Compares a sweep's jobs when all have ended, and lists those that left no result.

    A sweep over targets, datasets or dtypes is compared all the same, because the user asked for just that.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the comparison into the sweep's folder."""
        from experiments.reporting.comparison import report_comparison
        from experiments.sweep.jobs import collect, job_folders

        folder = Path(config.hydra.sweep.dir)
        runs, missing = collect(folder)
        jobs = [path.parent.parent for path, _ in job_folders(folder)]
        failed = [job.name for job in jobs if (job / ERROR).exists()]
        if failed:
            show(
                ValueError(
                    f"{len(failed)} of {len(jobs)} jobs failed: {ERROR} of {', '.join(failed)} in {folder} says why"
                )
            )
        if not runs:
            print("\n".join([*missing, f"no job of the sweep in {folder} has results, so there is nothing to compare"]))
            return
        try:
            report_comparison(runs, folder, allow_mixed=True, missing=missing)
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)


class BatchSweep(Callback):
    """Draws latency against throughput over the batch sizes of a sweep's jobs."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the table and the picture into the sweep's folder."""
        from experiments.reporting.batch_sweep import report_batch_sweep
        from experiments.sweep.jobs import collect

        folder = Path(config.hydra.sweep.dir)
        runs, _ = collect(folder)
        try:
            report_batch_sweep(runs, folder)
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)


class Quadrants(Callback):
    """Says what each kind of requests is about, over two input and two output lengths, and what drafting does to it."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the table and the picture into the sweep's folder."""
        from experiments.reporting.quadrants import report_quadrants
        from experiments.sweep.jobs import collect

        folder = Path(config.hydra.sweep.dir)
        runs, missing = collect(folder)
        try:
            report_quadrants(runs, folder, missing)
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
        from experiments.commands.replay import named_verifiers, replay_runs
        from experiments.results.statistics import Bootstrap
        from experiments.sweep.jobs import job_folders
        from experiments.tracing.trace import FOLDER, shards

        searchpath = list(config.hydra.searchpath)
        sweep = Path(config.hydra.sweep.dir)
        traced = [folder for _, folder in job_folders(sweep) if shards(folder / FOLDER)]
        try:
            rules = named_verifiers(None if self.verifiers is None else list(self.verifiers), searchpath)
            if not traced:
                raise ValueError(f"no job of the sweep in {sweep} left a trace: give trace=true")
            replay_runs(traced, rules, sweep, baseline=self.baseline, bootstrap=Bootstrap())
        except ValueError as error:  # Hydra would turn it into a warning of its own
            show(error)
