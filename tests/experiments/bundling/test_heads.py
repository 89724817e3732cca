"""Trained heads among the bundled models: cards, checksums, and what is refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.eagle import EagleDrafter
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from experiments.bundle import bundle
from experiments.bundling import heads
from specdec import bundled
from specdec.target.target import Target
from tests.experiments.runs import Configure


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of an EAGLE-3 head leaves, but with random weights."""
    folder = tmp_path_factory.mktemp("training")
    target = Target.from_pretrained("bundled/target", dtype="bfloat16", device="cpu")
    torch.manual_seed(0)
    head = Eagle3Head.for_target(target.model, hidden_layers=(1, 3, 5))
    torch.nn.Module.to(head, torch.bfloat16)
    save_eagle(head, folder / "best")
    facts = {
        "head": "TrainedEagle3", "target": "bundled/target", "documents": 3, "tokens": 1234, "parameters": 567,
        "seed": 0, "step": 400,
        "figures": {
            "served_length/T=0": 3.456, "served_length/T=1": 2.5,
            "held_out/accuracy/1": 0.75, "held_out/accuracy/2": 0.5,
        },
    }  # fmt: skip
    (folder / "best" / "training.json").write_text(json.dumps(facts))
    manifest = {
        "config": {
            "head": {"depths": 5},
            "regenerate": {"file": "/home/me/answers.jsonl"},
            "fit": {"steps": 1200},
            "seed": 0,
            "out": "elsewhere",
        },
        "overrides": ["recipe=bundled_eagle3", "out=elsewhere", "threads=2"],
        "versions": {"torch": "2.13.0"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder of bundled models: the card, and the heads that there were."""
    folder = tmp_path / "bundled"
    folder.mkdir()
    shutil.copy(bundled.FOLDER / "MODEL_CARD.md", folder)
    return folder


def install(configure: Configure, out: Path, *more: str) -> None:
    threads = torch.get_num_threads()
    try:
        bundle(configure("bundle", f"out={out}", f"work={out / 'work'}", "stages=[heads]", *more))
    finally:
        torch.set_num_threads(threads)


def test_a_head_is_installed_with_its_card(configure: Configure, trained: Path, out: Path, capsys: Any) -> None:
    (out / "eagle3").mkdir()
    (out / "eagle3" / "old.safetensors").write_bytes(b"old")
    install(configure, out, f"heads.eagle3={trained}")
    assert "tokens per round on one prompt" in capsys.readouterr().out
    assert EagleDrafter.from_pretrained(out / "eagle3").head is not None
    assert not (out / "eagle3" / "old.safetensors").exists(), "nothing of an earlier head stays"
    card = (out / "eagle3" / "MODEL_CARD.md").read_text()
    assert "`python -m experiments.train recipe=bundled_eagle3`, commit 0123456789" in card
    assert "| served length | 3.46 at T=0, 2.50 at T=1 |" in card
    assert "| held-out accuracy | 75%, 50% |" in card and "step 400 of 1200" in card and "depths: 5" in card
    assert "file: answers.jsonl" in card, "no folder of this machine"
    whole = (out / "MODEL_CARD.md").read_text()
    assert "| `bundled/eagle3` | EAGLE-3 head, 567 parameters | [card](eagle3/MODEL_CARD.md) |" in whole
    assert (out / "SHA256SUMS").read_text() == bundled.checksums(out)
    assert bundled.names(out) == ("eagle3",)
    assert "eagle3/model.safetensors" in bundled.checksums(out) and not (out / "work").exists()
    install(configure, out, f"heads.medusa={trained}")  # any head will do
    assert (out / "MODEL_CARD.md").read_text().count("bundled/eagle3") == 1, "the list is made anew"
    rows = [line for line in (out / "MODEL_CARD.md").read_text().splitlines() if line.startswith("| Medusa heads")]
    assert rows == ["| Medusa heads | see [their card](medusa/MODEL_CARD.md) |"]
    assert bundled.names(out) == ("eagle3", "medusa")


def test_what_does_not_work_is_not_installed(
    configure: Configure, trained: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads((trained / "best" / "training.json").read_text())
    for number, (change, sentence) in enumerate(
        [
            ({"target": "somebody/model"}, "was trained for somebody/model: give a head for bundled/target"),
            ({"head": "TrainedLM"}, "holds a TrainedLM: give one of TrainedEagle3, "),
        ]
    ):
        other = tmp_path / str(number)
        shutil.copytree(trained, other)
        (other / "best" / "training.json").write_text(json.dumps(facts | change))
        with pytest.raises(ValueError, match=re.escape(sentence)):
            install(configure, out, f"heads.eagle3={other}")
    for more, sentence in (
        ([], "there is no head to install: give heads.eagle3=FOLDER"),
        ([f"heads.eagle3={tmp_path}"], "there is no best/training.json, give the folder of a training"),
        ([f"+heads.target={trained}"], "heads.target: the target and the small model are stages of their own"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            install(configure, out, *more)
    monkeypatch.setattr(bundled, "MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"all bundled models would have 4\.\d MB, more than 1: leave eagle3 out"):
        install(configure, out, f"heads.eagle3={trained}")
    assert sorted(path.name for path in out.iterdir()) == ["MODEL_CARD.md"], "before anything is copied"


@pytest.mark.full
def test_a_head_that_changes_outputs_is_refused(trained: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(heads.RejectionVerifier):
        """Accepts another token."""

        def laws(self, tree: Any, target_probs: Any) -> Any:
            laws = super().laws(tree, target_probs)
            return replace(laws, after=lambda stop: laws.after(stop).roll(1, -1))

    monkeypatch.setattr(heads, "RejectionVerifier", Wrong)
    with pytest.raises(ValueError, match="changes greedy outputs: it must not be bundled"):
        heads.install_heads({"eagle3": str(trained)}, out)
