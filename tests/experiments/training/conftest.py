"""A tiny training: byte tokens, a target of random weights, and a text file that repeats itself."""

from pathlib import Path

import pytest

from specdec.target.target import Target
from tests.experiments.conftest import VOCAB_SIZE, byte_tokenizer
from tests.experiments.runs import Configure
from tests.models import tiny_model

LM = "{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"


@pytest.fixture
def tiny_training(saved: Path, tmp_path: Path) -> list[str]:
    """Overrides that make a training of twelve steps."""
    for name, words in (("a", "spam and eggs, "), ("b", "ham, spam, "), ("c", "one two three. "), ("d", "eggs. ")):
        (tmp_path / f"{name}.txt").write_text(words * 20)
    return [
        *(f"target.name={saved / 'target'}", "target.device=cpu", f"out={tmp_path / 'out'}", "threads=1"),
        *("data=text", f"data.files={tmp_path}/*.txt", "data.held_out=0.25", f"head.config={LM}", "head.depths=2"),
        "fit={steps: 12, batch_size: 2, length: 32, lr: 1e-2, muon_lr: 1e-2, warmup: 2, save_every: 4, log_every: 1}",
        *("served={prompts: 2, prompt_tokens: 8, max_new_tokens: 8}", "held_out_rows=2", "mixed_precision=no"),
        "evaluate_every=6",
    ]


@pytest.fixture
def training(configure: Configure, tiny_training: list[str]) -> Configure:
    return lambda *overrides: configure("train", *tiny_training, *overrides)


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB_SIZE), byte_tokenizer(), name="tiny")
