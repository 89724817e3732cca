"""Forwards on a GPU: invariant mode, the kernels' numbers, and programs in rounds and in graphs."""

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.engine.engine import Engine
from specdec.execution.forwards import FusedExecutor
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import DraftSampling
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model
from tests.plain_kernels import plain_add_norm, plain_gated, plain_rotate
from tests.specdec.invariant_forwards import PATH, PROMPTS, VOCAB, chain, one_by_one, runner_for, same, tokens, trees
from verifiers.rejection import RejectionVerifier

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


layers = pytest.importorskip("specdec.kernels.layers")

CUDA = torch.device("cuda")
LOOPS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 1, 2, 3, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["32", "16", "b16"])
def test_kernels_at_the_sizes_of_an_8b(dtype: torch.dtype) -> None:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA).to(dtype)

    def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
        few = 1e-5 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, atol=few, rtol=few)

    for rows in (1, 60, 1920):
        x, residual, weight = drawn(1, rows, 4096), drawn(1, rows, 4096), drawn(4096)
        for form in ((True, 0.0), (False, 1.0)):
            found = layers.add_norm(x, residual, weight, 1e-5, *form)
            expected = plain_add_norm(x, residual, weight, 1e-5, *form)
            assert torch.equal(found[1], expected[1])
            assert_close(found[0], expected[0])
        gate, up = drawn(1, rows, 14336), drawn(1, rows, 14336)
        for activation in layers.ACTIVATIONS:
            found_gate = layers.gated(gate, up, activation)
            assert_close(found_gate, plain_gated(gate, up, activation))
        query, key, value = (drawn(1, rows, count, 128).transpose(1, 2) for count in (32, 8, 8))
        given = query, key, value, drawn(1, 1, rows, 128), drawn(1, 1, rows, 128), None, None, None
        for one, other in zip(layers.rotate(*given), plain_rotate(*given), strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_tokens_are_those_of_the_models_own_code(architecture: str) -> None:
    model = tiny_model(architecture, scale=4.0).to(CUDA)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=60)
    found = {}
    for optimize, recording in ((False, "off"), (True, "off"), (True, "auto")):
        with Engine(
            Target(model), NGramDrafter(max_draft_tokens=3), RejectionVerifier(),
            max_batch_size=2, max_length=96, optimize=optimize, recording=recording,
        ) as engine:  # fmt: skip
            found[optimize, recording] = [done.token_ids for done in engine.generate(LOOPS, sampling)]
            executor = engine.runner.executor
            assert isinstance(executor, FusedExecutor) is optimize
            if isinstance(executor, FusedExecutor):
                assert len(executor.recordings) and not executor.recordings.refused
    assert found[True, "off"] == found[True, "auto"] == found[False, "off"]
