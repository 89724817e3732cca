"""Are the answers as good as plain decoding's? ``python -m experiments.accuracy runs=outputs/one``.

Grades the outputs of finished runs: GSM8K by the final number, HumanEval and MBPP by running the code, which needs
``execute=true``. A lossless method has the accuracy of plain decoding, and the paired difference shows how well that
is known.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.given import folders_of, formats_of, listed, tidy
from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import bootstrap_of
from experiments.config.settings import ACCURACY

if TYPE_CHECKING:
    from experiments.reporting.accuracy import GradedRun


def accuracy(config: DictConfig) -> "list[GradedRun]":
    """Grade the configuration's runs; print and write what comes of it.

    Raises:
        ValueError: There is no such run, it has no right answers, or none that may be graded.
    """
    folders = folders_of(config, ACCURACY)
    bootstrap = bootstrap_of(config)
    from experiments.commands.grading import check_samples, references_of
    from experiments.grading.accuracy import accuracies
    from experiments.grading.grade import grade
    from experiments.grading.sandbox import Limits
    from experiments.reporting.accuracy import EXECUTE, GradedRun, report_accuracy
    from experiments.results.comparison import distinguishing
    from experiments.results.origin import read_manifest
    from experiments.results.runs import records_of

    ks = listed(config, "k")
    manifests = [read_manifest(folder) for folder in folders]
    check_samples(manifests, max(ks))
    references = [
        references_of(folder, manifest, config.answers) for folder, manifest in zip(folders, manifests, strict=True)
    ]
    limits = Limits(seconds=config.seconds, memory_mb=config.memory_mb)
    workers = config.workers or os.cpu_count() or 1
    runs = []
    for folder, settings, known in zip(folders, distinguishing(manifests), references, strict=True):
        graded = grade(records_of(folder), known, execute=config.execute, limits=limits, workers=workers)
        runs.append(GradedRun(folder, settings, graded, accuracies(graded.grades, ks, bootstrap)))
    if not any(run.accuracies for run in runs):
        waiting = sum(run.graded.not_executed for run in runs)
        raise ValueError(f"all {waiting} answers are programs: {EXECUTE}" if waiting else "every prompt failed")
    made = {f"{manifest['target']['name']}, {manifest['dtype']}" for manifest in manifests}
    title = f"accuracy: {'; '.join(sorted(made))}"
    report_accuracy(runs, Path(config.out), confidence=bootstrap.confidence, formats=formats_of(config), title=title)
    return runs


def main() -> None:
    """Grade the runs that the command line names."""
    rewrite_command_line(tidy)
    launch(accuracy, "accuracy")


if __name__ == "__main__":
    main()
