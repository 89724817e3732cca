"""Every exact rule: its output law is the target's, over shapes, laws and tables; at temperature 0 it is greedy.

A new exact rule needs a line in RULES.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.checks.drafts import Samplings, enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import ROW_KINDS, Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import (
    EXACT,
    IID,
    KINDS,
    LAWS,
    SHAPES,
    SWOR,
    TOP,
    complete,
    drafts,
    takes,
    widest,
)
from verifiers import (
    BlockVerifier,
    GreedyMultiPathVerifier,
    KSeqVerifier,
    RejectionVerifier,
    TargetWalkVerifier,
    TransportVerifier,
    TraversalVerifier,
    TwoDraftVerifier,
    WeightedTransportVerifier,
)

RULES: dict[str, Verifier] = {
    "rejection": RejectionVerifier(),
    "block": BlockVerifier(),
    "traversal": TraversalVerifier(),
    "k-seq": KSeqVerifier(),
    "target walk": TargetWalkVerifier(),
    "two drafts": TwoDraftVerifier(),
    "weighted transport": WeightedTransportVerifier(),
    "greedy multi-path": GreedyMultiPathVerifier(),
    "transport": TransportVerifier(),
    "weighted transport, program": WeightedTransportVerifier(solver="program"),
}
SLOW = ("transport", "weighted transport, program")
"""Programs, solved node by node: fewer cases."""
SHAPES = SHAPES | {
    "a single token": TreeShape.chain(1),
    "three children": TreeShape.branching(3),
    "two paths": TreeShape.branching(2, 1),
    "uneven": TreeShape.from_paths([(0,), (1,), (0, 0)]),
}


def laws_of(laws: Samplings) -> set[DraftSampling]:
    return {laws} if isinstance(laws, DraftSampling) else set(laws)


def fits(rule: Verifier, shape: TreeShape, laws: Samplings) -> bool:
    return laws_of(laws) <= rule.samplings and takes(rule, shape)


def is_strong(rule: Verifier, shape: str, kinds: str) -> bool:
    """Whether a case asks the most of a rule: a whole chain, long paths, or two levels of siblings; then also a gap."""
    hardest = "chain" if rule.chain_only else "2x1x1" if rule.paths_only else "2x2"
    return (shape, kinds) in ((hardest, "every kind"), ("uneven", "dense"))


CASES = [
    complete(rule, shape, laws, kinds, strong=is_strong(RULES[rule], shape, kinds))
    for rule in RULES
    for shape in SHAPES
    for laws in LAWS
    for kinds in KINDS
    # A chain has no siblings that could mix laws.
    if (not SHAPES[shape].is_chain or laws in ("top", "iid", "swor")) and fits(RULES[rule], SHAPES[shape], LAWS[laws])
    if rule not in SLOW or (SHAPES[shape].num_nodes < 4 and laws not in ("iid, then swor", "swor, then iid"))
]


@pytest.mark.parametrize(("rule", "shape", "laws", "kinds"), CASES)
def test_the_output_law_is_the_targets(rule: str, shape: str, laws: str, kinds: str) -> None:
    tree = SHAPES[shape]
    tables = Tables.random(3 if tree.num_nodes > 3 else 4, tree.max_depth, seed=len(shape), kinds=KINDS[kinds])
    assert enumerate_outcome(RULES[rule], tables, tree, LAWS[laws]).tv < EXACT


@pytest.mark.parametrize(
    ("rule", "laws"), [(rule, law) for rule in RULES for law in (TOP, IID, SWOR) if law in RULES[rule].samplings]
)
def test_temperature_zero_is_greedy_matching(rule: str, laws: DraftSampling) -> None:
    """With one-hot p no draft leaves a choice: the walk along the argmax, and the argmax after it. float32."""
    shape = widest(RULES[rule])
    tables = Tables.random(4, shape.max_depth, seed=5, kinds=("one_hot",))
    made = enumerate_drafts(tables, shape, laws)
    p = made.target_probs.nan_to_num(0.0).float()
    tree = made.tree if made.tree.draft_probs is None else replace(made.tree, draft_probs=made.tree.draft_probs.float())
    stop_law = RULES[rule].laws(tree, p).stop
    assert ((stop_law == 0) | (stop_law == 1)).all() and (stop_law.sum(1) == 1).all()
    stop = stop_law.argmax(1)
    assert torch.equal(RULES[rule].laws(tree, p).after(stop), p[torch.arange(len(p)), stop])
    # A walk along the argmax, to where no child is it.
    wanted = (p.argmax(-1).gather(1, tree.parents.clamp(min=0)) == tree.tokens) & tree.valid
    wanted[:, 0] = True
    walked = (wanted[:, None] | ~tree.ancestors).all(-1)
    assert walked.gather(1, stop[:, None]).all()
    assert not (wanted & (tree.parents == stop[:, None])).any()


@pytest.mark.parametrize("rule", RULES)
def test_rows_at_temperature_zero_share_a_batch_with_sampled_rows(rule: str) -> None:
    """A greedy row is DETERMINISTIC in a tree that has draft_probs, and its q may hold anything."""
    shape = widest(RULES[rule]) if RULES[rule].paths_only or RULES[rule].chain_only else SHAPES["uneven"]
    nodes = shape.num_nodes + 1
    p = torch.randn(2, nodes, 5, dtype=torch.float64).softmax(-1)
    q = torch.randn(2, nodes, 5, dtype=torch.float64).softmax(-1)
    q[0] = torch.nan
    law = torch.tensor([[TOP] * nodes, [IID] * nodes], dtype=torch.int8)
    tokens = torch.arange(nodes).expand(2, -1)
    both = DraftTree.from_shape(shape, tokens, sampling=law, draft_probs=q)
    alone = DraftTree.from_shape(shape, tokens[:1])
    sampled = DraftTree.from_shape(shape, tokens[1:], sampling=IID, draft_probs=q[1:])
    for row, tree in ((0, alone), (1, sampled)):
        mine = slice(row, row + 1)
        torch.testing.assert_close(RULES[rule].laws(both, p).stop[mine], RULES[rule].laws(tree, p[mine]).stop)
        for node in range(nodes):
            torch.testing.assert_close(
                RULES[rule].laws(both, p).after(torch.full((2,), node))[mine],
                RULES[rule].laws(tree, p[mine]).after(torch.tensor([node])),
            )


@pytest.mark.parametrize("rule", RULES)
def test_nothing_drafted_is_plain_decoding(rule: str) -> None:
    """To the last bit, beside a batch mate that was drafted for, too."""
    p = torch.rand(3, 1, 5).softmax(-1) * 1.000001  # sums to one as well as float32 sums do
    tree = DraftTree.root_only(torch.tensor([1, 2, 3]))
    assert torch.equal(RULES[rule].laws(tree, p).stop, torch.ones(3, 1))
    assert torch.equal(RULES[rule].laws(tree, p).after(torch.zeros(3, dtype=torch.long)), p[:, 0])
    shape = TreeShape.chain(2) if RULES[rule].chain_only else TreeShape.branching(2)
    p, q = torch.rand(2, 3, 50).softmax(-1) * 1.000001, torch.rand(2, 3, 50).softmax(-1)
    valid = torch.tensor([[True, False, False], [True, True, True]])
    tokens = torch.tensor([[3, 4, 5], [3, 4, 5]])
    tree = DraftTree.from_shape(shape, tokens, valid=valid, sampling=IID, draft_probs=q)
    assert torch.equal(RULES[rule].laws(tree, p).stop[0], torch.tensor([1.0, 0.0, 0.0]))
    next_law = RULES[rule].laws(tree, p).after(torch.zeros(2, dtype=torch.long))
    assert torch.equal(next_law[0], p[0, 0]) and not torch.equal(next_law[1], p[1, 0])


def fitting(rule: Verifier, tree: DraftTree) -> DraftTree:
    """The same, with laws that the rule takes."""
    if SWOR in rule.samplings:
        return tree
    return replace(tree, law=torch.where(tree.law == SWOR, IID, tree.law.long()).to(torch.int8))


@pytest.mark.parametrize("examples", [6, complete(15, strong=False)])
@pytest.mark.parametrize("rule", RULES)
def test_both_laws_are_laws_in_float32(rule: str, examples: int) -> None:
    verifier = RULES[rule]
    kind = "chain" if verifier.chain_only else "paths" if verifier.paths_only else "tree"

    @settings(max_examples=min(examples, 8) if rule in SLOW else examples, deadline=None, derandomize=True)
    @given(drafts(torch.float32, kind))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, p = fitting(verifier, case[0]), case[1]
        stop_law = verifier.laws(tree, p).stop
        assert stop_law.dtype == torch.float32
        assert torch.isfinite(stop_law).all() and (stop_law >= 0).all()
        assert (stop_law[~tree.valid] == 0).all()
        assert (stop_law.sum(1) - 1).abs().max() < 1e-6
        for node in range(tree.width):
            next_law = verifier.laws(tree, p).after(torch.full_like(tree.tokens[:, 0], node))
            assert next_law.dtype == torch.float32
            assert torch.isfinite(next_law).all() and (next_law >= 0).all()
            assert (next_law.sum(1) - 1).abs().max() < 1e-6
            assert (next_law[p[:, node] == 0] == 0).all(), "a token that the target excludes"
        entered = p.flatten(1).gather(1, tree.parents.clamp(min=0) * p.shape[2] + tree.tokens)[:, 1:]
        assert (stop_law[:, 1:][entered == 0] == 0).all(), "a path through a token that the target excludes"

    check()


@pytest.mark.parametrize("examples", [3, complete(8, strong=False)])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_its_batch_mates(rule: str, examples: int) -> None:
    verifier = RULES[rule]
    kind = "chain" if verifier.chain_only else "paths" if verifier.paths_only else "tree"

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(drafts(torch.float64, kind))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, p = fitting(verifier, case[0]), case[1]
        together = verifier.laws(tree, p).stop
        for row in range(len(p)):
            mine = slice(row, row + 1)
            q = None if tree.draft_probs is None else tree.draft_probs[mine]
            alone = DraftTree.build(
                tree.tokens[mine],
                tree.parents[mine],
                valid=tree.valid[mine],
                sampling=tree.law[mine],
                draft_probs=q,
                max_children=tree.max_children,
            )
            torch.testing.assert_close(together[mine], verifier.laws(alone, p[mine]).stop, atol=1e-12, rtol=0)
            for node in range(tree.width):
                # Where a path all but never ends, the residual is all rounding: compare what it contributes.
                weight = together[row, node]
                both = verifier.laws(tree, p).after(torch.full_like(tree.tokens[:, 0], node))[mine]
                one = verifier.laws(alone, p[mine]).after(torch.tensor([node]))
                torch.testing.assert_close(weight * both, weight * one, atol=1e-12, rtol=0)

    check()


PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("examples", [8, complete(20, strong=False)])
@pytest.mark.parametrize("rule", RULES)
def test_random_trees_are_exact(rule: str, examples: int) -> None:
    """Any shape, tables and laws, and nodes that are left out by what stands above them: by enumeration."""
    verifier = RULES[rule]
    laws_taken = sorted(law for law in verifier.samplings if law in (TOP, IID, SWOR))

    @settings(max_examples=min(examples, 8) if rule in SLOW else examples, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        if verifier.chain_only or verifier.paths_only:
            branches = 1 if verifier.chain_only else data.draw(st.integers(1, 3))
            shape = TreeShape.branching(branches, *[1] * data.draw(st.integers(0, 2 if branches < 3 else 1)))
        else:
            chosen = data.draw(st.sets(st.sampled_from(PATHS), min_size=1, max_size=3))
            # Closed under ancestors and earlier siblings.
            shape = TreeShape.from_paths(
                {
                    (*path[:depth], rank)
                    for path in chosen
                    for depth in range(len(path))
                    for rank in range(path[depth] + 1)
                }
            )
        vocab = data.draw(st.integers(2, 3 if shape.num_nodes < 6 else 2))
        kinds = data.draw(st.lists(st.sampled_from(sorted(ROW_KINDS)), min_size=1, max_size=3))
        laws = data.draw(st.sampled_from(laws_taken) | st.tuples(*[st.sampled_from(laws_taken)] * 3))
        if verifier.paths_only:
            laws = data.draw(st.sampled_from(laws_taken))
        tables = Tables.random(vocab, shape.max_depth, seed=data.draw(st.integers(0, 1000)), kinds=kinds)
        salt = data.draw(st.integers(0, 5))

        def grows(node: int, prefix: Tensor) -> Tensor:
            # In independent paths, all nodes of a depth behave alike.
            place = shape.depths[node] if verifier.paths_only else node
            return (prefix * 7 + place * 5 + salt) % 4 > 0

        assert enumerate_outcome(verifier, tables, shape, laws, grows=grows if salt else None).tv < EXACT

    check()
