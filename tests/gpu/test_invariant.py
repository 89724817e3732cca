"""Invariant mode on a GPU, whose kernels choose the order of their sums by the shape, too."""

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import DraftSampling
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model
from tests.specdec.invariant_forwards import PATH, PROMPTS, VOCAB, chain, one_by_one, runner_for, same, tokens, trees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tokens_logits_do_not_depend_on_the_forward(dtype: torch.dtype) -> None:
    runner = runner_for(tiny_model(vocab_size=VOCAB).to(dtype).cuda())  # type: ignore[arg-type]
    given = tokens().cuda()
    plain = one_by_one(runner, given)
    assert same(chain(runner, given, slot=1), plain)
    starts, slots = (22, 13, 3), (2, 0, 1)
    found = trees(runner, given, starts, slots)
    for row, start in enumerate(starts):
        assert same(found[row, PATH], plain[start : start + len(PATH)])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_drafters_greedy_output_is_plain_decodings(drafter: str) -> None:
    full = tiny_model(vocab_size=VOCAB).cuda()
    made = DRAFTERS[drafter](full)
    coupled = DraftSampling.COUPLED in made.laws
    sampling = [
        SamplingParams(max_new_tokens=10, temperature=float(coupled and row % 2)) for row in range(len(PROMPTS))
    ]
    target = Target(full.bfloat16())
    with Engine(target, made, fitting(made), max_batch_size=2, max_length=64, invariant=True) as engine:
        outputs = [each.token_ids for each in engine.generate(PROMPTS, sampling)]
        assert outputs == [each.token_ids for each in engine.generate(PROMPTS, sampling, speculate=False)]
