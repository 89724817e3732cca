"""Greedy multi-path block verification: published figures, beside rules on the merged paths, and mistakes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import verifiers.greedy_multipath
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome, outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Verifier
from specdec.tree import DraftTree, TreeShape
from tests.verifiers.cases import BIASED, DIGITS, EXACT, IID, SWOR, needs_tables
from verifiers import GreedyMultiPathVerifier, RejectionVerifier, TraversalVerifier


def merged(drafts: WeightedDrafts) -> WeightedDrafts:
    """The trie of drafted paths: siblings are then distinct, in the order of their first draw."""
    tree, depth = drafts.tree, drafts.tree.depth
    twin = (drafts.prefixes[:, :, None] == drafts.prefixes[:, None, :]) & (depth[:, :, None] == depth[:, None, :])
    first = twin.byte().argmax(-1)
    trie = DraftTree.build(
        tree.tokens,
        torch.cat([tree.parents[:, :1], first.gather(1, tree.parents[:, 1:])], 1),
        valid=first == torch.arange(tree.width),
        sampling=SWOR,
        draft_probs=tree.draft_probs,
        max_depth=tree.max_depth,
    )
    return replace(drafts, tree=trie)


@needs_tables
@pytest.mark.parametrize(
    ("paths", "length", "figure"), [(1, 4, 2.136358), (2, 2, 1.502657), (2, 3, 2.023354), (3, 3, 1.969057)]
)
def test_figures(tables: dict[str, Tables], paths: int, length: int, figure: float) -> None:
    shape = TreeShape.branching(paths, *[1] * (length - 1))
    result = enumerate_outcome(GreedyMultiPathVerifier(), tables["A"], shape, IID)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
    assert result.tv < EXACT


@needs_tables
@pytest.mark.parametrize(
    ("rule", "length", "figure"),
    [(TraversalVerifier(), 2, 1.447552), (RejectionVerifier(), 2, 1.367008), (TraversalVerifier(), 3, 1.933680)],
)
def test_figures_of_the_trie(tables: dict[str, Tables], rule: Verifier, length: int, figure: float) -> None:
    """The same two paths, merged: distinct siblings are as good as drawn without replacement."""
    trie = merged(enumerate_drafts(tables["A"], TreeShape.branching(2, *[1] * (length - 1)), IID))
    result = outcome(rule, tables["A"], trie)
    assert result.expected_accepted == pytest.approx(figure, abs=DIGITS)
    assert result.tv < EXACT


@pytest.mark.parametrize("rule", [TraversalVerifier(), RejectionVerifier()], ids=lambda rule: type(rule).__name__)
def test_a_trie_verified_as_independent_is_rejected(rule: Verifier) -> None:
    tables = Tables.random(4, 2, seed=21)
    trie = merged(enumerate_drafts(tables, TreeShape.branching(2, 1), IID))
    assert outcome(rule, tables, trie).tv < EXACT
    declared = replace(trie, tree=replace(trie.tree, law=torch.full_like(trie.tree.law, IID)))
    assert outcome(rule, tables, declared).tv > BIASED


def test_the_law_of_the_largest_by_hand() -> None:
    """p = (.5, .5) and q = (.25, .75): token 0 ranks first, and is selected unless both paths have token 1."""
    p, q = (
        torch.tensor([[[0.5, 0.5]] * 3], dtype=torch.float64),
        torch.tensor([[[0.25, 0.75]] * 3], dtype=torch.float64),
    )
    law = verifiers.greedy_multipath._law_of_the_largest(p, q, torch.tensor([[0, 1, 1]]), torch.tensor([[2]]), 2)
    nine = 9 / 16
    # Behind token 1, of both: again both. Behind (1, 1): once more.
    torch.testing.assert_close(law, torch.tensor([[[1 - nine, nine]] * 3], dtype=torch.float64))
    law = verifiers.greedy_multipath._law_of_the_largest(p, q, torch.tensor([[0, 0, 1]]), torch.tensor([[2]]), 2)
    # Behind token 0 the other path is smaller (mass .75) or has token 0, too: (.75 + .1875)^2 - .75^2 for token 1.
    one = ((0.75 + 0.1875) ** 2 - 0.75**2) / (1 - 0.75**2)
    torch.testing.assert_close(law[0, 1], torch.tensor([1 - one, one], dtype=torch.float64))


def test_nothing_is_lost_on_long_paths_in_float32() -> None:
    """Forty tokens of probability 1/50 each: the mass of the prefix is 10^-68, and q~ is a law all the same."""
    vocab, length = 50, 40
    p, q = (torch.rand(1, length + 1, vocab).softmax(-1) for _ in range(2))
    for token in (0, 25):
        tokens = torch.full((1, length + 1), token)
        law = verifiers.greedy_multipath._law_of_the_largest(p, q, tokens, torch.tensor([[3]]), 3)
        assert torch.isfinite(law).all() and (law >= 0).all()
        torch.testing.assert_close(law.sum(-1), torch.ones(1, length + 1, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def no_skew(p: Tensor, q: Tensor, tokens: Tensor, paths: Tensor, most_paths: int) -> Tensor:
    """Takes the selected path for one that was drawn."""
    return q


def skew_of_one_position(p: Tensor, q: Tensor, tokens: Tensor, paths: Tensor, most_paths: int) -> Tensor:
    """Takes the best of K at every position for itself, as if the others had not lost paths before."""
    both = [original(p[:, i, None], q[:, i, None], tokens[:, i, None], paths, most_paths) for i in range(p.shape[1])]
    return torch.cat(both, 1)


original = verifiers.greedy_multipath._law_of_the_largest


@needs_tables
@pytest.mark.parametrize(("length", "figure"), [(2, 0.128)])
def test_the_figure_of_the_best_path_without_its_law(
    tables: dict[str, Tables], length: int, figure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers.greedy_multipath, "_law_of_the_largest", no_skew)
    result = enumerate_outcome(GreedyMultiPathVerifier(), tables["A"], TreeShape.branching(2, *[1] * (length - 1)), IID)
    assert result.tv == pytest.approx(figure, abs=5.1e-4)


@pytest.mark.parametrize("mistake", [no_skew, skew_of_one_position], ids=lambda mistake: mistake.__name__)
def test_enumeration_rejects_another_law_of_the_path(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, shape = Tables.random(4, 2, seed=3), TreeShape.branching(2, 1)
    assert enumerate_outcome(GreedyMultiPathVerifier(), tables, shape, IID).tv < EXACT
    monkeypatch.setattr(verifiers.greedy_multipath, "_law_of_the_largest", mistake)
    result = enumerate_outcome(GreedyMultiPathVerifier(), tables, shape, IID)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
