"""Rules asked about the drafts of traced runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.config.sections import bootstrap_of, build, listed, plain, sections
from experiments.reporting.replay import report_replay
from experiments.results.comparison import distinguishing
from experiments.results.origin import read_manifest
from experiments.results.rows import Row
from experiments.results.runs import find_folders
from experiments.results.statistics import Bootstrap
from experiments.tracing.scoring import RAN, figures, find_drafts, score
from experiments.tracing.trace import FOLDER, shards
from specdec.interfaces import Verifier


def replay(config: DictConfig) -> list[Row]:
    """Ask the configuration's verifiers, or all, about the drafts of a trace; print and write what they say."""
    bootstrap = bootstrap_of(config)
    rules = named_verifiers(plain(config, "verifiers"))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folders = find_folders(listed(config, "trace"))
    return replay_runs(folders, rules, Path(config.out), baseline=config.baseline, bootstrap=bootstrap)


def replay_runs(
    folders: Sequence[Path], rules: Mapping[str, Verifier], out: Path, *, baseline: str, bootstrap: Bootstrap
) -> list[Row]:
    """Ask rules about the drafts of traced runs; print and write what they say.

    Args:
        out: Folder for ``replay.md``, ``.csv``, ``.json``, ``.png`` and the folder ``reach``.
        baseline: Name of the rule that differences are over.
    """
    manifests = [read_manifest(folder) for folder in folders]
    done: list[Row] = []
    for folder, manifest, settings in zip(folders, manifests, distinguishing(manifests), strict=True):
        parts = [part for part in settings if not part.startswith("sampling.temperature=")]
        ran = build(OmegaConf.create({"verifier": manifest["config"]["verifier"]}), "verifier")
        for drafts in find_drafts(folder, parts, ran):
            done += figures(score(drafts, {**rules, RAN: ran}), baseline=baseline, bootstrap=bootstrap)
    done.sort(key=lambda row: row["temperature"])
    if all(row["refused"] for row in done):
        raise ValueError(f"none of {', '.join(rules)} fits these drafts: {done[0]['refused']}")
    report_replay(done, out, baseline=baseline, confidence=bootstrap.confidence, manifests=manifests)
    return done


def named_verifiers(given: Any) -> dict[str, Verifier]:
    """Rules by name: those that ``sections`` describes, made.

    Args:
        given: Names, or dictionaries with arguments; None for every rule along Hydra's search path.

    Raises:
        ValueError: There is no such rule, or it refuses its arguments.
    """
    found = sections("verifier", given)
    return {label: build(OmegaConf.create({"verifier": section}), "verifier") for label, section in found.items()}


def traced(folder: Path) -> Path:
    """A folder of a job that left a trace."""
    if not shards(folder / FOLDER):
        raise ValueError(f"{folder} has no trace: give trace=true")
    return folder


def replay_jobs(
    folders: Sequence[Path], out: Path, *, missing: Sequence[str], verifiers: Any = None, baseline: str = "rejection"
) -> None:
    """Ask rules, by default all, about the drafts of a sweep's jobs."""
    print("\n".join(missing), end="\n" * bool(missing))
    replay_runs(folders, named_verifiers(verifiers), out, baseline=baseline, bootstrap=Bootstrap())
