"""The head of the documentation's own project is trained, and loads as what it says it is."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from drafters.medusa import MedusaHeads
from experiments.train import train

PROJECT = Path(__file__).parents[3] / "examples" / "project"


@pytest.mark.full
def test_a_head_of_ones_own(
    configure: Callable[..., DictConfig], tiny_training: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT))
    given = [each for each in tiny_training if not each.startswith("head.config")]
    try:
        best = train(configure("train", f"hydra.searchpath=[file://{PROJECT / 'conf'}]", "head=shared_output", *given))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
    heads = MedusaHeads.from_pretrained(best)
    assert heads.num_heads == 2
    assert any(torch.count_nonzero(head[0].linear.weight) for head in heads.heads), "its blocks were trained"  # type: ignore[index]
