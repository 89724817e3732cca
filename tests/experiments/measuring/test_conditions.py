"""What is said about an engine's forwards is what they are on its device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.measuring.conditions import ingredients_of
from specdec import Engine, Target
from tests.models import tiny_model


@pytest.mark.parametrize(
    ("device", "options", "forwards"),
    [
        ("cpu", {"recording": "decisions"}, "packed, captured, decisions recorded"),
        ("cpu", {"optimize": False, "recording": "off"}, "the model's own code"),
        ("cpu", {"invariant": True, "recording": "off"}, "invariant"),
        ("cuda", {"recording": "rounds"}, "fused, rounds recorded"),
    ],
)
def test_forwards_are_named_by_what_makes_them_fast(
    device: str, options: dict[str, Any], forwards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny_model())
    with Engine(target, max_length=32, **options) as engine:
        if device == "cuda":  # an executor for GPUs says that it captures, too
            own = {"model": target.model, "name": target.name, "dtype": target.dtype}
            monkeypatch.setattr(engine, "target", SimpleNamespace(device=torch.device(device), **own))
        assert ingredients_of(engine, speculate=False)["forwards"] == forwards
