"""Drafters made of others: which one drafts for a row, merged trees, stages; none loses step, and all stay exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters import (
    BlockDrafter,
    EagleDrafter,
    MedusaDrafter,
    ModelDrafter,
    NGramDrafter,
    SelfDrafter,
    StagedDrafter,
    SuffixDrafter,
)
from drafters.combined import ChoiceDrafter, ChoiceSession, CombinedDrafter, MergedDrafter, merged
from drafters.staged import _Stage
from specdec import Batch, Drafter, DraftTree, Engine, SamplingParams, Session, Sizes, Target, TreeShape
from specdec.checks.drafter import assert_conforms
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import outcome
from specdec.checks.tables import Tables
from specdec.types import DraftSampling, Outcome
from tests.changed_rule import ChangedRule, emit_p
from tests.components import block_head, eagle3_head, medusa_heads, perturbed
from tests.drafters.agreeing import agreements
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.shapes import shapes_unchecked
from tests.test_distribution import FEWER, LEVEL, SAMPLINGS, p_value
from tests.test_distribution import VOCAB as FEW
from tests.verifiers.cases import BIASED, EXACT, IID, MIXED, SWOR, TOP, complete, takes_laws
from verifiers import BlockVerifier, RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")

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
    law, tokens, parents = torch.tensor([[TOP, IID, IID]], dtype=torch.int8), torch.tensor([[4, 5, 7]]), [[-1, 0, 1]]
    second = DraftTree.build(torch.tensor([[4, 5, 8, 6]]), torch.tensor([[-1, 0, 1, 0]]))
    q = torch.full((1, 3, 9), 1 / 9)
    tree = merged(DraftTree.build(tokens, torch.tensor(parents), sampling=law, draft_probs=q), second)
    assert tree.tokens.tolist() == [[4, 5, 7, 5, 8, 6]] and tree.parents.tolist() == [[-1, 0, 1, 0, 1, 0]]
    assert tree.valid.tolist() == [[True, True, True, False, True, True]] and tree.law.tolist() == [[0, 1, 1, 0, 0, 0]]
    assert merged(DraftTree.build(tokens, torch.tensor(parents)), second).only_law is TOP


HEADS: dict[str, Callable[[Any], Drafter]] = {
    "eagle": lambda model: EagleDrafter(eagle3_head(model), 2),
    "block": lambda model: BlockDrafter(block_head(model), 2),
    "medusa": lambda model: MedusaDrafter(medusa_heads(model), 2),
}


CASES = [complete("eagle", MergedDrafter, strong=True)] + [
    complete(head, kind, strong=False) for head, kind in (("block", MergedDrafter), ("medusa", ChoiceDrafter))
]


def looping() -> Any:
    """A target that repeats itself soon, so that a look-up is right for long."""
    return tiny_model(vocab_size=12, layers=2)


def combined(kind: type[CombinedDrafter], head: str, model: Any) -> CombinedDrafter:
    """A head beside a look-up whose paths are deeper than its own: rounds commit more than the head could draft."""
    return kind(lookup=SuffixDrafter(20, shared=False), model=HEADS[head](model))


@pytest.mark.parametrize(("head", "kind"), CASES)
def test_long_rounds_lose_nothing(head: str, kind: type[CombinedDrafter]) -> None:
    """The longest rounds end where the cache does. Several prompts make rounds of unequal lengths."""
    model = looping()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6], [2, 2, 2, 2]]
    longest = 0

    class Counting(Wrapped):
        def observe(self, outcome: Outcome) -> None:
            nonlocal longest
            if outcome.path is not None:
                longest = max(longest, int(outcome.counts.max()))
            super().observe(outcome)

    sampling = [SamplingParams(max_new_tokens=64 - len(prompt)) for prompt in prompts]
    drafter = Wrapping(combined(kind, head, model), Counting)
    with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=4, max_length=64) as engine:
        done = [output.token_ids for output in engine.generate(prompts, sampling)]
        assert done == [output.token_ids for output in engine.generate(prompts, sampling, speculate=False)]
    assert longest > 8, "the look-up's paths are accepted, and deeper than the head's"


@pytest.mark.full
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_drafts_after_long_rounds_are_those_of_a_new_request(head: str, kind: type[CombinedDrafter]) -> None:
    model, rule = looping(), RejectionVerifier()
    assert_conforms(lambda: combined(kind, head, model), Target(model), verifier=rule, rounds=8, draws=0)


VOCAB = 32
LOOPS = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
NEW = [5, 9, 2, 7, 1, 8, 3]


class Asked(Wrapped):
    """Notes for which slots it drafts."""

    def __init__(self, inner: Session):
        super().__init__(inner)
        self.asked: list[list[int]] = []

    def propose(self, batch: Batch) -> DraftTree:
        self.asked.append(batch.on_host.slots.tolist())
        return super().propose(batch)


def chooser(model, **options) -> ChoiceSession:
    part = Wrapping(ModelDrafter(perturbed(model, 0.1), [2, 1], sampling="iid"), Asked)
    return ChoiceDrafter(SuffixDrafter(6), part, **options).bind(Target(model), Sizes(max_batch_size=3, max_length=64))


@torch.inference_mode()
def test_each_row_gets_the_better_draft(model) -> None:
    drafter, sequences = chooser(model, start=0.9), [NEW, LOOPS, NEW[::-1]]
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0), SamplingParams()]
    for slot, sequence in enumerate(sequences):
        drafter.admit(slot, sequence, params[slot])
    with shapes_unchecked():
        slots = slots_of(sequences, vocab_size=VOCAB, params=params)
        assert drafter.parts[0].rate(slots)[0] == 0 and drafter.parts[0].rate(slots)[1] > 0.9
        tree = drafter.propose(slots)
    assert drafter.parts[1].asked == [[0, 2]]  # the row that is looked up costs the model nothing
    assert tree.law[0, 1:5].tolist() == [1] * 4 and tree.law[2, 1:5].tolist() == [0] * 4
    assert tree.tokens[1][tree.valid[1]].tolist() == [2, 3, 4, 1, 2, 3, 4] and not tree.law[1].any()
    assert tree.parents[1, :3].tolist() == [-1, 0, 1] and tree.parents[0, :5].tolist() == [-1, 0, 0, 1, 2]
    assert tree.draft_probs is not None and tree.draft_probs[0, 0].sum() == pytest.approx(1)


def test_the_mean_follows_what_the_model_reaches(model) -> None:
    """A model that is always right is asked until the look-up promises more."""
    drafter = ChoiceDrafter(SuffixDrafter(8), Wrapping(ModelDrafter(model, 3), Asked), start=0.0, memory=0.5)
    with shapes_unchecked(), Engine(Target(model), drafter, RejectionVerifier(), max_length=64) as engine:
        engine.generate([NEW], SamplingParams(max_new_tokens=16, ignore_eos=True))
        assert engine.session._mean[0] > 2
        rounds = len(engine.session.parts[1].asked)
        engine.generate([LOOPS * 4], SamplingParams(max_new_tokens=1))
        assert engine.session._mean[0] == 0.0  # every request begins anew
    assert rounds >= 3


class Peeks(Wrapped):
    """Mutant: keeps the model's draft only if its first token is one of low numbers, which looks at what was drawn."""

    def propose(self, batch: Batch) -> DraftTree:
        drawn = super().propose(batch)
        if drawn.width == 1:
            return drawn
        kept = drawn.tokens[:, 1] < 2
        return drawn.limited(torch.where(kept, drawn.max_depth, 0))


def test_a_choice_that_looks_at_the_draft_is_biased() -> None:
    model = tiny_model("llama", vocab_size=FEW, scale=1.5, layers=2)
    drafter = Wrapping(ModelDrafter(perturbed(model, 0.6), 2), Peeks)
    assert p_value(model, drafter, RejectionVerifier(), SAMPLINGS["temperature 1"], samples=600) < LEVEL


# Staged drafts: the chain is the model's own, whatever drafts for it, and takes fewer of its forwards

RULE = RejectionVerifier()
LOOKUP = NGramDrafter(4, branches=1)
PROMPTS = [[1, 2, 3, 4, 5, 1, 2], [7], [9, 8], [2, 2, 3, 1, 2, 2, 3, 5, 6, 1, 4]]
DRAWN = SamplingParams(max_new_tokens=22, temperature=1.0, ignore_eos=True, seed=2)


def near(model: Any, length: int = 5, distance: float = 0.15) -> ModelDrafter:
    return ModelDrafter(perturbed(model, distance), length)


HELPERS: dict[str, Callable[[Any], Drafter]] = {
    "look-up": lambda model: LOOKUP,
    "model": lambda model: near(model, 3, 0.3),
    "three stages": lambda model: StagedDrafter(near(model, 4, 0.3), near(model, 2, 0.6), BlockVerifier()),
    "four stages": lambda model: StagedDrafter(
        SelfDrafter(["1.mlp"], 5, temperature=0.8), StagedDrafter(near(model, 3, 0.6), LOOKUP, RULE), BlockVerifier()
    ),
}


def agreeing(model: Any, helper: Drafter) -> list[tuple[int, bool]]:
    """Whether q is what the drafting model says behind the tokens of the row, by plain forwards."""
    staged, drafting = StagedDrafter(near(model), helper, RULE), near(model).model
    sizes = {"max_batch_size": 3, "max_length": 40, "prefill_chunk": 3}
    return agreements(
        Target(model), staged, lambda known, path: drafting(torch.tensor([known + path[1:]])).logits[0, -1].softmax(-1),
        prompts=PROMPTS, sampling=DRAWN, **sizes, check=True,
    )[0]  # fmt: skip


@pytest.mark.parametrize("helper", HELPERS)
def test_q_is_the_models_own_law(model: Any, helper: str) -> None:
    found = agreeing(model, HELPERS[helper](model))
    assert all(same for _, same in found) and sum(depth == 4 for depth, _ in found) > 10


def test_a_cache_that_lacks_a_token_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the last committed token is taken to be in every cache."""
    begin = _Stage.begin

    def too_sure(self: _Stage, batch: Any) -> None:
        begin(self, batch)
        self.known = batch.on_host.lengths

    monkeypatch.setattr(_Stage, "begin", too_sure)
    assert not all(same for _, same in agreeing(model, LOOKUP))


def test_the_model_runs_less_often_than_it_drafts(model: Any) -> None:
    """A helper like the model itself: all that it drafts is accepted, so two forwards draw five tokens."""
    runs = []
    for drafter in (near(model), StagedDrafter(near(model), near(model, 3), RULE)):
        engine = Engine(Target(model), drafter, RULE, max_length=40, optimize=False)  # nothing is replayed
        session: Any = engine.session
        runner, ran = session.models[0], []
        runner.run = lambda batch, ran=ran, run=runner.run: ran.append(batch.wants.logits != 0) or run(batch)
        (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, ignore_eos=True))
        runs.append([sum(ran), *(step.proposed_depth for step in done.steps)])
    (alone, *depths), (staged, *same) = runs
    assert depths == same and alone == sum(depths)
    assert staged == sum(-(-depth // 4) for depth in depths)


def test_a_rule_that_is_not_exact_one_stage_down_biases_the_output() -> None:
    """Mutant: the model's chain takes the next token from p after a rejection, so that it does not follow q."""
    model, biased = tiny_model(vocab_size=FEW, scale=1.5, layers=2), ChangedRule(RULE, after=emit_p)
    made = StagedDrafter(near(model, 3, 0.3), near(model, 2, 1.5), biased)
    assert p_value(model, made, RULE, SAMPLINGS["temperature 1"], samples=FEWER) < LEVEL
    honest = StagedDrafter(near(model, 3, 0.3), near(model, 2, 1.5), RULE)
    assert p_value(model, honest, RULE, SAMPLINGS["top-k and top-p"], samples=FEWER) > LEVEL
