"""A quantized cache in a run: named in its heading and its manifest, and lossless."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments.config.checking import in_words
from experiments.config.settings import EngineSettings
from experiments.run import run
from specdec.cache.formats import FORMATS

Configure = Callable[..., DictConfig]


def test_the_settings_know_all_formats() -> None:
    """They have the names without importing PyTorch."""
    (kind,) = (field.type for field in fields(EngineSettings) if field.name == "kv_cache")
    assert in_words(kind) == f"one of {', '.join(FORMATS)}, or null"


@pytest.mark.parametrize("kv_cache", ["int8", None])
def test_a_run_says_which_cache_it_has(
    kv_cache: str | None, configure: Configure, tiny: list[str], capsys: Any
) -> None:
    setting = f"engine.kv_cache={kv_cache or 'null'}"
    config = configure(
        "run", *tiny, "drafter=ngram", setting, "method=mine", "target.dtype=float32", "warmup_prompts=0"
    )
    summary = run(config)
    assert all(method.lossless is None or method.lossless.divergences == 0 for method in summary.methods)
    assert ("keys and values in int8" in " ".join(capsys.readouterr().out.split())) == (kv_cache is not None)
    target = json.loads((Path(config.out) / "manifest.json").read_text())["target"]
    assert target["kv_cache"] == kv_cache
    assert target["kv_bytes_per_position"] > 0
