"""Packed linear weights, also in 16 bits, and captured operations: the same function, changes noticed."""

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdec import ModelRunner, Target
from specdec.execution.forwards import fuse
from specdec.execution.packing import PackedLinears
from specdec.execution.program import noted, write_program
from specdec.execution.recorder import TapeRecorder
from specdec.native import native_library
from tests.architectures import tiny
from tests.launches import counted

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")


def test_only_plain_layers_are_packed() -> None:
    model = nn.ModuleList([nn.Linear(640, 704, dtype=torch.float64), nn.Embedding(640, 704)])
    assert not PackedLinears(model).layers
    layer = nn.Linear(640, 704)
    packed = PackedLinears(layer)
    layer.forward = lambda inputs: inputs + 1  # type: ignore[method-assign]
    with packed.in_use():
        assert layer(torch.zeros(1)).item() == 1, "it has been given a forward since it was packed"
    assert layer(torch.zeros(1)).item() == 1


@pytest.mark.parametrize("change", ["in place", "data", "fused", "replaced"])
def test_copies_of_old_weights_are_not_shared_with_a_new_engine(change: str) -> None:
    layer = nn.Linear(640, 704)
    old, inputs = PackedLinears(layer), torch.randn(3, 640)
    assert PackedLinears(layer).layers[0].packed is old.layers[0].packed
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
    with torch.inference_mode(), PackedLinears(layer).in_use():
        expected = nn.functional.linear(inputs, layer.weight, layer.bias)
        torch.testing.assert_close(layer(inputs), expected, atol=1e-5, rtol=1e-5)


def test_the_bytes_that_are_read_are_those_of_the_copies() -> None:
    """A float32 model whose copies take 16 bits, its embedding's table too, which the output layer multiplies by."""
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}  # whole panels
    model = tiny("llama", **sizes, tie_word_embeddings=True).bfloat16().float()
    size = {"max_batch_size": 1, "max_length": 64}
    runner = ModelRunner(model, **size)
    layers = runner.executor.packed.layers
    copied = {layer.module.weight for layer in layers}
    assert all(layer.packed.bytes == 2 * layer.module.weight.numel() for layer in layers)
    other = [each.numel() for each in model.parameters() if each not in copied]  # norms, and what is too small
    assert model.get_input_embeddings().weight in copied
    assert runner.weights_read().bytes == 2 * sum(weight.numel() for weight in copied) + 4 * sum(other)
    plain = ModelRunner(model, **size, optimize=False)
    assert plain.weights_read().bytes == 4 * model.num_parameters()
    assert plain.weights_read().bytes_per_weight == Target(model).bytes_per_weight == 4.0
    assert 2.0 < runner.weights_read().bytes_per_weight < 2.1


KEPT = torch.arange(12.0).view(3, 4)  # at an address that stays
FUNCTIONS_THAT_WRITE = {
    "read again after a write": (lambda x: [KEPT.sum(0) + KEPT[0].add_(x).sum() + KEPT.sum(0)], 6),
    "read again without one": (lambda x: [KEPT.sum(0) + x + KEPT.sum(0)], 3),
    "a view of what stays": (lambda x: [KEPT[1].mul_(x) + KEPT[1, :1]], 2),
    "a reshape that copies what stays": (lambda x: [KEPT[1].mul_(x) + KEPT.t().reshape(-1)[:4]], 2),
    "a cast of what stays, before and after a write": (
        lambda x: [KEPT.to(torch.float64)[0] + KEPT[0].add_(x) + KEPT.to(torch.float64)[0]],
        3,
    ),
    "a view of what is made": (lambda x: [(x + 1)[:2] * 2], 2),
    "made, written to, and read": (lambda x: [_filled(x)], 2),
    "what was made is written to": (lambda x: [(x * 2).neg_() + x * 2], 4),
    "what is there already": (lambda x: [(x.cos() + x.cos().float()) * x.contiguous()], 3),
    "other arguments": (lambda x: [x.sum(-1) + x.sum(0, keepdim=True).sum(-1)], 4),
}


def _filled(x: Tensor) -> Tensor:
    made = x.new_zeros(2, 4)
    made[0] = x
    return made


@pytest.mark.parametrize("case", FUNCTIONS_THAT_WRITE)
def test_what_writes_to_its_tensors_is_written_down_as_it_is(case: str) -> None:
    """Nothing moves over a write; and it takes so many operations."""
    call, operations = FUNCTIONS_THAT_WRITE[case]
    recording, _ = TapeRecorder().record("stage", call, [torch.rand(4)])
    assert not isinstance(recording, str), recording
    for _ in range(3):
        given, before = torch.rand(4), KEPT.clone()
        wanted, after = [each.clone() for each in call(given)], KEPT.clone()
        KEPT.copy_(before)
        with torch.inference_mode(), counted() as work:
            found = recording(given)
        assert all(map(torch.equal, found, wanted)) and torch.equal(KEPT, after)
        assert work.launches == operations, work.operations


@pytest.mark.parametrize(("between", "products"), [(False, 1), (True, 2)])
@torch.inference_mode()
def test_products_are_joined_unless_their_inputs_are_written_between_them(between: bool, products: int) -> None:
    model = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(2)]).bfloat16().float()
    packed = PackedLinears(model)

    def call(x: Tensor) -> list[Tensor]:
        hidden, other = x * 3, x.cos()
        first = model[0](hidden)
        (hidden if between else other).mul_(2)
        return [first, model[1](hidden), other]

    first, inputs = torch.randn(3, 128), torch.randn(3, 128)
    with packed.in_use():
        with noted() as noticed:
            outputs = call(first)
        program = write_program(fuse(noticed.steps, [first], outputs, packed.joint), [first], outputs)
        with counted() as work:
            found = program(inputs)
        assert work.operations["panels"] == products
        assert all(map(torch.equal, found, call(inputs)))


def test_a_file_holds_the_weights_that_are_packed_unless_somebody_has_written_there(tmp_path: Path) -> None:
    """Plain weights are not in memory twice, and are what they were to whoever reads them; a change stays."""
    given = torch.randn(2048, 2048, dtype=torch.bfloat16)
    save_file({"weight": given}, tmp_path / "model.safetensors")
    for written in (False, True):
        layer = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
        layer.weight = nn.Parameter(load_file(tmp_path / "model.safetensors")["weight"], requires_grad=False)
        if written:
            layer.weight[-1] = given[-1] = 3.0
        assert torch.equal(layer.weight, given), "read, so that it is in memory"
        before = psutil.Process().memory_info().shared
        assert len(PackedLinears(layer).layers) == 1
        freed = before - psutil.Process().memory_info().shared
        assert (freed > 2**22) is not written, f"{freed} bytes, of 2 ** 23"
        assert torch.equal(layer.weight, given)
