"""The demo's model is as large as this machine can carry in the time that a reader has."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from experiments.commands import demo as pace
from experiments.commands.demo import fit_to_machine
from experiments.demo import demo

Configure = Callable[..., DictConfig]


def small(configure: Configure, tiny: list[str], *more: str) -> DictConfig:
    return configure("demo", *tiny, "engine.max_length=128", *more)


def test_a_slow_one_takes_the_model_at_its_own_size_and_says_so(
    configure: Configure, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(configure, tiny)
    monkeypatch.setattr(pace, "seconds_needed", lambda config: 421.2)
    said = fit_to_machine(config)
    assert said is not None
    assert "At the cost of a 110m model this would take about 421 s here, more than time_limit=420" in said
    assert config.target.inflate is None


@pytest.mark.full
def test_resuming_keeps_what_was_decided(
    configure: Configure, saved: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "seconds_needed", lambda config: 1000.0)
    more = [
        "target.dtype=float32",
        "dataset.count=1",
        "~methods.medusa",
        "~methods.eagle",
        f"methods.model.name={saved / 'drafter'}",
    ]
    assert demo(small(configure, tiny, *more)).complete
    monkeypatch.setattr(pace, "seconds_needed", lambda config: 1.0)
    config = small(configure, tiny, *more, "resume=true")
    assert demo(config).complete
    assert config.target.inflate is None
