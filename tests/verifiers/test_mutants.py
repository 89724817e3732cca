"""Mistakes, in every exact rule and in those with parts of their own: enumeration must reject each of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import verifiers.greedy_multipath
import verifiers.kseq
import verifiers.thresholds
import verifiers.transport
import verifiers.two_draft
import verifiers.walk
from specdec import DraftTree, Laws, TreeShape, Verifier
from specdec.checks.drafts import Samplings, WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import Outcome, enumerate_outcome, outcome
from specdec.checks.tables import Tables
from tests.changed_rule import IGNORES_THE_PATH, ChangedRule, WalkedRule, emit_p
from tests.verifiers.cases import BIASED, EXACT, IID, MIXED, RULES, SLOW, SWOR, TOP
from verifiers.transport import try_by_program
from verifiers.two_draft import try_in_pairs
from verifiers.walk import Family, Tried, TryChildren, leaf_to_root, top_down, try_in_turn


def rejected(result: Outcome) -> None:
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9), "not even a law: the mistake is another one"


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


@pytest.mark.parametrize("rule", RULES)
def test_mistakes_of_every_rule(rule: str) -> None:
    """One coin for all is no mistake of the programs: their plans are vertices, which leave a coin next to nothing."""
    exact, tables = RULES[rule], Tables.random(4, 2, seed=1)
    shape = TreeShape.chain(2) if exact.chain_only else TreeShape.branching(2, 1)
    level = shape if exact.chain_only or exact.paths_only else TreeShape.branching(2)
    # What is left where the path came from.
    left_above = lambda tree, p, laws, stop: laws.after(tree.parents.gather(1, stop[:, None])[:, 0].clamp(min=0))  # noqa: E731
    mistakes: list[tuple[TreeShape, Samplings, dict[str, Callable[..., Tensor]]]] = [
        (shape, TOP, {"after": emit_p}),
        (shape, IID, {"after": emit_p}),
        (shape, IID, {"after": left_above}),
        (shape, IID, {"after": coin_of_the_stop_draws_the_token}),
    ]
    if rule not in SLOW:
        coin_shape = TreeShape.chain(2) if level is shape else level
        mistakes.append((coin_shape, IID, {"stop": one_coin_for_all_children}))
    for tree, laws, mistake in mistakes:
        assert enumerate_outcome(exact, tables, tree, laws).tv < EXACT
        rejected(enumerate_outcome(ChangedRule(exact, **mistake), tables, tree, laws))


@pytest.mark.parametrize("rule", RULES)
def test_false_statements_about_the_draft(rule: str) -> None:
    """The walk does not look at q, and is exact; a chain's tokens have no siblings that they could depend on."""
    walks, tables = rule == "target walk", Tables.random(4, 2, seed=1)
    shape = TreeShape.chain(2) if RULES[rule].chain_only else TreeShape.branching(2, 1)
    drawn = Tables(tables.p, tables.tempered(0.7).q)
    tv = enumerate_outcome(RULES[rule], drawn, shape, IID, declared_q=tables.q).tv
    assert tv < EXACT if walks else tv > BIASED, "q of another temperature"
    for law, declared in ((TOP, IID), (SWOR, IID), (IID, SWOR)):
        if declared in RULES[rule].samplings:
            tv = enumerate_outcome(RULES[rule], tables, shape, law, declared=declared).tv
            assert tv < EXACT if walks or (shape.is_chain and law is not TOP) else tv > BIASED, (law, declared)
    if rule in (*MIXED, "weighted transport, program"):  # a looked-up token that is taken for drawn
        law = SWOR if SWOR in RULES[rule].samplings else IID
        tables, shape = Tables.random(4, 1, seed=21), TreeShape.branching(2)
        assert enumerate_outcome(RULES[rule], tables, shape, (TOP, law)).tv < EXACT
        tv = enumerate_outcome(RULES[rule], tables, shape, (TOP, law), declared=law).tv
        assert tv < EXACT if walks else tv > BIASED


def residual_of_rejection(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    return RULES["rejection"].laws(tree, target_probs).after(stop)


def stops_at_the_first_failure(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Tries positions from the first on, and ends at the first that is not acceptable."""
    # The chances back from the law, which is that of the last success.
    chance = laws.stop / laws.stop.cumsum(1).clamp(min=1e-300)
    go = torch.cat([torch.ones_like(chance[:, :1]), chance[:, 1:]], 1).cumprod(1)
    return go - torch.nn.functional.pad(go[:, 1:], (0, 1))


def last_uncapped(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
    """Accepts the last position by the product of all ratios, as hierarchical speculative decoding was released."""
    entry = tree.parents.clamp(min=0) * target_probs.shape[2] + tree.tokens
    ratio = target_probs.flatten(1).gather(1, entry) / tree.draft_probs.flatten(1).gather(1, entry)
    last = ratio[:, 1:].prod(1, keepdim=True).clamp(max=1)
    others = laws.stop[:, :-1]
    return torch.cat([others / others.sum(1, keepdim=True).clamp(min=1e-300) * (1 - last), last], 1)


UNCAPPED = ChangedRule(RULES["block"], stop=last_uncapped)


def residual_of_the_parent(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    above = tree.parents.clamp(min=0)[..., None].expand_as(target_probs)
    other = replace(tree, draft_probs=tree.draft_probs.gather(1, above))
    return RULES["rejection"].laws(other, target_probs).after(stop)


def second_use_of_the_coin(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    """A coin against the children's cumulative mass; if it is beyond them, it draws the token from the residual."""
    law = laws.after(stop)
    children = (tree.parents == stop[:, None]) & tree.valid
    taken = (emit_p(tree, target_probs, laws, stop).gather(1, tree.tokens) * children).sum(-1, keepdim=True)
    above = law.cumsum(-1)
    shared = (above - torch.maximum(above - law, taken)).clamp(min=0)
    return torch.where(taken < 1, shared / (1 - taken), law)


def keeps_the_weight(family: Family, weight: Tensor) -> Tried:
    """Does not update w when a child has failed."""
    below, _, law = try_in_turn(family, weight)
    return below, weight, law


def forgets_the_weight(solve: TryChildren) -> TryChildren:
    """Begins at every node with weight 1, as if the path to it were certain."""
    return lambda family, weight: solve(family, torch.ones_like(weight))


def not_given_failure(family: Family, weight: Tensor) -> Tried:
    """Takes a child's share for its weight, as if its earlier siblings had not failed before it is tried."""
    below, own, law = try_in_pairs(family, weight)
    failed = torch.nn.functional.pad((1 - below).cumprod(-1)[..., :-1], (1, 0), value=1.0)
    return below * failed, own, law


ONE_BY_ONE = [SWOR] * 4
"""Laws rank by rank, so that siblings are tried one by one, which is what some of the mistakes change."""


@pytest.mark.parametrize(
    ("mutant", "factors", "laws", "seed"),
    [
        (ChangedRule(RULES["rejection"], after=residual_of_the_parent), (1, 1, 1, 1), IID, 21),
        (ChangedRule(RULES["rejection"], after=residual_of_the_parent), (2, 2), SWOR, 21),
        (IGNORES_THE_PATH, (1, 1, 1, 1), IID, 21),
        (ChangedRule(RULES["block"], stop=stops_at_the_first_failure), (1, 1, 1, 1), IID, 3),
        (ChangedRule(RULES["block"], after=residual_of_rejection), (1, 1, 1, 1), IID, 3),
        (UNCAPPED, (1, 1, 1, 1), IID, 3),
        (ChangedRule(RULES["k-seq"], after=residual_of_rejection), (2, 2), IID, 21),
        (ChangedRule(RULES["two drafts"], after=residual_of_rejection), (2, 1), IID, 5),
        (ChangedRule(RULES["transport"], after=residual_of_rejection), (2, 2), SWOR, 5),
        (ChangedRule(RULES["target walk"], after=second_use_of_the_coin), (1, 1), TOP, 1),
        (ChangedRule(RULES["target walk"], after=second_use_of_the_coin), (2, 1), TOP, 1),
        (WalkedRule(leaf_to_root, keeps_the_weight), (2, 2), ONE_BY_ONE, 3),
        (WalkedRule(leaf_to_root, forgets_the_weight(try_in_turn)), (2, 2), ONE_BY_ONE, 3),
        (WalkedRule(leaf_to_root, forgets_the_weight(try_in_pairs)), (2, 1), IID, 3),
        (WalkedRule(leaf_to_root, forgets_the_weight(try_by_program)), (2, 1), IID, 3),
        (WalkedRule(leaf_to_root, not_given_failure), (2, 1), IID, 3),
    ],
)
def test_mistakes_of_one_rule(mutant: Verifier, factors: tuple[int, ...], laws: Samplings, seed: int) -> None:
    rejected(enumerate_outcome(mutant, Tables.random(4, len(factors), seed=seed), TreeShape.branching(*factors), laws))


largest, run = verifiers.greedy_multipath._law_of_the_largest, verifiers.kseq._run
share_out, given = verifiers.two_draft.share_out, verifiers.transport._Plan.given
masses_left, fill = verifiers.thresholds._masses_left, verifiers.thresholds._fill


def skew_of_one_position(p: Tensor, q: Tensor, tokens: Tensor, paths: Tensor, most_paths: int) -> Tensor:
    """Takes the best of K at every position for itself, as if the others had not lost paths before."""
    both = [largest(p[:, i, None], q[:, i, None], tokens[:, i, None], paths, most_paths) for i in range(p.shape[1])]
    return torch.cat(both, 1)


def evenly(mass: Tensor, q: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A coin decides which of two tokens is selected, and the selected one is judged by the optimal law."""
    best_of = share_out(mass, q, first, first)[0], share_out(mass, q, second, second)[0]
    same = first == second
    left = share_out(mass, q, first, second)[2]
    return best_of[0].where(same, best_of[0] / 2), torch.where(same, 0.0, best_of[1] / 2), left


def always_the_later(mass: Tensor, q: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Never hands over: selects the token that is drafted too little."""
    of_first, of_second, left = share_out(mass, q, first, second)
    ratio = mass / q
    later = ratio.gather(-1, first[..., None]) > ratio.gather(-1, second[..., None])
    total, later = of_first + of_second, later[..., 0] | (first == second)
    return total.where(later, 0.0), total.where(~later, 0.0), left


MISTAKES: dict[str, tuple[str, Callable[..., object]]] = {
    "takes a selected path for one drawn": ("greedy_multipath._law_of_the_largest", lambda p, q, *of: q),
    "best of K, place by place": ("greedy_multipath._law_of_the_largest", skew_of_one_position),
    "accepts as if p were twice there": ("kseq._run", lambda *of: (torch.ones_like(run(*of)[0]), run(*of)[1])),
    "a plan that spends p twice": ("transport._Plan.given", lambda *of: given(*of) / max(given(*of).sum(), 1e-300)),
    "a coin selects one of two": ("two_draft.share_out", evenly),
    "never hands over": ("two_draft.share_out", always_the_later),
    "q is not smaller for later siblings": ("thresholds._masses_left", lambda *of: torch.ones_like(masses_left(*of))),
    "weights are 1 among siblings": ("thresholds._fill", lambda *of: fill(*of[:-1], torch.ones_like(of[-1]))),
}


@pytest.mark.parametrize(
    ("mistake", "rule", "factors", "law", "seed"),
    [
        ("takes a selected path for one drawn", "greedy multi-path", (2, 1), IID, 3),
        ("best of K, place by place", "greedy multi-path", (2, 1), IID, 3),
        ("accepts as if p were twice there", "k-seq", (2, 2), IID, 21),
        ("a plan that spends p twice", "transport", (2, 2), SWOR, 3),
        ("a coin selects one of two", "two drafts", (2, 1), IID, 1),
        ("a coin selects one of two", "weighted transport", (2, 1), IID, 1),
        ("never hands over", "two drafts", (2, 1), IID, 1),
        ("never hands over", "weighted transport", (2, 1), IID, 1),
        ("q is not smaller for later siblings", "rejection", (1, 3), SWOR, 1),
        ("q is not smaller for later siblings", "traversal", (1, 3), SWOR, 1),
        ("weights are 1 among siblings", "traversal", (1, 3), SWOR, 1),
    ],
)
def test_mistakes_of_one_function(mistake: str, rule: str, factors, law, seed: int, monkeypatch) -> None:
    tables, shape, (place, wrong) = Tables.random(4, 2, seed=seed), TreeShape.branching(*factors), MISTAKES[mistake]
    assert enumerate_outcome(RULES[rule], tables, shape, law).tv < EXACT
    monkeypatch.setattr(verifiers.transport, "_try_one", verifiers.transport._try_one.__wrapped__)  # nothing kept
    monkeypatch.setattr(f"verifiers.{place}", wrong)
    rejected(enumerate_outcome(RULES[rule], tables, shape, law))


@pytest.mark.parametrize("law", [IID, SWOR, (TOP, SWOR, SWOR)], ids=str)
@pytest.mark.parametrize(("rule", "walk"), [("rejection", top_down), ("traversal", leaf_to_root)])
def test_walks_node_by_node(rule: str, walk: Callable[..., Laws], law: Samplings, monkeypatch) -> None:
    """Trees whose shape the host does not know have the same laws; the mutant accepts less than it takes from p."""
    tables = Tables.random(4, 2, seed=3)
    for grows in (None, lambda node, prefix: (prefix * 7 + node * 5) % 4 > 0):
        static = enumerate_drafts(tables, TreeShape.branching(3, 1), law, grows=grows)
        tree, wanted = static.tree, outcome(RULES[rule], tables, static).expected_accepted
        given = {"draft_probs": tree.draft_probs, "valid": tree.valid, "max_depth": 2, "max_children": 3}
        drafts = replace(static, tree=DraftTree.build(tree.tokens, tree.parents.clone(), sampling=tree.law, **given))
        # As on a CPU, and as on a GPU, where nodes of one depth are tried together.
        for judge in (RULES[rule], WalkedRule(walk, lambda *given: try_in_turn(*given))):
            found = outcome(judge, tables, drafts)
            assert found.tv < EXACT and found.expected_accepted == pytest.approx(wanted, abs=EXACT)
    chance = verifiers.walk.chance_of
    monkeypatch.setattr("verifiers.walk.chance_of", lambda mass, drawn: 0.8 * chance(mass, drawn))
    rejected(outcome(RULES[rule], tables, drafts))


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


@pytest.mark.parametrize("rule", ["traversal", "rejection"])
def test_a_trie_verified_as_independent(rule: str) -> None:
    tables = Tables.random(4, 2, seed=21)
    trie = merged(enumerate_drafts(tables, TreeShape.branching(2, 1), IID))
    assert outcome(RULES[rule], tables, trie).tv < EXACT
    declared = replace(trie, tree=replace(trie.tree, law=torch.full_like(trie.tree.law, IID)))
    assert outcome(RULES[rule], tables, declared).tv > BIASED


def test_a_draft_that_was_sorted_after_it_was_drawn() -> None:
    """It biases every rule that looks at q; the target walk takes any draft, and drafts declared to be coupled."""
    tables = Tables.random(4, 1, seed=21)
    made = enumerate_drafts(tables, TreeShape.branching(2), SWOR, declared=SWOR)
    children = made.tree.tokens[:, 1:]
    children = children.gather(1, tables.q[0][0][children].argsort(dim=1, descending=True))
    tokens = torch.cat([made.tree.tokens[:, :1], children], 1)
    p = torch.stack([tables.p[0].expand(len(tokens), -1), *(tables.p[1][children[:, i]] for i in range(2))], 1)
    prefixes = torch.cat([torch.zeros_like(tokens[:, :1]), children], 1)
    for rule, law in ((RULES["target walk"], 3), (RULES["target walk"], SWOR), (RULES["rejection"], SWOR)):
        law = torch.where(made.tree.law > 0, int(law), 0).to(torch.int8)
        tree = DraftTree.from_shape(TreeShape.branching(2), tokens, sampling=law, draft_probs=made.tree.draft_probs)
        tv = outcome(rule, tables, WeightedDrafts(tree, prefixes, made.probability, p)).tv
        assert tv < EXACT if rule is RULES["target walk"] else tv > BIASED
