"""The same mistakes in every exact rule: enumeration must reject each of them.

What is particular to a rule (its own residual, its own weights, its own plan) is in that rule's file.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.interfaces import Laws
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling
from tests.changed_rule import ChangedRule, emit_p
from tests.verifiers.cases import BIASED, EXACT, IID, SWOR, TOP
from tests.verifiers.test_exact_rules import RULES, SLOW
from verifiers import RejectionVerifier, TargetWalkVerifier


def what_is_left_above(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """Emits from what is left where the path came from."""
    return laws.after(tree.parents.gather(1, stop[:, None])[:, 0].clamp(min=0))


def one_coin_for_all_children(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """One uniform number decides on every node that is tried, in post-order: of one level, or of a chain."""
    # The order of trial: a chain from its end, siblings from the first, the root last.
    order = list(range(1, tree.width)) if tree.max_depth == 1 else list(range(tree.width - 1, 0, -1))
    tried, highest = torch.zeros_like(laws.stop[:, 0]), torch.zeros_like(laws.stop[:, 0])
    result = torch.zeros_like(laws.stop)
    for node in order:
        chance = (laws.stop[:, node] / (1 - tried)).where(tried < 1 - 1e-12, 0.0)
        result[:, node] = (chance - highest).clamp(min=0)
        tried, highest = tried + laws.stop[:, node], torch.maximum(highest, chance)
    result[:, 0] = 1 - highest
    return result


def coin_of_the_stop_draws_the_token(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """The number that ended the path, which is then known to lie in an interval, draws the next token as well."""
    law = laws.after(stop)
    ends = laws.stop.flip(-1).cumsum(-1).flip(-1)  # deeper nodes first
    last = ends.gather(1, stop[:, None])
    first = torch.nn.functional.pad(ends, (0, 1)).gather(1, stop[:, None] + 1)
    above = law.cumsum(-1)
    shared = torch.minimum(above, last) - torch.maximum(above - law, first)
    return torch.where(last > first, shared.clamp(min=0) / (last - first), law)


def caught(rule: str, shape: TreeShape, laws: DraftSampling, **mistake: Callable[..., Tensor]) -> None:
    tables = Tables.random(4, 2, seed=1)
    assert enumerate_outcome(RULES[rule], tables, shape, laws).tv < EXACT
    result = enumerate_outcome(ChangedRule(RULES[rule], **mistake), tables, shape, laws)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


def shape_of(rule: str) -> TreeShape:
    return TreeShape.chain(2) if RULES[rule].chain_only else TreeShape.branching(2, 1)


@pytest.mark.parametrize("laws", [TOP, IID], ids=lambda law: law.name)
@pytest.mark.parametrize("rule", RULES)
def test_no_residual(rule: str, laws: DraftSampling) -> None:
    caught(rule, shape_of(rule), laws, after=emit_p)


@pytest.mark.parametrize("rule", RULES)
def test_the_residual_of_the_node_above(rule: str) -> None:
    caught(rule, shape_of(rule), IID, after=what_is_left_above)


@pytest.mark.parametrize(
    ("rule", "law", "factors", "seed"),
    [("k-seq", IID, (2, 2), 21), ("two drafts", IID, (2, 1), 5), ("transport", SWOR, (2, 2), 5)],
)
def test_the_residual_of_rejection_sampling(rule: str, law: DraftSampling, factors: tuple[int, ...], seed: int) -> None:
    mutant = ChangedRule(RULES[rule], after=lambda tree, p, laws, stop: RejectionVerifier().laws(tree, p).after(stop))
    assert enumerate_outcome(mutant, Tables.random(4, 2, seed=seed), TreeShape.branching(*factors), law).tv > BIASED


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in SLOW])
def test_one_coin_for_all_children(rule: str) -> None:
    """Not of the programs, whose plans are vertices: they leave next to nothing between siblings to a coin."""
    one_path = RULES[rule].chain_only or RULES[rule].paths_only
    caught(rule, TreeShape.chain(2) if one_path else TreeShape.branching(2), IID, stop=one_coin_for_all_children)


@pytest.mark.parametrize("rule", RULES)
def test_the_coin_of_the_stop_draws_the_token(rule: str) -> None:
    caught(rule, shape_of(rule), IID, after=coin_of_the_stop_draws_the_token)


@pytest.mark.parametrize("rule", RULES)
def test_q_of_another_temperature(rule: str) -> None:
    """All but the walk, which does not look at q, and is exact."""
    tables = Tables.random(4, 2, seed=1)
    drawn = Tables(tables.p, tables.tempered(0.7).q)
    tv = enumerate_outcome(RULES[rule], drawn, shape_of(rule), IID, declared_q=tables.q).tv
    assert tv < EXACT if rule == "target walk" else tv > BIASED


@pytest.mark.parametrize("drawn", [TOP, SWOR], ids=lambda law: law.name)
@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_not_independent(rule: str, drawn: DraftSampling) -> None:
    """The same; and a chain's tokens have no siblings that they could depend on."""
    shape = shape_of(rule)
    tv = enumerate_outcome(RULES[rule], Tables.random(4, 2, seed=1), shape, drawn, declared=IID).tv
    legal = rule == "target walk" or (shape.is_chain and drawn is SWOR)
    assert tv < EXACT if legal else tv > BIASED


def second_use_of_the_coin(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """A coin against the children's cumulative mass; if it is beyond them, it draws the token from the residual."""
    law = laws.after(stop)
    children = (tree.parents == stop[:, None]) & tree.valid
    taken = (emit_p(tree, target_probs, laws, stop).gather(1, tree.tokens) * children).sum(-1, keepdim=True)
    above = law.cumsum(-1)
    shared = (above - torch.maximum(above - law, taken)).clamp(min=0)
    return torch.where(taken < 1, shared / (1 - taken), law)


@pytest.mark.parametrize("factors", [(1, 1), (2, 1)], ids=str)
def test_the_coin_of_a_walk_is_not_used_twice(factors: tuple[int, ...]) -> None:
    tables, shape = Tables.random(4, 2, seed=1), TreeShape.branching(*factors)
    assert enumerate_outcome(TargetWalkVerifier(), tables, shape, TOP).tv < EXACT
    result = enumerate_outcome(ChangedRule(TargetWalkVerifier(), after=second_use_of_the_coin), tables, shape, TOP)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"
