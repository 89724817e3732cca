"""Logits processors of transformers, at every node on its own path: equal to plain decoding, greedy and sampled."""

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec import Engine, SamplingParams, Target
from specdec.checks.reference import reference_decode
from tests.components import DRAFTERS, STRONGEST, fitting
from tests.models import tiny_model
from tests.test_distribution import LEVEL, NO_RESIDUAL, p_value
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")
VOCAB = 24
BIAS = {(3,): 4.0, (5, 7): 6.0, (2, 3, 5): -8.0}


def cases(prompt_length: int) -> dict[str, object]:
    return {
        "bias": SequenceBiasLogitsProcessor(BIAS),
        "no_repeat": NoRepeatNGramLogitsProcessor(2),
        "several": LogitsProcessorList([NoRepeatNGramLogitsProcessor(3), SuppressTokensLogitsProcessor([0, 1, 2])]),
        "min_new": MinNewTokensLengthLogitsProcessor(prompt_length, 6, [4]),
        "mask_by_last": lambda ids, scores: scores.masked_fill(
            (torch.arange(scores.shape[1]) + ids[:, -1:]) % 3 == 0, -torch.inf
        ),
    }


# By default every processor with one tree; every drafter with a processor that looks at the path is marked ``full``.
@pytest.mark.parametrize(
    ("drafter", "case"),
    [
        complete(drafter, case, strong=drafter == STRONGEST["rejection"] or (drafter, case) == ("ngram", "no_repeat"))
        for drafter in DRAFTERS
        for case in cases(1)
        if case == "no_repeat" or drafter == STRONGEST["rejection"]
    ],
)
def test_greedy_equals_the_reference(drafter: str, case: str) -> None:
    model = tiny_model(vocab_size=VOCAB)
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (6, 1, 11)]
    wanted = [
        SamplingParams(max_new_tokens=14, logits_processor=cases(len(p))[case], stop_token_ids=(4,)) for p in prompts
    ]
    wanted.append(SamplingParams(max_new_tokens=14))  # a row without any shares the batch
    prompts.append(prompts[0])
    made = DRAFTERS[drafter](model)
    engine = Engine(Target(model), made, fitting(made), max_batch_size=3, max_length=40)
    outputs = [list(output.token_ids) for output in engine.generate(prompts, wanted)]
    stops = [frozenset(sampling.stop_token_ids) for sampling in wanted]
    expected = [reference_decode(model, p, s, stop_ids=stop) for p, s, stop in zip(prompts, wanted, stops, strict=True)]
    assert outputs == expected
    without = reference_decode(model, prompts[0], SamplingParams(max_new_tokens=14), stop_ids=stops[0])
    assert expected[0] != without or case == "min_new"


@pytest.mark.full
def test_the_sampled_distribution_is_the_processed_one() -> None:
    model = tiny_model(vocab_size=5, scale=1.5, layers=2)
    sampling = SamplingParams(temperature=1.0, logits_processor=SequenceBiasLogitsProcessor({(1, 3): 2.0, (4,): -1.0}))
    assert p_value(model, "model_chain_iid", RejectionVerifier(), sampling, samples=1500) > LEVEL
    # Mutant: a rejected draft is followed by a token from p, not from the residual.
    assert p_value(model, "model_chain_iid", NO_RESIDUAL, sampling, samples=1500) < LEVEL


def test_scores_of_another_shape_and_what_is_no_processor_are_refused() -> None:
    """One row of scores would be spread over all the nodes of a depth."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    engine = Engine(Target(model), DRAFTERS["model_tree_iid"](model), RejectionVerifier(), max_length=40)
    sampling = SamplingParams(max_new_tokens=8, logits_processor=lambda ids, scores: scores[0])
    with pytest.raises(ValueError, match="logits processor"):
        engine.generate([[1, 2, 3]], sampling)
    with pytest.raises(ValueError, match="logits_processor"):
        SamplingParams(logits_processor=["x"])
