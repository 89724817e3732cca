"""Numbers that are not finite end the request that they belong to, and no other."""

import pytest
import torch

from drafters import ModelDrafter
from specdec import Engine, SamplingParams, Target
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.specdec.test_engine_failures import PROMPTS, SAMPLING, VOCAB
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier


@pytest.mark.parametrize("kind", ["model_tree_without_replacement", complete("ngram", strong=False)])
def test_nan_logits_near_the_last_position_end_that_request_only(kind: str) -> None:
    """The row has no room for what a verdict without meaning would emit."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    bad, length = VOCAB - 1, 24
    prompts = [[*range(1, 23), bad], [1, 2, 1, 2, 1]]
    sampling = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=8)]
    wanted = Engine(Target(model), max_length=length).generate(prompts[1:], sampling[1:])[0].token_ids
    assert bad not in wanted
    drafter = DRAFTERS[kind](model)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=length)
    failed, other = engine.generate(prompts, sampling)
    assert failed.finish_reason == "error" and "not finite in round 0" in str(failed.error)
    assert other.token_ids == wanted


@pytest.mark.parametrize(
    ("batch", "kv_cache"),
    [(2, "int8"), *(complete(*each, strong=False) for each in ((1, None), (2, None), (2, "fp8")))],
)
def test_nan_logits_end_that_request_only_and_go_with_it(batch: int, kv_cache: str | None) -> None:
    model, bad, options = tiny_model(vocab_size=VOCAB, layers=2), VOCAB - 1, {"max_length": 64, "kv_cache": kv_cache}
    drafter = ModelDrafter(perturbed(model, 0.1), [2, 1])
    wanted = [o.token_ids for o in Engine(Target(model), **options).generate(PROMPTS, SAMPLING)]
    assert not any(bad in tokens for tokens in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=batch, **options)
    outputs = engine.generate([PROMPTS[0], [1, 2, bad, 3], *PROMPTS[1:]], SAMPLING)
    failed = outputs.pop(1)
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    assert "not finite in round" in str(failed.error)
    assert [o.token_ids for o in outputs] == wanted
    # The slot that held NaN is clean again.
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
