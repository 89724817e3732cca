"""The recipe of the bundled models on a few files and tiny sizes: every stage, once."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from omegaconf import DictConfig
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.medusa_heads import MedusaHeads
from experiments.bundle import bundle
from experiments.bundling.config import LlamaSize, Recipe
from experiments.bundling.fitting import Windows, fit
from experiments.bundling.losses import distance, next_token
from experiments.bundling.text import interleave
from experiments.config.sections import plain, typed
from experiments.datasets.sources import stdlib_root
from experiments.training.fitting import Schedule
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target

Configure = Callable[..., DictConfig]
SIZE = (
    "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,"
    " max_position_embeddings: 256}"
)
FIT = "{steps: 3, batch_size: 2, length: 16, lr: 1e-3, muon_lr: 1e-3, warmup: 1, save_every: 2}"
TINY = [
    "mixed_precision=no",
    "tokenizer.vocab_size=300",
    *(f"{name}.model={SIZE}" for name in ("target", "drafter")),
    *(f"{name}.fit={FIT}" for name in ("target", "drafter", "medusa")),
    "samples={count: 8, batch_size: 4, prompt_length: 8, length: 32, greedy_fraction: 0.5}",
    "medusa.num_heads=2",
]


def test_the_configuration_is_a_recipe(configure: Configure, tmp_path: Path) -> None:
    config = configure("bundle", f"out={tmp_path}")
    recipe = typed(Recipe, {str(name): plain(config, str(name)) for name in config})
    assert recipe.target.fit == Schedule(steps=2200, batch_size=4, length=1024, lr=6e-3, muon_lr=3e-2)
    assert recipe.drafter.model.num_hidden_layers == 2
    assert recipe.medusa.num_heads == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.fit.steps=many", "target.fit.steps='many': give an integer"),
        ("+target.fit.speed=2", "there is no target.fit.speed: choose among steps"),
        ("+samples.counts=2", "there is no samples.counts: did you mean samples.count?"),
        ("~drafter.model.hidden_size", "drafter.model.hidden_size is missing: give drafter.model.hidden_size="),
        ("stages=[target,card,cake]", "stages=.*: give a list of tokenizer, target"),
        ("medusa.fit.warmup=1000", "fit.warmup=1000 is above fit.steps=450"),
        ("medusa.fit.batch_size=0", "fit.batch_size=0: give at least 1"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(override: str, message: str, configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        bundle(configure("bundle", f"out={tmp_path}", f"work={tmp_path / 'work'}", override))
    assert not (tmp_path / "work").exists(), "before any work"


def test_all_stages(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    files = [stdlib_root() / name for name in ("abc.py", "bisect.py", "heapq.py")]
    for module in ("text", "recipe"):
        monkeypatch.setattr(f"experiments.bundling.{module}.training_files", lambda: files)
    monkeypatch.setattr("experiments.bundling.evaluation.held_out_files", lambda: files[:1])
    threads = torch.get_num_threads()
    config = configure("bundle", f"out={tmp_path / 'out'}", f"work={tmp_path / 'work'}", *TINY)
    try:
        bundle(config)
        first = capsys.readouterr().out
        bundle(config)
    finally:
        torch.set_num_threads(threads)
    assert first.count(": done {") == 5
    assert ": done {" not in capsys.readouterr().out, "finished stages are passed over"
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "  vocab_size: 300\n" in card and "  num_heads: 2\n" in card and "python -m experiments.bundle`" in card
    target = Target.from_pretrained(str(tmp_path / "out" / "target"), device="cpu")
    (done,) = Engine(target, max_length=64).generate(["def f("], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(done.token_ids) == 4
    assert len(MedusaHeads.from_pretrained(tmp_path / "out" / "medusa").heads) == 2


def test_windows_alternate() -> None:
    first, second = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7, 8, 9])
    assert interleave(first, second, length=2).tolist() == [1, 2, 6, 7, 3, 4, 8, 9]


def test_the_distance_goes_from_kl_to_total_variation() -> None:
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    kl = (p * (p / q).log()).sum()
    torch.testing.assert_close(distance(q.log(), p, 0.0), kl)
    torch.testing.assert_close(distance(q.log(), p, 1.0), torch.tensor(0.4))
    torch.testing.assert_close(distance(q.log(), p, 0.25), 0.75 * kl + 0.25 * 0.4)


def test_an_interrupted_training_ends_as_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, also if the process dies while it writes a checkpoint."""
    size = LlamaSize(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    schedule = Schedule(steps=7, batch_size=2, length=8, lr=1e-2, muon_lr=1e-2, warmup=2, save_every=2)
    tokens = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(1))
    windows = Windows(tokens, length=8, batch_size=2, seed=3)

    def trained(folder: Path) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=50, tie_word_embeddings=True, **asdict(size))
        model, begun = LlamaForCausalLM(config), []

        def loss(module: torch.nn.Module, batch: torch.Tensor, progress: float) -> torch.Tensor:
            begun.append(progress)
            return next_token(module, batch, progress)

        fit(model, loss, windows, schedule, accelerator=Accelerator(), checkpoint=folder, name="model")
        assert round(begun[0] * 7) == (0 if folder.name == "whole" else 2), "goes on from the whole checkpoint"
        return [parameter.detach().clone() for parameter in model.parameters()]

    whole = trained(tmp_path / "whole")
    save = torch.save

    def dies(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        if state["step"] == 4:
            path.write_bytes(path.read_bytes()[:100])
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(torch, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "broken")
    assert all(torch.equal(*pair) for pair in zip(trained(tmp_path / "broken"), whole, strict=True))
