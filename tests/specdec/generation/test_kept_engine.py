"""The engine that is kept from call to call: its length grows, and few are made."""

from typing import Any

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.generation import SpeculativeGenerate, generate
from tests.components import DRAFTERS
from verifiers.rejection import RejectionVerifier


class Counted(Engine):
    """Counts the engines that are made, and refuses long ones."""

    made = 0
    longest = 10**6

    def __init__(self, *args: Any, max_length: int, **kwargs: Any):
        if max_length > Counted.longest:
            raise ValueError("no room for so many tokens")
        super().__init__(*args, max_length=max_length, **kwargs)
        Counted.made += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(generate, "Engine", Counted)
    monkeypatch.setattr(Counted, "made", 0)
    return Counted


def test_a_conversation_needs_few_engines(model, counted: type[Counted]) -> None:
    """The length doubles: of 13, 26, ... up to 104 tokens, four engines (9 before), and the outputs are plain ones."""
    ours = SpeculativeGenerate(DRAFTERS["ngram"](model), RejectionVerifier())
    ids = torch.tensor([[1, 2, 3]])
    for turn in range(8):
        plain = model.generate(ids, max_new_tokens=10)
        assert torch.equal(model.generate(ids, max_new_tokens=10, custom_generate=ours), plain)
        ids = torch.cat([plain, torch.tensor([[turn, 5, 9]])], dim=1)
    assert counted.made == 4


def test_the_length_grows_up_to_the_model_s_positions(model, counted: type[Counted]) -> None:
    ours = SpeculativeGenerate()
    for length in (150, 200, 256):
        prompt = torch.ones((1, length - 2), dtype=torch.long)
        plain = model.generate(prompt, max_new_tokens=2)
        assert torch.equal(model.generate(prompt, max_new_tokens=2, custom_generate=ours), plain)
    assert counted.made == 2


def test_room_for_later_calls_is_no_reason_to_fail(model, counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "longest", 20)
    ours = SpeculativeGenerate()
    for length in (12, 18, 20):
        prompt = torch.ones((1, length - 2), dtype=torch.long)
        plain = model.generate(prompt, max_new_tokens=2)
        assert torch.equal(model.generate(prompt, max_new_tokens=2, custom_generate=ours), plain)
    with pytest.raises(ValueError, match="no room"):
        model.generate(torch.ones((1, 20), dtype=torch.long), max_new_tokens=2, custom_generate=ours)
