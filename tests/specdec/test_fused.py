"""Forwards as on a GPU: rewritten in a few kernels, which Triton interprets here, with the model's own results."""

import sys
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from drafters.ngram import NGramDrafter
from specdec import Engine, ModelRunner, Paging, SamplingParams, Target
from specdec.attention import BACKENDS
from specdec.execution.executor import Executor
from specdec.execution.forwards import CurrentForward, FusedExecutor, _Rewriter, executor_for
from specdec.host import without_looking
from specdec.kernels import obstacle
from specdec.quantization import quantize
from specdec.target.facts import find
from tests.models import tiny_model
from tests.plain_kernels import plain_add_norm, plain_gated
from tests.specdec.test_forward import rounds, runner_of
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("specdec.kernels.layers")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")
LOOPS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 1, 2, 3, 1, 2]]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["32", "16", "b16"])
assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def fused(runner: ModelRunner, table: Any = None) -> ModelRunner:
    runner.executor = FusedExecutor(runner.model, runner.facts, runner.backend, table or kernels)
    return runner


def decoded(model: PreTrainedModel, *, fuse: bool, **options: Any) -> list[tuple[int, ...]]:
    options |= {"max_batch_size": 2, "max_length": 64, "recording": "off", "optimize": fuse}
    with Engine(Target(model), NGramDrafter(max_draft_tokens=3), RejectionVerifier(), **options) as engine:
        executor: Any = fused(engine.runner).executor if fuse else None
        engine.runner.joins = False  # as on a GPU: prompts of several lengths go by themselves
        outputs = [done.token_ids for done in engine.generate(LOOPS, SamplingParams(max_new_tokens=7))]
        assert executor is None or (len(executor.recordings.kept) > 1 and not executor.recordings.refused)
        return outputs


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma3", {}),
        ("qwen3", {"cache": Paging(page_size=8)}),
        complete("llama", {"kv_cache": "int8"}, strong=False),
        *(complete(each, {}, strong=False) for each in ("qwen2", "gemma2", "phi3", "gpt2", "mistral_sliding")),
    ],
)
def test_greedy_tokens_are_those_of_the_models_own_code(architecture: str, options: dict[str, Any]) -> None:
    model = tiny_model(architecture, scale=4.0, layers=2)
    assert decoded(model, fuse=True, **options) == decoded(model, fuse=False, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["16", "b16"])
@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
@torch.inference_mode()
def test_half_precision_rounds_where_the_model_does(architecture: str, dtype: torch.dtype) -> None:
    """Logits of two rounds, the second one over what the first one has written to the cache."""
    model = tiny_model(architecture, layers=1)
    nn.Module.to(model, dtype)
    runners = runner_of(model, optimize=False), fused(runner_of(model))
    expected, found = (list(islice(rounds(runner), 2)) for runner in runners)
    assert {each.dtype for each in found} == {dtype}
    assert_close(found, expected, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)


@torch.inference_mode()
def test_a_single_row_of_a_length_that_the_host_does_not_know() -> None:
    model = tiny_model("llama", layers=2)
    expected, runner = next(rounds(runner_of(model, optimize=False), 1)), fused(runner_of(model, attention="triton"))
    with without_looking():
        assert_close([next(rounds(runner, 1))], [expected])


WRONG = {
    "rotate": lambda *given: kernels.rotate(*given[:4], -given[4], *given[5:]),
    "add_norm": lambda x, residual, weight, *given: kernels.add_norm(x, residual, 0.5 * weight, *given),
    "gated": Mock(side_effect=RuntimeError("PassManager::run failed")),
}


@pytest.mark.parametrize("name", WRONG)
@torch.inference_mode()
def test_a_wrong_kernel_is_refused_and_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", layers=2)
    expected = list(rounds(runner_of(model, optimize=False)))
    runner = fused(runner_of(model), SimpleNamespace(**vars(kernels) | {name: WRONG[name]}))
    assert_close([*rounds(runner), *rounds(runner, 1)], [*expected, *rounds(runner_of(model, optimize=False), 1)])
    assert len(caplog.records) == 1 and "are not recorded" in caplog.text
    assert not runner.executor.recordings.kept  # type: ignore[attr-defined]


@torch.inference_mode()
def test_quantized_layers_are_one_operation_each() -> None:
    model = tiny_model("llama", layers=2)
    quantize(model, "int8")
    expected = list(rounds(runner_of(model, optimize=False)))
    runner = fused(runner_of(model))
    # Inputs of products are rounded to bfloat16, on either side of a tie.
    assert_close(list(rounds(runner)), expected, atol=0.05, rtol=0.05)
    assert runner.executor.recordings.kept  # type: ignore[attr-defined]
    assert not any("forward" in vars(module) for module in model.modules())


class Keeps(nn.Module):
    """Keeps a table that it makes when it is first used, as some rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table, self.last = torch.arange(3.0), x
        return x * self.table + torch.tensor([1.0, 2.0, 3.0])


@torch.inference_mode()
def test_no_tensor_without_numbers_stays_and_code_that_looks_at_numbers_or_writes_is_left_alone() -> None:
    module, x = Keeps(), torch.randn(2, 3)
    rewriter = _Rewriter(module, kernels, CurrentForward(None))  # type: ignore[arg-type]

    def written(x: Tensor) -> list[Tensor]:
        y = nn.functional.silu(x)
        return [(y * x).add_(y)]

    for work in (lambda x: [module(x)], written):
        expected = work(x)[0]
        assert torch.equal(rewriter.program(work, [x])(x)[0], expected)
    assert not any(isinstance(each, FakeTensor) for each in (module.last, module.table))
    with pytest.raises(Exception, match="_local_scalar_dense"):
        rewriter.program(lambda x: [x * 2 if float(x.sum()) > 0 else x], [x])


def steps_apart(found: Tensor, expected: Tensor) -> float:
    """The largest distance of two tensors in steps of their dtype at the expected number's size."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    info = torch.finfo(expected.dtype)
    size = torch.exp2(torch.floor(torch.log2(expected.double().abs().clamp_min(info.tiny))))
    return float(((found.double() - expected.double()).abs() / (size * info.eps)).max())


NORMS: dict[str, tuple[tuple[int, ...], bool, bool, float]] = {
    "Llama": ((2, 3, 96), True, True, 0.0),
    "Gemma": ((2, 3, 64), True, False, 1.0),
    "without a weight": ((5, 40), False, False, 0.0),
}
"""The shape; whether there is a weight; what is rounded; what is added to the weight."""


@dtypes
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_with_its_residual(name: str, dtype: torch.dtype) -> None:
    shape, weighted, rounds, offset = NORMS[name]
    # A residual that nearly cancels: rows whose squares are about as large as eps.
    x = 0.01 * torch.randn(*shape).to(dtype)
    residual = 0.01 * torch.randn(*shape).to(dtype)
    weight = torch.randn(shape[-1], dtype=dtype) if weighted else None
    expected, total = plain_add_norm(x, residual, weight, 1e-4, rounds, offset)
    found = kernels.add_norm(x, residual, weight, 1e-4, rounds, offset)
    assert torch.equal(found[1], total)
    assert steps_apart(found[0], expected) <= (8 if dtype is torch.float32 else 1)  # sums in another order
    for eps, moved in ((0.0, offset), (1e-4, offset + 0.01)):  # forgotten, or nearly so
        wrong = kernels.add_norm(x, residual, weight, eps, rounds, moved)[0]
        assert steps_apart(wrong, expected) > 8 or (eps and not weighted)


@dtypes
@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_a_gate(activation: str, dtype: torch.dtype) -> None:
    both = 3 * torch.randn(2, 3, 2 * 1100, dtype=dtype)
    gate, up = both.chunk(2, dim=-1)  # halves of one product; more than one block, and a part of another
    expected = plain_gated(gate, up, activation)
    found = kernels.gated(gate, up, activation)
    # In float32, exponentials differ in their last places, and 1 + tanh loses some where the gate is nearly closed.
    open_enough = gate > -2
    assert found.is_contiguous()
    assert steps_apart(found[open_enough], expected[open_enough]) <= (64 if dtype is torch.float32 else 1)
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-3, rtol=0.0)
    others = [name for name in kernels.ACTIVATIONS if name != activation]
    assert all(steps_apart(kernels.gated(gate, up, each), expected) > 64 for each in others)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "Triton is not installed (CUDA builds of torch bring it; pip install triton)"),
        ((7, 5), "this GPU has compute capability 7.5, and kernels need 8.0"),
    ],
)
def test_what_kernels_lack_is_said_once_and_torch_runs(capability, reason: str, monkeypatch, caplog) -> None:
    if capability is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    facts, model, device = find(tiny_model(layers=1)).facts, tiny_model(layers=1), torch.device("cuda")
    monkeypatch.setattr(type(model), "device", device)
    obstacle.cache_clear()
    try:
        for _ in range(2):
            assert isinstance(executor_for(model, facts, BACKENDS["grouped"], optimize=True), Executor)
            assert str(BACKENDS["triton"].check(model)).startswith(reason)
    finally:
        obstacle.cache_clear()
    assert [record.getMessage().partition("because ")[2][: len(reason)] for record in caplog.records] == [reason]
