"""Every exact rule: its output law is the target's, over shapes, laws and tables; at temperature 0 it is greedy."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.drafts import Samplings
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import ROW_KINDS, Tables
from tests.verifiers.cases import EXACT, IID, KINDS, LAWS, RULES, SHAPES, SLOW, SWOR, TOP, complete, drafts, takes

PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
# Looked-up branches beside drawn ones (None): before them, behind them, and around them.
BESIDE: list[dict[tuple[int, ...], DraftSampling | None]] = [
    {(0,): TOP, (0, 0): TOP, (1,): None, (1, 0): None, (1, 1): None},
    {(0,): None, (0, 0): None, (0, 1): None, (1,): TOP, (1, 0): TOP},
    {(0,): TOP, (1,): None, (2,): None, (3,): TOP},
]


def some_of(strategy: st.SearchStrategy, examples: int):
    """Runs a check over some examples, the same ones in every run."""
    return lambda check: settings(max_examples=examples, deadline=None, derandomize=True)(given(strategy)(check))()


def kind_of(rule: Verifier) -> str:
    return "chain" if rule.chain_only else "paths" if rule.paths_only else "tree"


@pytest.mark.parametrize("rule", RULES)
def test_the_output_law_is_the_targets(rule: str) -> None:
    """What asks most of a rule: a whole chain, long paths or two levels of siblings, every kind of table; and a gap."""
    exact = RULES[rule]
    hardest = {"chain": "chain", "paths": "2x1x1", "tree": "2x2"}[kind_of(exact)]
    cases: list[tuple[TreeShape, Samplings, str]] = [
        (SHAPES[shape], law, kinds)
        for shape, kinds in ((hardest, "every kind"), ("uneven", "dense"))
        for law in LAWS
        if takes(exact, SHAPES[shape]) and (rule not in SLOW or SHAPES[shape].num_nodes < 4)
        if isinstance(law, DraftSampling) or not SHAPES[shape].is_chain  # a chain has no siblings that could mix laws
    ]
    if kind_of(exact) == "tree":
        cases += [
            (TreeShape.from_paths(list(places)), {path: place or law for path, place in places.items()}, "every kind")
            for places in BESIDE
            for law in (IID, SWOR)
        ]
    elif kind_of(exact) == "paths":  # a looked-up path beside a drawn one
        cases.append((TreeShape.branching(2, 1), {(0,): TOP, (0, 0): TOP, (1,): IID, (1, 0): IID}, "dense"))
    for shape, laws, kinds in cases:
        drawn = {laws} if isinstance(laws, DraftSampling) else set(laws.values() if isinstance(laws, dict) else laws)
        if drawn <= exact.samplings:
            tables = Tables.random(3, shape.max_depth, seed=3, kinds=KINDS[kinds])
            assert enumerate_outcome(exact, tables, shape, laws).tv < EXACT, f"{shape} {laws}"


@pytest.mark.parametrize("examples", [8, complete(40, strong=False)])
@pytest.mark.parametrize("rule", RULES)
def test_random_trees_are_exact(rule: str, examples: int) -> None:
    """Any shape, tables and laws, and nodes that are left out by what stands above them: by enumeration."""
    verifier, kind = RULES[rule], kind_of(RULES[rule])
    laws_taken = sorted(law for law in verifier.samplings if law in (TOP, IID, SWOR))
    one_law = st.sampled_from(laws_taken)

    @some_of(st.data(), min(examples, 15) if rule in SLOW else examples)
    def check(data: st.DataObject) -> None:
        if kind == "tree":
            chosen = data.draw(st.sets(st.sampled_from(PATHS), min_size=1, max_size=3))
            # Closed under ancestors and earlier siblings.
            closed = {
                (*path[:depth], rank)
                for path in chosen
                for depth in range(len(path))
                for rank in range(path[depth] + 1)
            }
            shape = TreeShape.from_paths(closed)
        else:
            branches = 1 if kind == "chain" else data.draw(st.integers(1, 3))
            shape = TreeShape.branching(branches, *[1] * data.draw(st.integers(0, 2 if branches < 3 else 1)))
        vocab = data.draw(st.integers(2, 3 if shape.num_nodes < 6 else 2))
        kinds = data.draw(st.lists(st.sampled_from(sorted(ROW_KINDS)), min_size=1, max_size=3))
        laws = data.draw(one_law if kind == "paths" else one_law | st.tuples(*[one_law] * 3))
        tables = Tables.random(vocab, shape.max_depth, seed=data.draw(st.integers(0, 1000)), kinds=kinds)
        salt = data.draw(st.integers(0, 5))

        def grows(node: int, prefix: Tensor) -> Tensor:
            # In independent paths, all nodes of a depth behave alike.
            place = shape.depths[node] if kind == "paths" else node
            return (prefix * 7 + place * 5 + salt) % 4 > 0

        assert enumerate_outcome(verifier, tables, shape, laws, grows=grows if salt else None).tv < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_nothing_drafted_is_plain_decoding(rule: str) -> None:
    """To the last bit, beside a batch mate that was drafted for, too."""
    shape = TreeShape.chain(2) if RULES[rule].chain_only else TreeShape.branching(2)
    # It sums to one as well as float32 sums do.
    p, q = torch.rand(2, 3, 50).softmax(-1) * 1.000001, torch.rand(2, 3, 50).softmax(-1)
    valid = torch.tensor([[True, False, False], [True, True, True]])
    tokens = torch.tensor([[3, 4, 5], [3, 4, 5]])
    laws = RULES[rule].laws(DraftTree.from_shape(shape, tokens, valid=valid, sampling=IID, draft_probs=q), p)
    assert torch.equal(laws.stop[0], torch.tensor([1.0, 0.0, 0.0]))
    next_law = laws.after(torch.zeros(2, dtype=torch.long))
    assert torch.equal(next_law[0], p[0, 0]) and not torch.equal(next_law[1], p[1, 0])
    laws = RULES[rule].laws(DraftTree.root_only(torch.tensor([1, 2])), p[:, :1])
    assert torch.equal(laws.stop, torch.ones(2, 1)) and torch.equal(laws.after(torch.tensor([0, 0])), p[:, 0])


@pytest.mark.parametrize("rule", RULES)
def test_both_laws_are_laws_and_a_row_does_not_depend_on_its_batch_mates(rule: str) -> None:
    """Laws in float32: nothing is negative, they sum to one, and no token that the target excludes is emitted."""
    verifier = RULES[rule]

    @some_of(drafts(torch.float64, kind_of(verifier)), 6)
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, p = case
        if SWOR not in verifier.samplings:
            tree = replace(tree, law=torch.where(tree.law == SWOR, IID, tree.law.long()).to(torch.int8))
        if len(p) > 1 and tree.draft_probs is not None:  # a row at temperature zero, whose q may hold anything
            law, q = tree.law.clone(), tree.draft_probs.clone()
            law[0], q[0] = int(TOP), torch.nan
            tree = replace(tree, law=law, draft_probs=q)
        q, p32 = tree.draft_probs, p.float()
        laws = verifier.laws(replace(tree, draft_probs=None if q is None else q.float()), p32)
        assert laws.stop.dtype == torch.float32 and torch.isfinite(laws.stop).all() and (laws.stop >= 0).all()
        assert (laws.stop[~tree.valid] == 0).all()
        assert (laws.stop.sum(1) - 1).abs().max() < 1e-6
        entered = p32.flatten(1).gather(1, tree.parents.clamp(min=0) * p.shape[2] + tree.tokens)[:, 1:]
        assert (laws.stop[:, 1:][entered == 0] == 0).all(), "a path through a token that the target excludes"
        together = verifier.laws(tree, p)
        rows = [slice(row, row + 1) for row in range(len(p))]
        alone = [verifier.laws(tree.rows(row), p[row]) for row in rows]
        for row, one in zip(rows, alone, strict=True):
            torch.testing.assert_close(together.stop[row], one.stop, atol=1e-12, rtol=0)
        for node in range(tree.width):
            at = torch.full_like(tree.tokens[:, 0], node)
            next_law, exact = laws.after(at), together.after(at)
            assert next_law.dtype == torch.float32 and torch.isfinite(next_law).all() and (next_law >= 0).all()
            assert (next_law.sum(1) - 1).abs().max() < 1e-6
            assert (next_law[p32[:, node] == 0] == 0).all(), "a token that the target excludes"
            for row, one in zip(rows, alone, strict=True):
                # Where a path all but never ends, the residual is all rounding: compare what it contributes.
                weight = together.stop[row, node]
                torch.testing.assert_close(weight * exact[row], weight * one.after(at[row]), atol=1e-12, rtol=0)
