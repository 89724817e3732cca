"""Speculative cascades through the engine: exact with respect to the stated mixture, and which drafters they take."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.model import ModelDrafter
from specdec.checks.reference import reference_decode
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.requests import SamplingParams
from specdec.sampling import adjust, distribution
from specdec.target.target import Target
from tests.components import TREE, perturbed
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.test_distribution import LEVEL, goodness
from tests.verifiers.cascade_mutants import residual_of_the_target, target_after_leaves
from verifiers import CascadeVerifier

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
    [target_after_leaves, pytest.param(residual_of_the_target, marks=pytest.mark.full)],  # enumerated above
)
def test_a_biased_rule_is_rejected(model, mutant: Callable[..., Verifier]) -> None:
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
