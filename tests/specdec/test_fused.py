"""Forwards as on a GPU: rewritten in a few kernels, which Triton interprets here, with the model's own results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

import specdec.execution.forwards
import specdec.target.runner
from drafters.ngram import NGramDrafter
from specdec import Engine, ModelRunner, Paging, SamplingParams, Target
from specdec.counting import is_view
from specdec.execution.forwards import FusedExecutor, _restored, _Rewriter, triton_kernels
from specdec.execution.patterns import Kernels, Layers
from specdec.execution.program import Step
from specdec.execution.recorder import _while_recording
from specdec.host import without_looking
from specdec.quantization import quantize
from tests.launches import FREE
from tests.models import tiny_model
from tests.specdec.test_forward import rounds, runner_of
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")


@pytest.fixture
def fuses(monkeypatch: pytest.MonkeyPatch) -> list[FusedExecutor]:
    """Let runners take the executor of GPUs; returns those that they have taken."""
    taken: list[FusedExecutor] = []

    def executor_for(model: Any, facts: Any, backend: Any, **options: Any) -> FusedExecutor:
        taken.append(FusedExecutor(model, facts, backend, triton_kernels()))
        return taken[-1]

    monkeypatch.setattr(specdec.target.runner, "executor_for", executor_for)
    return taken


def fused(runner: ModelRunner, table: Kernels | None = None) -> ModelRunner:
    runner.executor = FusedExecutor(runner.model, runner.facts, runner.backend, table or triton_kernels())
    return runner


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 1, 2, 3, 1, 2]]


def decoded(model: PreTrainedModel, **options: Any) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=7)
    drafter = NGramDrafter(max_draft_tokens=3)
    with Engine(
        Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64, recording="off", **options
    ) as engine:
        return [done.token_ids for done in engine.generate(PROMPTS, sampling)]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("qwen3", {"cache": Paging(page_size=8)}),
        complete("llama", {"kv_cache": "int8"}, strong=False),
        *(complete(each, {}, strong=False) for each in ("qwen2", "gemma2", "phi3", "gpt2", "mistral_sliding")),
    ],
)
def test_greedy_tokens_are_those_of_the_models_own_code(
    architecture: str, options: dict[str, Any], fuses: list[FusedExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(architecture, scale=4.0, layers=2)
    found = decoded(model, **options)
    assert len(fuses[0].recordings) > 1 and not fuses[0].recordings.refused
    monkeypatch.undo()
    assert found == decoded(model, optimize=False, **options)


def is_launch(step: Step) -> bool:
    if not isinstance(step.function, OpOverload):
        return True
    name = step.function._schema.name.removeprefix("aten::")
    return not is_view(step.function) and name not in FREE | {"reshape"}


@pytest.mark.parametrize(("architecture", "most"), [("llama", 12), ("qwen2", 12), ("qwen3", 12), ("gemma3", 14)])
@torch.inference_mode()
def test_the_kernels_of_a_layer(architecture: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention are among them; attention may take one more."""
    programs: list[list[Step]] = []
    write = specdec.execution.forwards.write_program
    monkeypatch.setattr(
        specdec.execution.forwards,
        "write_program",
        lambda steps, *given: programs.append(steps) or write(steps, *given),
    )
    for layers in (2, 4):  # both kinds of layers, each with a table of sines
        next(rounds(fused(runner_of(tiny_model(architecture, layers=layers)))))
    few, more = (sum(map(is_launch, steps)) for steps in programs)
    assert more - few == 2 * most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["16", "b16"])
@torch.inference_mode()
def test_half_precision_rounds_where_the_model_does(dtype: torch.dtype) -> None:
    model = tiny_model("gemma3", layers=1)
    nn.Module.to(model, dtype)
    expected = next(rounds(runner_of(model, optimize=False)))
    found = next(rounds(fused(runner_of(model))))
    assert found.dtype is dtype
    assert_close([found], [expected], 4 * torch.finfo(dtype).eps)


@torch.inference_mode()
def test_a_single_row_and_lengths_that_the_host_does_not_know() -> None:
    model = tiny_model("llama", layers=2)
    expected = next(rounds(runner_of(model, optimize=False), 1))
    assert_close([next(rounds(fused(runner_of(model)), 1))], [expected])
    runner = fused(runner_of(model, attention="triton"))
    with without_looking():
        assert_close([next(rounds(runner, 1))], [expected])


def _sines_turned(*given: Any) -> tuple[Tensor, Tensor]:
    return triton_kernels().rotate(*given[:4], -given[4], *given[5:])


def _weight_forgotten(x: Tensor, residual: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    return triton_kernels().add_norm(x, residual, 0.5 * weight, *given)


def _broken(*given: Any) -> Tensor:
    raise RuntimeError("PassManager::run failed")


WRONG: dict[str, Callable[..., Any]] = {"rotate": _sines_turned, "add_norm": _weight_forgotten, "gated": _broken}


@pytest.mark.parametrize("name", WRONG)
@torch.inference_mode()
def test_a_wrong_kernel_is_refused_and_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", layers=2)
    expected = list(rounds(runner_of(model, optimize=False)))
    runner = fused(runner_of(model), triton_kernels()._replace(**{name: WRONG[name]}))
    assert_close([*rounds(runner), *rounds(runner, 1)], [*expected, *rounds(runner_of(model, optimize=False), 1)])
    assert len(caplog.records) == 1 and "is not rewritten" in caplog.text
    assert not runner.executor.recordings.keys  # type: ignore[attr-defined]


@torch.inference_mode()
def test_while_a_graph_is_recorded_only_known_programs_run() -> None:
    runner = fused(runner_of(tiny_model("llama", layers=2)))
    recordings = runner.executor.recordings  # type: ignore[attr-defined]
    with _while_recording():
        expected = list(rounds(runner))
    assert not recordings.keys
    list(rounds(runner))
    before = recordings.replays
    with _while_recording():
        assert_close(list(rounds(runner)), expected)
    assert recordings.replays == before + 4


@torch.inference_mode()
def test_quantized_layers_are_one_operation_each() -> None:
    model = tiny_model("llama", layers=2)
    quantize(model, "int8")
    expected = list(rounds(runner_of(model, optimize=False)))
    runner = fused(runner_of(model))
    # Inputs of products are rounded to bfloat16, on either side of a tie.
    assert_close(list(rounds(runner)), expected, 0.05)
    assert runner.executor.recordings.keys  # type: ignore[attr-defined]
    assert not any("forward" in vars(module) for module in model.modules())


class Keeps(nn.Module):
    """Keeps a table that it makes when it is first used, as some rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.arange(3.0)
        self.last = x
        return x * self.table + torch.tensor([1.0, 2.0, 3.0])


def test_no_tensor_without_numbers_stays_in_a_module_or_in_a_program() -> None:
    module, x = Keeps(), torch.randn(2, 3)
    expected = module(x)
    with _restored([module]):
        module.last, module.table = None, None  # type: ignore[assignment]
    assert torch.equal(module.last, x) and module.table is not None
    layers = Layers(*(lambda *given: None for _ in range(3)))  # type: ignore[arg-type]
    with torch.inference_mode():
        program = _Rewriter(module, triton_kernels(), layers).program(lambda x: [module(x)], [x])
    assert torch.equal(program(x)[0], expected)
    assert not any(isinstance(each, FakeTensor) for each in (module.last, module.table))


def test_code_that_looks_at_numbers_or_writes_is_left_alone() -> None:
    layers = Layers(*(lambda *given: None for _ in range(3)))  # type: ignore[arg-type]
    rewriter, x = _Rewriter(nn.Identity(), triton_kernels(), layers), torch.randn(2, 3)

    def written(x: Tensor) -> list[Tensor]:
        y = nn.functional.silu(x)
        return [(y * x).add_(y)]

    with torch.inference_mode():
        with pytest.raises(Exception, match="_local_scalar_dense"):
            rewriter.program(lambda x: [x * 2 if float(x.sum()) > 0 else x], [x])
        assert torch.equal(rewriter.program(written, [x])(x)[0], written(x)[0])
