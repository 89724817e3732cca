"""The bundled models: trained by one command, with cards and checksums; and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.medusa import MedusaHeads
from experiments.bundle import bundle
from experiments.training import bundled as room
from experiments.training.bundled import install
from specdec import Engine, SamplingParams, Target, bundled
from tests.experiments.runs import Configure

TINY = ["data.count=3", "fit={steps: 2, batch_size: 2, length: 32, warmup: 1, save_every: 2}", "served.prompts=0"]
TINY += ["evaluate_every=2", "held_out_rows=1", "mixed_precision=no"]


def test_what_does_not_work_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out := tmp_path / "bundled").mkdir()
    with pytest.raises(ValueError, match=r"eagle3: there is no best/training\.json"):
        install("eagle3", tmp_path, out)
    (best := tmp_path / "training" / "best").mkdir(parents=True)
    (best / "model.safetensors").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(bundled, "MOST_BYTES", 1_000_000)
    for change, sentence in (
        ({"target": "somebody/model"}, "was trained for somebody/model, give a head for bundled/target"),
        ({"head": "TrainedPoem"}, "holds a TrainedPoem, give one of TrainedLM, TrainedEagle3, "),
        ({}, r"all bundled models would have 2\.0 MB, more than 1: leave eagle3 out"),
    ):
        (best / "training.json").write_text(json.dumps({"head": "TrainedEagle3", "target": "bundled/target"} | change))
        with pytest.raises(ValueError, match=sentence):
            install("eagle3", best.parent, out)
    (best / "training.json").write_text(json.dumps({"head": "TrainedEagle3", "target": "bundled/target"}))
    with pytest.raises(ValueError, match=r"was trained for bundled/target, give a head for bundled/hybrid"):
        install("hybrid_eagle3", best.parent, out)
    assert not list(out.iterdir()), "before anything is copied"


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
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == bundled.checksums(tmp_path / "out")
    card = (tmp_path / "out" / "medusa" / "MODEL_CARD.md").read_text()
    assert "`python -m experiments.train recipe=bundled_medusa" in card and str(tmp_path) not in card
    card = (tmp_path / "out" / "target" / "MODEL_CARD.md").read_text()
    assert "causal LM, " in card and "served length" not in card.split("*Served")[0]
    sizes = sizes.replace("layers: 1", "layers: 2, num_key_value_heads: 2, head_dim: 8")
    sizes = f"{sizes[:-1]}, layer_types: [linear_attention, full_attention]}}"
    bundle(configure("bundle", *given, "models=[hybrid]", f"overrides={[*TINY, f'head.config={sizes}']}"))
    bundle(configure("bundle", *given, "models=[hybrid_eagle3]", f"overrides={[*TINY, 'head.name=null']}"))
    facts = json.loads((tmp_path / "out" / "hybrid_eagle3" / "training.json").read_text())
    assert facts["target"] == str(tmp_path / "out" / "hybrid")
    with pytest.raises(ValueError, match="training of cake ended early"):
        bundle(configure("bundle", *given, "models=[cake]"))


@pytest.mark.full
def test_a_head_that_changes_outputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(room.RejectionVerifier):
        """Accepts another token."""

        def laws(self, tree: Any, target_probs: Any) -> Any:
            laws = super().laws(tree, target_probs)
            return replace(laws, after=lambda stop: laws.after(stop).roll(1, -1))

    (out := tmp_path / "bundled").mkdir()
    shutil.copytree(bundled.FOLDER / "eagle3", best := tmp_path / "training" / "best")
    (best / "training.json").write_text(json.dumps({"head": "TrainedEagle3", "target": "bundled/target"}))
    monkeypatch.setattr(room, "RejectionVerifier", Wrong)
    with pytest.raises(ValueError, match="changes greedy outputs, it must not be bundled"):
        install("eagle3", best.parent, out)
