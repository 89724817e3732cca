"""Acceptance rates by depth and rank; compressed tables, and how far a lossy rule is from the target."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.results.statistics import Bootstrap
from experiments.tracing.compressed import pack, unpack
from experiments.tracing.distance import first_token_distances
from experiments.tracing.rates import PRIOR, Recorded, record
from experiments.tracing.scoring import find_drafts, score
from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts, sample_drafts
from specdec.checks.outcomes import emitted_law
from specdec.checks.tables import Tables
from tests.experiments.made_runs import traced
from verifiers import BlockVerifier, LenientVerifier, RejectionVerifier, TargetWalkVerifier, TraversalVerifier

IID, SWOR, TOP = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC


def followed(shape: TreeShape, ranks: np.ndarray) -> tuple[DraftTree, torch.Tensor]:
    """Greedy rounds: which child the target follows after every node of every row, by rank, which is the token, too."""
    tokens = torch.tensor(shape.ranks).expand(len(ranks), -1)
    said = torch.from_numpy(ranks)
    return DraftTree.from_shape(shape, tokens), torch.nn.functional.one_hot(said, 8).float()


def recorded(folder: Path, rule: Verifier) -> Recorded:
    return record(find_drafts(folder), rule)


def test_counts_by_hand(tmp_path: Path) -> None:
    """The target follows 0-0, 0-1, nothing, and 1-0 down a tree with two children everywhere."""
    shape = TreeShape.branching(2, 2)  # nodes 1 and 2, 3 and 4 below 1, 5 and 6 below 2
    ranks = np.full((4, 7), 7)
    ranks[0, :2], ranks[1, :2], ranks[3, [0, 2]] = [0, 0], [0, 1], [1, 0]
    traced(tmp_path, *followed(shape, ranks), ["a", "a", "b", "b"])
    found = recorded(tmp_path, TargetWalkVerifier())
    assert found.shape == shape and found.prompts == ("a", "b") and found.rounds == 4 and found.top_down
    assert found.accepted.tolist() == [[[2, 0], [1, 1]], [[0, 1], [1, 0]]]
    assert found.offered.tolist() == [[[2, 2], [2, 2]], [[2, 2], [1, 1]]]
    assert found.tokens == pytest.approx(1 + 6 / 4)
    # Over both depths the first rank was accepted in 4 of 7 nodes, the second in 2 of 7.
    table = found.rates().table
    assert table[0] == pytest.approx([(2 + PRIOR * 4 / 7) / (4 + PRIOR), (1 + PRIOR * 2 / 7) / (4 + PRIOR)])
    assert table[1] == pytest.approx([(2 + PRIOR * 4 / 7) / (3 + PRIOR), (1 + PRIOR * 2 / 7) / (3 + PRIOR)])
    one, two = table
    tree = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 1)])
    assert found.rates().tokens_per_round(tree) == pytest.approx(1 + sum(one) + one[0] * two[0] + one[1] * two[1])
    # Prompt a alone, or b alone: 2 of 2 (with 3 of 4 over both depths), or 0 of 2 (with 1 of 3).
    low, high = (0 + PRIOR * 1 / 3) / (4 + PRIOR), (4 + PRIOR * 3 / 4) / (4 + PRIOR)
    assert found.tokens_interval(TreeShape.chain(1), Bootstrap(resamples=200)) == pytest.approx((1 + low, 1 + high))


@pytest.mark.parametrize("rule", [RejectionVerifier(), TargetWalkVerifier()], ids=lambda rule: type(rule).__name__)
def test_what_was_accepted_is_what_the_rule_expects(rule: Verifier, tmp_path: Path) -> None:
    """Over all drafts there are of a small vocabulary: every depth and rank together is the expected number."""
    law = SWOR if isinstance(rule, RejectionVerifier) else TOP
    shape = TreeShape.branching(2, 2)
    drafts = enumerate_drafts(Tables.random(3, 2, seed=1), shape, law)
    rows = [str(row) for row in range(len(drafts.tree.tokens))]
    traced(tmp_path, drafts.tree, drafts.target_probs.nan_to_num(), rows)
    found = recorded(tmp_path, rule)
    (expected,) = score(find_drafts(tmp_path)[0], {"rule": rule})
    assert found.accepted.sum() == pytest.approx(expected.accepted.sum(), rel=1e-6)
    assert found.top_down and (found.accepted <= found.offered + 1e-9).all()
    if law is SWOR:
        assert not recorded(tmp_path, TraversalVerifier()).top_down, "it looks below a node"


def test_children_that_could_not_be_drawn_were_offered_and_those_cut_off_were_not(tmp_path: Path) -> None:
    """Row a: q had one token for the root's children. Row b: the output had room for one token more."""
    shape = TreeShape.branching(2, 1)  # nodes 1 and 2, 3 below 1, 4 below 2
    ranks = np.array([[0, 0, 7, 7, 7]] * 2)
    tree, p = followed(shape, ranks)
    valid = torch.tensor([[True, True, False, True, False], [True, True, True, False, False]])
    tree = DraftTree.from_shape(shape, tree.tokens, valid=valid)
    traced(tmp_path, tree, p, ["a", "b"])
    found = recorded(tmp_path, TargetWalkVerifier())
    assert found.offered.tolist() == [[[1, 1], [1, 0]], [[1, 1], [0, 0]]]
    assert found.accepted.tolist() == [[[1, 0], [1, 0]], [[1, 0], [0, 0]]]
    assert found.tokens == pytest.approx(3), "of the round that drafted to full depth"


def test_chains_are_refused(tmp_path: Path) -> None:
    traced(tmp_path, *followed(TreeShape.chain(2), np.zeros((1, 3), dtype=int)), ["a"])
    with pytest.raises(ValueError, match=r"has chains only \(model, T=1\), from which no rank but the first is known"):
        recorded(tmp_path, TargetWalkVerifier())


def test_a_table_by_hand() -> None:
    # Left of p below its two most probable tokens: .15; of q below its most probable: .2. Token 4 was drafted.
    q = torch.tensor([[[0.05, 0.8, 0.0, 0.05, 0.1], [0.0] * 5]])
    tree = DraftTree.from_shape(TreeShape.chain(1), torch.tensor([[0, 4]]), sampling=IID, draft_probs=q)
    p = torch.tensor([[[0.25, 0.0, 0.6, 0.1, 0.05], [0.0, 1.0, 0.0, 0.0, 0.0]]])
    packed = pack(tree, p, dropped=0.21)
    assert packed.counts.tolist() == [[4, 1]]
    assert packed.ids.tolist() == [0, 1, 2, 4, 1]
    assert packed.p.tolist() == pytest.approx([0.25, 0.0, 0.6, 0.05, 1.0])
    assert packed.q.tolist() == pytest.approx([0.05, 0.8, 0.0, 0.1, 0.0])
    assert packed.rest_p.ravel().tolist() == pytest.approx([0.1, 0.0])
    assert packed.rest_q.ravel().tolist() == pytest.approx([0.05, -1.0])

    small, table = unpack(packed)
    assert small.tokens.tolist() == [[0, 3]], "the drafted token is the fourth that was kept at the root"
    assert table[0].flatten().tolist() == pytest.approx([0.25, 0, 0.6, 0.05, 0.1, 1, 0, 0, 0, 0])
    assert small.draft_probs is not None
    assert small.draft_probs[0, 0].tolist() == pytest.approx([0.05, 0.8, 0, 0.1, 0.05])
    # A drafter on the host pads its trees; results have as many places as drafts are deep.
    valid = torch.tensor([[True, True, False]])
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 2]]), sampling=TOP, valid=valid)
    small, _ = unpack(pack(tree, torch.full((1, 3, 4), 0.25)))
    assert small.max_depth == 1 and small.depth.max() == 1


def moved(drafts: WeightedDrafts, dropped: float, like_q: bool = True) -> tuple[Tensor, Tensor]:
    """p': like q (or evenly) on the tokens that are dropped; and how far it is from p, by node."""
    packed = pack(drafts.tree, drafts.target_probs, dropped=dropped)
    p, q = drafts.target_probs, drafts.tree.draft_probs
    kept = torch.zeros_like(p, dtype=torch.bool)
    kept.flatten(0, 1)[np.arange(packed.counts.size).repeat(packed.counts.ravel()), packed.ids] = True
    weight = (~kept).double()
    if q is not None and like_q:
        weight = torch.where(torch.from_numpy(packed.rest_q)[..., None] > 0, q * weight, weight)
    p = torch.where(kept, p, (p * ~kept).sum(-1, keepdim=True) * weight / weight.sum(-1, keepdim=True))
    far = 0.5 * (p - drafts.target_probs).abs().sum(-1)
    return p, far[drafts.tree.valid]


@pytest.mark.parametrize(
    ("rule", "shape", "law"),
    [
        (RejectionVerifier(), TreeShape.branching(2, 1), IID),
        (RejectionVerifier(), TreeShape.branching(2, 1), SWOR),
        (BlockVerifier(), TreeShape.chain(2), IID),
        (TargetWalkVerifier(), TreeShape.branching(2, 1), TOP),
    ],
)
def test_a_rule_says_what_it_says_of_a_near_target(rule: Verifier, shape: TreeShape, law: DraftSampling) -> None:
    kinds = ("dense", "zeros", "exhausted")
    drafts = enumerate_drafts(Tables.random(5, shape.max_depth, seed=0, kinds=kinds), shape, law)
    for dropped in (0, 0.4):
        near, far = moved(drafts, dropped)
        assert far.max() <= dropped + 1e-6, "nothing dropped is nothing changed"
        tree, p = unpack(pack(drafts.tree, drafts.target_probs, dropped=dropped))
        torch.testing.assert_close(
            rule.laws(tree, p).stop, rule.laws(drafts.tree, near).stop, rtol=0, atol=2e-5 if dropped else 1e-5
        )
    if law is SWOR:  # the mutant: another near target would not do
        drafts = enumerate_drafts(Tables.random(12, 1, seed=0, kinds=kinds), TreeShape.branching(2), SWOR)
        wrong, _ = moved(drafts, 0.4, like_q=False)
        tree, p = unpack(pack(drafts.tree, drafts.target_probs, dropped=0.4))
        assert (rule.laws(tree, p).stop - rule.laws(drafts.tree, wrong).stop).abs().max() > 1e-2


TABLES = Tables.random(5, 2, seed=3)
CHAIN, PAIRS = TreeShape.chain(2), TreeShape.branching(2, 1)


@pytest.mark.parametrize(
    ("rule", "shape", "law", "off"),
    [
        (BlockVerifier(), CHAIN, IID, 1e-9),
        (TargetWalkVerifier(), CHAIN, IID, 1e-9),
        (LenientVerifier(lenience=0.5), CHAIN, IID, 1e-9),
        # Siblings are drawn again. A half's mean of 128 laws, summed over few tokens, is off by less than 0.1; forty
        # contexts share one seed's draws.
        (RejectionVerifier(), PAIRS, SWOR, 0.03),
        (TraversalVerifier(), PAIRS, IID, 0.03),
        (LenientVerifier(lenience=0.01), PAIRS, SWOR, 0.05),
    ],
)
def test_distances_are_those_of_all_drafts(rule: Verifier, shape: TreeShape, law: DraftSampling, off: float) -> None:
    p, every = TABLES.p[0][0], enumerate_drafts(TABLES, shape, law)
    emitted = (every.probability[:, None] * emitted_law(rule, every.tree, every.target_probs)).sum(0)
    tv, kl = float(0.5 * (emitted - p).abs().sum()), float((emitted * (emitted / p).log()).sum())
    assert (tv > 0.05 + 3 * off) == isinstance(rule, LenientVerifier), "an exact rule has none"
    drafts = sample_drafts(TABLES, shape, law, 40, seed=0)
    found = first_token_distances(rule, drafts.tree, drafts.target_probs)
    assert np.mean([each.tv for each in found]) == pytest.approx(tv, abs=off)
    if shape is CHAIN:
        assert np.array(found) == pytest.approx(np.array([[tv, kl]] * 40), abs=off)
    else:
        assert {each.kl for each in found} == {None}
    # The law given one draft is another thing, unless the rule ignores what was drafted.
    given = (emitted_law(rule, drafts.tree, drafts.target_probs) - p).abs().sum(-1)
    assert (given.max() > 0.1) == (not isinstance(rule, TargetWalkVerifier))
