"""Checks of drafters and of running engines: honest drafters pass, and each mistake is noticed and named."""

import re
from collections.abc import Iterator

import pytest
from torch import Tensor

import specdec.checks.drafter
from drafters.itself import SelfDrafter
from drafters.medusa import MedusaScorer
from specdec import Drafter, Engine, Outcome, SamplingParams, Target
from specdec.checks.drafter import Finding, assert_conforms, check_drafter
from specdec.checks.playing import Status
from specdec.quantization import quantize
from tests import mutants
from tests.components import DRAFTERS, fitting
from tests.honest import Honest
from tests.models import tiny_model
from tests.mutants import BEHAVIOUR, DRAWS, HONEST, MALFORMED, broken
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete
from verifiers import BlockVerifier, RejectionVerifier

VOCAB = 12
ENOUGH = 1700  # drafts, a quarter of them after one of two prompts: more than draws.FEWEST after each
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5], [7, 8]]
COUNTED = {"draws": ENOUGH, "rounds": 2, "tokens": 12, "max_length": 96}
FEW = {"draws": 0, "rounds": 4, "tokens": 6, "max_length": 40, "prompts": PROMPTS}  # where nothing is counted


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    with shapes_unchecked():
        yield


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB, layers=1))


@pytest.fixture
def wide() -> Target:
    return Target(tiny_model(vocab_size=96, layers=1))


def failing(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.detail for finding in findings if finding.failed}


def check(make, target: Target, **options) -> list[Finding]:
    return check_drafter(make, target, **{"verifier": RejectionVerifier(), **options})


def assert_an_engine_that_checks_names(drafter: type[Honest], target: Target) -> None:
    sampling = [SamplingParams(max_new_tokens=9), SamplingParams(temperature=1.0, max_new_tokens=8, top_p=0.9)]
    engine = Engine(target, drafter(), RejectionVerifier(), max_batch_size=2, max_length=64, check=True)
    with pytest.raises(ValueError, match=rf"^{drafter.__name__}\b.*") as caught:
        engine.generate([[1, 2, 3, 1, 2], [4, 5]], sampling)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [complete(name, strong=name == "without replacement") for name in HONEST])
def test_honest_drafters_pass(target: Target, name: str) -> None:
    findings = check(HONEST[name], target, **COUNTED)
    assert failing(findings) == {}
    drawn = [finding for finding in findings if finding.check.startswith("q is what was drawn")]
    wanted = Status.NOT_APPLICABLE if name == "chosen" else Status.PASSED
    assert [finding.status for finding in drawn] == [wanted] * 3
    assert not [finding for finding in findings if finding.status is Status.NOT_TRIED]


# An instrument drafts by the request's random numbers even where it is greedy, which no method should do: marginals are
# estimated (test_marginals.py has them without draws).
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "marginals"])
def test_the_drafters_of_this_project_pass(name: str) -> None:
    """The conformance suite: a drafter takes part in it by its line in ``tests/components.py``."""
    model = tiny_model(vocab_size=96, layers=2)
    made = DRAFTERS[name](model)
    options = {"verifier": fitting(made), "rounds": 8, "tokens": 10, "draws": ENOUGH}
    findings = check_drafter(lambda: DRAFTERS[name](model), Target(model), **options)
    assert failing(findings) == {}
    found = {finding.check: finding.status for finding in findings}
    assert Status.NOT_TRIED not in found.values() and found["NaN logits"] is Status.PASSED


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees_are_noticed(target: Target, name: str) -> None:
    change, wanted = MALFORMED[name]
    found = failing(check(broken(Honest, change), target, **FEW))
    assert list(found) == [f"trees: {wanted}"]
    assert_an_engine_that_checks_names(broken(Honest, change), target)


@pytest.mark.parametrize("drafter", BEHAVIOUR)
def test_one_mistake_fails_the_check_that_is_for_it(target: Target, drafter: type[Honest]) -> None:
    found = failing(check(drafter, target, **FEW))
    assert list(found) == [BEHAVIOUR[drafter]]
    if drafter is mutants.Stumbles:  # the line of the drafter is named
        assert re.search(r"ZeroDivisionError: a bug.*mutants\.py, line", found[BEHAVIOUR[drafter]])
    if BEHAVIOUR[drafter].startswith("trees: "):
        assert_an_engine_that_checks_names(drafter, target)


@pytest.mark.parametrize("drafter", [complete(each, strong=each is mutants.SaysIid) for each in DRAWS])
def test_draws_that_are_not_what_q_says(target: Target, drafter: type[Honest]) -> None:
    """The first check that fails is the one that names the place; what follows from the mistake may fail, too."""
    found = failing(check(drafter, target, **COUNTED))
    assert DRAWS[drafter] in found
    assert all(name.startswith(("q is what was drawn", "draws are")) for name in found)
    if DRAWS[drafter] == "draws are independent":
        assert list(found) == [DRAWS[drafter]]


def test_bad_arguments_and_a_drafter_that_lacks_something_end_it(target: Target) -> None:
    for methods, words in (
        ({}, "abstract method '?bind"),
        ({"bind": lambda *given: None}, "Unfinished has no max_nodes and no max_depth and no laws"),
    ):
        (finding,) = check(type("Unfinished", (Drafter,), methods), target)
        assert finding.failed and re.search(words, finding.detail)
    for options, words in (
        ({"prompts": [[1, 2, 3]]}, "1 prompts have two tokens or more"),
        (FEW | {"verifier": BlockVerifier()}, "BlockVerifier takes chains only"),
    ):
        with pytest.raises(ValueError, match=words):
            check(Honest, target, **options)


def test_drafts_for_a_quantized_target_are_not_compared_between_batches() -> None:
    """Such layers round to bfloat16, so that rows of other batches differ."""
    quantized = Target(quantize(tiny_model(vocab_size=VOCAB, layers=2), "int8", check=False))
    findings = check(lambda: SelfDrafter(["1.mlp"], 2), quantized, **FEW)
    apart = {each.check for each in findings if "quantized layers round to bfloat16" in each.detail}
    batches = {"independent of batch mates", "a slot is used again", "no drift"}
    assert failing(findings) == {}
    assert apart == batches | {"independent of the prompt's pieces", "shared beginnings"}


def test_what_nan_leaves_behind_is_noticed(wide: Target) -> None:
    found = failing(check(mutants.ClearsByProduct, wide, **FEW))
    assert list(found) == ["NaN logits"]
    assert "in slots of such requests, it drafts otherwise in round" in found["NaN logits"]


@pytest.mark.full
def test_state_in_new_tensors_is_noticed_in_recorded_rounds(wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording goes on with the old ones; in all other rounds the drafter drafts what it should."""
    observe = MedusaScorer.observe

    def replaces(scorer: MedusaScorer, outcome: Outcome, nodes: Tensor | None) -> None:
        scorer.newest = scorer.newest.clone()
        observe(scorer, outcome, nodes)

    monkeypatch.setattr(MedusaScorer, "observe", replaces)
    found = failing(check(lambda: DRAFTERS["medusa"](wide.model), wide, **FEW | {"tokens": 24}))
    assert list(found) == ["recorded rounds"] and "in the same tensors" in found["recorded rounds"]


def test_a_test_of_a_drafter_is_one_line(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="breaks its contract:\\ntrees: distinct siblings: FAILED: node 2"):
        assert_conforms(mutants.Twins, target, verifier=RejectionVerifier(), **FEW)
    fine = [Finding("one", Status.PASSED, ""), Finding("two", Status.NOT_APPLICABLE, "")]
    monkeypatch.setattr(specdec.checks.drafter, "check_drafter", lambda make, target, **options: fine)
    assert_conforms(Honest, target)
