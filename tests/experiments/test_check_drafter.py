"""The command that checks a drafter: its table, its verdict, and what it says about bad input."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from experiments.check_drafter import check_drafter as check
from specdec.checks import draws
from specdec.checks.drafter import Status
from specdec.interfaces import Drafter
from tests import mutants
from verifiers import RejectionVerifier, TransportVerifier

Configure = Callable[..., DictConfig]
SMALL = ("draws=0", "rounds=6", "tokens=8", "threads=1", "engine.max_length=160", "prompts=[abcabc, one two one two]")
SMALLEST = (*SMALL, "every_rule=false")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_drafter_that_keeps_its_contract(
    configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every rule: two stand for all, one of which is too slow for a model."""
    monkeypatch.setattr(draws, "fitting_rules", lambda drafter: [RejectionVerifier, TransportVerifier])
    config = configure("check_drafter", f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}", *SMALL)
    findings = check(config)
    captured = capsys.readouterr()
    text, said = " ".join(captured.out.split()), captured.err
    assert "exact with RejectionVerifier passed greedy" in text and "Transport" not in text
    assert "0 s: drafter" in said and " s: recorded rounds\n" in said, "a line per check where there is no terminal"
    assert "ModelDrafter, tried with" in text and "greedy outputs passed equal to plain decoding" in text
    passed = sum(finding.status is Status.PASSED for finding in findings)
    assert f"ModelDrafter keeps its contract: it passes {passed} checks, and" in text


@pytest.mark.full
def test_a_drafter_with_another_tree_and_a_policy(
    configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'drafter'}"]
    shape = ["tree=sampled", "drafter.shape.nodes=6", "drafter.shape.depth=2", "policy=confidence"]
    shape.append("policy.threshold=0.001")  # a random model is never sure
    findings = check(configure("check_drafter", *models, *shape, *SMALL, "every_rule=false"))
    assert not [finding for finding in findings if finding.failed]
    assert "max_nodes=6, max_depth=2, laws=WITHOUT_REPLACEMENT" in shown(capsys)
    with pytest.raises(ValueError, match="NGramDrafter has none: give policy=cost_aware or policy=additive"):
        check(configure("check_drafter", models[0], "drafter=ngram", "policy=confidence", *SMALL))


def test_a_drafter_that_does_not(configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = f"drafter._target_={mutants.__name__}.Twins"
    config = configure("check_drafter", f"target.name={saved / 'target'}", "drafter=none", drafter, *SMALLEST)
    with pytest.raises(ValueError, match=r"^Twins breaks its contract in 1 check: trees: distinct siblings: node 2: "):
        check(config)
    text = shown(capsys)
    assert "trees: distinct siblings FAILED" in text and "exact with" not in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["prompts=[abc,3]"], r"^prompts=\['abc', 3\]: give a list of texts, or null"),
        (["drafter=none"], r"^drafter=none drafts nothing, so there is nothing to check"),
        (["+drafter.width=3"], r"^there is no drafter\.width: "),
    ],
)
def test_bad_settings(configure: Configure, overrides: list[str], words: str) -> None:
    """All of them before a model is loaded: the target does not exist."""
    with pytest.raises(ValueError, match=words):
        check(configure("check_drafter", "target.name=/nowhere", *overrides))


def test_a_class_that_lacks_a_method(configure: Configure) -> None:
    target = f"drafter._target_={__name__}.Unfinished"
    with pytest.raises(ValueError, match=r"^drafter: Unfinished has no bind: write bind\(self, target, sizes\), which"):
        check(configure("check_drafter", "target.name=/nowhere", "drafter=none", target))


class Unfinished(Drafter):
    """Has no ``bind``."""
