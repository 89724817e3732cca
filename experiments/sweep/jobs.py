"""The jobs of a sweep: where each wrote its results."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.config.launch import ERROR
from experiments.results.runs import Run, by_number, load_run


def job_folders(sweep: Path) -> list[tuple[Path, Path]]:
    """Each job's configuration file, by the job's number, and the folder that has its results."""
    found = sorted(sweep.glob("**/.hydra/config.yaml"), key=lambda path: by_number(path.parent.parent))
    return [(path, _out(path, path.parent.parent)) for path in found]


def collect(sweep: Path) -> tuple[list[Run], list[str]]:
    """The runs of a sweep's jobs, and a sentence on each job that has none."""
    runs: list[Run] = []
    missing: list[str] = []
    folders = job_folders(sweep)
    given = {path: [str(text) for text in OmegaConf.load(path.with_name("overrides.yaml"))] for path, _ in folders}
    shared = set.intersection(*map(set, given.values())) if len(given) > 1 else set()
    for path, folder in folders:
        try:
            runs.append(load_run(folder))
        except ValueError as error:
            own = " ".join(text for text in given[path] if text not in shared)
            note = path.parent.parent / ERROR
            reason = note.read_text(encoding="utf-8").splitlines()[0] if note.exists() else error
            missing.append(f"NO RESULT of job {path.parent.parent.name} ({own}): {reason}")
    return runs, missing


def _out(settings: Path, job: Path) -> Path:
    """Where a job wrote its results: its own folder, unless the user gave another."""
    config: Any = OmegaConf.load(settings)
    given = OmegaConf.to_container(config, resolve=False)
    assert isinstance(given, dict)
    return job if "${hydra:" in str(given.get("out", "${hydra:}")) else Path(str(config.out))
