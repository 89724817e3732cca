"""Mistakes in rejection sampling that enumeration must catch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, outcome
from specdec.exactness.tables import Tables
from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import (
    BIASED,
    EXACT,
    IID,
    SHAPES,
    SWOR,
    TOP,
    needs_tables,
)
from verifiers import RejectionVerifier


def residual_of_the_parent(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Takes the residual with the q of the node above."""
    above = tree.parents.clamp(min=0)[..., None].expand_as(target_probs)
    other = replace(tree, draft_probs=tree.draft_probs.gather(1, above))
    return RejectionVerifier().laws(other, target_probs).after(stop)


def acceptance_of_the_root(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Forgets the parent: accepts with p and q of the root."""
    return RejectionVerifier().laws(tree, target_probs[:, :1].expand_as(target_probs).contiguous()).stop


RESAMPLES = ChangedRule(RejectionVerifier(), after=emit_p)
ABOVE = ChangedRule(RejectionVerifier(), after=residual_of_the_parent)
MISTAKES = {
    "p instead of the residual": (RESAMPLES, "chain", IID, IID, False),
    "p instead of the residual, tree": (RESAMPLES, "2x2", SWOR, SWOR, False),
    "p again after a mismatch": (RESAMPLES, "2x2", TOP, TOP, False),
    "residual of the parent": (ABOVE, "chain", IID, IID, False),
    "residual of the parent, tree": (ABOVE, "2x2", SWOR, SWOR, False),
    "acceptance by the root": (ChangedRule(RejectionVerifier(), stop=acceptance_of_the_root), "chain", IID, IID, False),
    "q of another temperature": (RejectionVerifier(), "chain", IID, IID, True),
    "q of another temperature, tree": (RejectionVerifier(), "2x2", SWOR, SWOR, True),
    "SpecInfer's rule on drafts without replacement": (RejectionVerifier(), "2x2", SWOR, IID, False),
    "the rule without replacement on independent drafts": (RejectionVerifier(), "2x2", IID, SWOR, False),
    "top-k verified with the softmax": (RejectionVerifier(), "2x2", TOP, IID, False),
    "top-k verified as if drawn without replacement": (RejectionVerifier(), "2x2", TOP, SWOR, False),
    "top-1 verified with the softmax": (RejectionVerifier(), "chain", TOP, IID, False),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_enumeration_rejects(mistake: str) -> None:
    rule, shape, laws, declared, other_temperature = MISTAKES[mistake]
    tables = Tables.random(4, SHAPES[shape].max_depth, seed=21)
    drawn = Tables(tables.p, tables.tempered(0.7).q) if other_temperature else tables
    result = enumerate_outcome(rule, drawn, SHAPES[shape], laws, declared=declared, declared_q=tables.q)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
    # The same drafts, drawn as declared and verified by the rule: exact.
    assert enumerate_outcome(RejectionVerifier(), drawn, SHAPES[shape], laws).tv < EXACT


def test_enumeration_rejects_siblings_sorted_after_they_were_drawn() -> None:
    tables = Tables.random(4, 1, seed=21)
    drafts = enumerate_drafts(tables, TreeShape.branching(2), SWOR)
    q = tables.q[0][0]
    children = drafts.tree.tokens[:, 1:]
    children = children.gather(1, q[children].argsort(dim=1, descending=True))
    tokens = torch.cat([drafts.tree.tokens[:, :1], children], 1)
    p = torch.stack([tables.p[0].expand(len(tokens), -1), *(tables.p[1][children[:, i]] for i in range(2))], 1)
    order = replace(
        drafts,
        tree=replace(drafts.tree, tokens=tokens),
        prefixes=torch.cat([torch.zeros_like(tokens[:, :1]), children], 1),
        target_probs=p,
    )
    assert outcome(RejectionVerifier(), tables, drafts).tv < EXACT
    assert outcome(RejectionVerifier(), tables, order).tv > BIASED


@needs_tables
@pytest.mark.parametrize(
    ("rule", "shape", "drawn", "declared", "temperature", "figure"),
    [
        (RejectionVerifier(), "2x2", SWOR, IID, 1.0, 0.028),
        (RejectionVerifier(), "2x2", IID, SWOR, 1.0, 0.035),
        (RejectionVerifier(), "2x2", TOP, IID, 1.0, 0.453),
        (RejectionVerifier(), "chain", IID, IID, 0.7, 0.088),
        (RESAMPLES, "chain", IID, TOP, 1.0, 0.092),
        (RESAMPLES, "chain", IID, IID, 1.0, 0.154),
    ],
)
def test_figures_of_mistakes(
    tables: dict[str, Tables],
    rule: Verifier,
    shape: str,
    drawn: DraftSampling,
    declared: DraftSampling,
    temperature: float,
    figure: float,
) -> None:
    table = tables["A"]
    drafted = Tables(table.p, table.tempered(temperature).q)
    # Declared rank by rank, so that siblings are tried one by one. Where all nodes have one law, the rule uses that
    # siblings drawn without replacement are distinct, and is wrong by another figure if they are not.
    result = enumerate_outcome(rule, drafted, SHAPES[shape], drawn, declared=[declared] * 2, declared_q=table.q)
    assert result.tv == pytest.approx(figure, abs=5.1e-4)
