"""Rejection sampling: exact by enumeration, and its formulas."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from specdec.exactness.drafts import Samplings, enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, outcome
from specdec.exactness.tables import Tables
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness
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
)
from verifiers import RejectionVerifier

# A chain has no siblings that could mix laws.
CASES = [
    complete(
        shape,
        laws,
        kinds,
        strong=shape in ("chain", "2x2", "two children below one") and kinds in ("dense", "every kind"),
    )
    for shape in SHAPES
    for laws in LAWS
    for kinds in KINDS
    if not SHAPES[shape].is_chain or laws in ("top", "iid", "swor")
]


@pytest.mark.parametrize(("shape", "laws", "kinds"), CASES)
def test_the_output_law_is_the_targets(shape: str, laws: str, kinds: str) -> None:
    tree = SHAPES[shape]
    tables = Tables.random(3 if tree.num_nodes > 5 else 4, tree.max_depth, seed=len(shape), kinds=KINDS[kinds])
    result = enumerate_outcome(RejectionVerifier(), tables, tree, LAWS[laws])
    assert result.tv < EXACT


@pytest.mark.parametrize("laws", [TOP, IID, SWOR], ids=lambda law: law.name)
@pytest.mark.parametrize("seed", [complete(seed, strong=seed == 0) for seed in range(5)])
def test_the_output_law_is_the_targets_on_more_tables(laws: DraftSampling, seed: int) -> None:
    tables = Tables.random(4, 2, seed=seed, kinds=("dense", "zeros", "equal", "disjoint"))
    assert enumerate_outcome(RejectionVerifier(), tables, SHAPES["2x2"], laws).tv < EXACT


@pytest.mark.parametrize("laws", LAWS)
def test_trees_whose_shape_depends_on_the_draft_are_exact(laws: str) -> None:
    """Nodes may be left out by what stands above them; the rest then has gaps in rows, ranks and depths."""
    tables = Tables.random(4, 2, seed=3, kinds=("dense", "zeros"))
    shape = TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])

    def grows(node: int, prefix: Tensor) -> Tensor:
        if node in (3, 5):  # first children
            return (prefix + node) % 2 == 0
        return (prefix < 3) | (node < 6)

    drafts = enumerate_drafts(tables, shape, LAWS[laws], grows=grows)
    valid = drafts.tree.valid
    gap = (valid[:, 4] & ~valid[:, 3]) | (valid[:, 6] & ~valid[:, 5])
    assert gap.any(), "no row lacks a first child and has a second"
    stop_law = RejectionVerifier().laws(drafts.tree, drafts.target_probs).stop
    assert (stop_law[~valid] == 0).all()
    assert outcome(RejectionVerifier(), tables, drafts).tv < EXACT


def test_iid_siblings_may_repeat() -> None:
    """The enumeration has such drafts, and a repeated token is worth no more than the residual leaves it."""
    tables = Tables.random(3, 1, seed=1)
    drafts = enumerate_drafts(tables, TreeShape.branching(3), IID)
    tokens = drafts.tree.tokens
    repeated = (tokens[:, 1] == tokens[:, 2]) & (tokens[:, 2] == tokens[:, 3])
    assert repeated.sum() == 3
    assert outcome(RejectionVerifier(), tables, drafts).tv < EXACT


def test_repeated_deterministic_siblings_count_once() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(1, 4, 3).contiguous()
    tree = DraftTree.from_shape(TreeShape.branching(3), torch.tensor([[1, 1, 0, 1]]))
    rule = RejectionVerifier()
    expected = torch.tensor([[0.2, 0.3, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(rule.laws(tree, p).stop, expected)
    torch.testing.assert_close(
        rule.laws(tree, p).after(torch.zeros(1, dtype=torch.long)), torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    )
    with_q = replace(tree, draft_probs=torch.full_like(p, torch.nan))
    torch.testing.assert_close(rule.laws(with_q, p).stop, expected)


# By hand: p = (.5, .3, .2), q = (.2, .5, .3), one level, so p_1 = N([p - q]+) is all on token 0.
#   a child 0 is accepted with probability 1, a first child 1 with .3 / .5, a first child 2 with .2 / .3;
#   after a rejection (of 1 or 2) an IID child 0 has min(1, 1 / .2) = 1, and without replacement min(1, 1 / q_1(0)) = 1.
BY_HAND = [
    (IID, [1], [0.4, 0.6], [1.0, 0.0, 0.0]),
    (IID, [0], [0.0, 1.0], None),
    (IID, [2, 1], [1 / 3, 2 / 3, 0.0], [1.0, 0.0, 0.0]),
    (IID, [1, 0], [0.0, 0.6, 0.4], None),
    (IID, [1, 1], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]),
    (SWOR, [1, 0], [0.0, 0.6, 0.4], None),
    (SWOR, [1, 2], [0.4, 0.6, 0.0], [1.0, 0.0, 0.0]),
    (TOP, [1, 2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]),
    (TOP, [1], [0.7, 0.3], [5 / 7, 0.0, 2 / 7]),
    # Token 1 for certain, then q without it, (.4, 0, .6), from what is left of p, (5/7, 0, 2/7):
    # token 2 is accepted with (2/7) / .6 = 10/21 of the .7, and N([p_1 - q_1]+) is all on token 0.
    ((TOP, SWOR), [1, 2], [0.7 * 11 / 21, 0.3, 0.7 * 10 / 21], [1.0, 0.0, 0.0]),
    # The same, but from q itself: (2/7) / .3 = 20/21 of the .7.
    ((TOP, IID), [1, 2], [0.7 * 1 / 21, 0.3, 0.7 * 20 / 21], [1.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("laws", "tokens", "stop_law", "residual"), BY_HAND)
def test_one_level_by_hand(
    laws: Samplings, tokens: list[int], stop_law: list[float], residual: list[float] | None
) -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(1, len(tokens) + 1, 3).contiguous()
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).expand(1, len(tokens) + 1, 3).contiguous()
    law = [laws] * len(tokens) if isinstance(laws, DraftSampling) else list(laws)
    tree = DraftTree.from_shape(
        TreeShape.branching(len(tokens)),
        torch.tensor([[0, *tokens]]),
        sampling=torch.tensor([[TOP, *law]], dtype=torch.int8),
        draft_probs=q,
    )
    rule = RejectionVerifier()
    torch.testing.assert_close(rule.laws(tree, p).stop, torch.tensor([stop_law], dtype=torch.float64))
    if residual is not None:
        next_law = rule.laws(tree, p).after(torch.zeros(1, dtype=torch.long))
        torch.testing.assert_close(next_law, torch.tensor([residual], dtype=torch.float64))
    # After a leaf p itself, to the last bit.
    assert torch.equal(rule.laws(tree, p).after(torch.ones(1, dtype=torch.long)), p[:, 1])


def test_acceptance_rates_by_hand() -> None:
    """P(a child is accepted) over all drafts of the tables above."""
    row = {(): [0.5, 0.3, 0.2]} | {(token,): [1 / 3] * 3 for token in range(3)}
    draft = {(): [0.2, 0.5, 0.3]} | {(token,): [1 / 3] * 3 for token in range(3)}
    tables = Tables.from_rows(row, draft)

    def rate(laws: Samplings, children: int) -> float:
        return enumerate_outcome(RejectionVerifier(), tables, TreeShape.branching(children), laws).expected_accepted

    assert rate(IID, 1) == pytest.approx(0.2 + 0.3 + 0.2, abs=EXACT)
    assert rate(SWOR, 1) == pytest.approx(0.7, abs=EXACT)
    assert rate(IID, 2) == pytest.approx(0.7 + 0.3 * 0.2, abs=EXACT)
    # Token 1 (.5) is rejected with .4, and then token 0 comes with .2 / .5; token 2 (.3) with 1/3, .2 / .7.
    assert rate(SWOR, 2) == pytest.approx(0.7 + 0.5 * 0.4 * 0.4 + 0.3 / 3 * 2 / 7, abs=EXACT)
    assert rate(TOP, 2) == pytest.approx(0.3 + 0.2, abs=EXACT)


def test_nothing_drafted_is_plain_decoding() -> None:
    p = torch.rand(3, 1, 5).softmax(-1)
    tree = DraftTree.root_only(torch.tensor([1, 2, 3]))
    rule = RejectionVerifier()
    assert torch.equal(rule.laws(tree, p).stop, torch.ones(3, 1))
    assert torch.equal(rule.laws(tree, p).after(torch.zeros(3, dtype=torch.long)), p[:, 0])


def test_a_row_without_drafts_gets_p_to_the_last_bit() -> None:
    """So that its output does not depend on whether its batch mates were drafted for."""
    p = torch.rand(2, 3, 50).softmax(-1) * 1.000001  # sums to one as well as float32 sums do
    q = torch.rand(2, 3, 50).softmax(-1)
    valid = torch.tensor([[True, False, False], [True, True, True]])
    for draft_probs, sampling in ((None, TOP), (q, IID)):
        for shape in (TreeShape.chain(2), TreeShape.branching(2)):
            tree = DraftTree.from_shape(
                shape, torch.tensor([[3, 4, 5], [3, 4, 5]]), valid=valid, sampling=sampling, draft_probs=draft_probs
            )
            stop_law = RejectionVerifier().laws(tree, p).stop
            assert torch.equal(stop_law[0], torch.tensor([1.0, 0.0, 0.0]))
            next_law = RejectionVerifier().laws(tree, p).after(torch.zeros(2, dtype=torch.long))
            assert torch.equal(next_law[0], p[0, 0])
            assert not torch.equal(next_law[1], p[1, 0])


@pytest.mark.parametrize("laws", LAWS)
def test_temperature_zero_is_greedy_matching(laws: str) -> None:
    """With one-hot p every draft leaves no choice: the walk along the argmax, and the argmax after it."""
    tables = Tables.random(4, 2, seed=5, kinds=("one_hot",))
    drafts = enumerate_drafts(tables, SHAPES["2x2"], LAWS[laws])
    p = drafts.target_probs.float()
    stop_law = RejectionVerifier().laws(drafts.tree, p).stop
    assert ((stop_law == 0) | (stop_law == 1)).all() and (stop_law.sum(1) == 1).all()
    # Every row, slow and literally.
    for row in range(len(p)):
        node = 0
        while True:
            argmax = int(p[row, node].argmax())
            children = [child for child in drafts.tree.children[row, node].tolist() if child >= 0]
            fitting = [child for child in children if int(drafts.tree.tokens[row, child]) == argmax]
            if not fitting:
                break
            node = fitting[0]
        assert int(stop_law[row].argmax()) == node
    stop = stop_law.argmax(1)
    next_law = RejectionVerifier().laws(drafts.tree, p).after(stop)
    assert torch.equal(next_law, p[torch.arange(len(p)), stop])


# ---------------------------------------------------------------------------------------------------------------------
# The formulas, literally


def literal_laws(tree: DraftTree, target_probs: Tensor) -> tuple[list[int], list[list[float]], list[list[list[float]]]]:
    """Rows that can be drawn, and both laws of these, the second of every node, node by node in Python floats."""
    rows, stop_laws, next_laws = [], [], []
    for row in range(len(target_probs)):
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        reach = [1.0] + [0.0] * (len(tokens) - 1)
        stop, residuals, possible = [0.0] * len(tokens), [], True
        for node in range(len(tokens)):
            p = node_p = target_probs[row, node].tolist()
            rejected, earlier = 1.0, set()
            for child in range(len(tokens)):
                if parents[child] != node or not tree.valid[row, child]:
                    continue
                token, law = tokens[child], int(tree.law[row, child])
                if law == TOP:
                    q = [float(other == token) for other in range(len(p))]
                else:
                    q = tree.draft_probs[row, node].tolist()
                    if law == SWOR:
                        q = [0.0 if other in earlier else mass for other, mass in enumerate(q)]
                        q = [mass / sum(q) for mass in q] if sum(q) > 0 else q
                a = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
                reach[child] = reach[node] * rejected * a
                rejected *= 1 - a
                left = [max(0.0, mass - drafted) for mass, drafted in zip(p, q, strict=True)]
                p = [mass / sum(left) for mass in left] if sum(left) > 0 else node_p
                earlier.add(token)
                possible &= law != SWOR or q[token] > 0
            if tree.valid[row, node]:
                stop[node] = reach[node] * rejected
            residuals.append(p)
        if possible:
            rows.append(row)
            stop_laws.append(stop)
            next_laws.append(residuals)
    return rows, stop_laws, next_laws


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drafts(torch.float64))
def test_the_laws_are_the_formulas(case: tuple[DraftTree, Tensor]) -> None:
    tree, p = case
    rows, *expected = literal_laws(tree, p)
    assume(rows)
    expected_stop, expected_next = (torch.tensor(law, dtype=torch.float64) for law in expected)
    laws = RejectionVerifier().laws(tree, p)
    torch.testing.assert_close(laws.stop[rows], expected_stop, atol=1e-12, rtol=0)
    for node in range(tree.width):
        next_law = laws.after(torch.full_like(tree.tokens[:, 0], node))[rows]
        # Where a path all but never ends, the residual is all rounding: compare what it contributes.
        weight = expected_stop[:, node, None]
        torch.testing.assert_close(weight * next_law, weight * expected_next[:, node], atol=1e-12, rtol=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drafts(torch.float32))
def test_both_laws_are_laws_in_float32(case: tuple[DraftTree, Tensor]) -> None:
    tree, p = case
    stop_law = RejectionVerifier().laws(tree, p).stop
    assert stop_law.dtype == torch.float32
    assert torch.isfinite(stop_law).all() and (stop_law >= 0).all()
    assert (stop_law[~tree.valid] == 0).all()
    assert (stop_law.sum(1) - 1).abs().max() < 1e-6
    for node in range(tree.width):
        next_law = RejectionVerifier().laws(tree, p).after(torch.full_like(tree.tokens[:, 0], node))
        assert next_law.dtype == torch.float32
        assert torch.isfinite(next_law).all() and (next_law >= 0).all()
        assert (next_law.sum(1) - 1).abs().max() < 1e-6
        assert (next_law[p[:, node] == 0] == 0).all(), "a token that the target excludes"
    # A path never goes through a token that the target excludes.
    entered = p.flatten(1).gather(1, tree.parents.clamp(min=0) * p.shape[2] + tree.tokens)[:, 1:]
    assert (stop_law[:, 1:][entered == 0] == 0).all()


@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape.branching(2, 2)], ids=repr)
def test_the_shortcuts_agree_with_the_general_rule(shape: TreeShape) -> None:
    """No table for deterministic drafts, no residuals on chains: neither changes the law."""
    p, q = (torch.randn(5, shape.num_nodes + 1, 7, dtype=torch.float64).softmax(-1) for _ in range(2))
    tokens = torch.randint(0, 7, (5, shape.num_nodes + 1))
    deterministic = DraftTree.from_shape(shape, tokens)
    sampled = DraftTree.from_shape(shape, tokens, sampling=IID, draft_probs=q)
    # The bound that a tree has which nobody knows more of.
    topology = replace(deterministic.topology, max_children=shape.num_nodes)
    for short, general in (
        (deterministic, replace(deterministic, topology=topology, draft_probs=q)),
        (sampled, replace(sampled, topology=topology)),
    ):
        rule = RejectionVerifier()
        torch.testing.assert_close(rule.laws(short, p).stop, rule.laws(general, p).stop, atol=1e-14, rtol=0)
        for node in range(shape.num_nodes + 1):
            stop = torch.full((5,), node)
            torch.testing.assert_close(rule.laws(short, p).after(stop), rule.laws(general, p).after(stop))


def test_rows_at_temperature_zero_share_a_batch_with_sampled_rows() -> None:
    """A greedy row is DETERMINISTIC in a tree that has draft_probs, and its q may hold anything."""
    p = torch.rand(2, 3, 4, dtype=torch.float64).softmax(-1)
    q = torch.rand(2, 3, 4, dtype=torch.float64).softmax(-1)
    q[0] = torch.nan
    law = torch.tensor([[TOP] * 3, [SWOR] * 3], dtype=torch.int8)
    for shape in (TreeShape.branching(2), TreeShape.chain(2)):
        both = DraftTree.from_shape(shape, torch.tensor([[0, 1, 2], [0, 1, 2]]), sampling=law, draft_probs=q)
        alone = DraftTree.from_shape(shape, torch.tensor([[0, 1, 2]]))
        rule = RejectionVerifier()
        torch.testing.assert_close(rule.laws(both, p).stop[:1], rule.laws(alone, p[:1]).stop)
        for node in range(3):
            torch.testing.assert_close(
                rule.laws(both, p).after(torch.full((2,), node))[:1],
                rule.laws(alone, p[:1]).after(torch.tensor([node])),
            )


def test_laws_and_promise() -> None:
    assert RejectionVerifier.exactness is Exactness.EXACT
    assert RejectionVerifier.samplings == {TOP, IID, SWOR}
    assert not RejectionVerifier.chain_only
