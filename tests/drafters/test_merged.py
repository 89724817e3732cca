"""One tree of a model's and a look-up's nodes: how it is put together, and that it is exact, by enumeration."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from drafters.merged import MergedDrafter, merged
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from specdec.checks.drafter import check_drafter
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import outcome
from specdec.checks.tables import Tables
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.components import perturbed
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import BIASED, EXACT, IID, MIXED, SWOR, TOP, takes_laws
from verifiers import (
    GreedyMultiPathVerifier,
    KSeqVerifier,
    RejectionVerifier,
)

SHAPE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0)])
# What the look-up drafts: 0 2, 0 1 and 2 0 2, so that it often meets what is drawn.
PARENTS, TOKENS = (-1, 0, 0, 1, 1, 2, 5), (0, 0, 2, 2, 1, 0, 2)


def looked_up(rows: int) -> DraftTree:
    return DraftTree.build(torch.tensor([TOKENS] * rows), torch.tensor([PARENTS] * rows))


def every_draft(
    tables: Tables, law: DraftSampling, merge: Callable[[DraftTree, DraftTree], DraftTree]
) -> WeightedDrafts:
    """All drafts of a model, each with the looked-up nodes."""
    drawn = enumerate_drafts(tables, SHAPE, law)
    tree = merge(drawn.tree, looked_up(len(drawn.probability)))
    prefixes = torch.zeros_like(tree.tokens)
    depth = tree.depth
    probs = torch.full((*tree.tokens.shape, tables.vocab), torch.nan, dtype=torch.float64)
    probs[:, 0] = tables.p[0]
    for node in range(1, tree.width):
        above = prefixes.gather(1, tree.parents[:, node, None])[:, 0]
        prefixes[:, node] = above * tables.vocab + tree.tokens[:, node]
        level = tables.p[int(depth[0, node])][prefixes[:, node]]
        probs[:, node] = torch.where(tree.valid[:, node, None], level, torch.nan)
    return WeightedDrafts(tree, prefixes, drawn.probability, probs)


@pytest.mark.parametrize(
    ("rule", "law"), [(rule, law) for rule in MIXED for law in (TOP, IID, SWOR) if takes_laws(MIXED[rule], TOP, law)]
)
def test_the_joint_output_law_is_the_targets(rule: str, law: DraftSampling) -> None:
    tables = Tables.random(3, 3, seed=3, kinds=("dense", "zeros"))
    found = outcome(MIXED[rule], tables, every_draft(tables, law, merged))
    assert found.tv < EXACT
    alone = outcome(MIXED[rule], tables, enumerate_drafts(tables, SHAPE, law))
    assert found.expected_accepted > alone.expected_accepted


def without_drawn_repeats(first: DraftTree, second: DraftTree) -> DraftTree:
    """Mutant: a drawn node whose token was looked up, too, is dropped in favour of the looked-up one."""
    tree = DraftTree.build(
        torch.cat([first.tokens, second.tokens[:, 1:]], 1),
        torch.cat([first.parents, second.parents[:, 1:] + (second.parents[:, 1:] > 0) * (first.width - 1)], 1),
        sampling=torch.cat([first.law, second.law[:, 1:]], 1),
        draft_probs=torch.nn.functional.pad(first.draft_probs, (0, 0, 0, second.width - 1)),
    )
    valid = torch.cat([first.valid, second.valid[:, 1:]], 1)
    for node in range(1, first.width):
        at_root = tree.parents[:, node, None] == 0
        twin = at_root & (second.parents == 0) & (second.tokens == tree.tokens[:, node, None])
        valid[:, node] &= ~twin.any(-1)
        valid &= valid.gather(1, tree.parents.clamp(min=0))
    return DraftTree.build(tree.tokens, tree.parents, valid=valid, sampling=tree.law, draft_probs=tree.draft_probs)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (rule, law)
        for rule in MIXED
        for law in (IID, SWOR)
        if takes_laws(MIXED[rule], TOP, law) and rule != "target walk"
    ],
)
def test_to_drop_a_drawn_token_is_biased(rule: str, law: DraftSampling) -> None:
    tables = Tables.random(3, 3, seed=3)
    assert outcome(MIXED[rule], tables, every_draft(tables, law, without_drawn_repeats)).tv > BIASED


def test_equal_beginnings_are_shared() -> None:
    """The example of the docstring."""
    law, tokens, parents = torch.tensor([[TOP, IID, IID]], dtype=torch.int8), [[4, 5, 7]], [[-1, 0, 1]]
    second = DraftTree.build(torch.tensor([[4, 5, 8, 6]]), torch.tensor([[-1, 0, 1, 0]]))
    drawn = DraftTree.build(
        torch.tensor(tokens), torch.tensor(parents), sampling=law, draft_probs=torch.full((1, 3, 9), 1 / 9)
    )
    tree = merged(drawn, second)
    assert tree.tokens.tolist() == [[4, 5, 7, 5, 8, 6]] and tree.parents.tolist() == [[-1, 0, 1, 0, 1, 0]]
    assert tree.valid.tolist() == [[True, True, True, False, True, True]] and tree.law.tolist() == [[0, 1, 1, 0, 0, 0]]
    assert tree.draft_probs is not None and tree.draft_probs[0].sum(-1).tolist() == pytest.approx([1, 1, 1, 0, 0, 0])
    chosen = merged(DraftTree.build(torch.tensor(tokens), torch.tensor(parents)), second)
    assert torch.equal(chosen.valid, tree.valid)
    assert chosen.only_law is TOP and chosen.draft_probs is None
    assert chosen.children[0, 1].tolist()[:2] == [2, 4]  # the model's child first


def test_invalid_nodes_share_nothing() -> None:
    first = DraftTree.build(
        torch.tensor([[4, 5], [4, 5]]), torch.tensor([[-1, 0]] * 2), valid=torch.tensor([[True, True], [True, False]])
    )
    second = DraftTree.build(torch.tensor([[4, 5, 8]] * 2), torch.tensor([[-1, 0, 1]] * 2))
    tree = merged(first, second)
    assert tree.valid.tolist() == [[True, True, False, True], [True, False, True, True]]
    assert tree.parents[:, 3].tolist() == [1, 2]


def lookup_and_model(model, distance: float = 0.6, sampling: str = "iid") -> MergedDrafter:
    lookup = NGramDrafter(max_draft_tokens=3, branches=2, max_ngram=2)
    return MergedDrafter(lookup, ModelDrafter(perturbed(model, distance), [2, 1], sampling=sampling))


@pytest.mark.full
def test_the_model_follows_where_the_look_up_was_accepted() -> None:
    """Drafts do not depend on how rounds went: the model never takes a token for known that it was not shown."""
    model = tiny_model(vocab_size=24, layers=2)
    findings = check_drafter(
        lambda: lookup_and_model(model, 0.3),
        Target(model),
        verifier=RejectionVerifier(),
        rules=(),
        rounds=12,
        draws=0,
    )
    assert not [finding for finding in findings if finding.failed]


def test_a_round_tells_the_host_the_path() -> None:
    """What the host is told of a path and its tokens is what the device has."""
    model = tiny_model(vocab_size=24, layers=2)
    drafter = lookup_and_model(model, 0.1)
    told = []

    class Listens(Wrapped):
        def observe(self, outcome):
            told.append(outcome)
            super().observe(outcome)

    drafter = Wrapping(drafter, Listens)
    with shapes_unchecked(), Engine(Target(model), drafter, RejectionVerifier(), max_length=64) as engine:
        engine.generate([[1, 2, 1, 2, 1, 2, 1]], SamplingParams(max_new_tokens=20))
    rounds = [each for each in told if each.path is not None]
    for each in rounds:
        assert np.array_equal(each.host.path, each.path.numpy())
        count = int(each.counts[0])
        assert each.host.emitted[0, :count].tolist() == [*each.tokens[0, 1:count].tolist(), int(each.next_tokens[0])]
    assert max(each.counts[0] for each in rounds) > 1


def test_a_rule_without_trees_or_laws_is_refused() -> None:
    model = tiny_model(vocab_size=24, layers=1)
    drafter = lookup_and_model(model, sampling="without_replacement")
    for rule in (KSeqVerifier(), GreedyMultiPathVerifier()):
        with pytest.raises(ValueError, match="use RejectionVerifier"):
            Engine(Target(model), drafter, rule, max_length=64)
