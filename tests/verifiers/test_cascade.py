"""Cascades and mixtures, exact with respect to the mixture that they state."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.model import ModelDrafter
from specdec import DraftTree, Engine, Laws, SamplingParams, Target, TreeShape, Verifier
from specdec.checks.drafts import enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.wellformed import check_drafts
from tests.changed_rule import ChangedRule, emit_p
from tests.components import TREE, perturbed
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.test_distribution import LENGTH, LEVEL, PROMPT, VOCAB, goodness, joint_law, next_law
from tests.verifiers.cases import BIASED, EXACT, IID, KINDS, SHAPES, SWOR, tables_of
from verifiers import CascadeVerifier, MixtureVerifier, RejectionVerifier
from verifiers.cascade import DEFERRALS, ensemble_head

SOME = dict.fromkeys(DEFERRALS, 0.3)
NONE = {"chow": -0.1, "diff": -1.1, "opt": -1e9, "token_v1": -1.1, "token_v2": -1.1, "token_v3": -0.1}
ALL = {"chow": 1.0, "diff": 1.0, "opt": 1e9, "token_v1": 1.0, "token_v2": 1.0, "token_v3": 1.0}


@pytest.mark.parametrize("deferral", DEFERRALS)
def test_the_output_law_is_the_mixture(deferral: str) -> None:
    """Which is the target's law if nothing is kept of the drafter, and the drafter's if everything is."""
    for kinds, law in itertools.product(("dense", "every kind"), (IID, (IID, SWOR, SWOR))):
        tables = Tables.random(3, 2, seed=3, kinds=KINDS[kinds])
        rule = CascadeVerifier(deferral=deferral, alpha=SOME[deferral])
        result = enumerate_outcome(rule, tables, SHAPES["2x2"], law)
        assert result.tv < EXACT
        assert result.target_tv > BIASED or kinds != "dense"
    tables = Tables.random(4, 2, seed=1, kinds=("dense", "zeros", "disjoint"))
    mine = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=NONE[deferral]), tables, SHAPES["2x2"], SWOR)
    exact = enumerate_outcome(RejectionVerifier(), tables, SHAPES["2x2"], SWOR)
    assert mine.target_tv < EXACT
    assert mine.expected_accepted == pytest.approx(exact.expected_accepted, abs=EXACT)
    result = enumerate_outcome(CascadeVerifier(deferral=deferral, alpha=ALL[deferral]), tables, TreeShape.chain(2), IID)
    assert tables.q is not None
    assert float((result.joint - Tables(tables.q, tables.q).joint(3)).abs().sum()) < EXACT
    assert result.expected_accepted == pytest.approx(2, abs=EXACT)


def uncapped(share: float) -> ChangedRule:
    """Accepts with min(1, p / (w q)), as if the ratio alone were to be relaxed."""

    def stop(tree: DraftTree, target_probs: Tensor, laws: Laws) -> Tensor:
        token = tree.tokens[:, 1:]
        ratio = target_probs[:, 0].gather(1, token) / tree.draft_probs[:, 0].gather(1, token)  # type: ignore[index]
        accepted = (ratio / share).clamp(max=1)
        return torch.cat([1 - accepted, accepted], 1)

    return ChangedRule(MixtureVerifier(target_share=share), stop=stop)


@pytest.mark.parametrize(
    ("share", "accepted", "distance", "wrong"),
    [(1.0, 0.75, 0.0, 0.0), (0.7, 0.825, 0.075, 0.139286), (0.3, 0.925, 0.175, 0.075), (0.0, 1.0, 0.25, None)],
)
def test_constant_shares(share: float, accepted: float, distance: float, wrong: float | None) -> None:
    """One step by hand, the mutant's distance to the mixture, and the law on trees."""
    p, q = (0.45, 0.30, 0.15, 0.10), (0.60, 0.05, 0.25, 0.10)
    # p follows, so that all distances are those of one step.
    tables = tables_of({(): p, **{(x,): p for x in range(4)}}, {(): q, **{(x,): p for x in range(4)}})
    rule, chain = MixtureVerifier(target_share=share), TreeShape.chain(1)
    found = enumerate_outcome(rule, tables, chain, IID)
    assert (found.expected_accepted, found.target_tv) == pytest.approx((accepted, distance), abs=EXACT)
    if wrong is not None:
        assert enumerate_outcome(uncapped(share), tables, chain, IID).tv == pytest.approx(wrong, abs=1e-6)
    for kinds, law in itertools.product(("dense", "every kind"), (IID, (IID, SWOR, SWOR))):
        assert enumerate_outcome(rule, Tables.random(3, 2, seed=3, kinds=KINDS[kinds]), SHAPES["2x2"], law).tv < EXACT


def test_learned_shares(tmp_path: Path) -> None:
    """A head's shares go node by node; p and q stand for the hidden states, of which a rule sees nothing."""
    file, generator = tmp_path / "ensemble_head.bin", torch.Generator().manual_seed(0)
    weight, bias = 3 * torch.randn(2, 6, generator=generator), torch.tensor([0.5, 0.0])
    torch.save({"summary.weight": weight.bfloat16(), "summary.bias": bias.bfloat16()}, file)
    head = ensemble_head(file, drafter=3, target=3)
    assert torch.equal(head(torch.zeros(6)).softmax(-1), bias.softmax(-1)), "the drafter's share comes first"
    shares = lambda p, q, *_: head.double()(torch.cat([q, p], -1)).softmax(-1)[..., :1].detach()  # noqa: E731
    found = enumerate_outcome(CascadeVerifier(deferral=shares), Tables.random(3, 2, seed=3), SHAPES["2x2"], SWOR)
    assert found.tv < EXACT and found.target_tv > BIASED
    with pytest.raises(ValueError, match=r"shape \[2, 6\].* 4 and 3 numbers need \[2, 7\]"):
        ensemble_head(file, drafter=4, target=3)
    torch.save({"weight": weight}, file)
    with pytest.raises(ValueError, match="holds no summary"):
        ensemble_head(file, drafter=3, target=3)


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


def test_rows_and_leaves_without_q_and_a_rule_of_ones_own() -> None:
    def rare(p: Tensor, q: Tensor, distance: Tensor, alpha: float) -> Tensor:
        return p < alpha

    rule = CascadeVerifier(deferral=rare, alpha=0.25)
    torch.testing.assert_close(rule.stated_law(P, Q), torch.tensor([0.25, 0.15, 0.4, 0.2], dtype=torch.float64))
    assert enumerate_outcome(rule, Tables.random(4, 2, seed=1), SHAPES["2x2"], SWOR).tv < EXACT
    p, q = torch.rand(2, 2, 2, 5).softmax(-1)
    q[0] = 0
    tokens, valid = torch.tensor([[3, 0], [3, 1]]), torch.tensor([[True, False], [True, True]])
    tree = DraftTree.from_shape(TreeShape.chain(1), tokens, valid=valid, sampling=IID, draft_probs=q)
    laws = CascadeVerifier(deferral="chow", alpha=1.0).laws(tree, p)
    assert torch.equal(laws.stop[0], torch.tensor([1.0, 0.0]))
    assert torch.equal(laws.after(torch.zeros(2, dtype=torch.long))[0], p[0, 0])
    torch.testing.assert_close(laws.after(torch.tensor([0, 1]))[1], q[1, 1])
    made = enumerate_drafts(Tables.random(3, 1, seed=0), TreeShape.chain(1), IID)
    with pytest.raises(ValueError, match="row 0, node 1"):
        check_drafts(CascadeVerifier(), made.tree, made.target_probs)


def _after_leaves(tree: DraftTree, target_probs: Tensor, laws: Laws, stop: Tensor) -> Tensor:
    leaf = ~((tree.parents == stop[:, None]) & tree.valid).any(1, keepdim=True)
    return emit_p(tree, target_probs, laws, stop).where(leaf, laws.after(stop))


REJECTION = RejectionVerifier()
MUTANTS: dict[str, Callable[[Verifier], ChangedRule]] = {
    # Without q at the leaves, a path that ends at one goes on with p, as in transformers.
    "p after leaves": lambda rule: ChangedRule(rule, after=_after_leaves),
    "emits what is left of p": lambda rule: ChangedRule(
        rule, after=lambda tree, p, laws, stop: REJECTION.laws(tree, p).after(stop)
    ),
    "accepts towards p": lambda rule: ChangedRule(rule, stop=lambda tree, p, laws: REJECTION.laws(tree, p).stop),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("deferral", ["diff", "token_v3"])
def test_enumeration_rejects(mutant: str, deferral: str) -> None:
    wrong = MUTANTS[mutant](CascadeVerifier(deferral=deferral, alpha=0.2))
    result = enumerate_outcome(wrong, Tables.random(4, 2, seed=3), SHAPES["2x2"], SWOR)
    assert result.tv > BIASED
    assert result.joint.sum().item() == pytest.approx(1, abs=1e-9)


SAMPLES = 1000
FILTERED = SamplingParams(temperature=1.2, top_k=4, top_p=0.85, repetition_penalty=1.3)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("rule", [CascadeVerifier(deferral="token_v3", alpha=0.4), MixtureVerifier(target_share=0.3)])
def test_the_engine_follows_the_mixture(rule: Verifier, right: bool) -> None:
    """Once in 100 000 other seeds a correct engine fails; the mutant goes on with p behind leaves."""
    model = tiny_model("llama", vocab_size=VOCAB, scale=1.5, layers=2)
    twin, rule = perturbed(model, 0.6), rule if right else MUTANTS["p after leaves"](rule)
    law = joint_law(lambda sequence: rule.stated_law(*(next_law(each, sequence, FILTERED) for each in (model, twin))))
    drafter = ModelDrafter(twin, [2, 1], sampling="without_replacement")
    engine = Engine(Target(model), drafter, rule, max_batch_size=500, max_length=32)
    outputs = engine.generate([PROMPT], replace(FILTERED, max_new_tokens=LENGTH, n=SAMPLES, seed=0))
    assert (goodness((output.token_ids for output in outputs), law) > LEVEL) is right


PROMPTS = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5]]


@torch.inference_mode()
def most_probable(model, twin, prompt: list[int], length: int, law: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """The most probable token of a law of p and q at temperature 1, again and again."""
    sequence = list(prompt)
    for _ in range(length):
        p, q = (m(torch.tensor([sequence])).logits[0, -1].softmax(-1) for m in (model, twin))
        sequence.append(int(law(p, q).argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("rule", [CascadeVerifier(deferral="diff", alpha=0.0), MixtureVerifier(target_share=0.6)])
def test_temperature_zero_is_decided_at_temperature_one(rule: Verifier) -> None:
    """Token for token, beside a sampled row, after which slots are refilled; both models have their say."""
    model = tiny_model("llama", vocab_size=24, layers=2)
    twin, greedy = perturbed(model, 0.6), SamplingParams(max_new_tokens=12)
    sampled = SamplingParams(temperature=1.0, max_new_tokens=9)
    laws = (rule.stated_law, lambda p, q: p, lambda p, q: q)
    wanted, *alone = ([most_probable(model, twin, prompt, 12, each) for prompt in PROMPTS] for each in laws)
    assert wanted not in alone
    engine = Engine(Target(model), ModelDrafter(twin, TREE), rule, max_batch_size=3, max_length=40, prefill_chunk=3)
    prompts, sampling = [PROMPTS[0], [3, 4], *PROMPTS[1:]], [greedy, sampled, greedy, greedy]
    first, drawn, *others = (list(each.token_ids) for each in engine.generate(prompts, sampling))
    assert [first, *others] == wanted
    assert drawn != reference_decode(model, [3, 4], sampled.seeded(1))
    both = (greedy, sampled)
    plain = [list(each.token_ids) for each in engine.generate(PROMPTS[:1] * 2, both, speculate=False)]
    assert plain == [reference_decode(model, PROMPTS[0], each.seeded(number)) for number, each in enumerate(both)]
    assert plain[0] != first
