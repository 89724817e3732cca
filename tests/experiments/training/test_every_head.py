"""Every head learns in a few steps, is written, and drafts what it drafted; so does the documentation's own one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.eagle_files import load_eagle
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter, MedusaHeads
from drafters.model import ModelDrafter
from drafters.mtp import MTPDrafter
from drafters.pard import PARDDrafter
from drafters.peagle import PEagleDrafter
from drafters.redrafter import ReDrafter
from drafters.uno import UnoDrafter
from experiments.train import train
from experiments.training.loop import LOG
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.training.conftest import LM
from verifiers.rejection import RejectionVerifier

Compose = Callable[..., DictConfig]
Load = Callable[[Path], Drafter]
HEADS: dict[str, tuple[list[str], Load]] = {
    "lm": (
        [f"head.config={LM}", "head.depths=3"],
        lambda path: ModelDrafter.from_pretrained(str(path), dtype="float32"),
    ),
    "lora": (
        ["head.name={saved}/drafter", "head.rank=4", "head.depths=3"],
        lambda path: ModelDrafter.from_pretrained(
            json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"],
            adapter=str(path),
            dtype="float32",
        ),
    ),
    "medusa": (["head.depths=3"], lambda path: MedusaDrafter.from_pretrained(str(path), shape=3)),
    "hydra": (["head.depths=3"], lambda path: HydraDrafter.from_pretrained(str(path), shape=3)),
    "hydra, prefixed": (
        ["head.depths=3", "head.prefix_attention=true"],
        lambda path: HydraDrafter.from_pretrained(str(path), shape=3),
    ),
    "redrafter": (["head.depths=3"], lambda path: ReDrafter.from_pretrained(str(path))),
    "eagle3": (
        ["head.depths=3", "head.draft_vocabulary=64", "head.hidden_layers=[1,2,3]"],
        lambda path: EagleDrafter(load_eagle(path), 3),
    ),
    "peagle": (
        ["head.depths=3", "head.layers=2", "head.hidden_layers=[1,2,3]", "head.draft_vocabulary=64"],
        lambda path: PEagleDrafter.from_pretrained(path),
    ),
    "pard": (
        [f"head.config={LM}", "head.depths=3"],
        lambda path: PARDDrafter.from_pretrained(str(path), shape=3, dtype="float32"),
    ),
    "uno": (["head.depths=3", "head.rank=4"], lambda path: UnoDrafter.from_pretrained(path, shape=3)),
    "mtp": (["head.depths=2"], lambda path: MTPDrafter.from_pretrained(path, shape=2)),
    "dflash": (["head.block_size=4", "head.anchors=8"], lambda path: BlockDrafter.from_pretrained(str(path))),
    "dflash2": (
        ["head.block_size=4", "head.anchors=8", "head.config.selector_rank=8", "head.config.conv_group_size=8"],
        lambda path: BlockDrafter.from_pretrained(str(path)),
    ),
    "domino": (
        ["head.block_size=3", "head.anchors=8", "head.config.gru_hidden_dim=8", "head.config.emb_dim=8"],
        lambda path: BlockDrafter.from_pretrained(str(path)),
    ),
    "xpress": (
        ["head.block_size=4", "head.anchors=8", "head.config.xpress_rank=8"],
        lambda path: BlockDrafter.from_pretrained(str(path)),
    ),
    "dspark": (
        ["head.block_size=3", "head.anchors=8", "head.markov_rank=8"],
        lambda path: BlockDrafter.from_pretrained(str(path)),
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "dspark" else pytest.param(name, marks=pytest.mark.full) for name in HEADS]
)
def test_a_head_learns_and_loads(
    name: str, configure: Compose, tiny_training: list[str], saved: Path, tmp_path: Path
) -> None:
    """The loss falls on a text that repeats itself; the finished drafter loads, and is lossless."""
    overrides, load = HEADS[name]
    given = [each for each in tiny_training if not each.startswith("head.")]
    overrides = [each.replace("{saved}", str(saved)) for each in overrides]
    more = ["fit.steps=60", "fit.decay=none", "fit.muon_lr=null", "fit.lr=3e-3", "evaluate_every=60", "loss=kl"]
    best = train(configure("train", f"head={name.partition(',')[0]}", *given, *overrides, *more))
    log: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    first, last = (sum(line["loss"] for line in part) / 8 for part in (steps[:8], steps[-8:]))
    assert last < 0.9 * first, "the divergence falls"
    (measured,) = [line for line in log if "served_length" in line]
    assert measured["served_length"] >= 1 and measured["held_out/simulated_length"] > 1
    assert ("held_out/calibration_error_scaled" in measured) == (name == "dspark")
    target = Target.from_pretrained(str(saved / "target"), device="cpu", dtype="float32")
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=10, ignore_eos=True)
    with Engine(target, load(best), RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
        drafted = engine.generate(prompts, sampling)
        plain = engine.generate(prompts, sampling, speculate=False)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert any(step.proposed_depth > 1 for each in drafted for step in each.steps)
    assert torch.isfinite(torch.tensor([line["loss"] for line in steps])).all()


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
