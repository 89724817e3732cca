"""Compressed tables: what they hold, what a rule says of them; and how far a lossy rule is from the target."""

import pytest
import torch
from torch import Tensor

from experiments.tracing.compressed import pack, unpack
from experiments.tracing.distance import first_token_distances
from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts, sample_drafts
from specdec.checks.outcomes import emitted_law
from specdec.checks.tables import Tables
from verifiers import (
    BlockVerifier,
    FuzzyVerifier,
    KSeqVerifier,
    LenientVerifier,
    RejectionVerifier,
    TargetWalkVerifier,
    TraversalVerifier,
)

IID, SWOR, TOP = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
CASES = [
    (RejectionVerifier(), TreeShape.branching(2, 1), IID),
    (RejectionVerifier(), TreeShape.branching(2, 1), SWOR),
    (KSeqVerifier(), TreeShape.branching(2, 1), IID),
    (BlockVerifier(), TreeShape.chain(2), IID),
    (TargetWalkVerifier(), TreeShape.branching(2, 1), TOP),
]


def drafted(shape: TreeShape, law: DraftSampling, *, vocab: int = 5) -> WeightedDrafts:
    kinds = ("dense", "zeros", "exhausted")
    return enumerate_drafts(Tables.random(vocab, shape.max_depth, seed=0, kinds=kinds), shape, law)


def test_a_table_by_hand() -> None:
    # Left of p below its two most probable tokens: .15; of q below its most probable: .2. Token 4 was drafted.
    tree = DraftTree.from_shape(
        TreeShape.chain(1),
        torch.tensor([[0, 4]]),
        sampling=IID,
        draft_probs=torch.tensor([[[0.05, 0.8, 0.0, 0.05, 0.1], [0.0] * 5]]),
    )
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


def test_nodes_that_are_not_drafted_do_not_make_a_tree_deeper() -> None:
    """A drafter on the host pads its trees; results have as many places as drafts are deep."""
    valid = torch.tensor([[True, True, False]])
    tree = DraftTree.from_shape(TreeShape.chain(2), torch.tensor([[0, 1, 2]]), sampling=TOP, valid=valid)
    small, _ = unpack(pack(tree, torch.full((1, 3, 4), 0.25)))
    assert small.max_depth == 1 and small.depth.max() == 1


def moved(drafts: WeightedDrafts, dropped: float, like_q: bool = True) -> tuple[Tensor, Tensor]:
    """p': like q (or evenly) on the tokens that are dropped; and how far it is from p, by node."""
    packed = pack(drafts.tree, drafts.target_probs, dropped=dropped)
    p, q = drafts.target_probs.clone(), drafts.tree.draft_probs
    batch, nodes, vocab = p.shape
    start = 0
    for row in range(batch):
        for node in range(nodes):
            ids = torch.from_numpy(packed.ids[start : start + packed.counts[row, node]])
            start += len(ids)
            rest = torch.ones(vocab, dtype=torch.bool)
            rest[ids] = False
            has_q = q is not None and packed.rest_q[row, node] > 0
            weight = q[row, node] * rest if has_q and like_q and q is not None else rest.double()
            if rest.any() and weight.sum() > 0:
                p[row, node] = torch.where(rest, p[row, node][rest].sum() * weight / weight.sum(), p[row, node])
    far = 0.5 * (p - drafts.target_probs).abs().sum(-1)
    return p, far[drafts.tree.valid]


@pytest.mark.parametrize(("rule", "shape", "law"), CASES, ids=lambda value: type(value).__name__)
def test_a_rule_says_what_it_says_of_a_near_target(rule: Verifier, shape: TreeShape, law: DraftSampling) -> None:
    drafts = drafted(shape, law)
    for dropped in (0, 0.4):
        near, far = moved(drafts, dropped)
        assert far.max() <= dropped + 1e-6, "nothing dropped is nothing changed"
        tree, p = unpack(pack(drafts.tree, drafts.target_probs, dropped=dropped))
        torch.testing.assert_close(
            rule.laws(tree, p).stop, rule.laws(drafts.tree, near).stop, rtol=0, atol=2e-5 if dropped else 1e-5
        )
    if law is SWOR:  # the mutant: another near target would not do
        drafts = drafted(TreeShape.branching(2), SWOR, vocab=12)
        wrong, _ = moved(drafts, 0.4, like_q=False)
        tree, p = unpack(pack(drafts.tree, drafts.target_probs, dropped=0.4))
        assert (rule.laws(tree, p).stop - rule.laws(drafts.tree, wrong).stop).abs().max() > 1e-2


TABLES = Tables.random(5, 2, seed=3)


@pytest.mark.parametrize("rule", [BlockVerifier(), TargetWalkVerifier()])
def test_an_exact_rule_has_none_though_given_one_draft_it_seems_to(rule: Verifier) -> None:
    drafts = sample_drafts(TABLES, TreeShape.chain(2), IID, 4, seed=0)
    for found in first_token_distances(rule, drafts.tree, drafts.target_probs):
        assert found.tv == pytest.approx(0, abs=1e-9)
        assert found.kl == pytest.approx(0, abs=1e-9)
    # The law given one draft is another thing, unless the rule ignores what was drafted.
    given = (emitted_law(rule, drafts.tree, drafts.target_probs) - drafts.target_probs[:, 0]).abs().sum(-1)
    assert (given.max() > 0.1) == (not isinstance(rule, TargetWalkVerifier))


@pytest.mark.parametrize(("rule", "law"), [(RejectionVerifier(), SWOR), (TraversalVerifier(), IID)])
def test_an_exact_rule_has_none_on_average_where_siblings_are_drawn_again(rule: Verifier, law: DraftSampling) -> None:
    drafts = sample_drafts(TABLES, TreeShape.branching(2, 1), law, 40, seed=0)
    found = torch.tensor([each.tv for each in first_token_distances(rule, drafts.tree, drafts.target_probs)])
    # A half's mean of 128 laws, summed over few tokens, is off by less than 0.1; forty contexts share one seed's draws.
    assert abs(found.mean()) < 0.03
    assert all(each.kl is None for each in first_token_distances(rule, drafts.tree, drafts.target_probs))


def test_lenience_in_closed_form() -> None:
    p, q = TABLES.p[0][0], TABLES.q[0][0]  # type: ignore[index]
    accepted = torch.minimum(q, p / 0.5)
    residual = (p - q).clamp(min=0)
    emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()
    drafts = sample_drafts(TABLES, TreeShape.chain(2), IID, 1, seed=0)
    (found,) = first_token_distances(LenientVerifier(lenience=0.5), drafts.tree, drafts.target_probs)
    assert found.tv == pytest.approx(float(0.5 * (emitted - p).abs().sum()), abs=1e-9)
    assert found.tv > 0.05
    assert found.kl == pytest.approx(float((emitted * (emitted / p).log()).sum()), abs=1e-9)


def test_several_sampled_siblings_show_a_lossy_rule() -> None:
    drafts = sample_drafts(TABLES, TreeShape.branching(2, 1), SWOR, 8, seed=0)
    exact = enumerate_drafts(TABLES, TreeShape.branching(2), SWOR)
    rule = FuzzyVerifier(threshold=10.0)  # always trusts q
    emitted = (exact.probability[:, None] * emitted_law(rule, exact.tree, exact.target_probs)).sum(0)
    true = float(0.5 * (emitted - TABLES.p[0][0]).abs().sum())
    found = [each.tv for each in first_token_distances(rule, drafts.tree, drafts.target_probs)]
    assert sum(found) / len(found) == pytest.approx(true, abs=0.05)  # type: ignore[arg-type]
    assert true > 0.2
