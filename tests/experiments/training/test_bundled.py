"""The bundled models: trained by one command, with cards and checksums; and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drafters.medusa import MedusaHeads
from specdec import Engine, SamplingParams, Target, bundled
from verifiers.rejection import RejectionVerifier

TINY = ["data.count=3", "fit={steps: 2, batch_size: 2, length: 32, warmup: 1, save_every: 2}", "served.prompts=0"]
TINY += ["evaluate_every=2", "held_out_rows=1", "mixed_precision=no"]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    return __import__("bundle")


@pytest.mark.full
def test_a_training_makes_the_target_and_a_head(room: ModuleType, tmp_path: Path) -> None:
    """A tokenizer, a language model on text alone, and heads for it."""
    overrides = [*TINY, "regenerate={documents: 4, prompt_tokens: 8, max_new_tokens: 24, batch_size: 4}"]
    sizes = "head.config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    room.train("target", out, work, (300, 64), [*TINY, sizes])
    room.train("medusa", out, work, (300, 64), overrides)
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
    with pytest.raises(ValueError, match="training of cake ended early"):
        room.train("cake", out, work, (300, 64), [])


@pytest.mark.full
def test_a_head_that_changes_outputs_is_refused(
    room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(RejectionVerifier):
        """Accepts another token."""

        def laws(self, tree: Any, target_probs: Any) -> Any:
            laws = super().laws(tree, target_probs)
            return replace(laws, after=lambda stop: laws.after(stop).roll(1, -1))

    (out := tmp_path / "bundled").mkdir()
    shutil.copytree(bundled.FOLDER / "eagle3", best := tmp_path / "training" / "best")
    (best / "training.json").write_text(json.dumps({"head": "TrainedEagle3", "target": "bundled/target"}))
    monkeypatch.setattr(room, "RejectionVerifier", Wrong)
    with pytest.raises(ValueError, match="changes greedy outputs, it must not be bundled"):
        room.install("eagle3", best.parent, out)
