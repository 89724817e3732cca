"""Drafters made of others: which one drafts for a row, merged trees, stages; none loses step, and all stay exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, ModelDrafter, NGramDrafter, SelfDrafter, SuffixDrafter
from drafters.combined import ChoiceDrafter, CombinedDrafter, MergedDrafter, merged
from drafters.staged import StagedDrafter
from specdec import Batch, Drafter, DraftSampling, DraftTree, Engine, SamplingParams, Session, Sizes, Target, TreeShape
from specdec.checks.drafter import assert_conforms
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import outcome
from specdec.checks.tables import Tables
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


def every_draft(tables: Tables, law: DraftSampling, merge: Callable[..., DraftTree]) -> WeightedDrafts:
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


def without_drawn_repeats(first: DraftTree, second: DraftTree) -> DraftTree:
    """Mutant: a drawn node whose token was looked up, too, is dropped in favour of the looked-up one."""
    parents = torch.cat([first.parents, second.parents[:, 1:] + (second.parents[:, 1:] > 0) * (first.width - 1)], 1)
    tokens, law, valid = (
        torch.cat([getattr(first, part), getattr(second, part)[:, 1:]], 1) for part in ("tokens", "law", "valid")
    )
    for node in range(1, first.width):
        repeats = (second.parents == 0) & (second.tokens == tokens[:, node, None]) & (parents[:, node, None] == 0)
        valid[:, node] &= ~repeats.any(-1)
        valid &= valid.gather(1, parents.clamp(min=0))
    q = torch.nn.functional.pad(first.draft_probs, (0, 0, 0, second.width - 1))
    return DraftTree.build(tokens, parents, valid=valid, sampling=law, draft_probs=q)


@pytest.mark.parametrize(
    ("rule", "law"), [(rule, law) for rule in MIXED for law in (TOP, IID, SWOR) if takes_laws(MIXED[rule], TOP, law)]
)
def test_the_joint_output_law_is_the_targets(rule: str, law: DraftSampling) -> None:
    """Not so if a drawn token is dropped, but for the walk, which does not look at q."""
    tables = Tables.random(3, 3, seed=3, kinds=("dense", "zeros"))
    found = outcome(MIXED[rule], tables, every_draft(tables, law, merged))
    assert found.tv < EXACT
    alone = outcome(MIXED[rule], tables, enumerate_drafts(tables, SHAPE, law))
    assert found.expected_accepted > alone.expected_accepted
    if law is not TOP and rule != "target walk":
        tables = Tables.random(3, 3, seed=3)
        assert outcome(MIXED[rule], tables, every_draft(tables, law, without_drawn_repeats)).tv > BIASED


def test_equal_beginnings_are_shared() -> None:
    law, tokens, parents = torch.tensor([[TOP, IID, IID]], dtype=torch.int8), torch.tensor([[4, 5, 7]]), [[-1, 0, 1]]
    second = DraftTree.build(torch.tensor([[4, 5, 8, 6]]), torch.tensor([[-1, 0, 1, 0]]))
    q = torch.full((1, 3, 9), 1 / 9)
    tree = merged(DraftTree.build(tokens, torch.tensor(parents), sampling=law, draft_probs=q), second)
    assert tree.tokens.tolist() == [[4, 5, 7, 5, 8, 6]] and tree.parents.tolist() == [[-1, 0, 1, 0, 1, 0]]
    assert tree.valid.tolist() == [[True, True, True, False, True, True]] and tree.law.tolist() == [[0, 1, 1, 0, 0, 0]]
    assert merged(DraftTree.build(tokens, torch.tensor(parents)), second).only_law is TOP


# A head beside a look-up whose paths are deeper than its own: rounds commit more than the head could draft.
LONG = {"lookup": SuffixDrafter(20, shared=False)}
LONG_ROUNDS: dict[str, Callable[[Any], CombinedDrafter]] = {
    "eagle": lambda model: MergedDrafter(**LONG, model=EagleDrafter(eagle3_head(model), 2)),
    "block": lambda model: MergedDrafter(**LONG, model=BlockDrafter(block_head(model), 2)),
    "medusa": lambda model: ChoiceDrafter(**LONG, model=MedusaDrafter(medusa_heads(model), 2)),
}


@pytest.fixture(scope="module")
def looping() -> Any:
    """A target that repeats itself soon, so that a look-up is right for long."""
    return tiny_model(vocab_size=12, layers=2)


@pytest.mark.parametrize("head", [complete(name, strong=name == "eagle") for name in LONG_ROUNDS])
def test_long_rounds_lose_nothing(looping: Any, head: str) -> None:
    """The longest rounds end where the cache does. Several prompts make rounds of unequal lengths."""
    prompts, drafter = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 5, 6], [2, 2, 2, 2]], LONG_ROUNDS[head](looping)
    sampling = [SamplingParams(max_new_tokens=64 - len(prompt)) for prompt in prompts]
    with Engine(Target(looping), drafter, RejectionVerifier(), max_batch_size=4, max_length=64) as engine:
        outputs, plain = (engine.generate(prompts, sampling, speculate=each) for each in (True, False))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    longest = max(step.accepted for output in outputs for step in output.steps)
    assert longest > 7, "the look-up's paths are accepted, and deeper than the head's"


@pytest.mark.full
@pytest.mark.parametrize("head", LONG_ROUNDS)
def test_drafts_after_long_rounds_are_those_of_a_new_request(looping: Any, head: str) -> None:
    options = {"verifier": RejectionVerifier(), "rounds": 8, "draws": 0}
    assert_conforms(lambda: LONG_ROUNDS[head](looping), Target(looping), **options)


VOCAB = 32
LOOPS = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
NEW = [5, 9, 2, 7, 1, 8, 3]


class Asked(Wrapped):
    def __init__(self, inner: Session):
        super().__init__(inner)
        self.asked: list[list[int]] = []

    def propose(self, batch: Batch) -> DraftTree:
        self.asked.append(batch.on_host.slots.tolist())
        return super().propose(batch)


@torch.inference_mode()
def test_each_row_gets_the_better_draft(model) -> None:
    part = Wrapping(ModelDrafter(perturbed(model, 0.1), [2, 1], sampling="iid"), Asked)
    chooser = ChoiceDrafter(SuffixDrafter(6), part, start=0.9)
    drafter, sequences = chooser.bind(Target(model), Sizes(max_batch_size=3, max_length=64)), [NEW, LOOPS, NEW[::-1]]
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


@pytest.mark.parametrize("helper", HELPERS)
def test_q_is_the_models_own_law(model: Any, helper: str) -> None:
    """As plain forwards behind the tokens of the row say, whatever drafts for the model."""
    staged, drafting = StagedDrafter(near(model), HELPERS[helper](model), RULE), near(model).model

    def law(known: list[int], path: list[int]) -> torch.Tensor:
        return drafting(torch.tensor([known + path[1:]])).logits[0, -1].softmax(-1)

    options = {"max_batch_size": 3, "max_length": 40, "prefill_chunk": 3, "check": True}
    found, _ = agreements(Target(model), staged, law, prompts=PROMPTS, sampling=DRAWN, **options)
    assert all(same for _, same in found) and sum(depth == 4 for depth, _ in found) > 10


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
