"""Kernels between a forward's products against plain torch, in the interpreter; and that Triton compiles them."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention import BACKENDS
from specdec.execution import EagerExecutor, executor_for
from specdec.kernels import Destination, obstacle
from specdec.target.facts import find
from tests.models import tiny_model
from tests.plain_kernels import plain_add_norm, plain_gated, plain_norm, plain_rotate

triton = pytest.importorskip("triton")
layers = pytest.importorskip("specdec.kernels.layers")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["32", "16", "b16"])


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


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


@interpreted
@dtypes
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_with_its_residual(name: str, dtype: torch.dtype) -> None:
    shape, weighted, rounds, offset = NORMS[name]
    # A residual that nearly cancels: rows whose squares are about as large as eps.
    x = 0.01 * drawn(*shape, dtype=dtype)
    residual = 0.01 * drawn(*shape, dtype=dtype)
    weight = drawn(shape[-1], dtype=dtype) if weighted else None
    expected, total = plain_add_norm(x, residual, weight, 1e-4, rounds, offset)
    found = layers.add_norm(x, residual, weight, 1e-4, rounds, offset)
    assert torch.equal(found[1], total)
    assert steps_apart(found[0], expected) <= (8 if dtype is torch.float32 else 1)  # sums in another order
    for eps, moved in ((0.0, offset), (1e-4, offset + 0.01)):  # forgotten, or nearly so
        wrong = layers.add_norm(x, residual, weight, eps, rounds, moved)[0]
        assert steps_apart(wrong, expected) > 8 or (eps and not weighted)


@interpreted
@dtypes
def test_a_norm_of_heads_that_do_not_lie_in_order(dtype: torch.dtype) -> None:
    heads = drawn(2, 5, 3 * 24, dtype=dtype).view(2, 5, 3, 24).transpose(1, 2)
    weight = drawn(24, dtype=dtype)
    found = layers.norm(heads, weight, 1e-6, True, 0.0)
    assert found.stride() == heads.stride()
    assert steps_apart(found, plain_norm(heads, weight, 1e-6, True, 0.0)) <= (8 if dtype is torch.float32 else 1)


@interpreted
@dtypes
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_a_gate(activation: str, dtype: torch.dtype) -> None:
    both = 3 * drawn(2, 3, 2 * 1100, dtype=dtype)
    gate, up = both.chunk(2, dim=-1)  # halves of one product; more than one block, and a part of another
    expected = plain_gated(gate, up, activation)
    found = layers.gated(gate, up, activation)
    # In float32, exponentials differ in their last places, and 1 + tanh loses some where the gate is nearly closed.
    open_enough = gate > -2
    assert found.is_contiguous()
    assert steps_apart(found[open_enough], expected[open_enough]) <= (64 if dtype is torch.float32 else 1)
    torch.testing.assert_close(found, expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-3, rtol=0.0)
    others = [name for name in layers.ACTIVATIONS if name != activation]
    assert all(steps_apart(layers.gated(gate, up, each), expected) > 64 for each in others)


Rotated = tuple[tuple[Tensor, Tensor], Destination | None]


def rotated(
    rotate: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, *, writes: bool, norms: bool, sign: float = 1.0
) -> Rotated:
    """Queries and keys of two rows, as products leave them, and a cache of five slots into which they are written."""
    torch.manual_seed(1)
    sizes = (5, 24), (2, 24), (2, 20)
    query, key, value = (drawn(2, 3, heads, dim, dtype=dtype).transpose(1, 2) for heads, dim in sizes)
    angles = (torch.rand(2, 1, 3, 12) * 7).repeat(1, 1, 1, 2)
    table = angles.cos().to(dtype), sign * angles.sin().to(dtype)
    options = [(drawn(24, dtype=dtype), 1e-6, True, 0.0) if norms else None for _ in range(2)]
    kept = None
    if writes:
        memory = [torch.zeros(5, 2, 8, dim, dtype=dtype).transpose(1, 2) for dim in (24, 20)]
        kept = Destination(memory[0], memory[1], torch.tensor([[4], [0]]), torch.tensor([[1, 2, 3], [0, 1, 7]]))
    return rotate(query, key, value, *table, *options, kept), kept


@interpreted
@dtypes
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_a_rotary_embedding_and_the_write_behind_it(norms: bool, dtype: torch.dtype) -> None:
    expected, there = rotated(plain_rotate, dtype, writes=True, norms=norms)
    found, here = rotated(layers.rotate, dtype, writes=True, norms=norms)
    assert here is not None and there is not None
    for one, other in zip((*found, *here[:2]), (*expected, *there[:2]), strict=True):
        if norms:
            torch.testing.assert_close(one, other, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
        else:  # the interpreter makes 1e-38 of a zero in bfloat16
            torch.testing.assert_close(one, other, atol=1e-37, rtol=0.0)
    assert int((here.keys != 0).any(-1).sum()) == int((here.values != 0).any(-1).sum()) == 2 * 3 * 2
    without, _ = rotated(layers.rotate, dtype, writes=False, norms=norms)
    assert all(map(torch.equal, without, found))
    for wrong in (
        rotated(layers.rotate, dtype, writes=False, norms=norms, sign=-1.0)[0],
        rotated(layers.rotate, dtype, writes=False, norms=not norms)[0],
    ):
        assert not any(torch.allclose(*pair, atol=0.1) for pair in zip(wrong, expected, strict=True))


LACKS: dict[str, tuple[Any, str]] = {
    "missing": (None, "Triton is not installed (CUDA builds of torch bring it; pip install triton)"),
    "old": (SimpleNamespace(__version__="2.3.1"), "Triton 2.3.1 is older than 3.0"),
    "an old GPU": ((7, 5), "this GPU has compute capability 7.5, and kernels need 8.0"),
    "no driver": ((8, 0), "Triton does not work here: "),  # no compiler: whatever is raised
}


@pytest.mark.parametrize("lacks", LACKS)
def test_what_kernels_lack_is_said_once_and_torch_runs(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, reason = LACKS[lacks]
    if isinstance(found, tuple):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: found)
    else:
        monkeypatch.setitem(sys.modules, "triton", found)
    facts, model, device = find(tiny_model(layers=1)).facts, tiny_model(layers=1), torch.device("cuda")
    monkeypatch.setattr(type(model), "device", device)
    obstacle.cache_clear()
    try:
        for _ in range(2):
            assert isinstance(executor_for(model, facts, BACKENDS["grouped"], optimize=True), EagerExecutor)
            assert str(BACKENDS["triton"].check(model)).startswith(reason)
    finally:
        obstacle.cache_clear()
    assert [record.getMessage().partition("because ")[2][: len(reason)] for record in caplog.records] == [reason]
