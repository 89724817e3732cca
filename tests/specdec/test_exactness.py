"""The exactness harness itself: it refuses what means nothing, and its estimates agree with its enumerations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.checks.drafts import check_drafts, enumerate_drafts, sample_drafts
from specdec.checks.outcomes import enumerate_outcome, estimate
from specdec.checks.tables import Tables
from specdec.interfaces import Laws
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule
from verifiers import RejectionVerifier

TOP, IID, SWOR = DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT
COIN = {(): [0.5, 0.5], (0,): [1.0, 0.0], (1,): [0.25, 0.75]}


@pytest.mark.parametrize(
    ("p", "words"),
    [
        ({**COIN, (1,): [0.25, 0.7]}, r"p after \(1,\) sums to 0.95"),
        ({**COIN, (0,): [1.25, -0.25]}, r"p after \(0,\) has a negative"),
        ({**COIN, (0,): [1.0, float("nan")]}, r"p after \(0,\) .* not finite"),
        ({**COIN, (0,): [1.0]}, r"p after \(0,\) has 1 entries"),
        ({(): COIN[()], (1,): COIN[1,]}, r"no row for the prefix \(0,\)"),
        ({**COIN, (2,): [0.5, 0.5]}, r"row for the prefix \(2,\)"),
        ({(0,): [0.5, 0.5]}, "no row for the empty prefix"),
    ],
)
def test_rows_that_are_no_distributions(p: dict[tuple[int, ...], list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tables.from_rows(p, COIN)


CHAIN, FORK = TreeShape.chain(1), TreeShape.branching(2)
TABLES = Tables.from_rows(COIN, COIN)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tables(TABLES.p, (TABLES.q[0], TABLES.q[1][:1])), "q has 1 rows for prefixes of length 1"),
        (lambda: enumerate_drafts(TABLES, TreeShape.chain(2), IID), "the tables end after 1 tokens"),
        (lambda: enumerate_drafts(Tables.from_rows(COIN, None), CHAIN, IID), "have no q"),
        (lambda: enumerate_drafts(TABLES, CHAIN, DraftSampling.COUPLED), "COUPLED"),
        (lambda: enumerate_drafts(TABLES, FORK, (IID,)), r"node 2 of .* has rank 1 and laws has 1"),
        (lambda: enumerate_drafts(Tables.random(40, 1, seed=0), TreeShape.branching(4), IID), "too many to enumerate"),
        (lambda: Tables.random(2, 1, seed=0, kinds=("dens",)), "choose from dense"),
    ],
)
def test_tables_that_do_not_do(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


class ChainRule(RejectionVerifier):
    samplings = frozenset({IID})
    chain_only = True


def broken(**changes: object) -> tuple[DraftTree, Tensor]:
    """Row 1 of a batch of two trees with two children."""
    p = torch.full((2, 3, 2), 0.5)
    parts = {
        "tokens": torch.zeros(2, 3, dtype=torch.long),
        "parents": torch.tensor([[-1, 0, 0], [-1, 0, 0]]),
        "sampling": IID,
        "draft_probs": p.clone(),
        **{name: value for name, value in changes.items() if name != "p"},
    }
    return DraftTree.build(**parts), changes.get("p", p)


def changed(table: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    table = table.clone()
    table[at] = value
    return table


HALF = torch.full((2, 3, 2), 0.5)
PARENTS = torch.tensor([[-1, 0, 0], [-1, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parents": changed(PARENTS, (1, 1), 2)}, "row 1, node 1: its parent is 2"),
        ({"parents": changed(PARENTS, (1, 2), -1)}, "row 1, node 2: its parent is -1"),
        ({"parents": changed(PARENTS, (1, 0), 0)}, "row 1, node 0: its parent is 0"),
        (
            {"valid": torch.tensor([[True] * 3, [True, False, True]]), "parents": changed(PARENTS, (1, 2), 1)},
            "row 1, node 2: it is valid and its parent is not",
        ),
        ({"tokens": changed(PARENTS * 0, (1, 2), 2)}, "row 1, node 2: its token is 2"),
        ({"p": changed(HALF, (1, 2, 0), 0.6)}, "row 1, node 2: p after it sums to 1.1"),
        ({"p": changed(HALF, (0, 1, 0), float("nan"))}, "row 0, node 1: p after it .* not finite"),
        ({"draft_probs": changed(HALF, (1, 0, 0), -0.5)}, "row 1, node 0: q after it has a negative"),
        ({"draft_probs": None}, "row 0, node 1: .* no draft_probs"),
        ({"sampling": DraftSampling.COUPLED}, "row 0, node 1: it is COUPLED"),
    ],
)
def test_malformed_drafts(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_drafts(RejectionVerifier(), *broken(**changes))


def test_well_formed_drafts_pass() -> None:
    check_drafts(RejectionVerifier(), *broken())
    # A leaf's q is not read.
    check_drafts(RejectionVerifier(), *broken(draft_probs=changed(HALF, (1, 2, 0), float("nan"))))


def test_a_rule_is_not_asked_for_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"row 0, node 2: .* ChainRule takes chains only"):
        check_drafts(ChainRule(), *broken())
    tables = Tables.random(3, 2, seed=0)
    with pytest.raises(ValueError, match="node 1: it is WITHOUT_REPLACEMENT, and ChainRule takes IID"):
        enumerate_outcome(ChainRule(), tables, TreeShape.chain(2), SWOR)


def test_the_joint_law_is_a_law_and_its_distance_is_counted_by_hand() -> None:
    """p = (.5, .5), q = (.25, .75): accepting all, the first token follows q."""

    def accept_all(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
        return torch.eye(2, dtype=target_probs.dtype)[-1].expand(len(target_probs), -1)

    p = {(): [0.5, 0.5], (0,): [0.5, 0.5], (1,): [0.5, 0.5]}
    q = {**p, (): [0.25, 0.75]}
    rule = ChangedRule(RejectionVerifier(), stop=accept_all)
    result = enumerate_outcome(rule, Tables.from_rows(p, q), TreeShape.chain(1), IID)
    assert result.joint.tolist() == [0.125, 0.125, 0.375, 0.375]
    assert result.tv == 0.25 and result.expected_accepted == 1


def test_the_sample_is_of_the_enumerated_law() -> None:
    tables, shape = Tables.random(3, 2, seed=2, kinds=("dense", "exhausted", "zeros")), TreeShape.branching(3, 1)
    laws = (SWOR, SWOR, IID)
    exact, sample = enumerate_drafts(tables, shape, laws), sample_drafts(tables, shape, laws, 4000, seed=1)
    assert sample.probability.sum().item() == pytest.approx(1)
    place = 3 ** torch.arange(shape.num_nodes + 1)
    chance = torch.zeros(3 ** len(place), dtype=torch.float64)
    counts = chance.clone()
    chance.index_add_(0, (exact.tree.tokens * place).sum(1), exact.probability)
    counts.index_add_(0, (sample.tree.tokens * place).sum(1), sample.probability)
    assert (counts[chance == 0] == 0).all()
    assert (chance - counts).abs().max() < 4 / 4000**0.5 / 2


def test_an_estimate_agrees_with_the_enumeration() -> None:
    """Within intervals of confidence 0.999; a bias is seen."""
    tables, shape = Tables.random(4, 2, seed=0), TreeShape.branching(2, 2)
    exact = enumerate_outcome(RejectionVerifier(), tables, shape, SWOR)
    guess = estimate(RejectionVerifier(), tables, shape, SWOR, samples=4000, seed=0, confidence=0.999)
    assert guess.bias.low < 0 < guess.bias.high < 0.04
    assert guess.expected_accepted.low < exact.expected_accepted < guess.expected_accepted.high

    biased = enumerate_outcome(RejectionVerifier(), tables, shape, TOP, declared=IID)
    guess = estimate(RejectionVerifier(), tables, shape, TOP, declared=IID, samples=4000, seed=0, confidence=0.999)
    assert guess.bias.low > 0 and guess.bias.mean == pytest.approx(biased.tv, abs=0.04)
