"""``Engine(check=True)``: every mistake of a drafter or a rule is named with its request, round and node."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Laws, Verifier, fitting_rules
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from tests import mutants
from tests.components import DRAFTERS, VERIFIERS
from tests.honest import Honest
from tests.models import tiny_model
from tests.mutants import MALFORMED, broken
from tests.shapes import shapes_unchecked
from verifiers import RejectionVerifier

VOCAB = 12
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6]]
SAMPLING = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(temperature=1.0, max_new_tokens=8, top_p=0.9),
    SamplingParams(temperature=0.7, max_new_tokens=9, repetition_penalty=1.2),
]


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    with shapes_unchecked():
        yield


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB, layers=2))


def outputs(target: Target, drafter: Drafter, rule: Verifier, *, check: bool = True) -> list[tuple[int, ...]]:
    engine = Engine(target, drafter, rule, max_batch_size=2, max_length=64, check=check)
    return [each.token_ids for each in engine.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize(
    ("rule", "drafter"), [("rejection", "model_tree_without_replacement"), ("traversal", "model_tree_iid")]
)
def test_nothing_is_found_in_what_is_right_and_outputs_stay(target: Target, rule: str, drafter: str) -> None:
    """All other pairs, too: ``tests/test_random_programs.py`` has checking engines."""
    made, fitting = DRAFTERS[drafter](target.model), VERIFIERS[rule]()
    assert outputs(target, made, fitting) == outputs(target, made, fitting, check=False)


WORDS = {
    "dtype": "Broken: tokens is int32",
    "rows": r"Broken: tokens has the shape \[4, 5\]",
    "half q": "Broken: draft_probs is bfloat16",
    "parent after child": "node 3.: its parent is 4",
    "two roots": "node 1.: its parent is -1",
    "orphan": "node 3.: .*parent is not",
    "no root": "node 0.: .*valid",
    "wrong root": "node 0.: its token is 3",
    "token too large": "node 4.: its token is 10000",
    "padding": "node 4.: its token is -1",
    "too deep": "node 3.: .*max_depth=2",
    "law": "node 3.: its law is WITHOUT_REPLACEMENT",
    "no q": "node 1.: .*no draft_probs",
    "nan": "node 1.: q .*token 0",
    "negative": "node 0.: q .*negative",
    "not normalized": "node 0.: q .*2",
    "impossible": "its token [0-9]+ has probability 0",
}
BROKEN = [
    *((broken(Honest, MALFORMED[name][0]), WORDS[name]) for name in MALFORMED),
    (mutants.Twins, "node 2.: its token .* node 1"),
    (mutants.SaysChain, "node 2.: .*is_chain"),
    (mutants.SaysPaths, "node 4.: .*is_paths"),
    (mutants.TooMany, "TooMany: .*max_nodes=3"),
    (mutants.LooseBound, "node 2.: .*max_children=1"),
]


@pytest.mark.parametrize(("drafter", "words"), BROKEN, ids=[*MALFORMED, *range(len(BROKEN) - len(MALFORMED))])
def test_malformed_trees_are_named(target: Target, drafter: type[Honest], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        outputs(target, drafter(), RejectionVerifier())
    assert "\n" not in str(caught.value)
    assert words[:4] != "node" or "request 0, round 0, " in str(caught.value)


def test_the_round_is_counted_per_request(target: Target) -> None:
    class Late(Honest):
        def finish(self, slots, tokens, q):
            if (slots.rounds == 2).any():
                tokens = tokens.clone()
                tokens[:, 0] = -5
            return super().finish(slots, tokens, q)

    with pytest.raises(ValueError, match=r"Late \(request \d, round 2, node 0\)"):
        outputs(target, Late(), RejectionVerifier())


class SomeRows(Honest):
    """Node 4 is never valid."""

    def finish(self, slots, tokens, q):
        tree = super().finish(slots, tokens, q)
        valid = mutants.at(tree.valid, 4, False)
        return DraftTree.from_shape(self.shape, tokens, sampling=self.law, draft_probs=q, valid=valid)


def same(tree: DraftTree | None, law: Tensor) -> Tensor:
    return law


@pytest.mark.parametrize(
    ("stop", "after", "words"),
    [
        (lambda tree, law: law * 1.5, same, r"Wrong .request 0, round 0.: stop sums to 1\.5"),
        (lambda tree, law: torch.where(tree.valid, law, 0.25), same, "request 0, round 0, node 4.: stop"),
        (lambda tree, law: law[:, :-1], same, r"Wrong: stop has the shape \[2, 4\]"),
        (same, lambda _, law: torch.cat([law[:, :1] - 1, law[:, 1:]], 1), "round 0, node .*: after has a negative"),
        (same, lambda _, law: law / 0 * 0, "round 0, node .*: after has an entry that is not finite"),
        (same, lambda _, law: law[:, 1:], r"Wrong: after has the shape \[2, 11\]"),
    ],
)
def test_laws_of_a_rule_are_named(target: Target, stop: Callable, after: Callable, words: str) -> None:
    class Wrong(RejectionVerifier):
        def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
            laws = super().laws(tree, target_probs)
            return Laws(stop(tree, laws.stop), lambda node: after(None, laws.after(node)))

    outputs(target, SomeRows(), RejectionVerifier())
    with pytest.raises(ValueError, match=words):
        outputs(target, SomeRows(), Wrong())


def test_it_is_off_by_default_and_costs_nothing_then(target: Target) -> None:
    """Unchecked, the engine holds the drafter's and the rule's own methods: nothing stands in between."""
    rule = RejectionVerifier()
    engine = Engine(target, SomeRows(), rule, max_length=64)
    assert engine._speculative.verifier is rule
    checked = Engine(target, SomeRows(), rule, max_length=64, check=True)
    assert checked._speculative.verifier is not rule
    assert not [found for found in fitting_rules(SomeRows()) if found.__module__.startswith("specdec.")]
