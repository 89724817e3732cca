"""Ways of stopping a draft, and trees that choose their own nodes: which leave the output the target's, enumerated.

A node may exist or not for any reason that is settled before its own token is drawn, never for a reason that looks at
that token or at later ones (Leviathan et al.; DSpark, arXiv 2607.05147, appendix A, whose counterexample is here).
Chains that end for a stated reason are in test_legal_lengths.py; here the project's own builders and policies grow the
trees. All that can be drawn is gone through one by one, so that the output's law comes out exactly, up to float32.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import Batch, DraftSampling, DraftTree, SamplingParams, Topology, Verifier
from specdec.drafting.builders import ExpansionTree, PricedTree, ReplayedTree, RheoTree, SampledTree, StaticTree
from specdec.drafting.builders.base import TreeBuilder
from specdec.drafting.builders.sampled import without_replacement
from specdec.drafting.costs import RoundCosts
from specdec.drafting.drawing import Drawing
from specdec.drafting.policies import ConfidenceNodes, CostAwareNodes, LoopedNodes, NodePolicy
from specdec.drafting.scorer import Scorer
from specdec.drafting.vocabulary import VocabularyMap
from tests.forwards import slots_of
from verifiers import BlockVerifier, KSeqVerifier, RejectionVerifier, TraversalVerifier

VOCAB, LENGTH = 3, 3
Law = Callable[[tuple[int, ...]], Tensor]


def table(seed: int) -> Law:
    """A distribution after every sequence of tokens, in float64."""

    def law(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return (1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)

    return law


P, Q = table(1), table(2)


def narrow(path: tuple[int, ...]) -> Tensor:
    """Q, but after the first token without the least likely one: there is less to go through."""
    law = Q(path)
    return law if not path else law.where(law > law.min(), 0.0) / (1 - law.min())


class Table(Scorer):
    def __init__(self, q: Law):
        self._q = q

    def root_logits(self, batch: Batch) -> Tensor:
        self._paths: list[tuple[int, ...]] = [()]
        return self._q(()).log()[None, None]

    def level_logits(self, batch: Batch, tokens: Tensor, topology: Topology, depth: int) -> Tensor:
        parents = topology.parents[0, -tokens.shape[1] :].tolist()
        del self._paths[topology.width - tokens.shape[1] :]
        new = [(*self._paths[above], token) for above, token in zip(parents, tokens[0].tolist(), strict=True)]
        self._paths += new
        return torch.stack([self._q(path).log() for path in new])[None]

    @property
    def version(self) -> Hashable:
        return 0


class Choices:
    """Stands for all draws of a round: it chooses by a script, and notes how likely that is."""

    def __init__(self) -> None:
        self.script: list[list[int]] = []  # for every draw, the possible tokens that are still to be gone through
        self.weight, self._made = 1.0, 0

    def begin(self) -> None:
        self.weight, self._made = 1.0, 0

    def draw(self, weights: Tensor, uniform: Tensor) -> Tensor:
        return self.with_total(weights, uniform)[0]

    def with_total(self, weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        flat = weights.double().flatten(0, -2)
        chosen = []
        for row in flat:
            total = float(row.sum())
            possible = row.nonzero()[:, 0].tolist() if total > 0 else [0]
            if self._made == len(self.script):
                self.script.append(possible)
            token = self.script[self._made][0]
            self.weight *= float(row[token]) / total if total > 0 else 1.0
            self._made += 1
            chosen.append(token)
        shape = weights.shape[:-1]
        return torch.tensor(chosen).view(shape), flat.sum(-1).view(shape)

    def in_blocks(self, blocks: Tensor, masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        token, total = self.with_total(blocks.flatten(2), uniform[..., 0])
        torch.testing.assert_close(masses.sum(-1), total)
        return token[..., None], total[..., None]

    def next(self) -> bool:
        """Go on to what can be drawn else; False at the end."""
        del self.script[self._made :]
        while self.script:
            self.script[-1].pop(0)
            if self.script[-1]:
                return True
            self.script.pop()
        return False


def worlds(
    builder: TreeBuilder, policy: NodePolicy | None, q: Law, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, DraftTree]]:
    """All trees that a round may draft, with their probabilities."""
    choices, scorer = Choices(), Table(q)
    monkeypatch.setattr("specdec.drafting.builders.static.draw", choices.draw)
    monkeypatch.setattr("specdec.drafting.builders.sampled.draw_in_blocks", choices.in_blocks)
    vocab = len(q(()))
    slots = slots_of([[1, 0]], vocab_size=vocab, params=[SamplingParams(temperature=1.0)])
    builder.bind(slots.device)
    law = DraftSampling.WITHOUT_REPLACEMENT if isinstance(builder, StaticTree) else builder.takes[0]
    if policy is not None:
        policy.bind(builder, scorer, slots.device, max_batch_size=1)
        policy.prepare(1)
    while True:
        choices.begin()
        vocabulary = VocabularyMap(vocab, vocab)
        rater = None if policy is None else policy.rater(scorer, slots, vocabulary, may_stop=True)
        drawing = Drawing.of(slots, vocabulary, law, None, rater=rater)
        grown = builder.grow(scorer, drawing, builder.max_depth)
        if policy is not None:
            grown = policy.prune(grown, slots, slots.drafting)
        yield choices.weight, grown.tree
        if not choices.next():
            return


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents[0].tolist()):
        if node:
            paths.append((*paths[parent], int(tree.tokens[0, node])))
    return paths


def bias(rule: Verifier, drafted: Iterable[tuple[float, DraftTree]], p: Law = P) -> float:
    """The total variation between the law of the first tokens and the target's."""
    vocab = len(p(()))
    law = dict.fromkeys(itertools.product(range(vocab), repeat=LENGTH), 0.0)
    chance = {path: math.prod(float(p(path[:i])[token]) for i, token in enumerate(path)) for path in law}
    total = 0.0
    for weight, tree in drafted:
        total += weight
        paths = paths_of(tree)
        laws = rule.laws(tree, torch.stack([p(path) for path in paths])[None])
        stops = laws.stop[0]
        for stop in stops.nonzero()[:, 0].tolist():
            following = laws.after(torch.tensor([stop]))[0]
            for token in range(vocab):
                emitted = (*paths[stop], token)[:LENGTH]
                begun = weight * float(stops[stop] * following[token] / following.sum())
                behind = [path for path in law if path[: len(emitted)] == emitted]
                known = sum(chance[path] for path in behind)
                for path in behind:
                    law[path] += begun * chance[path] / known
    assert total == pytest.approx(1, abs=1e-6), "all that can be drawn was gone through"
    return sum(abs(law[path] - chance[path]) for path in law) / 2


COSTS = RoundCosts(rows=(1,), table=((1.0, 1.35, 1.75, 2.2, 2.7, 3.3),), nodes=(0, 1, 2, 3, 4, 5))
CLIFF = RoundCosts(rows=(1,), table=((1.0, 1.7, 1.75, 1.8, 3.5, 3.6),), nodes=(0, 1, 2, 3, 4, 5))

LEGAL = {
    "one slot of a level, three deep": (lambda: SampledTree(2, 3, 1), lambda: None),
    "best first, priced, by confidence": (lambda: PricedTree(4, 2, 2), lambda: ConfidenceNodes(0.2, learn=False)),
    "best first at a low price": (lambda: PricedTree(4, 2, 2, theta=0.09), lambda: None),
    "a chain by confidence": (lambda: StaticTree(3), lambda: ConfidenceNodes(0.35, learn=False)),
    "a chain by entropy": (lambda: StaticTree(3), lambda: ConfidenceNodes(0.3, source="entropy", learn=False)),
    "a tree by margin": (lambda: StaticTree([2, 1]), lambda: ConfidenceNodes(0.05, source="margin", learn=False)),
    "a chain by a cost with a cliff": (lambda: StaticTree(3), lambda: CostAwareNodes(CLIFF, learn=False)),
    "a chain by cost and margin": (lambda: StaticTree(3), lambda: CostAwareNodes(COSTS, source="margin", learn=False)),
    "a chain in stages of two": (lambda: StaticTree(4), lambda: LoopedNodes(-1.5, 2)),
    "a tree by cost": (lambda: StaticTree([2, 1]), lambda: CostAwareNodes(CLIFF, learn=False)),
    "best first by cost": (lambda: SampledTree(4, 2, 2), lambda: CostAwareNodes(COSTS, learn=False)),
}


@pytest.mark.parametrize("case", LEGAL)
def test_no_choice_of_nodes_changes_the_output(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, policy = LEGAL[case]
    law = narrow if case.startswith("best first") else Q
    found = list(worlds(builder(), policy(), law, monkeypatch))
    sizes = {int(tree.valid.sum()) for _, tree in found}
    shapes = {tuple(tree.parents[0][tree.valid[0]].tolist()) for _, tree in found}
    assert len(sizes) > 1 or len(shapes) > 1 or builder().is_chain, "the choice depends on what was drawn"
    for_chains = [BlockVerifier(), KSeqVerifier()] if builder().is_chain else []
    for rule in (RejectionVerifier(), TraversalVerifier(), *for_chains):
        assert bias(rule, found) < 1e-6


def rolled(*first: float) -> Law:
    """The same law behind every token, rolled by it."""
    return lambda path: torch.tensor(first, dtype=torch.float64).roll(path[-1] if path else 0)


WANTED, DRAFTED = rolled(0.5, 0.3, 0.2), rolled(0.4, 0.35, 0.25)


def test_a_stage_that_ends_a_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of one token: tokens 1 and 2 end the draft, and are kept; to discard them is the mutant."""
    kept = list(worlds(StaticTree(2), LoopedNodes(math.log(0.38), 1), DRAFTED, monkeypatch))
    assert sorted(int(tree.valid.sum()) for _, tree in kept) == [2, 2, 3, 3, 3]
    whole = [(w, tree, tree.valid & (tree.valid.sum() == 3)) for w, tree in kept]
    discarded = [(w, replace(tree, valid=valid | (tree.depth == 0))) for w, tree, valid in whole]
    for rule in (RejectionVerifier(), TraversalVerifier()):
        assert bias(rule, kept, WANTED) < 1e-6
        assert bias(rule, discarded, WANTED) == pytest.approx(0.2, abs=1e-6)


class GlobalBest(CostAwareNodes):
    """Takes the best of all sizes, also where the gain falls and rises again on the way there (DSpark, appendix A)."""

    def kept(self, survival: Tensor, batch: Batch) -> Tensor:
        seconds = torch.tensor(self.costs.table[0])[: survival.shape[1]]  # type: ignore[union-attr]
        best = int((survival.clamp(min=0).sum(0).cumsum(0) / seconds).argmax())
        return (torch.arange(survival.shape[1]) <= best).expand_as(survival)


def two(first: float) -> Tensor:
    return torch.tensor([first, 1 - first], dtype=torch.float64)


def test_the_counterexample_of_dspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node alone does not pay, two do if the second one is sure. The best size of all then depends on the token.

    Verified whole after A and not at all after B, which comes half as often as it should.
    """
    wanted, q = (lambda path: two(0.7)), (lambda path: two(0.98 if path[:1] == (0,) else 0.5))
    costs = RoundCosts(rows=(1,), table=((1.0, 1.6, 2.0),), nodes=(0, 1, 2))
    policies = CostAwareNodes(costs, learn=False), GlobalBest(costs, learn=False)
    right, wrong = (list(worlds(StaticTree(2), policy, q, monkeypatch)) for policy in policies)
    assert {int(tree.valid.sum()) - 1 for _, tree in right} == {1, 2}, "without the step in the costs, one node pays"
    assert {int(tree.valid.sum()) - 1 for _, tree in wrong} == {0, 2}
    assert bias(RejectionVerifier(), right, wanted) < 1e-6
    assert bias(RejectionVerifier(), wrong, wanted) == pytest.approx(0.15, abs=1e-6)


def skewed(path: tuple[int, ...]) -> Tensor:
    """Two likely tokens and an unlikely one, others after every path: worth differs even where tokens are trusted."""
    return torch.tensor([0.55, 0.4, 0.05], dtype=torch.float64).roll(-sum((i + 1) * x for i, x in enumerate(path)))


def tied(path: tuple[int, ...]) -> Tensor:
    return DRAFTED(path) if path else torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def in_order_of_q(q: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a node's children, and puts them in the order of q."""
    token, own = without_replacement(q, uniform)
    own, order = own.sort(dim=-1, descending=True)
    return token.gather(-1, order), own


class KeepsByTheirTokens(SampledTree):
    """Keeps the most probable of the drawn nodes, as is right where none is drawn at random (EAGLE-2)."""

    def drawn(self, *given: Any) -> Any:
        q, token, _, node = super().drawn(*given)
        return q, token, node, node


class DropsUnlikely(SampledTree):
    """Drops a drawn token because it is unlikely."""

    def drawn(self, *given: Any) -> Any:
        q, token, slot, node = super().drawn(*given)
        return q, token, slot.where(node > 0.2, 0.0), node


class RanksByTheDraw(RheoTree):
    """Ranks the drawn token by its own probability."""

    def drawn(self, above: Tensor, scores: Tensor, q: Tensor, uniform: Tensor) -> Any:
        tail, token, worth, _ = super().drawn(above, scores, q, uniform)
        worth[..., :1] = above[:, :, None] * q.double().gather(2, token[..., :1])
        return tail, token, worth, worth


class LosesTies(RheoTree):
    """Lets the lower token come first where two are worth as much."""

    def drawn(self, *given: Any) -> Any:
        tail, token, worth, _ = super().drawn(*given)
        worth = worth - 1e-7 * token
        return tail, token, worth, worth


class DeclaresQ(RheoTree):
    """Says that the drawn token comes from all of q."""

    def drawn(self, above: Tensor, scores: Tensor, q: Tensor, uniform: Tensor) -> Any:
        return q, *super().drawn(above, scores, q, uniform)[1:]


def accepted(rule: Verifier, drafted: Iterable[tuple[float, DraftTree]], p: Law) -> float:
    """The expected number of drafted tokens that are accepted."""
    laws = [(weight, tree, torch.stack([p(path) for path in paths_of(tree)])[None]) for weight, tree in drafted]
    return sum(weight * float((rule.laws(tree, target).stop * tree.depth).sum()) for weight, tree, target in laws)


LENGTHS = {
    "most probable paths": (ExpansionTree(4, 2, 3), DRAFTED, 1.25, 1.25),
    "replayed": (ReplayedTree(2, 2, 2), DRAFTED, 0.957436, 0.957436),
    "rheo": (RheoTree(2, 2, 3), DRAFTED, 1.0, 1.0),
    "rheo with a tie": (RheoTree(2, 2, 3), tied, 1.0, 1.0),
    "at a low price": (PricedTree(4, 2, 2, theta=0.09), DRAFTED, 1.572336, 1.582171),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_what_chosen_and_drawn_trees_of_few_nodes_accept(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rejection and by traversal, in a vocabulary of three; the output is the target's."""
    builder, q, *lengths = LENGTHS[case]
    found = list(worlds(builder, None, q, monkeypatch))
    for rule, length in zip((RejectionVerifier(), TraversalVerifier()), lengths, strict=True):
        assert bias(rule, found, WANTED) < 1e-6
        assert accepted(rule, found, WANTED) == pytest.approx(length, abs=2e-6)


def test_a_node_costs_what_plain_decoding_would_emit_meanwhile() -> None:
    """One of four takes 0.4 s beside a plain round of 1 s with one request, and 1 s with three."""
    costs = RoundCosts(rows=(1, 3), table=((1.0, 1.2, 2.6), (1.0, 2.0, 5.0)), nodes=(0, 1, 4))
    assert [PricedTree(4, 2, 2, costs=costs).price(rows) for rows in (1, 2, 3)] == pytest.approx([0.4, 0.7, 1.0])
    assert PricedTree(4, 2, 2, theta=0.3).price(2) == 0.3


@pytest.mark.parametrize(
    ("right", "mutant", "p", "q", "wrong"),
    [
        (ReplayedTree(2, 2, 2), ReplayedTree(2, 2, 2), WANTED, DRAFTED, 0.284615),  # its siblings are put in order of q
        (SampledTree(3, 2, 2, power=1.0), KeepsByTheirTokens(3, 2, 2, power=1.0), P, narrow, 0.313102),
        (SampledTree(3, 2, 2, power=0.1), KeepsByTheirTokens(3, 2, 2, power=0.1), P, skewed, 0.004119),
        (SampledTree(3, 2, 2, power=1.0), DropsUnlikely(3, 2, 2, power=1.0), P, narrow, 0.060797),
        (RheoTree(2, 2, 3), RanksByTheDraw(2, 2, 3), WANTED, DRAFTED, 0.125),
        (RheoTree(2, 2, 3), LosesTies(2, 2, 3), WANTED, tied, 0.133333),
        (RheoTree(2, 2, 3), DeclaresQ(2, 2, 3), WANTED, DRAFTED, 0.333333),
    ],
)
def test_trees_that_choose_among_drawn_tokens_and_their_mutants(
    right: TreeBuilder, mutant: TreeBuilder, p: Law, q: Law, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(worlds(right, None, q, monkeypatch))
    for rule in (RejectionVerifier(), TraversalVerifier()):
        assert bias(rule, found, p) < 1e-6
    monkeypatch.setattr("specdec.drafting.builders.replayed.without_replacement", in_order_of_q)
    found = list(worlds(mutant, None, q, monkeypatch))
    assert bias(RejectionVerifier(), found, p) == pytest.approx(wrong, abs=2e-6)
