"""``Engine(check=True)``: every mistake of a drafter or a rule is named with its request, round and node."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Laws, Verifier, fitting_rules
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from tests import mutants
from tests.components import DRAFTERS, VERIFIERS, skip_unfit, tried
from tests.honest import Honest
from tests.models import tiny_model
from tests.mutants import MALFORMED, broken
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete
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


def outputs(target: Target, drafter: Drafter, rule: Verifier, *, check: bool) -> list[tuple[int, ...]]:
    engine = Engine(target, drafter, rule, max_batch_size=2, max_length=64, check=check)
    return [each.token_ids for each in engine.generate(PROMPTS, SAMPLING)]


STRONG = {("rejection", "model_tree_without_replacement"), ("traversal", "model_tree_iid"), ("rejection", "ngram")}


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        complete(rule, drafter, strong=(rule, drafter) in STRONG)
        for rule in VERIFIERS
        for drafter in DRAFTERS
        if tried(drafter, rule)
    ],
)
def test_nothing_is_found_in_what_is_right_and_outputs_stay(target: Target, rule: str, drafter: str) -> None:
    skip_unfit(DRAFTERS[drafter](target.model), VERIFIERS[rule]())
    first, second = (
        outputs(target, DRAFTERS[drafter](target.model), VERIFIERS[rule](), check=check) for check in (False, True)
    )
    assert first == second


WORDS = {
    "dtype": r"Broken: tokens is int32: give int64$",
    "rows": r"Broken: tokens has the shape \[4, 5\]: give \[batch, node\], with a row for each of the 2 slots$",
    "half q": r"Broken: draft_probs is bfloat16: give float32$",
    "parent after child": r"Broken \(request 0, round 0, node 3\): its parent is 4, which must be a node before it$",
    "two roots": r"Broken \(request 0, round 0, node 1\): its parent is -1, which must be a node before it$",
    "orphan": r"Broken \(request 0, round 0, node 3\): it is valid and its parent is not$",
    "no root": r"Broken \(request 0, round 0, node 0\): it is the root, which must be valid$",
    "wrong root": r"Broken \(request 0, round 0, node 0\): its token is 3, and node 0 must be the root, .* is 2$",
    "token too large": r"Broken \(request 0, round 0, node 4\): its token is 10000, which is none of the target's 12$",
    "padding": r"\(request 0, round 0, node 4\): its token is -1, .*: give nodes that are not valid some token, too$",
    "too deep": r"\(request 0, round 0, node 3\): it stands at depth 3, and the drafter announced max_depth=2$",
    "law": r"\(request 0, round 0, node 3\): its law is WITHOUT_REPLACEMENT, and the drafter announced laws=\{IID\}$",
    "no q": r"\(request 0, round 0, node 1\): it was drawn IID and the tree has no draft_probs: give q$",
    "nan": r"\(request 0, round 0, node 1\): q after it has an entry that is not finite \(token 0\)$",
    "negative": r"\(request 0, round 0, node 0\): q after it has a negative entry \(token \d+: -",
    "not normalized": r"\(request 0, round 0, node 0\): q after it sums to 2, not to 1$",
    "impossible": r"its token [0-9]+ has probability 0 in the q that it says it was drawn from$",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees_are_named(target: Target, name: str) -> None:
    with pytest.raises(ValueError, match=WORDS[name]) as caught:
        outputs(target, broken(Honest, MALFORMED[name][0])(), RejectionVerifier(), check=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (
            mutants.Twins,
            r"Twins \(request 0, round 0, node 2\): its token \d+ is also that of its sibling, node 1",
        ),
        (mutants.SaysChain, r"node 2\): it has a sibling, and the drafter says is_chain=True"),
        (mutants.SaysPaths, r"node 4\): it has a sibling below the first level, and the drafter says is_paths=True"),
        (mutants.TooMany, r"TooMany: it proposed 4 nodes and announced max_nodes=3"),
        (mutants.LooseBound, r"node 2\): it is child 2 of its parent, and the drafter gave the tree max_children=1"),
    ],
)
def test_announcements_that_are_not_kept_are_named(target: Target, drafter: type[Honest], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        outputs(target, drafter(), RejectionVerifier(), check=True)


def test_the_round_is_counted_per_request(target: Target) -> None:
    class Late(Honest):
        def finish(self, slots, tokens, q):
            if (slots.rounds == 2).any():
                tokens = tokens.clone()
                tokens[:, 0] = -5
            return super().finish(slots, tokens, q)

    with pytest.raises(ValueError, match=r"Late \(request \d, round 2, node 0\)"):
        outputs(target, Late(), RejectionVerifier(), check=True)


class _Rule(RejectionVerifier):
    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        laws = super().laws(tree, target_probs)
        return Laws(self.bad_stop(tree, laws.stop), lambda stop: self.bad_next(laws.after(stop)))

    def bad_stop(self, tree: DraftTree, law: Tensor) -> Tensor:
        return law

    def bad_next(self, law: Tensor) -> Tensor:
        return law


class TooMuch(_Rule):
    def bad_stop(self, tree, law):
        return law * 1.5


class Beside(_Rule):
    def bad_stop(self, tree, law):
        return torch.where(tree.valid, law, 0.25)


class Flat(_Rule):
    def bad_stop(self, tree, law):
        return law[:, :-1]


class Negative(_Rule):
    def bad_next(self, law):
        return torch.cat([law[:, :1] - 1, law[:, 1:]], 1)


class NotANumber(_Rule):
    def bad_next(self, law):
        return law / 0 * 0


class Narrow(_Rule):
    def bad_next(self, law):
        return law[:, 1:]


class SomeRows(Honest):
    """Node 4 is never valid."""

    def finish(self, slots, tokens, q):
        tree = super().finish(slots, tokens, q)
        valid = mutants.at(tree.valid, 4, False)
        return DraftTree.from_shape(self.shape, tokens, sampling=self.law, draft_probs=q, valid=valid)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (TooMuch, r"TooMuch \(request 0, round 0\): stop sums to 1\.5, not to 1$"),
        (
            Beside,
            r"Beside \(request 0, round 0, node 4\): stop gives it the probability 0\.25, and it is not",
        ),
        (Flat, r"Flat: stop has the shape \[2, 4\]: give \[batch, node\], here \[2, 5\]$"),
        (Negative, r"Negative \(request 0, round 0, node \d\): after has a negative entry \(token 0: -"),
        (NotANumber, r"NotANumber \(request 0, round 0, node \d\): after has an entry that is not finite \(token"),
        (Narrow, r"Narrow: after has the shape \[2, 11\]: give \[batch, vocab\], here \[2, 12\]$"),
    ],
)
def test_laws_of_a_rule_are_named(target: Target, rule: type[_Rule], words: str) -> None:
    outputs(target, SomeRows(), RejectionVerifier(), check=True)
    with pytest.raises(ValueError, match=words):
        outputs(target, SomeRows(), rule(), check=True)


def test_it_is_off_by_default_and_costs_nothing_then(target: Target) -> None:
    """Unchecked, the engine holds the drafter's and the rule's own methods: nothing stands in between."""
    rule = RejectionVerifier()
    engine = Engine(target, SomeRows(), rule, max_length=64)
    assert engine._speculative.verifier is rule
    checked = Engine(target, SomeRows(), rule, max_length=64, check=True)
    assert checked._speculative.verifier is not rule
    assert not [found for found in fitting_rules(SomeRows()) if found.__module__.startswith("specdec.")]
