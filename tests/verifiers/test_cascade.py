"""Speculative cascades: exact with respect to the stated mixture, by enumeration and through the engine."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from drafters.model import ModelDrafter
from specdec.engine.engine import Engine
from specdec.exactness.checks import check_drafts
from specdec.exactness.drafts import Laws, enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, estimate
from specdec.exactness.reference import reference_decode
from specdec.exactness.tables import Tables
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.sampling import adjust, distribution
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling, Exactness
from tests.components import DRAFTERS, TREE, perturbed
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.test_distribution import LEVEL, goodness
from tests.verifiers.cases import BIASED, EXACT, IID, KINDS, SHAPES, SWOR, complete, drafts, needs_tables
from verifiers import CascadeVerifier, RejectionVerifier
from verifiers.cascade import DEFERRALS

SOME = dict.fromkeys(DEFERRALS, 0.3)
NONE = {"chow": -0.1, "diff": -1.1, "opt": -1e9, "token_v1": -1.1, "token_v2": -1.1, "token_v3": -0.1}
ALL = {"chow": 1.0, "diff": 1.0, "opt": 1e9, "token_v1": 1.0, "token_v2": 1.0, "token_v3": 1.0}


# ---------------------------------------------------------------------------------------------------------------------
# Over tables


@pytest.mark.parametrize("deferral", DEFERRALS)
@pytest.mark.parametrize(
    ("shape", "kinds", "laws"),
    [
        complete(shape, kinds, laws, strong=shape == "2x2" and kinds in ("dense", "every kind"))
        for shape in SHAPES
        for kinds in KINDS
        for laws in (IID, SWOR, (IID, SWOR, SWOR))
        if not SHAPES[shape].is_chain or isinstance(laws, DraftSampling)  # a chain has no siblings that could mix laws
    ],
)
def test_the_output_law_is_the_mixture(deferral: str, shape: str, kinds: str, laws: Laws) -> None:
    rule, tree = CascadeVerifier(deferral=deferral, alpha=SOME[deferral]), SHAPES[shape]
    tables = Tables.random(3 if tree.num_nodes > 3 else 4, tree.max_depth, seed=len(shape), kinds=KINDS[kinds])
    result = enumerate_outcome(rule, tables, tree, laws)
    assert result.tv < EXACT
    if kinds == "dense":
        assert result.target_tv > BIASED


@needs_tables
def test_published_distance(tables: dict[str, Tables]) -> None:
    """.488 from the target and 7e-17 from its own law, published without the rule; these settings give it."""
    rule = CascadeVerifier(deferral="diff", alpha=0.05)
    result = enumerate_outcome(rule, tables["A"], TreeShape.chain(4), IID)
    assert result.target_tv == pytest.approx(0.488, abs=5e-4)
    assert result.tv < EXACT


P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)  # total variation .4


@pytest.mark.parametrize(
    ("deferral", "alpha", "expected"),
    [
        ("chow", 0.59, P),  # .4 < .41
        ("chow", 0.61, Q),  # .4 > .39
        ("diff", 0.09, P),  # .4 < .41
        ("diff", 0.11, Q),
        ("opt", 0.24, P),  # .4 < .5 - .096
        ("opt", 0.26, Q),  # .4 > .5 - .104
        ("token_v1", 0.15, [0.3, 0.58, 0.12, 0.0]),  # q of token 1 only is above .35; deferred mass .6
        ("token_v2", 0.25, [0.35, 0.55, 0.1, 0.0]),  # p of tokens 0 and 1 is above .25; deferred mass .5
        ("token_v3", 0.5, [0.35, 0.55, 0.1, 0.0]),  # the same
        ("token_v2", 0.35, [0.2, 0.46, 0.34, 0.0]),  # token 2, too; deferred mass .2
    ],
)
def test_rules_by_hand(deferral: str, alpha: float, expected: Tensor | list[float]) -> None:
    law = CascadeVerifier(deferral=deferral, alpha=alpha).stated_law(P, Q)
    torch.testing.assert_close(law, torch.as_tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("deferral", DEFERRALS)
def test_keeping_nothing_is_rejection_sampling(deferral: str) -> None:
    tables = Tables.random(4, 2, seed=1, kinds=("dense", "zeros", "disjoint"))
    mine = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=NONE[deferral]), tables, SHAPES["2x2"], SWOR)
    exact = enumerate_outcome(RejectionVerifier(), tables, SHAPES["2x2"], SWOR)
    assert mine.target_tv < EXACT
    assert mine.expected_accepted == pytest.approx(exact.expected_accepted, abs=EXACT)


@pytest.mark.parametrize("deferral", DEFERRALS)
def test_keeping_everything_is_the_drafter_alone(deferral: str) -> None:
    tables = Tables.random(4, 2, seed=1, kinds=("dense", "zeros", "disjoint"))
    result = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=ALL[deferral]), tables, TreeShape.chain(2), IID)
    assert tables.q is not None
    drafter = Tables(tables.q, tables.q).joint(3)
    assert float((result.joint - drafter).abs().sum()) < EXACT
    assert result.expected_accepted == pytest.approx(2, abs=EXACT)


def test_a_rule_of_ones_own() -> None:
    def rare(p: Tensor, q: Tensor, distance: Tensor, alpha: float) -> Tensor:
        return p < alpha

    rule = CascadeVerifier(deferral=rare, alpha=0.25)
    torch.testing.assert_close(rule.stated_law(P, Q), torch.tensor([0.25, 0.15, 0.4, 0.2], dtype=torch.float64))
    assert enumerate_outcome(rule, Tables.random(4, 2, seed=1), SHAPES["2x2"], SWOR).tv < EXACT


def test_the_estimate_contains_zero() -> None:
    rule, tables = CascadeVerifier(deferral="token_v3", alpha=0.4), Tables.random(4, 2, seed=1)
    result = estimate(rule, tables, SHAPES["2x2"], SWOR, samples=4000, confidence=0.999)
    assert result.bias.low < 0 < result.bias.high
    mutant = ResidualOfTheTarget(deferral="token_v3", alpha=0.4)
    biased = estimate(mutant, tables, SHAPES["2x2"], SWOR, samples=4000, confidence=0.999)
    assert biased.bias.low > 0


class TargetAfterLeaves(CascadeVerifier):
    """Mutant: without q at the leaves, a path that ends at one goes on with p."""

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        leaf = ~((tree.parents == stop[:, None]) & tree.valid).any(1, keepdim=True)
        return target_probs[torch.arange(len(stop)), stop].where(leaf, super().next_law(tree, target_probs, stop))


class ResidualOfTheTarget(CascadeVerifier):
    """Mutant: accepts towards the mixture, and emits what is left of p."""

    def next_law(self, tree: DraftTree, target_probs: Tensor, stop: Tensor) -> Tensor:
        return self._rule.next_law(tree, target_probs, stop)


class AcceptsTowardsTheTarget(CascadeVerifier):
    """Mutant: accepts towards p, and emits what is left of the mixture."""

    def stop_law(self, tree: DraftTree, target_probs: Tensor) -> Tensor:
        return self._rule.stop_law(tree, target_probs)


MUTANTS = [TargetAfterLeaves, ResidualOfTheTarget, AcceptsTowardsTheTarget]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("deferral", ["diff", "token_v3"])
def test_enumeration_rejects(mutant: type[CascadeVerifier], deferral: str) -> None:
    tables = Tables.random(4, 2, seed=3)
    result = enumerate_outcome(mutant(deferral=deferral, alpha=0.2), tables, SHAPES["2x2"], SWOR)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)


def test_both_laws_are_laws_in_float32() -> None:
    rules = [CascadeVerifier(deferral=name, alpha=alpha) for name, alpha in SOME.items()]

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(drafts(torch.float32))
    def check(case: tuple[DraftTree, Tensor]) -> None:
        tree, p = case
        if tree.draft_probs is None:
            return
        tree = replace(tree, law=torch.where(tree.law == 0, int(IID), tree.law.long()).to(torch.int8))
        for rule in rules:
            stop_law = rule.stop_law(tree, p)
            assert stop_law.dtype == torch.float32 and (stop_law >= 0).all()
            assert (stop_law[~tree.valid] == 0).all()
            assert (stop_law.sum(1) - 1).abs().max() < 1e-5
            for node in range(tree.width):
                next_law = rule.next_law(tree, p, torch.full_like(tree.tokens[:, 0], node))
                assert (next_law >= 0).all() and (next_law.sum(1) - 1).abs().max() < 1e-5
                assert tree.draft_probs is not None
                neither = (p[:, node] == 0) & (tree.draft_probs[:, node] == 0)
                assert (next_law[neither] == 0).all(), "a token that both models exclude"

    check()


def test_a_row_without_q_is_decoded_plainly() -> None:
    """Beside one that is not."""
    p, q = torch.rand(2, 2, 5).softmax(-1), torch.rand(2, 2, 5).softmax(-1)
    q[0] = 0
    valid = torch.tensor([[True, False], [True, True]])
    tree = DraftTree.from_shape(
        TreeShape.chain(1), torch.tensor([[3, 0], [3, 1]]), valid=valid, sampling=IID, draft_probs=q
    )
    rule = CascadeVerifier(deferral="chow", alpha=1.0)
    assert torch.equal(rule.stop_law(tree, p)[0], torch.tensor([1.0, 0.0]))
    assert torch.equal(rule.next_law(tree, p, torch.zeros(2, dtype=torch.long))[0], p[0, 0])
    torch.testing.assert_close(rule.next_law(tree, p, torch.tensor([0, 1]))[1], q[1, 1])


# ---------------------------------------------------------------------------------------------------------------------
# Through the engine

VOCAB, LENGTH = 5, 3
ENOUGH = 1000
"""Samples that show a mutant."""
PROMPT = [1, 2, 1, 2, 1]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=VOCAB, scale=1.5, layers=2)


@torch.inference_mode()
def law_after(model, sequence: list[int], sampling: SamplingParams) -> Tensor:
    """What a plain forward over the whole sequence draws from, in float64."""
    state, tokens = slots_of([sequence], vocab_size=VOCAB, params=[sampling]).sampling, torch.tensor([sequence])
    return distribution(adjust(model(tokens).logits[:, -1:], state, tokens[:, None, -1:]), state)[0, 0].double()


def mixture(p: Tensor, q: Tensor, deferral: str, alpha: float) -> Tensor:
    """π, written out once more: token by token."""
    result = torch.zeros_like(p)
    for x in range(len(p)):
        kept = {
            "opt": q.max() >= p.max() - alpha * 0.5 * (p - q).abs().sum(),
            "token_v3": p[x] >= (1 - alpha) * p.max(),
        }[deferral]
        if kept:
            result[x] += q[x]
        else:
            result += q[x] * p
    return result


def exact_mixture(model, twin, rule: tuple[str, float], sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens under π."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            p, q = (law_after(m, [*PROMPT, *prefix], sampling) for m in (model, twin))
            step = mixture(p, q, *rule)
            longer |= {(*prefix, token): mass * float(step[token] / step.sum()) for token in range(VOCAB)}
        law = longer
    return law


def fit(
    model, verifier: CascadeVerifier, rule: tuple[str, float], sampling: SamplingParams, law: str, samples: int
) -> float:
    """p-value of engine outputs against π of both models."""
    twin = perturbed(model, 0.6)
    drafter = ModelDrafter(twin, [2, 1], sampling=law)
    engine = Engine(Target(model), drafter, verifier, max_batch_size=500, max_length=32)
    outputs = engine.generate([PROMPT], replace(sampling, max_new_tokens=LENGTH, n=samples, seed=0))
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0)
    for output in outputs:
        counts[output.token_ids] += 1
    return goodness(counts, exact_mixture(model, twin, rule, sampling), samples)


PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.2, top_k=4, top_p=0.85, repetition_penalty=1.3)
RULES = [("opt", 0.1), ("token_v3", 0.4)]


@pytest.mark.parametrize(
    ("rule", "sampling", "law", "samples"),
    [
        pytest.param(RULES[0], PLAIN, "iid", 5000, marks=pytest.mark.full),
        pytest.param(RULES[1], FILTERED, "without_replacement", 5000, marks=pytest.mark.full),
        (RULES[1], FILTERED, "without_replacement", ENOUGH),
    ],
    ids=["opt", "token_v3, filters", "token_v3, filters, as many as show a mutant"],
)
def test_the_engine_follows_the_mixture(
    model, rule: tuple[str, float], sampling: SamplingParams, law: str, samples: int
) -> None:
    """Once in 100 000 other seeds a correct engine fails."""
    assert fit(model, CascadeVerifier(deferral=rule[0], alpha=rule[1]), rule, sampling, law, samples) > LEVEL


@pytest.mark.parametrize(
    "mutant",
    [TargetAfterLeaves, pytest.param(ResidualOfTheTarget, marks=pytest.mark.full)],  # enumerated above
)
def test_a_biased_rule_is_rejected(model, mutant: type[CascadeVerifier]) -> None:
    rule = RULES[1]
    biased = mutant(deferral=rule[0], alpha=rule[1])
    assert fit(model, biased, rule, FILTERED, "without_replacement", ENOUGH) < LEVEL


LONG = 24
PROMPTS = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5]]


@torch.inference_mode()
def greedy_cascade(model, twin, prompt: list[int], length: int, alpha: float) -> tuple[list[int], int]:
    """The most probable token of the drafter, where it is as sure as the target but for alpha; else the target's."""
    sequence, kept = list(prompt), 0
    for _ in range(length):
        p, q = (m(torch.tensor([sequence])).logits[0, -1].softmax(-1) for m in (model, twin))
        keeps = bool(q.max() >= p.max() - alpha)
        kept += keeps
        sequence.append(int((q if keeps else p).argmax()))
    return sequence[len(prompt) :], kept


@pytest.mark.parametrize("shape", [pytest.param(3, marks=pytest.mark.full), TREE], ids=["chain", "tree"])
def test_temperature_zero_is_the_greedy_cascade(shape) -> None:
    """Decided at temperature 1, token for token, beside a sampled row, after which slots are refilled."""
    model = tiny_model("llama", vocab_size=LONG)
    twin = perturbed(model, 0.6)
    sampled = SamplingParams(temperature=1.0, max_new_tokens=9)
    alpha = 0.05
    wanted = [greedy_cascade(model, twin, prompt, 15, alpha) for prompt in PROMPTS]
    engine = Engine(
        Target(model),
        ModelDrafter(twin, shape),
        CascadeVerifier(deferral="diff", alpha=alpha),
        max_batch_size=2,
        max_length=40,
        prefill_chunk=3,
    )
    params = [SamplingParams(max_new_tokens=15), sampled, *[SamplingParams(max_new_tokens=15)] * 2]
    outputs = engine.generate([PROMPTS[0], [3, 4], *PROMPTS[1:]], params)
    assert [list(outputs[i].token_ids) for i in (0, 2, 3)] == [tokens for tokens, _ in wanted]
    # Both models had their say, and it is neither's own output.
    assert 0 < sum(kept for _, kept in wanted) < 45
    plain = engine.generate(PROMPTS, SamplingParams(max_new_tokens=15), speculate=False)
    assert [list(output.token_ids) for output in plain] != [tokens for tokens, _ in wanted]
    assert [list(o.token_ids) for o in plain] == [
        reference_decode(model, p, SamplingParams(max_new_tokens=15)) for p in PROMPTS
    ]


def test_plain_requests_in_the_same_batch_follow_the_target() -> None:
    """Token for token, greedy and sampled."""
    model = tiny_model("llama", vocab_size=LONG)
    rule = CascadeVerifier(deferral="chow", alpha=1.0)
    engine = Engine(Target(model), ModelDrafter(perturbed(model, 0.6), 3), rule, max_batch_size=3, max_length=40)
    params = [SamplingParams(max_new_tokens=12, temperature=t) for t in (1.0, 0.0, 1.0)]
    outputs: dict[int, list[int]] = {}
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True)):
        outputs[engine.submit(prompt, sampling, speculate=number == 2)] = []
    while engine.unfinished:
        for step in engine.step():
            outputs[step.request] += step.token_ids
    for number in (0, 1):
        assert outputs[number] == reference_decode(model, PROMPTS[number], params[number].seeded(number))
    assert outputs[2] != reference_decode(model, PROMPTS[2], params[2].seeded(2))


# ---------------------------------------------------------------------------------------------------------------------
# What it says and refuses


def test_it_says_what_it_is() -> None:
    assert CascadeVerifier.exactness is Exactness.EXACT_WRT
    assert CascadeVerifier.needs_leaf_probs and not RejectionVerifier.needs_leaf_probs


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("ngram", "DETERMINISTIC"), ("medusa", "DETERMINISTIC"), ("model_tree_coupled", "COUPLED")],
)
def test_drafters_without_q_are_refused(drafter: str, words: str) -> None:
    model = tiny_model("llama", vocab_size=LONG)
    with pytest.raises(ValueError, match=f"CascadeVerifier is not made for drafts that are {words}"):
        Engine(Target(model), DRAFTERS[drafter](model), CascadeVerifier(), max_length=40)


def test_a_drafter_that_has_no_q_at_the_leaves_is_refused() -> None:
    model = tiny_model("llama", vocab_size=LONG)
    drafter = ModelDrafter(model, 2)
    drafter.has_leaf_probs = False
    with pytest.raises(ValueError, match="CascadeVerifier reads the draft's probabilities at every node, which Model"):
        Engine(Target(model), drafter, CascadeVerifier(), max_length=40)


def test_a_drafter_serves_one_engine_after_the_other() -> None:
    model = tiny_model("llama", vocab_size=LONG)
    drafter = ModelDrafter(perturbed(model, 0.3), 2)
    for rule in (CascadeVerifier(), RejectionVerifier()):
        with Engine(Target(model), drafter, rule, max_length=40) as engine:
            trees: list[DraftTree] = []
            engine.on_round = lambda seen, trees=trees: trees.append(seen.tree)
            engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=6, temperature=1.0))
        for tree in trees:
            assert tree.draft_probs is not None
            assert bool(tree.draft_probs[0, -1].any()) is rule.needs_leaf_probs


def test_drafts_without_q_at_the_leaves_are_refused() -> None:
    tables = Tables.random(3, 1, seed=0)
    made = enumerate_drafts(tables, TreeShape.chain(1), IID)
    with pytest.raises(ValueError, match="q in row 0 at node 1 has an entry that is not finite"):
        check_drafts(CascadeVerifier(), made.tree, made.target_probs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CascadeVerifier(deferral="opf"), "deferral='opf': choose chow, diff, opt"),
        (lambda: CascadeVerifier(alpha=float("nan")), "alpha=nan: give a number"),
    ],
)
def test_bad_settings(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
