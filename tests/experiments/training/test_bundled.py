"""The bundled models: trained by one command, with cards and checksums; and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.eagle import EagleDrafter
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from drafters.medusa import MedusaHeads
from experiments.bundle import bundle
from experiments.training.bundled import install
from specdec import bundled
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.experiments.runs import Configure

TINY = [
    "data.count=3",
    "fit={steps: 2, batch_size: 2, length: 32, warmup: 1, save_every: 2}",
    "served.prompts=0",
    "evaluate_every=2",
    "held_out_rows=1",
    "mixed_precision=no",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of an EAGLE-3 head leaves, but with random weights."""
    folder = tmp_path_factory.mktemp("training")
    target = Target.from_pretrained("bundled/target", dtype="bfloat16", device="cpu")
    torch.manual_seed(0)
    head = Eagle3Head.for_target(target.model, hidden_layers=(1, 3, 5))
    torch.nn.Module.to(head, torch.bfloat16)
    save_eagle(head, folder / "best")
    figures = {"served_length": 3.0, "served_length/T=0": 3.456, "served_length/T=1": 2.5}
    figures |= {"held_out/accuracy/1": 0.75, "held_out/accuracy/2": 0.5}
    facts = {"head": "TrainedEagle3", "target": "bundled/target", "documents": 3, "tokens": 1234, "parameters": 567}
    facts |= {"seed": 0, "step": 400, "figures": figures}
    (folder / "best" / "training.json").write_text(json.dumps(facts))
    manifest = {
        "config": {"head": {"depths": 5}, "regenerate": {"file": "/home/me/answers.jsonl"}, "fit": {"steps": 1200}},
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


@pytest.mark.full
def test_a_head_is_installed_with_its_card(trained: Path, out: Path, capsys: Any) -> None:
    (out / "eagle3").mkdir()
    (out / "eagle3" / "old.safetensors").write_bytes(b"old")
    install("eagle3", trained, out)
    assert "tokens per round on one prompt" in capsys.readouterr().out
    assert EagleDrafter.from_pretrained(out / "eagle3").head is not None
    assert not (out / "eagle3" / "old.safetensors").exists(), "nothing of an earlier head stays"
    card = (out / "eagle3" / "MODEL_CARD.md").read_text()
    for text in (
        "`python -m experiments.train recipe=bundled_eagle3`, commit 0123456789",
        *("| served length | 3.46 at T=0, 2.50 at T=1 |", "| held-out accuracy | 75%, 50% |", "step 400 of 1200"),
        *("depths: 5", "file: answers.jsonl"),  # no folder of this machine
    ):
        assert text in card
    assert (out / "SHA256SUMS").read_text() == bundled.checksums(out)
    install("medusa", trained, out)  # any head will do
    whole = (out / "MODEL_CARD.md").read_text()
    assert whole.count("| `bundled/eagle3` | EAGLE-3 head, 567 parameters | [card](eagle3/MODEL_CARD.md) |") == 1
    assert bundled.names(out) == ("eagle3", "medusa")


def test_what_does_not_work_is_not_installed(
    trained: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads((trained / "best" / "training.json").read_text())
    (other := tmp_path / "other" / "best").mkdir(parents=True)
    for change, sentence in (
        ({"target": "somebody/model"}, "was trained for somebody/model, give a head for bundled/target"),
        ({"head": "TrainedPoem"}, "holds a TrainedPoem, give one of TrainedLM, TrainedEagle3, "),
    ):
        (other / "training.json").write_text(json.dumps(facts | change))
        with pytest.raises(ValueError, match=sentence):
            install("eagle3", other.parent, out)
    with pytest.raises(ValueError, match=r"eagle3: there is no best/training\.json"):
        install("eagle3", tmp_path, out)
    monkeypatch.setattr(bundled, "MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"all bundled models would have 4\.\d MB, more than 1: leave eagle3 out"):
        install("eagle3", trained, out)
    assert sorted(path.name for path in out.iterdir()) == ["MODEL_CARD.md"], "before anything is copied"


@pytest.mark.full
def test_one_command_makes_target_and_heads(configure: Configure, tmp_path: Path, capfd: Any) -> None:
    """A tokenizer, a language model on text alone, and heads for it; a finished training is not run again."""
    overrides = [*TINY, "regenerate={documents: 4, prompt_tokens: 8, max_new_tokens: 24, batch_size: 4}"]
    given = [f"out={tmp_path / 'out'}", f"work={tmp_path / 'work'}", "vocab_size=300", "max_length=64"]
    sizes = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    bundle(configure("bundle", *given, "models=[target]", f"overrides={[*TINY, f'head.config={sizes}']}"))
    bundle(configure("bundle", *given, "models=[target,medusa]", f"overrides={overrides}"))
    said = capfd.readouterr().out
    assert said.count("python -m experiments.train recipe=bundled_target") == 1
    assert said.count("python -m experiments.train recipe=bundled_medusa") == 1
    target = Target.from_pretrained(str(tmp_path / "out" / "target"), device="cpu")
    assert target.vocab_size == 300
    with Engine(target, max_length=64) as engine:
        (done,) = engine.generate(["def f("], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(done.token_ids) == 4
    assert len(MedusaHeads.from_pretrained(tmp_path / "out" / "medusa").heads) == 4
    assert bundled.names(tmp_path / "out") == ("medusa", "target")
    card = (tmp_path / "out" / "target" / "MODEL_CARD.md").read_text()
    assert "causal LM, " in card and "served length" not in card.split("*Served")[0]
    with pytest.raises(ValueError, match="training of cake ended early"):
        bundle(configure("bundle", *given, "models=[cake]"))
