"""One round's acceptance: the path, and that what is drawn follows the verifier's two laws."""

import pytest
import torch
from scipy import stats

from specdec.acceptance import Plain, accept, path_to
from specdec.interfaces import Drafter, Laws, Verifier
from specdec.random import Purpose, draw, request_key, uniforms
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness

# 0 - 1 - 2 with a second child 3 of node 1.
PARENTS = [-1, 0, 1, 1]
VOCAB = 3


class Given(Verifier):
    """Any two laws, whatever the target says."""

    exactness = Exactness.LOSSY
    samplings = frozenset({DraftSampling.DETERMINISTIC})

    def __init__(self, stop_law: torch.Tensor, next_laws: torch.Tensor):
        self._stop_law, self._next_laws = stop_law, next_laws

    def laws(self, tree: DraftTree, target_probs: torch.Tensor) -> Laws:
        return Laws(self._stop_law.expand(len(target_probs), -1), lambda stop: self._next_laws[stop])


def batch(rows: int) -> DraftTree:
    parents = torch.tensor(PARENTS).expand(rows, -1)
    return DraftTree.build(torch.zeros_like(parents), parents, max_depth=2, max_children=2)


STOP_LAW = torch.tensor([0.4, 0.1, 0.2, 0.3])
NEXT_LAWS = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]])


def test_path_to_literally() -> None:
    stop = torch.tensor([0, 1, 2, 3])
    assert path_to(batch(4), stop).tolist() == [[-1, -1], [1, -1], [1, 2], [1, 3]]


def test_path_to_with_nodes_out_of_order_and_loose_bounds() -> None:
    """The root's second child stands before the first one's children."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]] * 2)
    tree = DraftTree.build(torch.zeros(2, 6, dtype=torch.long), parents, max_depth=5)
    assert path_to(tree, torch.tensor([5, 3])).tolist() == [[2, 4, 5, -1, -1], [1, 3, -1, -1, -1]]


def test_verdict_literally() -> None:
    rule = Given(STOP_LAW, NEXT_LAWS)
    u = torch.tensor([[0.0, 0.0], [0.45, 0.61], [0.55, 0.1999], [0.9999, 0.9999]], dtype=torch.float64)
    verdict = accept(rule, batch(4), torch.full((4, 4, VOCAB), 1 / VOCAB), u)
    assert verdict.path.tolist() == [[-1, -1], [1, -1], [1, 2], [1, 3]]
    assert verdict.num_accepted.tolist() == [0, 1, 2, 2]
    assert verdict.next_token.tolist() == [0, 2, 1, 2]
    torch.testing.assert_close(verdict.expected_accepted, torch.full((4,), 0.1 + 2 * 0.2 + 2 * 0.3))
    assert verdict.valid.all()


ROWS = 20_000
ALPHA = 1e-4


def joint_counts(u: torch.Tensor) -> torch.Tensor:
    """How often each pair of stop node and next token came: Int[node vocab]."""
    verdict = accept(Given(STOP_LAW, NEXT_LAWS), batch(len(u)), torch.full((len(u), 4, VOCAB), 1 / VOCAB), u)
    last = verdict.path.gather(1, (verdict.num_accepted - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0)
    return (last * VOCAB + verdict.next_token).bincount(minlength=4 * VOCAB).view(4, VOCAB)


def goodness(counts: torch.Tensor) -> float:
    """p-value of the joint counts under the product of the two laws."""
    expected = (STOP_LAW[:, None] * NEXT_LAWS).double()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return stats.chisquare(counts[some].numpy(), (expected[some] / expected.sum() * counts.sum()).numpy()).pvalue


def test_stop_and_next_token_follow_the_two_laws_jointly() -> None:
    """Fails by chance with probability 1e-4 for a new seed; with this one never."""
    keys = torch.tensor([request_key(11, 0)]).expand(ROWS)
    u = uniforms(keys, torch.arange(ROWS), Purpose.ACCEPT, 2)
    assert goodness(joint_counts(u)) > ALPHA


def test_one_uniform_for_both_draws_would_be_noticed() -> None:
    keys = torch.tensor([request_key(11, 0)]).expand(ROWS)
    u = uniforms(keys, torch.arange(ROWS), Purpose.ACCEPT, 1).expand(-1, 2)
    counts = joint_counts(u)
    # Each draw alone has the right law; only jointly they do not.
    assert (
        stats.chisquare(counts.sum(1).numpy(), (STOP_LAW.double() / STOP_LAW.double().sum() * ROWS).numpy()).pvalue
        > ALPHA
    )
    expected = (STOP_LAW[:, None] * NEXT_LAWS).double()
    distance = 0.5 * (counts / ROWS - expected).abs().sum()
    assert distance > 0.2, "the same uniform twice went unnoticed"


def test_no_node_or_token_of_probability_zero_is_taken() -> None:
    """Neither at the smallest nor at the largest uniform."""
    rule = Given(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([[0.0, 1.0, 0.0]] * 4))
    largest = 1 - 2.0**-52
    u = torch.tensor([[0.0, 0.0], [largest, largest]], dtype=torch.float64)
    verdict = accept(rule, batch(2), torch.full((2, 4, VOCAB), 1 / VOCAB), u)
    assert verdict.path.tolist() == [[1, -1], [1, -1]]
    assert verdict.next_token.tolist() == [1, 1]


def test_laws_that_are_not_finite_are_reported_per_row() -> None:
    stop_law = torch.tensor([[0.4, 0.1, 0.2, 0.3], [torch.nan] * 4, [1.0, 0.0, 0.0, 0.0]])
    rule = Given(stop_law, torch.tensor([[torch.nan, 0.5, 0.5], *NEXT_LAWS[1:].tolist()]))
    u = torch.tensor([[0.9, 0.5]] * 3, dtype=torch.float64)
    verdict = accept(rule, batch(3), torch.full((3, 4, VOCAB), 1 / VOCAB), u)
    assert verdict.valid.tolist() == [True, False, False]


def test_plain_decoding_draws_from_p_at_the_root() -> None:
    p = torch.rand(3, 1, 8).softmax(-1)
    u = torch.rand(3, 2, dtype=torch.float64)
    verdict = accept(Plain(), DraftTree.root_only(torch.tensor([1, 2, 3])), p, u)
    assert verdict.path.shape == (3, 0)
    assert verdict.num_accepted.tolist() == [0, 0, 0] and verdict.expected_accepted.tolist() == [0, 0, 0]
    assert torch.equal(verdict.next_token, draw(p[:, 0], u[:, 1]))


# check


class Fake(Drafter):
    max_nodes, max_depth = 3, 2

    def __init__(self, *laws: DraftSampling, chain: bool):
        self.laws = frozenset(laws)
        self.is_chain = chain

    def bind(self, target, sizes):
        raise NotImplementedError

    def propose(self, slots) -> DraftTree:
        raise NotImplementedError


def test_check_lets_fitting_pairs_pass_and_refuses_others() -> None:
    rule = Given(STOP_LAW, NEXT_LAWS)
    rule.check(Fake(DraftSampling.DETERMINISTIC, chain=False))
    with pytest.raises(ValueError, match=r"Given is not made for drafts that are IID, as Fake draws them: use BlockV"):
        rule.check(Fake(DraftSampling.IID, DraftSampling.DETERMINISTIC, chain=True))
    rule.chain_only = True
    rule.check(Fake(DraftSampling.DETERMINISTIC, chain=True))
    with pytest.raises(ValueError, match=r"Given takes chains only, and Fake drafts trees: use RejectionVerifier"):
        rule.check(Fake(DraftSampling.DETERMINISTIC, chain=False))


def test_static_and_computed_trees_accept_alike() -> None:
    shape = TreeShape.from_paths([(0,), (0, 0), (0, 1)])
    tree = DraftTree.from_shape(shape, torch.zeros(4, 4, dtype=torch.long))
    stop = torch.tensor([0, 1, 2, 3])
    assert torch.equal(path_to(tree, stop), path_to(batch(4), stop))
