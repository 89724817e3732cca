"""The verdict on a verifier: right on exact and lossy rules, and an error for one that promises too much."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.check_verifier import check_verifier as check
from experiments.results.checked import stated_exactness
from specdec.interfaces import Laws
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from tests.changed_rule import accept_the_first
from tests.experiments.runs import Configure
from verifiers import RejectionVerifier, SharedNoiseVerifier

SMALL = ("vocab=2", "tables=1", "temperatures=[1]")
STRONG = ("vocab=3", "tables=1", "temperatures=[1]")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_an_exact_rule_and_a_lossy_one(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    done = check(configure("check_verifier", "verifier=traversal", *SMALL))
    assert max(case.tv for case in done) < 1e-12
    assert all(case.accepted == pytest.approx(case.known["traversal"]) for case in done)
    assert {case.shape for case in done} > {"chain 3", "2 x 2"}
    assert all("block" in case.known for case in done if case.shape == "chain 3")
    text = said(capsys)
    assert "TraversalVerifier is exact, over" in text and "It says of itself: exact." in text
    done = check(configure("check_verifier", "verifier=lenient", *SMALL))
    assert {case.shape for case in done} == {"chain 3"}, "it takes chains only"
    text = said(capsys)
    assert "LenientVerifier is not exact" in text and "It says of itself: lossy." in text


def test_a_rule_that_is_exact_with_respect_to_a_mixture(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    done = check(configure("check_verifier", "verifier=cascade", "verifier.alpha=0.3", *SMALL))
    assert all(case.tv < 1e-12 for case in done)
    assert max(case.target_tv for case in done) > 0.1
    text = said(capsys)
    assert "CascadeVerifier is exact with respect to the distribution that it states, which is up to" in text
    assert "It says of itself: exact with respect to another distribution." in text


def test_a_rule_with_shared_noise(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    done = check(configure("check_verifier", "verifier=shared_noise", "streams=500", *SMALL))
    assert all(case.differing == 0 for case in done)
    assert {case.law for case in done} == set(DraftSampling)
    text = said(capsys)
    assert "SharedNoiseVerifier is exact by its own check" in text
    assert "It says of itself: exact, noise shared." in text


class NoResidual(RejectionVerifier):
    """Says that it is exact, and emits from p after a rejection."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        return replace(super().laws(tree, target_probs), after=lambda stop: target_probs[torch.arange(len(stop)), stop])


class AlwaysTheFirst(SharedNoiseVerifier):
    """Accepts the root's first child whatever the target drew."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        laws = super().laws(tree, target_probs)
        return replace(laws, stop=accept_the_first(tree, target_probs, laws))


class Checked(RejectionVerifier):
    """A rule that does not ship with the package, and is exact."""


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the rules that have passed, in a project that has checked none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".specdec").mkdir()
    return tmp_path / ".specdec" / "checked.json"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (NoResidual, "NoResidual says that it is exact and is not: total variation 0"),
        (AlwaysTheFirst, r"says that its noise is shared, and [0-9]+ outputs are not those of plain"),
    ],
)
def test_a_rule_that_promises_too_much(configure: Configure, rule: type, message: str, remembered: Path) -> None:
    words = [f"verifier._target_={rule.__module__}.{rule.__name__}", *SMALL]
    words += ["streams=500"] * (rule is AlwaysTheFirst)
    with pytest.raises(ValueError, match=message):
        check(configure("check_verifier", *words))
    assert not remembered.exists()


def test_a_rule_that_passes_is_remembered(
    configure: Configure, remembered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stated_exactness(Checked()) == "exact (declared)"
    check(configure("check_verifier", f"verifier._target_={Checked.__module__}.Checked", *STRONG))
    assert stated_exactness(Checked()) == "exact"
    assert "Remembered in .specdec/checked.json" in capsys.readouterr().out
    (entry,) = json.loads(remembered.read_text())["rules"].values()
    assert entry["rule"].endswith("Checked") and entry["vocab"] == 3 and entry["largest_total_variation"] < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "lenient"])
def test_a_rule_that_ships_is_not_remembered(configure: Configure, rule: str, remembered: Path) -> None:
    check(configure("check_verifier", f"verifier={rule}", *STRONG))
    assert not remembered.exists()
