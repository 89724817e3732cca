"""The joint distribution of several tokens, through the whole engine, against exact enumeration of the target's.

Every test is seeded, so it either always passes or always fails; its threshold is what would fail a correct engine
once in 100 000 other seeds. Beside each stands a biased rule that it must reject.

By default every rule and every sampling is tried with the drafts that ask most of it, and every law of siblings with a
mutant; every way of drawing and the other pairs are marked ``full``.

All samples of a case decode together, each in a slot of its own: no sample waits for another's prefill.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import Drafter, DraftSampling, Engine, SamplingParams, Target, Verifier
from specdec.checks.goodness import fits
from specdec.checks.reference import next_state
from specdec.random import Purpose, request_key, shared_noise, uniforms
from specdec.sampling import SamplingTensors, distribution, forbid_ends
from tests.changed_rule import IGNORES_THE_PATH, ChangedRule, emit_p
from tests.components import DRAFTERS, EVERYWHERE, STRONGEST, VERIFIERS, skip_unfit
from tests.shapes import shapes_unchecked
from tests.verifiers.cases import complete, spread
from verifiers import RejectionVerifier, SharedNoiseVerifier, TraversalVerifier

pytestmark = pytest.mark.usefixtures("untried")

VOCAB, SCALE, LENGTH, SAMPLES = 5, 1.5, 3, 5000
FEWER = 2000  # enough for the mistakes that are far from the law
PROMPT = [1, 2, 1, 2, 1]  # tokens 0, 3, 4 are unseen: a repetition penalty depends on the path
LEVEL = 1e-5

PLAIN = SamplingParams(temperature=1.0)
SAMPLINGS = {
    "temperature 1": PLAIN,
    "top-k and top-p": SamplingParams(temperature=1.2, top_k=4, top_p=0.85),
    "min-p": SamplingParams(temperature=1.5, min_p=0.15),
    "repetition penalty": SamplingParams(temperature=1.0, repetition_penalty=1.6),
    "penalties of the output": SamplingParams(temperature=1.0, presence_penalty=0.8, frequency_penalty=1.2),
    # An end may only be the third token, behind which there is none.
    "bias and early ends": SamplingParams(
        temperature=1.0, logit_bias={0: 1.5, 3: -0.7}, bad_words_ids=[[2]], min_new_tokens=2, stop_token_ids=(4,)
    ),
}


@torch.inference_mode()
def next_law(model, sequence: list[int], sampling: SamplingParams) -> Tensor:
    """What a plain forward over a whole sequence draws from, in float64."""
    logits, ends = model(torch.tensor([sequence])).logits[0, -1], frozenset(sampling.stop_token_ids)
    state, scores = next_state(logits, sequence, sampling, prompt_length=len(PROMPT), stop_ids=ends)
    p = distribution(scores[None, None], state.sampling)[0, 0].double()
    return p / p.sum()


def joint_law(step: Callable[[list[int]], Tensor]) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens, by the law of the token that follows a sequence."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        nexts = {prefix: (mass * step([*PROMPT, *prefix])).tolist() for prefix, mass in law.items()}
        law = {(*prefix, token): mass for prefix, masses in nexts.items() for token, mass in enumerate(masses)}
    return law


def exact_law(model, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    return joint_law(lambda sequence: next_law(model, sequence, sampling))


def p_value(
    model,
    drafter: str | Drafter | None,
    verifier: Verifier,
    sampling: SamplingParams,
    *,
    samples: int = SAMPLES,
    slots: int | None = None,
) -> float:
    """Chi-square p-value of engine outputs against the exact law."""
    # A drafter that often disagrees: where it agrees, no rule can go wrong.
    made = DRAFTERS[drafter](model, distance=0.6) if isinstance(drafter, str) else drafter
    engine = Engine(Target(model), made, verifier if made else None, max_batch_size=slots or samples, max_length=32)
    wanted = replace(sampling, max_new_tokens=LENGTH, n=samples, seed=0)
    engine.generate([PROMPT], replace(wanted, n=10))  # once with shapes checked
    with shapes_unchecked():
        outputs = engine.generate([PROMPT], wanted)
        law = exact_law(model, sampling)
    if made is not None:
        assert sum(step.accepted for output in outputs for step in output.steps) > 0, "nothing was ever accepted"
    return goodness((output.token_ids for output in outputs), law)


def goodness(outputs: Iterable[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square p-value of outputs under their law (rare ones pooled); 0 if one of them is impossible."""
    counts = Counter(outputs)
    if not counts.keys() <= law.keys():
        return 0.0
    return fits(np.array([counts[output] for output in law]), np.array([*law.values()]))


@pytest.mark.parametrize("sampling", [complete(name, strong=name == "repetition penalty") for name in SAMPLINGS])
def test_plain_sampling_follows_the_target(model, sampling: str) -> None:
    assert p_value(model, None, RejectionVerifier(), SAMPLINGS[sampling]) > LEVEL


# What runs by default: every law of drafts and every sampling, each where the others make it hardest. That the rules
# themselves are exact is enumerated (tests/verifiers).
STRONG = {
    ("temperature 1", STRONGEST[verifier], verifier) for verifier in (EVERYWHERE, "traversal", "shared_noise")
} | {
    ("min-p", "ngram", EVERYWHERE),
    *((sampling, "model_chain_iid", EVERYWHERE) for sampling in SAMPLINGS if "penal" in sampling or "bias" in sampling),
    ("top-k and top-p", "model_chain_own_temperature", EVERYWHERE),
    ("temperature 1", "block_markov_chain", "block"),
    ("repetition penalty", "block_markov_tree", "traversal"),
}

# Processing changes p for all alike, and q by how it is drawn: one drafter of each law, and one with another q.
PROCESSED = ("ngram", "model_chain_iid", "model_tree_without_replacement", "model_chain_own_temperature")

# Every way of drawing. All drafters' q is compared with what they draw (tests/specdec/test_drafter_checks.py).
DRAWN = (
    *("ngram", "choice", "merged", "marginals", "hydra", "redrafter_chain_iid", "tli_tree_without_replacement"),
    *("staged_chain_iid", "mtp_priced", "model_chain_iid", "model_tree_iid", "model_tree_without_replacement"),
    *("model_sampled_tree", "model_rheo", "model_by_confidence", "eagle3_looped", "model_respelled", "block_reduced"),
    *("block_markov_tree", "block_domino_replayed", "block_refiner_tree", "eagle3_chain_iid", "adaptive"),
)

EVERY_CASE = dict.fromkeys(
    [
        *(("temperature 1", drafter, EVERYWHERE) for drafter in DRAWN),
        *((*each, EVERYWHERE) for each in spread([*SAMPLINGS][1:], PROCESSED, 2)),
        *(("temperature 1", STRONGEST[rule], rule) for rule in VERIFIERS),
        ("temperature 1", "model_by_confidence", "traversal"),
        # With shared noise the output does not depend on the drafter (tests/test_lossless.py): one is enough.
        ("repetition penalty", "model_tree_coupled", "shared_noise"),
        *sorted(STRONG),
    ]
)


def test_the_default_cases_cover_every_sampling_and_law(model) -> None:
    samplings, drafters, _ = map(set, zip(*STRONG, strict=True))
    assert samplings == set(SAMPLINGS)
    assert set().union(*(DRAFTERS[name](model).laws for name in drafters)) == set(DraftSampling)


@pytest.mark.parametrize(
    ("sampling", "drafter", "verifier"), [complete(*case, strong=case in STRONG) for case in EVERY_CASE]
)
def test_speculation_follows_the_target(model, drafter: str, verifier: str, sampling: str) -> None:
    rule = VERIFIERS[verifier]()
    skip_unfit(DRAFTERS[drafter](model), rule)
    assert p_value(model, drafter, rule, SAMPLINGS[sampling]) > LEVEL


NO_RESIDUAL = ChangedRule(RejectionVerifier(), after=emit_p)
REJECTED = [
    complete("model_chain_iid", IGNORES_THE_PATH, "temperature 1", strong=True),
    complete("model_chain_iid", NO_RESIDUAL, "repetition penalty", strong=True),
    complete("model_tree_iid", NO_RESIDUAL, "temperature 1", strong=False),
    complete(
        "model_tree_without_replacement", ChangedRule(TraversalVerifier(), after=emit_p), "temperature 1", strong=True
    ),
]


@pytest.mark.parametrize(("drafter", "mutant", "sampling"), REJECTED)
def test_a_biased_rule_is_rejected(model, drafter: str, mutant: Verifier, sampling: str) -> None:
    samples = FEWER if drafter == "model_chain_iid" else SAMPLES
    assert p_value(model, drafter, mutant, SAMPLINGS[sampling], samples=samples) < LEVEL


@pytest.mark.parametrize("sampling", ["repetition penalty", "penalties of the output", "bias and early ends"])
def test_the_penalty_of_the_wrong_prefix_is_rejected(model, monkeypatch: pytest.MonkeyPatch, sampling: str) -> None:
    """Mutant: every node is penalized, or kept from ending, for the sequence only, not for the path above it."""

    def root_only(tokens: Tensor, ancestors: Tensor) -> Tensor:
        return tokens[:, :1, None].expand(*tokens.shape, 1)

    def at_root(scores: Tensor, state: SamplingTensors, positions: Tensor) -> Tensor:
        return forbid_ends(scores, state, positions[:, :1].expand_as(positions))

    monkeypatch.setattr("specdec.engine.round.path_tokens", root_only)
    monkeypatch.setattr("specdec.engine.round.forbid_ends", at_root)
    assert p_value(model, "model_chain_iid", RejectionVerifier(), SAMPLINGS[sampling], samples=FEWER) < LEVEL


def test_shared_noise_that_comes_twice_is_rejected(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the noise of a position is the next one's as well. Each token's own law is still right."""

    def repeated(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        return shared_noise(keys, positions // 2, vocab_size)

    monkeypatch.setattr("specdec.coupling.shared_noise", repeated)
    assert p_value(model, "model_tree_coupled", SharedNoiseVerifier(), PLAIN, samples=FEWER) < LEVEL


@pytest.mark.full
def test_one_seed_for_all_requests_is_rejected(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: requests share their random numbers."""
    monkeypatch.setattr("specdec.engine.slot_table.request_key", lambda seed, stream: request_key(seed, stream % 50))
    assert p_value(model, None, RejectionVerifier(), PLAIN, samples=FEWER) < LEVEL


def test_one_coin_per_request_is_rejected(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: every round of a request accepts by the same numbers."""

    def same_every_round(keys: Tensor, rounds: Tensor, purpose: Purpose, count: int) -> Tensor:
        return uniforms(keys, torch.zeros_like(rounds), purpose, count)

    monkeypatch.setattr("specdec.engine.round.uniforms", same_every_round)
    assert p_value(model, "ngram", RejectionVerifier(), PLAIN, samples=FEWER) < LEVEL
