"""Packed linear weights: the same function, the model left alone, changes noticed."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn

from specdec.engine.engine import Engine
from specdec.execution.packing import PackedLinears, can_pack, packed_linears
from specdec.target.target import Target
from tests.models import tiny_model

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.zeros(1, dtype=dtype))]
pytestmark = pytest.mark.skipif(not DTYPES, reason="oneDNN has no kernels for this processor")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "bias"), [(1, True), (9, False), (40, True)])
@torch.inference_mode()
def test_it_is_the_same_function(dtype: torch.dtype, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.execution.few_rows.native_library", lambda: None)  # test_few_rows.py has our own
    layer = nn.Linear(640, 704, bias=bias).to(dtype)  # large enough to be packed at one row
    inputs = torch.randn(2, rows, 640).to(dtype)
    expected = layer(inputs)
    packed = PackedLinears(layer)
    assert len(packed) == 1
    assert sum(packed.bytes_by_weight().values()) == 640 * 704 * dtype.itemsize
    with packed.in_use():
        assert "forward" in vars(layer)
        outputs = layer(inputs)
        assert layer(inputs[:, :0]).shape == (2, 0, 704)
    assert "forward" not in vars(layer)
    if dtype is torch.bfloat16:
        assert torch.equal(outputs, expected)  # the same sums, rounded once
    else:
        torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_only_plain_layers_are_packed() -> None:
    class Own(nn.Linear):
        """Somebody's layer, with a forward of its own."""

    changed = nn.Linear(640, 704)
    changed.forward = lambda inputs: inputs  # type: ignore[method-assign]
    model = nn.ModuleList([Own(640, 704), changed, nn.Linear(640, 704, dtype=torch.float64), nn.Embedding(640, 704)])
    assert len(PackedLinears(model)) == 0
    layer = nn.Linear(640, 704)
    packed = PackedLinears(layer)
    layer.forward = lambda inputs: inputs + 1  # type: ignore[method-assign]
    with packed.in_use():
        assert layer(torch.zeros(1)).item() == 1, "it has been given a forward since it was packed"
    assert layer(torch.zeros(1)).item() == 1


def test_engines_share_the_copies_which_go_with_the_last_of_them() -> None:
    model = tiny_model("llama")
    first, second = (Engine(Target(model), max_length=64) for _ in range(2))
    copies = ref(packed_linears(model))
    assert copies() is packed_linears(model) and len(packed_linears(model)) > 0
    del first
    gc.collect()
    assert copies() is not None
    del second
    gc.collect()
    assert copies() is None, "copies of a model's weights outlive the engines that read them"


@pytest.mark.parametrize("change", ["in place", "data", "fused", "replaced"])
def test_copies_of_old_weights_are_not_shared_with_a_new_engine(change: str) -> None:
    layer = nn.Linear(640, 704)
    old, inputs = packed_linears(layer), torch.randn(3, 640)
    assert not old.stale
    if change == "in place":
        torch.nn.init.zeros_(layer.weight)
    elif change == "data":
        layer.weight.data.mul_(2)
    elif change == "fused":
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        layer(inputs).square().sum().backward()
        optimizer.step()
    else:
        layer.weight = nn.Parameter(torch.randn(704, 640) / 25)
    assert old.stale
    with torch.inference_mode(), packed_linears(layer).in_use():
        expected = nn.functional.linear(inputs, layer.weight, layer.bias)
        torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=1e-5)
