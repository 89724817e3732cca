"""Rejection sampling: published figures, where the tables that they were computed from are at hand."""

import pytest
import torch

from specdec.exactness.outcomes import enumerate_outcome, expected_by_levels
from specdec.exactness.tables import Tables
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.verifiers.cases import (
    DIGITS,
    EXACT,
    IID,
    LAWS,
    SWOR,
    TOP,
    complete,
    needs_tables,
)
from verifiers import RejectionVerifier

ACCEPTED = {  # drawn, declared: expected accepted tokens on chain 4, 2x2, 2x1x1, 3x1x1, 2x2x2
    (TOP, TOP): (0.719437, 0.994120, 0.952749, 1.541411, 1.190922),
    (SWOR, TOP): (0.443959, 0.922251, 0.819233, 1.159061, 1.118451),
    (IID, IID): (1.818869, 1.441404, 1.682254, 1.757277, 1.946866),
    (SWOR, SWOR): (1.818869, 1.549511, 1.767262, 2.092776, 2.150742),
}
FACTORS = ((1, 1, 1, 1), (2, 2), (2, 1, 1), (3, 1, 1), (2, 2, 2))


@needs_tables
@pytest.mark.parametrize(
    ("drawn", "declared"),
    [complete(drawn, declared, strong=drawn is declared) for drawn, declared in ACCEPTED],  # others: the walk's figures
)
def test_figures_of_fixture_a(tables: dict[str, Tables], drawn: DraftSampling, declared: DraftSampling) -> None:
    rule = RejectionVerifier()
    for factors, figure in zip(FACTORS, ACCEPTED[drawn, declared], strict=True):
        levels = expected_by_levels(rule, tables["A"], factors, drawn, declared=declared)
        assert levels == pytest.approx(figure, abs=DIGITS)
        if factors in ((2, 2, 2), (3, 1, 1)) and drawn is not TOP:
            continue  # up to 10^7 drafts
        result = enumerate_outcome(rule, tables["A"], TreeShape.branching(*factors), drawn, declared=declared)
        assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
        assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(("length", "figure"), [(1, 0.756923), (2, 1.258243), (3, 1.593150)])
def test_figures_of_shorter_chains(tables: dict[str, Tables], length: int, figure: float) -> None:
    result = enumerate_outcome(RejectionVerifier(), tables["A"], TreeShape.chain(length), IID)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize(
    ("temperature", "figure"), [(1, 1.818869), (0.5, 1.426498), (0.2, 1.569305), (0.05, 1.987023), (0.01, 2.0)]
)
def test_figures_towards_temperature_zero(tables: dict[str, Tables], temperature: float, figure: float) -> None:
    result = enumerate_outcome(RejectionVerifier(), tables["A"].tempered(temperature), TreeShape.chain(4), IID)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
    assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(
    ("drawn", "declared", "figures"),
    [
        (TOP, TOP, (0.074955, 0.299749, 0.319652)),
        (SWOR, TOP, (0.135435, 0.271444, 0.408035)),
        (IID, IID, (0.698887, 0.796539, 0.843709)),
        (SWOR, SWOR, (0.698887, 0.811749, 0.858172)),
    ],
)
def test_figures_of_one_level(
    tables: dict[str, Tables], drawn: DraftSampling, declared: DraftSampling, figures: tuple[float, ...]
) -> None:
    for children, figure in enumerate(figures, start=1):
        result = enumerate_outcome(
            RejectionVerifier(), tables["L"], TreeShape.branching(children), drawn, declared=declared
        )
        assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
        assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(("children", "first", "last"), [(2, 0.774061, 0.748424), (3, 0.844130, 0.781198)])
def test_figures_of_mixed_siblings(tables: dict[str, Tables], children: int, first: float, last: float) -> None:
    """The top k-1 for certain and one draw from the rest: better with the drawn one first."""
    rule, level, shape = RejectionVerifier(), tables["L"], TreeShape.branching(children)
    result = enumerate_outcome(rule, level, shape, (*[TOP] * (children - 1), SWOR))
    assert result.expected_accepted == pytest.approx(last, abs=DIGITS)
    assert result.tv < EXACT
    # Sampled first: its q is what is left of q without the top k-1, which follow it as certain siblings.
    q = level.q[0][0]
    rest = q.scatter(0, q.topk(children - 1).indices, 0.0)
    rest = rest / rest.sum()
    drafted = rest.nonzero()[:, 0]
    tokens = torch.zeros(len(drafted), children + 1, dtype=torch.long)
    tokens[:, 1], tokens[:, 2:] = drafted, q.topk(children - 1).indices
    tree = DraftTree.from_shape(
        shape,
        tokens,
        sampling=torch.tensor([TOP, IID, *[TOP] * (children - 1)], dtype=torch.int8).expand(len(drafted), -1),
        draft_probs=rest.expand(len(drafted), children + 1, -1).contiguous(),
    )
    accepted = 1 - rule.laws(tree, level.p[0].expand(len(drafted), children + 1, -1).contiguous()).stop[:, 0]
    assert float((rest[drafted] * accepted).sum()) == pytest.approx(first, abs=DIGITS)


@needs_tables
@pytest.mark.parametrize("laws", LAWS)
def test_fixture_b_is_exact(tables: dict[str, Tables], laws: str) -> None:
    """Zeros, disjoint supports, p = q and one-hot rows."""
    assert enumerate_outcome(RejectionVerifier(), tables["B"], TreeShape.branching(2, 2), LAWS[laws]).tv < EXACT
