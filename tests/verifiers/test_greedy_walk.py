"""Greedy requests are judged by arg-max ids alone: with the same verdict as by the rules' laws, node for node."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import DraftTree, Laws, TreeShape, Verdict, Verifier
from specdec.acceptance import accept, certain
from specdec.engine.round import Mode, judge
from specdec.host import without_looking
from specdec.sampling import one_hot
from specdec.target.parallel import Agreement
from tests.forwards import slots_of
from tests.launches import counted
from tests.verifiers.cases import RULES, SLOW, TOP, drafts
from tests.verifiers.test_exact_rules import kind_of
from verifiers import CascadeVerifier, FLyVerifier, SharedNoiseVerifier, TargetWalkVerifier

VOCAB = 6
SHAPES = {"chain": TreeShape.chain(4), "paths": TreeShape.branching(3, 1, 1), "tree": TreeShape.branching(3, 2, 1)}
GREEDY = [name for name, rule in RULES.items() if rule.walks_greedily]


def certain_tokens(tree: DraftTree, generator: torch.Generator) -> Tensor:
    """A token after every node: often that of one of the children, in a tree with equal siblings, too."""
    batch, width = tree.tokens.shape
    following = torch.randint(0, VOCAB, (batch, width), generator=generator)
    order = torch.randperm(width - 1, generator=generator) + 1
    likely = order[torch.rand(width - 1, generator=generator) < 0.8]
    for node in likely.tolist():
        following.scatter_(1, tree.parents[:, node, None].clamp(min=0), tree.tokens[:, node, None])
    return following


@st.composite
def greedy_rounds(draw: st.DrawFn, kind: str) -> tuple[DraftTree, Tensor]:
    """Trees that were not drawn at random, of one shape or row by row, and the token after every node."""
    tree, _ = draw(drafts(torch.float32, kind))
    if draw(st.booleans()):
        known = {"max_depth": None, "max_children": None} if draw(st.booleans()) else {}
        tree = DraftTree.build(tree.tokens, tree.parents, valid=tree.valid, sampling=TOP, **known)
    else:
        width = SHAPES[kind].num_nodes + 1
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        tree = DraftTree.from_shape(SHAPES[kind], torch.randint(0, VOCAB, (2, width), generator=generator))
        if draw(st.booleans()):
            tree = tree.limited(torch.tensor([draw(st.integers(0, 3)), 4]))
    return tree, certain_tokens(tree, torch.Generator().manual_seed(draw(st.integers(0, 2**32))))


def differing(one: Verdict, other: Verdict) -> list[str]:
    names = [each.name for each in fields(Verdict)]
    return [name for name in names if not torch.equal(getattr(one, name), getattr(other, name))]


def by_laws(rule: Verifier, tree: DraftTree, following: Tensor) -> Verdict:
    uniforms = torch.rand(len(following), 2, dtype=torch.float64)
    return accept(rule, tree, one_hot(following, VOCAB), uniforms)


@pytest.mark.parametrize("rule", GREEDY)
def test_the_verdict_is_that_of_the_laws(rule: str) -> None:
    @settings(max_examples=8 if rule in SLOW else 30, deadline=None, derandomize=True)
    @given(greedy_rounds(kind_of(RULES[rule])))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        assert differing(certain(*case), by_laws(RULES[rule], *case)) == []

    check()


def _last_sibling(tree: DraftTree, following: Tensor) -> Verdict:
    """Takes the last of equal siblings: the trees are read with their nodes in another order."""
    verdict = certain(tree, following)
    path = verdict.path.clone()
    for row, nodes in enumerate(path.tolist()):
        for depth, node in enumerate(nodes):
            same = (tree.parents[row] == tree.parents[row, node]) & (tree.tokens[row] == tree.tokens[row, node])
            if node > 0:
                path[row, depth] = int((same & tree.valid[row]).nonzero().max())
    return replace(verdict, path=path)


WRONG: dict[str, Callable[[DraftTree, Tensor], Verdict]] = {
    "any depth": lambda tree, following: certain(replace(tree, valid=torch.ones_like(tree.valid)), following),
    "the token after a node itself": lambda tree, following: certain(tree, following.roll(1, dims=1)),
    "last sibling": _last_sibling,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_walks_are_found(wrong: Callable[[DraftTree, Tensor], Verdict]) -> None:
    found = []

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(greedy_rounds("tree"))
    def look(case: tuple[DraftTree, Tensor]) -> None:
        found.extend(differing(wrong(*case), by_laws(TargetWalkVerifier(), *case)))

    look()
    assert "path" in found


class Spelled(TargetWalkVerifier):
    def laws(self, tree: DraftTree, target_probs: Tensor) -> Laws:
        return super().laws(tree, target_probs)


def test_a_rule_speaks_for_its_own_laws_only() -> None:
    class Named(TargetWalkVerifier):
        chain_only = True

    assert Named().walks_greedily and not Spelled().walks_greedily
    assert set(GREEDY) == set(RULES), "every exact rule with noise of its own says so"
    assert not any(rule.walks_greedily for rule in (CascadeVerifier, FLyVerifier, SharedNoiseVerifier))


class _Bytes(TorchDispatchMode):
    """Counts the bytes of the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        fresh = not any(each.alias_info for each in func._schema.returns)
        if fresh and isinstance(made, Tensor):
            self.most = max(self.most, made.numel() * made.element_size())
        return made


def test_a_greedy_round_makes_no_table_over_the_vocabulary() -> None:
    shape, vocab = TreeShape.branching(3, 2, 1), 4096
    tokens, logits = torch.randint(0, 9, (2, shape.num_nodes + 1)), torch.randn(2, shape.num_nodes + 1, vocab)
    batch = slots_of([[0, 1], [0, 1]], vocab_size=vocab)
    parents = DraftTree.from_shape(shape, tokens).parents.clone()
    for rule, small in ((TargetWalkVerifier(), True), (Spelled(), False)):
        tree = DraftTree.build(tokens, parents, max_depth=3, max_children=3)
        mode = Mode(verifier=rule)
        _ = tree.ancestors, tree.depth  # the attention of the verify forward reads them first
        with without_looking(), counted() as work, _Bytes() as memory:
            judge(mode, batch, Agreement(), False, tree, logits)
        assert (memory.most < logits.numel()) is small  # a byte per entry
        assert work.synchronizations == 0
        assert (work.launches < 70) is small
