"""Verdicts on verifiers and drafters: right ones pass, one that promises too much is an error; and trained heads."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, MTPDrafter
from drafters.heads.eagle import EagleHead
from experiments.check import check
from experiments.inspecting.acceptance import prompts_of
from experiments.inspecting.mistakes import Inspection, Mistake, alternatives, inspect
from experiments.measuring.exactness import LAWS, SHAPES, cases
from specdec import Drafter, DraftTree, Laws, Target, bundled
from specdec.checks.drafts import enumerate_drafts, num_drafts
from specdec.checks.playing import Status
from specdec.checks.tables import Tables
from tests import mutants
from tests.changed_rule import accept_the_first
from tests.components import wide
from tests.drafters.test_mtp import head_of
from tests.experiments.runs import Configure
from tests.models import tiny_model
from verifiers import RejectionVerifier, SharedNoiseVerifier, TransportVerifier

SMALL = ("vocab=2", "tables=1", "temperatures=[1]")


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "verdict", "says"),
    [
        ("traversal", "is exact, over", "exact."),
        ("lenient", "is not exact", "lossy."),
        ("cascade verifier.alpha=0.3", "is exact with respect to the distr", "exact with respect to another"),
        ("shared_noise streams=500", "is exact by its own check", "exact, noise shared."),
    ],
)
def test_the_verdict_on_a_rule(words: str, verdict: str, says: str, configure: Configure, capsys: Any) -> None:
    done = check(configure("check", *f"verifier={words}".split(), *SMALL))
    text = shown(capsys)
    assert f"Verifier {verdict}" in text and f"It says of itself: {says}" in text
    chains_only = words == "lenient"
    assert {case.shape for case in done} == {"chain 3"} if chains_only else len({case.shape for case in done}) > 2
    if words == "traversal":
        assert all(case.accepted > case.rejection - 1e-12 for case in done), "no fewer than rejection sampling"


def test_drafts_are_counted_without_making_them_and_too_many_are_refused_at_once() -> None:
    for shape, law, vocab in itertools.product(SHAPES.values(), LAWS, (2, 3)):
        made = Tables.random(vocab, shape.max_depth, seed=0)
        assert num_drafts(shape, law, vocab) == len(enumerate_drafts(made, shape, law).probability)
    with pytest.raises(ValueError, match=r"^vocab=50: a tree of shape 2 x 2, drafted iid, has .* vocab=11 or less"):
        next(cases(TransportVerifier(), 50, 2, 0, [1]))


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


def test_a_drafter_that_keeps_its_contract_and_one_that_does_not(
    configure: Configure, saved: Path, capsys: Any
) -> None:
    words = [f"target.name={saved / 'target'}", "draws=0", "rounds=4", "tokens=8", "threads=1", "engine.max_length=160"]
    words.append("prompts=[abcabc, one two one two]")
    findings = check(configure("check", "drafter=ngram", *words))
    told = capsys.readouterr()
    text = " ".join(told.out.split())
    assert " s: recorded rounds\n" in told.err, "a line per check where there is no terminal"
    assert "NGramDrafter, tried with" in text and "greedy outputs passed equal to plain decoding" in text
    passed = sum(finding.status is Status.PASSED for finding in findings)
    assert f"NGramDrafter keeps its contract: it passes {passed} checks, and" in text

    words += ["drafter=none", f"drafter._target_={mutants.__name__}.Twins"]
    with pytest.raises(ValueError, match=r"^Twins breaks its contract in 1 check: trees: distinct siblings: node 2: "):
        check(configure("check", *words))
    assert "trees: distinct siblings FAILED" in shown(capsys)


INSPECTED = ("tokens=32", "threads=1", "target.dtype=float32", "target.device=cpu")


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
    assert "kind EAGLE-3 head, 1 decoder layer, " in text and "RoPE theta 10,000, default (as the target's)" in text
    assert f"No mistake was found: none of {len(mended.tried)} alternatives raises the acceptance." in text


Make = Callable[[Mapping[str, Any]], Drafter]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained("bundled/target", dtype="float32")


def inspected(make: Make, target: Target, *, batches: int = 1, tokens: int = 40) -> Inspection:
    prompts = [prompt for seed in range(batches) for prompt in prompts_of(target, None, seed)]
    return inspect(make, target, prompts, tokens=tokens)


def loaded(kind: Any, name: str | Path, **options: Any) -> Make:
    return lambda settings: kind.from_pretrained(str(name), **{"shape": 2, "sampling": "iid", **options, **settings})


def eagle3(folder: Path, **config: Any) -> Make:
    """EAGLE-3 with something changed in its files."""
    shutil.copytree(bundled.resolve("bundled/eagle3"), folder, dirs_exist_ok=True)
    for name in ("config.json", "specdec.json"):
        kept = json.loads((folder / name).read_text()) | config
        (folder / name).write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return loaded(EagleDrafter, folder)


RIGHT: dict[str, Make] = {
    "block head (DSpark)": loaded(BlockDrafter, "bundled/dspark"),
    "Medusa heads": loaded(MedusaDrafter, "bundled/medusa"),
    "model": loaded(ModelDrafter, "bundled/drafter"),
}


@pytest.mark.parametrize("kind", [pytest.param(n, marks=[] if n[0] == "M" else pytest.mark.full) for n in RIGHT])
def test_a_right_head_is_not_accused(kind: str, target: Target) -> None:
    found = inspected(RIGHT[kind], target)
    assert found.mistake is None and not found.knows_nothing and not found.refused
    assert found.loaded.acceptance[0] > found.loaded.unigram + 0.1
    assert found.drafter.kind == kind


THETA = {"rope_type": "default", "rope_theta": 2.0}
WRONG: dict[Mistake, tuple[Callable[[Path], Make], str]] = {
    Mistake.LAYERS: (
        lambda folder: loaded(EagleDrafter, "bundled/eagle3", hidden_layers=(5, 3, 1)), "drafter.hidden_layers=[1,3,5]"
    ),
    Mistake.NORM: (lambda folder: eagle3(folder, norm_before_residual=False), "'norm_before_residual: true'"),
    Mistake.ROPE: (lambda folder: eagle3(folder, rope_theta=None, rope_parameters=THETA), "'rope_theta: 10000'"),
    Mistake.MASK_TOKEN: (
        lambda folder: loaded(BlockDrafter, "bundled/dspark", mask_token_id=5), "drafter.mask_token_id=4095"
    ),
}  # fmt: skip
"""How a mistake is made, and what mends it."""


@pytest.mark.parametrize("kind", [Mistake.LAYERS, *(pytest.param(n, marks=pytest.mark.full) for n in [*WRONG][1:])])
def test_a_mistake_is_named(kind: Mistake, target: Target, tmp_path: Path) -> None:
    plant, remedy = WRONG[kind]
    found = inspected(plant(tmp_path), target, batches=2)
    assert found.mistake is not None, [(each.alternative.name, each.gain) for each in found.tried]
    assert found.mistake.alternative.mistake == kind and remedy in found.mistake.alternative.remedy
    assert found.mistake.gain.tokens > 0.1


def test_an_mtp_module_is_tried_with_the_other_state() -> None:
    model: Any = tiny_model("llama", vocab_size=64)
    small, module = Target(model), head_of(model)
    for before, state in ((True, "after_norm"), (False, "before_norm")):
        module.before_norm = before
        tried = alternatives(MTPDrafter(module, 2).describe(small), small)
        (norm,) = [each for each in tried if each.settings.get("hidden_state")]
        assert norm.mistake is Mistake.NORM and norm.settings == {"hidden_state": state}


def test_an_untrained_head(target: Target) -> None:
    head = wide(EagleHead.for_target(target.model), 1.0)
    assert inspected(lambda settings: EagleDrafter(head, 2), target, tokens=16).knows_nothing
