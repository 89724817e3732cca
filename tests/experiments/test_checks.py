"""Verdicts on verifiers and drafters: right ones pass, one that promises too much is an error; and trained heads."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.check import check
from experiments.inspecting.mistakes import Mistake
from experiments.measuring.exactness import LAWS, SHAPES, cases
from specdec import DraftSampling, DraftTree, Laws
from specdec.checks.drafts import enumerate_drafts, num_drafts
from specdec.checks.playing import Status
from specdec.checks.tables import Tables
from tests import mutants
from tests.changed_rule import accept_the_first
from tests.experiments.runs import Configure
from verifiers import RejectionVerifier, SharedNoiseVerifier, TransportVerifier

SMALL = ("vocab=2", "tables=1", "temperatures=[1]")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_an_exact_rule_and_a_lossy_one(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    done = check(configure("check", "verifier=traversal", *SMALL))
    assert max(case.tv for case in done) < 1e-12
    assert all(case.accepted == pytest.approx(case.known["traversal"]) for case in done)
    assert {case.shape for case in done} > {"chain 3", "2 x 2"}
    assert all("block" in case.known for case in done if case.shape == "chain 3")
    text = shown(capsys)
    assert "TraversalVerifier is exact, over" in text and "It says of itself: exact." in text
    done = check(configure("check", "verifier=lenient", *SMALL))
    assert {case.shape for case in done} == {"chain 3"}, "it takes chains only"
    text = shown(capsys)
    assert "LenientVerifier is not exact" in text and "It says of itself: lossy." in text


def test_rules_that_are_exact_in_their_own_way(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """With respect to a mixture, and with noise that is shared."""
    done = check(configure("check", "verifier=cascade", "verifier.alpha=0.3", *SMALL))
    assert all(case.tv < 1e-12 for case in done) and max(case.target_tv for case in done) > 0.1
    text = shown(capsys)
    assert "CascadeVerifier is exact with respect to the distribution that it states, which is up to" in text
    assert "It says of itself: exact with respect to another distribution." in text
    done = check(configure("check", "verifier=shared_noise", "streams=500", *SMALL))
    assert all(case.differing == 0 for case in done) and {case.law for case in done} == set(DraftSampling)
    text = shown(capsys)
    assert "SharedNoiseVerifier is exact by its own check" in text and "It says of itself: exact, noise shared." in text


def test_drafts_are_counted_without_making_them() -> None:
    for shape, law, vocab in itertools.product(SHAPES.values(), LAWS, (2, 3)):
        made = Tables.random(vocab, shape.max_depth, seed=0)
        assert num_drafts(shape, law, vocab) == len(enumerate_drafts(made, shape, law).probability)


@pytest.mark.parametrize("vocab", [12, 50])
def test_a_vocabulary_that_does_not_fit_is_refused_at_once(vocab: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^vocab={vocab}: a tree of shape 2 x 2, drafted iid, has .* vocab=11 or less"
    ):
        next(cases(TransportVerifier(), vocab, 2, 0, [1]))


class AlwaysTheFirst(SharedNoiseVerifier):
    """Accepts the root's first child whatever the target drew."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        laws = super().laws(tree, target_probs)
        return replace(laws, stop=accept_the_first(tree, target_probs, laws))


class NoResidual(RejectionVerifier):
    """Mutant: a rejection is followed by a token from p instead of the residual."""

    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        rows = torch.arange(len(target_probs))
        return replace(super().laws(tree, target_probs), after=lambda stop: target_probs[rows, stop])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (NoResidual, "NoResidual says that it is exact and is not: total variation 0"),
        (AlwaysTheFirst, r"says that its noise is shared, and [0-9]+ outputs are not those of plain"),
    ],
)
def test_a_rule_that_promises_too_much(configure: Configure, rule: type, message: str) -> None:
    words = [f"verifier._target_={rule.__module__}.{rule.__name__}", *SMALL]
    words += ["streams=500"] * (rule is AlwaysTheFirst)
    with pytest.raises(ValueError, match=message):
        check(configure("check", *words))


CHECKED = ("draws=0", "rounds=4", "tokens=8", "threads=1", "engine.max_length=160", "prompts=[abcabc, one two one two]")


def test_a_drafter_that_keeps_its_contract(configure: Configure, saved: Path, capsys: Any) -> None:
    words = [f"target.name={saved / 'target'}", "drafter=ngram", *CHECKED]
    findings = check(configure("check", *words))
    captured = capsys.readouterr()
    text, said = " ".join(captured.out.split()), captured.err
    assert " s: recorded rounds\n" in said, "a line per check where there is no terminal"
    assert "NGramDrafter, tried with" in text and "greedy outputs passed equal to plain decoding" in text
    passed = sum(finding.status is Status.PASSED for finding in findings)
    assert f"NGramDrafter keeps its contract: it passes {passed} checks, and" in text


def test_a_drafter_that_does_not(configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["drafter=none", f"drafter._target_={mutants.__name__}.Twins", *CHECKED]
    with pytest.raises(ValueError, match=r"^Twins breaks its contract in 1 check: trees: distinct siblings: node 2: "):
        check(configure("check", f"target.name={saved / 'target'}", *words))
    text = shown(capsys)
    assert "trees: distinct siblings FAILED" in text


# ---------------------------------------------------------------- a trained head

INSPECTED = ("tokens=32", "threads=1", "target.dtype=float32", "target.device=cpu")


def test_how_much_two_vocabularies_share(configure: Configure, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All bytes are common; the end of text, which each has, is special, and nothing drafts it."""
    names = [f"target.name={saved / 'target'}", f"drafter.name={saved / 'other'}", *INSPECTED, "prompts=[abc,de]"]
    found = check(configure("check", "inspect=true", "drafter=tli", "depths=2", *names, "tokens=8"))
    share = 1 - float(found.loaded.frequencies[0])
    assert 0.9 < share < 1
    assert f"vocabulary 256 of the target's 257 tokens, which have {share:.1%} of its probability" in shown(capsys)


@pytest.mark.full
def test_a_mistake_and_what_mends_it(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """What the verdict says to set is set, and then nothing is wrong."""
    words = ["inspect=true", "drafter=eagle", "drafter.name=bundled/eagle3", "depths=1", *INSPECTED]
    found = check(configure("check", *words, "drafter.hidden_layers=[5,3,1]"))
    text = shown(capsys)
    assert found.mistake is not None and found.mistake.alternative.mistake is Mistake.LAYERS
    assert "was probably loaded with a mistake: wrong hidden layers. With " in text
    assert "To mend it: leave out drafter.hidden_layers." in text
    mended = check(configure("check", *words))
    text = shown(capsys)
    assert mended.mistake is None and not mended.knows_nothing
    assert mended.loaded.length == pytest.approx(found.mistake.acceptance.length)
    for words in (
        "kind EAGLE-3 head, 1 decoder layer, ",
        "trained on bundled/target, as its files say",
        "reads hidden states 1, 3, 5 (l is the input of layer l) of a target of 6 layers",
        "vocabulary 4,096 of the target's 4,096 tokens",
        "RoPE theta 10,000, default (as the target's)",
        f"No mistake was found: none of {len(mended.tried)} alternatives raises the acceptance.",
        f"1 {mended.loaded.acceptance[0]:.2f} {mended.loaded.unconditional[0]:.2f} 0.53 to 0.81",
    ):
        assert words in text
