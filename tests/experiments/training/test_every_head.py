"""Every head learns in a few steps, is written, and drafts what it drafted; so does the documentation's own one."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import BlockDrafter, EagleDrafter, HydraDrafter, ModelDrafter, MTPDrafter, PARDDrafter, PEagleDrafter
from drafters.medusa import MedusaDrafter, MedusaHeads
from drafters.redrafter import ReDrafter
from drafters.uno import UnoDrafter
from experiments.results.manifest import ROOT
from experiments.train import train
from experiments.training.loop import LOG
from specdec import Drafter, Engine, SamplingParams, Target, bundled
from tests.experiments.runs import Configure
from tests.experiments.training.conftest import LM
from verifiers.rejection import RejectionVerifier

READS = ["head.draft_vocabulary=64", "head.hidden_layers=[1,2,3]"]
HEADS: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "lm": ([f"head.config={LM}", "head.depths=3"], ModelDrafter, {"dtype": "float32"}),
    "lora": (["head.name={saved}/drafter", "head.rank=4", "head.depths=3"], ModelDrafter, {"dtype": "float32"}),
    "medusa": (["head.depths=3"], MedusaDrafter, {"shape": 3}),
    "hydra": (["head.depths=3"], HydraDrafter, {"shape": 3}),
    "hydra, prefixed": (["head.depths=3", "head.prefix_attention=true"], HydraDrafter, {"shape": 3}),
    "redrafter": (["head.depths=3"], ReDrafter, {}),
    "eagle3": (["head.depths=3", *READS], EagleDrafter, {"shape": 3}),
    "peagle": (["head.depths=3", "head.layers=2", *READS], PEagleDrafter, {}),
    "pard": ([f"head.config={LM}", "head.depths=3"], PARDDrafter, {"shape": 3, "dtype": "float32"}),
    "uno": (["head.depths=3", "head.rank=4"], UnoDrafter, {"shape": 3}),
    "mtp": (["head.depths=2"], MTPDrafter, {"shape": 2}),
    "dflash": (["head.block_size=4"], BlockDrafter, {}),
    "xpress": (["head.block_size=4", "head.config.xpress_rank=8"], BlockDrafter, {}),
    "dspark": (["head.block_size=3", "head.config.markov_rank=8"], BlockDrafter, {}),
}
"""The overrides of its training, its drafter, and how that is loaded."""


def drafter_of(name: str, path: Path) -> Drafter:
    """The drafter of a finished training; a LoRA's is its base, with the adapter."""
    _, kind, options = HEADS[name]
    if name == "lora":
        options = options | {"adapter": str(path)}
        path = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
    return kind.from_pretrained(str(path), **options)


SIXTY_STEPS = "fit.steps=60 fit.decay=none fit.muon_lr=null fit.lr=3e-3 evaluate_every=60"
FULL = pytest.mark.full


@pytest.mark.parametrize("name", [name if name == "dspark" else pytest.param(name, marks=FULL) for name in HEADS])
def test_a_head_learns_and_loads(name: str, configure, tiny_training, saved, tmp_path) -> None:
    """The loss falls on a text that repeats itself; the finished drafter loads, and is lossless."""
    overrides, kind, _ = HEADS[name]
    given = [each for each in tiny_training if not each.startswith("head.")]
    given += [*SIXTY_STEPS.split(), "loss=kl", "mixed_precision=auto", *["head.anchors=8"] * (kind is BlockDrafter)]
    overrides = [each.replace("{saved}", str(saved)) for each in overrides]
    best = train(configure("train", f"head={name.partition(',')[0]}", *given, *overrides))
    log: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), "the divergence falls"
    (measured,) = [line for line in log if "served_length" in line]
    assert measured["served_length"] >= 1 and measured["held_out/simulated_length"] > 1
    assert ("held_out/calibration_error_scaled" in measured) == (name == "dspark")
    target = Target.from_pretrained(str(saved / "target"), device="cpu", dtype="float32")
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=10, ignore_eos=True)
    with Engine(target, drafter_of(name, best), RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        drafted = engine.generate(prompts, sampling)
        plain = engine.generate(prompts, sampling, speculate=False)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert any(step.proposed_depth > 1 for each in drafted for step in each.steps)


@pytest.mark.parametrize(
    ("head", "loss"), [("dspark", "edr"), pytest.param("medusa", "block_verification", marks=FULL)]
)
def test_a_head_learns_with_losses_over_drafts(head: str, loss: str, configure, tiny_training, tmp_path) -> None:
    """More is accepted, on a text that repeats itself; with EDR, a block drafter's anchors are drawn."""
    given = [each for each in tiny_training if not each.startswith("head.")] + HEADS[head][0]
    given += [*SIXTY_STEPS.split(), "evaluate_every=30", "served.prompts=0", *["head.anchors=8"] * (head == "dspark")]
    train(configure("train", f"head={head}", *given, f"loss={loss}", "weights=equal"))
    log = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    first, last = (line["held_out/simulated_length"] for line in log if "held_out/simulated_length" in line)
    assert last > first > 1


@pytest.mark.full
def test_a_head_of_ones_own(configure: Configure, tiny_training: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    project = ROOT / "examples" / "project"
    monkeypatch.syspath_prepend(str(project))
    given = [each for each in tiny_training if not each.startswith("head.config")]
    try:
        best = train(configure("train", f"hydra.searchpath=[file://{project / 'conf'}]", "head=shared_output", *given))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
    heads: Any = MedusaHeads.from_pretrained(best).heads
    assert len(heads) == 2
    assert any(torch.count_nonzero(head[0].linear.weight) for head in heads), "its blocks were trained"


@pytest.mark.full
def test_a_training_makes_the_target_and_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    tiny = ["data.count=3", "fit={steps: 2, batch_size: 2, length: 32, warmup: 1, save_every: 2}", "served.prompts=0"]
    tiny += ["evaluate_every=2", "held_out_rows=1", "mixed_precision=no"]
    writes = "regenerate={documents: 4, prompt_tokens: 8, max_new_tokens: 24, batch_size: 4}"
    sizes = "head.config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    (out := tmp_path / "out").mkdir()
    for name, more in (("target", sizes), ("medusa", writes)):
        import_module("bundle").train(name, out, tmp_path / "work", (300, 64), [*tiny, more])
    target = Target.from_pretrained(str(out / "target"), device="cpu")
    assert target.vocab_size == 300
    with Engine(target, max_length=64) as engine:
        (done,) = engine.generate(["def f("], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(done.token_ids) == 4
    assert len(MedusaHeads.from_pretrained(out / "medusa").heads) == 4
    assert bundled.names(out) == ("medusa", "target")
    assert (out / "SHA256SUMS").read_text() == bundled.checksums(out)
    card = (out / "medusa" / "MODEL_CARD.md").read_text()
    assert "`python -m experiments.train recipe=bundled_medusa" in card and str(tmp_path) not in card
