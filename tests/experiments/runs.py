"""What tests of runs share: tiny models as drafters, a run in this process, an engine that fails at a chosen call."""

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.commands.settings import run
from experiments.config.launch import Command
from specdec.engine.engine import Engine

Configure = Callable[..., DictConfig]


def command_of(name: str) -> Command:
    room = importlib.util.find_spec(f"experiments.{name}.__main__") if name in ("load", "bench") else None
    return getattr(importlib.import_module(f"experiments.{name}{'.__main__' if room else ''}"), name)


def local(saved: Path, drafter: str) -> list[str]:
    """Overrides that choose a drafter, of the tiny models where it has a checkpoint."""
    names = {"model": [f"drafter.name={saved / 'drafter'}"], "medusa": [f"drafter.name={saved / 'medusa'}"]}
    shape = {"medusa": ["drafter.shape=[2,1,1]"]}
    return [f"drafter={drafter}", f"method={drafter}", *names.get(drafter, []), *shape.get(drafter, [])]


def summary_file(folder: Path) -> dict[str, Any]:
    """A run's summary, and its rows over all prompts as ``methods``."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary | {"methods": [row for row in summary["rows"] if row["category"] == "all"]}


class Stop:
    """Stands in for ``Engine.generate``: raises at the n-th call that speculates."""

    def __init__(self, patch: pytest.MonkeyPatch, error: BaseException, at: set[int]):
        self.calls = 0
        original = Engine.generate

        def generate(engine: Engine, prompts: Any, sampling: Any, *, speculate: bool = True) -> Any:
            self.calls += speculate
            if speculate and self.calls in at:
                raise error
            return original(engine, prompts, sampling, speculate=speculate)

        patch.setattr(Engine, "generate", generate)


def invoke(*arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    return launched(f"hydra.run.dir={tmp_path / 'hydra'}", *arguments, monkeypatch=monkeypatch)


def launched(*arguments: str, monkeypatch: pytest.MonkeyPatch, main: Callable[[], None] = run.main) -> int:
    """The exit code of a command or of a sweep in this process; a sweep's folder is among its arguments."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        HydraConfig.instance().cfg = None  # joblib's launcher leaves the last job's
        for log in [each for each in logging.root.handlers if getattr(each, "baseFilename", "").endswith(".log")]:
            logging.root.removeHandler(log)
            log.close()  # of Hydra, which leaves it open
    return 0
