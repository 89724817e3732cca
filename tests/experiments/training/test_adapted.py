"""Targets with a LoRA that was trained just now: as many directions as its rank, and text that it knows better."""

from pathlib import Path

import pytest
import torch

from experiments.training.adapted import adapted
from specdec.target.target import Target

WORDS = "the drafter keeps what the target says and the target says what the drafter keeps\n"


@pytest.fixture
def files(tmp_path: Path) -> str:
    (tmp_path / "words.txt").write_text(WORDS * 20)
    return str(tmp_path / "*.txt")


def loss(target: Target) -> float:
    assert target.tokenizer is not None
    tokens = torch.tensor([target.tokenizer(WORDS * 2)["input_ids"]])
    with torch.no_grad():
        return float(target.model(tokens, labels=tokens).loss)


def test_a_lora_of_its_rank_is_in_the_weights_and_knows_the_text(
    saved: Path, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(saved / "target")
    plain = adapted(name, rank=0, files="none.txt", dtype="float32")
    made, again = (
        adapted(name, rank=2, files=files, steps=12, length=32, lr=0.02, dtype="float32", device="cpu") for _ in "ab"
    )
    before, after, repeated = (each.model.state_dict() for each in (plain, made, again))
    ranks = {
        int(torch.linalg.matrix_rank(after[key] - before[key], rtol=1e-4))
        for key in before
        if not torch.equal(after[key], before[key])
    }
    assert ranks == {2} and all(torch.equal(after[key], repeated[key]) for key in after)
    assert loss(made) < 0.8 * loss(plain)
    assert "a LoRA of rank 2: loss" in capsys.readouterr().out and made.name.endswith("with a LoRA of rank 2")


def test_what_it_cannot_be_trained_on_is_refused(saved: Path, files: str) -> None:
    name = str(saved / "target")
    with pytest.raises(ValueError, match=r"target\.files: no file matches"):
        adapted(name, rank=1, files="nowhere/*.md")
    with pytest.raises(ValueError, match=r"target\.files have \d+ tokens and target\.length=99999: give more text"):
        adapted(name, rank=1, files=files, length=99999)
    with pytest.raises(ValueError, match=r"target\.rank=-1"):
        adapted(name, rank=-1, files=files)
