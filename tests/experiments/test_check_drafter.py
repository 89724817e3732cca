"""The commands that check and inspect a drafter: their tables and verdicts."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from drafters.heads.eagle_files import save_eagle
from experiments.check_drafter import check_drafter as check
from experiments.inspect_drafter import inspect_drafter as inspect
from experiments.inspecting.kinds import Mistake
from specdec.checks import draws
from specdec.checks.drafter import Status
from tests import mutants
from tests.experiments.inspecting.toys import Seen, toy_eagle3, toy_model, toy_tokenizer
from tests.experiments.runs import Configure
from verifiers import RejectionVerifier, TransportVerifier

CHECKED = ("draws=0", "rounds=4", "tokens=8", "threads=1", "engine.max_length=160", "prompts=[abcabc, one two one two]")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_drafter_that_keeps_its_contract(
    configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.name={saved / 'target'}", "drafter=ngram", *CHECKED, "every_rule=false"]
    findings = check(configure("check_drafter", *words))
    captured = capsys.readouterr()
    text, said = " ".join(captured.out.split()), captured.err
    assert "0 s: drafter" in said and " s: recorded rounds\n" in said, "a line per check where there is no terminal"
    assert "NGramDrafter, tried with" in text and "greedy outputs passed equal to plain decoding" in text
    passed = sum(finding.status is Status.PASSED for finding in findings)
    assert f"NGramDrafter keeps its contract: it passes {passed} checks, and" in text


@pytest.mark.full
def test_a_drafter_is_tried_with_every_rule(
    configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stand for all, one of which is too slow for a model."""
    monkeypatch.setattr(draws, "fitting_rules", lambda drafter: [RejectionVerifier, TransportVerifier])
    models = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}"]
    check(configure("check_drafter", *models, *CHECKED))
    text = shown(capsys)
    assert "exact with RejectionVerifier passed greedy" in text and "Transport" not in text


@pytest.mark.full
def test_a_drafter_with_another_tree_and_a_policy(
    configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", *CHECKED, "every_rule=false"]
    words += ["tree=sampled", "drafter.shape.nodes=6", "drafter.shape.depth=2", "policy=confidence"]
    words.append("policy.threshold=0.001")  # a random model is never sure
    assert not [finding for finding in check(configure("check_drafter", *words)) if finding.failed]
    assert "max_nodes=6, max_depth=2, laws=WITHOUT_REPLACEMENT" in shown(capsys)


def test_a_drafter_that_does_not(configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["drafter=none", f"drafter._target_={mutants.__name__}.Twins", *CHECKED, "every_rule=false"]
    with pytest.raises(ValueError, match=r"^Twins breaks its contract in 1 check: trees: distinct siblings: node 2: "):
        check(configure("check_drafter", f"target.name={saved / 'target'}", *words))
    text = shown(capsys)
    assert "trees: distinct siblings FAILED" in text and "exact with" not in text


# ---------------------------------------------------------------- a trained head

PROMPTS = ",".join(" ".join(f"w{7 * row + 5 * place * row % 63}" for place in range(9)) for row in range(1, 9))
INSPECTED = ("tokens=32", "threads=1", "target=hf", "target.dtype=float32", "target.device=cpu", f"prompts=[{PROMPTS}]")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the toy target and a head of it."""
    folder, seen = tmp_path_factory.mktemp("toys"), Seen(toy_model())
    seen.model.save_pretrained(folder / "target")
    toy_tokenizer().save_pretrained(folder / "target")
    save_eagle(toy_eagle3(seen), folder / "eagle", notes={"target": "someone/target"})
    return folder


@pytest.fixture
def composed(configure: Configure, toys: Path) -> Configure:
    """Composes an inspection of one of the toys."""

    def compose(kind: str, *overrides: str) -> DictConfig:
        names = [f"target.name={toys / 'target'}", f"drafter.name={toys / kind}"]
        return configure("inspect_drafter", f"drafter={kind}", *INSPECTED, *names, *overrides)

    return compose


@pytest.mark.full
def test_a_mistake_and_what_mends_it(composed: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """What the verdict says to set is set, and then nothing is wrong."""
    found = inspect(composed("eagle", "depths=1", "drafter.hidden_layers=[1,3,4]"))
    text = shown(capsys)
    assert found.mistake is not None and found.mistake.alternative.mistake is Mistake.LAYERS
    assert "was probably loaded with a mistake: wrong hidden layers. With " in text
    assert "To mend it: leave out drafter.hidden_layers." in text
    mended = inspect(composed("eagle", "depths=1"))
    text = shown(capsys)
    assert mended.mistake is None and not mended.knows_nothing
    assert mended.loaded.length == pytest.approx(found.mistake.acceptance.length)
    for words in (
        "kind EAGLE-3 head, 1 decoder layer, ",
        "layout EAGLE-3's (midlayer.*), with this project's specdec.json",
        "trained on someone/target, as its files say",
        "reads hidden states 2, 4, 5 (l is the input of layer l) of a target of 8 layers",
        "vocabulary 64 of the target's 64 tokens",
        "RoPE theta 50, default (as the target's)",
        f"No mistake was found: none of {len(mended.tried)} alternatives raises the acceptance.",
        f"1 {mended.loaded.acceptance[0]:.2f} {mended.loaded.unconditional[0]:.2f} 0.53 to 0.81",
    ):
        assert words in text
