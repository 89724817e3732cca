"""Acceptance rates from traces: by hand, where they are known, and against what the rule expects."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.results.statistics import Bootstrap
from experiments.tracing.draft_sets import find_drafts
from experiments.tracing.rates import PRIOR, Recorded, record
from experiments.tracing.scoring import score
from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.tables import Tables
from tests.experiments.traced import traced
from verifiers import RejectionVerifier, TargetWalkVerifier, TraversalVerifier

SWOR, TOP = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
QUICK = Bootstrap(resamples=200)


def followed(shape: TreeShape, ranks: np.ndarray) -> tuple[DraftTree, torch.Tensor]:
    """Greedy rounds: which child the target follows after every node of every row, by rank.

    Args:
        shape: The tree; the child of rank r has token r.
        ranks: The rank of the child that the target follows; one that does not exist: none of them.
    """
    tokens = torch.tensor(shape.ranks).expand(len(ranks), -1)
    said = torch.from_numpy(ranks)
    return DraftTree.from_shape(shape, tokens), torch.nn.functional.one_hot(said, 8).float()


def recorded(folder: Path, rule: Verifier) -> Recorded:
    (drafts,) = find_drafts(folder)
    return record([drafts], rule)


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
    # Prompt a alone, or b alone: 2 of 2 (with 3 of 4 over both depths), or 0 of 2 (with 1 of 3).
    low, high = (0 + PRIOR * 1 / 3) / (4 + PRIOR), (4 + PRIOR * 3 / 4) / (4 + PRIOR)
    assert found.rate_interval(1, 0, QUICK) == pytest.approx((low, high))


RATES = [[0.6, 0.2, 0.05], [0.5, 0.3], [0.7, 0.1]]


def world(rows: int, shape: TreeShape, seed: int) -> np.ndarray:
    """Which child the target follows, in a world where the positional assumption holds with ``RATES``."""
    random = np.random.default_rng(seed)
    ranks = np.full((rows, shape.num_nodes + 1), 7)
    for node, depth in enumerate(shape.depths):
        if depth < len(RATES):
            rates = RATES[depth]
            ranks[:, node] = random.choice([*range(len(rates)), 7], rows, p=[*rates, 1 - sum(rates)])
    return ranks


def test_a_smaller_tree_emits_what_is_predicted(tmp_path: Path) -> None:
    """Rates from a wide tree, and the tokens of another tree in other rounds of the same world.

    20,000 rounds give the mean with a standard error of 0.01, and the prediction from 1,500 rounds has one of 0.03:
    a right program fails at a bound of 0.12 with odds below 1 to 1000. Ranks that are mixed up are far beyond it.
    """
    wide = TreeShape.branching(3, 2, 2)
    traced(tmp_path, *followed(wide, world(1500, wide, 0)), [str(row % 40) for row in range(1500)])
    found = recorded(tmp_path, TargetWalkVerifier())
    shape = TreeShape.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)])
    ranks = world(20000, shape, 1)
    reached = np.ones((20000, shape.num_nodes + 1))
    for node in range(1, shape.num_nodes + 1):
        parent = shape.parents[node]
        reached[:, node] = reached[:, parent] * (ranks[:, parent] == shape.ranks[node])
    predicted = found.rates().tokens_per_round(shape)
    assert predicted == pytest.approx(reached.sum(1).mean(), abs=0.12)
    low, high = found.tokens_interval(shape, QUICK) or (0.0, 0.0)
    assert low < predicted < high < low + 0.3
    mixed = TreeShape.from_paths([(0,), (1,), (2,), (1, 0), (1, 1), (2, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)])
    assert abs(found.rates().tokens_per_round(mixed) - reached.sum(1).mean()) > 0.12


@pytest.mark.parametrize("rule", [RejectionVerifier(), TargetWalkVerifier()], ids=lambda rule: type(rule).__name__)
def test_what_was_accepted_is_what_the_rule_expects(rule: Verifier, tmp_path: Path) -> None:
    """Over all drafts there are of a small vocabulary: every depth and rank together is the expected number."""
    law = SWOR if isinstance(rule, RejectionVerifier) else TOP
    shape = TreeShape.branching(2, 2)
    drafts = enumerate_drafts(Tables.random(3, 2, seed=1), shape, law)
    rows = [str(row) for row in range(len(drafts.tree.tokens))]
    traced(tmp_path, drafts.tree, drafts.target_probs.nan_to_num(), rows)
    found = recorded(tmp_path, rule)
    (expected,), _ = score(find_drafts(tmp_path)[0], {"rule": rule})
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


def test_chains_and_trees_that_change_are_refused(tmp_path: Path) -> None:
    traced(tmp_path / "chain", *followed(TreeShape.chain(2), np.zeros((1, 3), dtype=int)), ["a"])
    with pytest.raises(ValueError, match=r"has chains only \(model, T=1\), from which no rank but the first is known"):
        recorded(tmp_path / "chain", TargetWalkVerifier())
    # Which node has the third place depends on how probable it looked.
    tokens = torch.tensor([[0, 0, 1, 0], [0, 0, 1, 0]])
    tree = DraftTree.build(tokens, torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 2]]), max_depth=2, max_children=2)
    traced(tmp_path / "tree", tree, torch.full((2, 4, 4), 0.25), ["a", "b"])
    with pytest.raises(ValueError, match=r"have another tree in every round"):
        recorded(tmp_path / "tree", TargetWalkVerifier())
