"""Tests that need a process of their own on a GPU: a capture that fails here may spoil all captures after it."""

import pytest
import torch

from specdec.engine import recording as recording_module
from specdec.engine.engine import Engine
from specdec.target.target import Target
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.test_lossless import SAMPLING, prompts
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.gpu


def test_graphs_take_a_bounded_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 1)
    monkeypatch.setattr(recording_module, "MOST_RECORDINGS", 8)
    model = tiny_model().cuda()
    made = DRAFTERS["model_tree_iid"](model)
    engine = Engine(Target(model), made, RejectionVerifier(), max_batch_size=3, max_length=96)
    sizes = []
    for _ in range(4):
        engine.generate(prompts(), SAMPLING)
        sizes.append(torch.cuda.memory_reserved())
    assert len(engine._rounds.recorder.recordings) <= 8
    assert sizes[-1] <= sizes[1] + 2**26  # what is dropped is used again
