"""Captured forwards as lists of operations in C, with the model's own numbers; norms, activations and loops in C."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import specdec.execution.forwards
import specdec.execution.native_program as native_program
from specdec import ForwardBatch, ModelRunner, Topology
from specdec.execution.forwards import CurrentForward
from specdec.execution.native_program import Looked, with_tables
from specdec.execution.norms import FUNCTIONS, Forward, modules_in_c
from specdec.execution.packing import PackedLinears
from specdec.execution.program import Step, noted
from specdec.native import library, native_library
from tests.architectures import tiny
from tests.components import mtp_head
from tests.launches import counted
from tests.models import ARCHITECTURES, tiny_model
from tests.specdec.test_forward import rounds, runner_of
from tests.verifiers.cases import complete

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def forwards(model: Any) -> tuple[list[Tensor], Any]:
    """Outputs of forwards over a cache that grows, and the cache; and their runner."""
    runner = runner_of(model)
    return [*rounds(runner, hidden_layers=(-1, 1)), *runner.cache.tensors], runner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", [complete(each, strong=each not in ("gemma3", "phi3")) for each in ARCHITECTURES]
)
def test_lists_give_the_bits_of_the_operations(architecture: str, dtype: torch.dtype, monkeypatch) -> None:
    model = tiny_model(architecture).to(dtype)
    monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", 10**9)
    eager, _ = forwards(model)
    monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", 1)
    listed, runner = forwards(model)
    recordings = runner.executor.recordings
    assert recordings.made == 1 and recordings.replays == 3 and not recordings.refused
    assert all(torch.equal(one, other) for one, other in zip(eager, listed, strict=True))
    with counted() as work:
        next(rounds(runner, hidden_layers=(-1, 1)))
    assert work.operations["turned"] == work.operations["attention"] == model.config.num_hidden_layers
    # What a layer computes in several operations of torch is in the lists; Phi-3 turns with code of its own.
    several = {"silu", "gelu", "rsqrt"} | ({"neg", "cos", "sin"} if architecture != "phi3" else set())
    assert not several & work.operations.keys(), work.operations


@pytest.mark.parametrize(
    ("angles", "looked_up"),
    [
        (lambda positions: (positions[..., None].float() * FREQUENCIES).cos(), True),
        (lambda positions: FREQUENCIES.expand(2, 3, 3).mul(positions[..., None]).sin() * 2, False),  # for three nodes
        (lambda positions: (positions - positions.amin(-1, keepdim=True))[..., None] * FREQUENCIES, False),
    ],
)
def test_what_depends_on_positions_alone_is_looked_up(angles: Callable[[Tensor], Tensor], looked_up: bool) -> None:
    positions, layers = torch.tensor([[3, 4, 4], [8, 9, 9]]), CurrentForward(None)  # type: ignore[arg-type]
    with noted() as work:
        made = angles(positions)[:, None]
    turn = Step(layers.turn, (0, made, made, made, made, made, None, None), {}, [made.clone()])
    steps = with_tables([*work.steps, turn], positions, turn.outputs, layers, 12)
    found = steps[-1].arguments[4]
    assert isinstance(found, Looked) is looked_up
    if isinstance(found, Looked):
        assert torch.equal(found.table[positions][:, None], made) and found.table.shape == (12, 3)


def test_features_that_lie_apart_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a wider tensor, in a forward that was captured with features side by side."""
    head = mtp_head(tiny_model()).bound(tiny_model())
    features = torch.randn(2, 6, head.feature_width, generator=torch.Generator().manual_seed(4))
    found = []
    for after in (10**9, 1):
        monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", after)
        runner = ModelRunner(head, max_batch_size=2, max_length=40, max_nodes=4)
        for given in (features[:, :1].contiguous(), features[:, 3:4]):
            batch = ForwardBatch(
                tokens=torch.tensor([[5], [9]]), slots=torch.arange(2), lengths=torch.zeros(2, dtype=torch.long),
                topology=Topology.chain(1, runner.device), features=given,
            )  # fmt: skip
            found.append(runner.run(batch).scores)
    assert runner.executor.recordings.replays == 1  # type: ignore[attr-defined]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_a_wrong_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: everything is taken for contiguous."""
    monkeypatch.setattr(specdec.execution.forwards, "CAPTURE_AFTER", 1)
    strides = native_program._strides
    monkeypatch.setattr(native_program, "_strides", lambda tensor, *axes: strides(tensor.contiguous(), *axes))
    recordings = forwards(tiny_model())[1].executor.recordings
    assert not recordings.made and "other numbers" in str(*recordings.refused)


class Twice(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(dtype: torch.dtype) -> None:
    modules = nn.Sequential(nn.SiLU(), nn.GELU(approximate="tanh"), nn.GELU(), Twice(), nn.ReLU())
    found = dict(modules_in_c(modules))
    assert list(found) == [*modules[:2]] and len(FUNCTIONS) == 2
    for module, activation in found.items():
        for size in (1, 17, 70_000):
            numbers = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 8).to(dtype)
            torch.testing.assert_close(activation(numbers), module(numbers))
            assert torch.equal(activation(numbers)[-1:], activation(numbers[-1:].clone()))
        special = torch.tensor([0.0, -0.0, -90.0, 90.0, -1e30, 1e30]).to(dtype)
        torch.testing.assert_close(activation(special), module(special))


def norms_in(model: nn.Module) -> dict[nn.Module, Forward]:
    return {module: norm for module, norm in modules_in_c(model) if "Norm" in type(module).__name__}


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@torch.inference_mode()
def test_every_norm_is_the_modules_own(model_type: str, dtype: torch.dtype) -> None:
    model = tiny(model_type).to(dtype)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    for module in norms:
        module.weight.add_(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0)) / 10)  # pyright: ignore
    found = norms_in(model)
    assert list(found) == norms
    for module, norm in found.items():
        width = module.weight.shape[0]  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
        inputs = 3 * torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        wanted, outputs = module(inputs), norm(inputs)
        apart = (outputs - wanted).abs() / wanted.abs().clamp(min=1e-3)
        assert outputs.dtype is dtype and apart.max() <= ERRORS[dtype]
        assert torch.equal(norm(inputs[1:, 2:3]), outputs[1:, 2:3]), "a row alone has the same bits"
        moved = inputs.transpose(0, 1)
        assert torch.equal(norm(moved), outputs.transpose(0, 1)), "rows may lie as they like"


class OtherRMSNorm(nn.Module):
    """Like a norm, and none."""

    def __init__(self, change: str):
        super().__init__()
        self.weight, self.eps, self.change = nn.Parameter(torch.ones(32)), 1e-5, change

    def forward(self, inputs: Tensor, gate: Tensor | None = None) -> Tensor:
        power = 3 if self.change == "power" else 2
        eps = 0.1 if self.change == "eps" else self.eps
        moved = inputs - inputs.mean(-1, keepdim=True) if self.change == "mean" else inputs
        root = (moved.abs().pow(power).mean(-1, keepdim=True) + eps).rsqrt()
        normed = moved * root * self.weight + (0.01 if self.change == "bias" else 0.0)
        return normed if gate is None else normed * gate


@torch.inference_mode()
def test_what_is_something_else_stays_and_a_norm_reads_its_present_weight() -> None:
    for change in ("power", "eps", "mean", "bias"):
        assert not norms_in(OtherRMSNorm(change)), change
    model, (inputs, gate) = OtherRMSNorm("nothing"), torch.randn(2, 3, 32)
    assert torch.equal(norms_in(model)[model](inputs, gate=gate), model(inputs, gate)), "a gate is the module's affair"
    with PackedLinears(model).in_use():
        before = model(inputs)
        model.weight.mul_(2)
        assert torch.equal(model(inputs), 2 * before)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(inputs), OtherRMSNorm.forward(model, inputs))
    assert "forward" not in vars(model)


PLAYED = """
#include "threads.h"
#include <unistd.h>

/* A loop that three threads share (native/threads.h): the last comes a second late, the first number takes long. */
void play(long count, long *did, long *whole, double *times) {
  loop l = {0};
  _Pragma("omp parallel num_threads(3)")
  {
    const int self = omp_get_thread_num();
    if (self == 2) usleep(1000000);
    times[3 + self] = omp_get_wtime();
    SHARE(&l, count, i) {
      usleep(i ? 100 : 100000);
      did[i]++;
    }
    for (long i = 0; i < count; i++) whole[self] += did[i];
    times[self] = omp_get_wtime();
  }
}
"""


def played(header: str, folder: Path, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How often each number was done; how many were when each thread left; when each left, and came."""
    (folder / "threads.h").write_text(header)
    (folder / "played.c").write_text(PLAYED)
    made = folder / "played.so"
    command = [*library._compiler(), *library._FLAGS, "-shared", str(folder / "played.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    did, whole, times = np.zeros(count, dtype=np.int64), np.zeros(3, dtype=np.int64), np.zeros((2, 3))
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (did, whole, times)]
    ctypes.CDLL(str(made)).play(ctypes.c_long(count), *addresses)
    return did, whole, times


WAITS = "atomic_load(&l->done) < count"


@pytest.mark.parametrize("mutant", [False, True])
def test_a_loop_is_whole_when_somebody_leaves_and_who_is_late_finds_it_done(mutant: bool, tmp_path: Path) -> None:
    """The mutant leaves when nothing is left to take."""
    header = (library.FOLDER / "threads.h").read_text()
    assert header.count(WAITS) == 1
    did, whole, (left, came) = played(header.replace(WAITS, "0") if mutant else header, tmp_path, 37)
    assert (did == 1).all() and left[:2].max() < came[2]
    assert (whole == 37).all() is not np.bool_(mutant)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_forwards_have_the_same_bits_with_any_number_of_threads(dtype, monkeypatch, tmp_path) -> None:
    """More than there are cores, so that some come late; every loop is shared, however small it is."""
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-DLEAST_PARALLEL=1"))
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    threads = torch.get_num_threads()
    native_library.cache_clear()
    try:
        model, found = tiny_model("gemma3").to(dtype), []
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found += [forwards(model)[0] for _ in range(10 if count > 1 else 1)]
        assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))
    finally:
        torch.set_num_threads(threads)
        native_library.cache_clear()
