"""Rewriting of captured forwards: fewer operations, the very same numbers, and nothing written that is still read."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import specdec.execution.replay
from specdec.execution.counting import counted
from specdec.execution.fusion import Joint, fuse
from specdec.execution.half_weights import half_products
from specdec.execution.packing import PackedLinears, can_pack
from specdec.execution.program import Program, noted, write_program
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from tests.forwards import verify
from tests.specdec.test_half_weights import llama_from_16_bits

WEIGHT = torch.rand(8)
needs_library = pytest.mark.skipif(
    not half_products() or not can_pack(torch.zeros(1)), reason="other products, other numbers"
)


def program_of(call: Callable[..., Sequence[Tensor]], *inputs: Tensor, joint: Joint = lambda packed: None) -> Program:
    with torch.inference_mode(), noted() as work:
        outputs = call(*inputs)
    assert work.refusal is None
    with torch.inference_mode():
        return write_program(fuse(work.steps, inputs, outputs, joint), inputs, outputs)


def operations(program: Program, *inputs: Tensor) -> Counter[str]:
    with torch.inference_mode(), counted() as work:
        program(*inputs)
    return work.operations


@torch.inference_mode()
def the_same(program: Program, call: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> bool:
    """Whether a program gives a call's bits twice, and leaves its inputs alone."""
    before = [tensor.clone() for tensor in inputs]
    expected = call(*inputs)
    same = all(torch.equal(a, b) for _ in range(2) for a, b in zip(program(*inputs), expected, strict=True))
    return same and all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def norm(x: Tensor, *, power: int = 2, dim: int = -1, weight: Tensor | None = WEIGHT) -> Tensor:
    scaled = x * torch.rsqrt(x.pow(power).mean(dim, keepdim=True) + 1e-6)
    return scaled if weight is None else weight * scaled


def rotated(x: Tensor, cosines: Tensor, sines: Tensor, *, half: int = 4) -> Tensor:
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosines + turned * sines


@pytest.mark.parametrize("weight", [WEIGHT, None], ids=["weight", "no weight"])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_norm_becomes_one_operation(rows: int, weight: Tensor | None) -> None:
    def call(x: Tensor) -> list[Tensor]:
        return [norm(x, weight=weight)]

    program = program_of(call, torch.randn(1, rows, 8))
    assert operations(program, torch.randn(1, rows, 8)) == {"_fused_rms_norm": 1}
    assert the_same(program, call, torch.randn(1, rows, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: [norm(x, power=3)],
        lambda x: [norm(x.bfloat16(), weight=None)],
        lambda x: [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x)],
        lambda x: [norm(x), x.pow(2).mean(-1, keepdim=True)],
        lambda x: [root := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), x * root],
    ],
    ids=["power", "bfloat16", "no constant", "its square is read twice", "its root is wanted"],
)
def test_what_is_no_norm_stays(call: Callable[..., list[Tensor]]) -> None:
    inputs = torch.randn(1, 8, 8).abs()
    program = program_of(call, inputs)
    assert operations(program, inputs)["_fused_rms_norm"] == 0
    assert the_same(program, call, torch.randn(1, 8, 8).abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_rotation_becomes_four_operations(dtype: torch.dtype, rows: int) -> None:
    """For the second tensor that is rotated by the same angles; the first one's signs the sines."""

    def call(x: Tensor, y: Tensor, angles: Tensor) -> list[Tensor]:
        cosines, sines = angles.cos(), angles.sin()
        return [rotated(each.transpose(1, 2), cosines, sines) for each in (x, y)]

    def tensors() -> list[Tensor]:
        return [torch.randn(2, rows, h, 8).to(dtype) for h in (6, 2)] + [torch.randn(2, 1, rows, 8).to(dtype)]

    inputs = tensors()
    program = program_of(call, *inputs)
    found = operations(program, *inputs)
    assert found == {"cos": 1, "sin": 1, "flip": 2, "mul": 3, "mul_": 2, "add_": 2}
    assert the_same(program, call, *tensors())


@pytest.mark.parametrize(
    "call",
    [
        lambda x, c, s: [rotated(x, c, s, half=3)],
        lambda x, c, s: [x * c + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * s],
        lambda x, c, s: [x * c + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * s[..., :1]],
    ],
    ids=["uneven", "the other way", "one angle"],
)
def test_what_is_no_rotation_stays(call: Callable[..., list[Tensor]]) -> None:
    inputs = [torch.randn(2, 3, 8) for _ in range(3)]
    program = program_of(call, *inputs)
    assert operations(program, *inputs)["flip"] == 0
    assert the_same(program, call, *(torch.randn(2, 3, 8) for _ in range(3)))


CONSTANT = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("call", "in_place"),
    [
        (lambda x: [(x * 2) + x], 1),
        (lambda x: [x + x, x * 2], 0),  # inputs stay
        (lambda x: [x * 2, (x * 2) + 1], 0),  # outputs stay
        (lambda x: [CONSTANT + x, CONSTANT * x], 0),  # constants stay
        (lambda x: [(y := x * 2)[:, :1], y + 1], 0),  # a view of it is read later
        (lambda x: [((y := x * 2) + 1) + y.flip(0)], 1),  # it is read later itself
        (lambda x: [(x[:1] * 2) + x], 0),  # the sum is larger
        (lambda x: [(x * 2).t() + x.new_ones(8, 3)], 0),  # it is a view itself
        (lambda x: [torch.add(x, x * 3, alpha=2.0)], 0),  # this does not commute
    ],
)
def test_memory_is_reused_only_if_nobody_reads_it(call: Callable[..., list[Tensor]], in_place: int) -> None:
    inputs = torch.randn(3, 8)
    program = program_of(call, inputs)
    written = sum(number for name, number in operations(program, inputs).items() if name.endswith("_"))
    assert written == in_place
    assert the_same(program, call, torch.randn(3, 8))
    assert torch.equal(CONSTANT, torch.ones(3, 8))


def test_the_same_operation_runs_once() -> None:
    def call(x: Tensor) -> list[Tensor]:
        return [(x.cos() + x.cos().float()) * x.contiguous(), x.sum(-1) + x.sum(0, keepdim=True).sum(-1)]

    program = program_of(call, torch.randn(3, 8))
    found = operations(program, torch.randn(3, 8))
    assert found["cos"] == 1 and found["sum"] == 3 and found["_to_copy"] == 0
    assert the_same(program, call, torch.randn(3, 8))


def test_a_forward_that_writes_over_tensors_is_left_alone() -> None:
    def call(x: Tensor) -> list[Tensor]:
        first = x.cos()
        first.mul_(2)
        return [norm(x), first + x.cos()]

    program = program_of(call, torch.randn(3, 8))
    assert operations(program, torch.randn(3, 8))["cos"] == 2
    assert the_same(program, call, torch.randn(3, 8))


@needs_library
@pytest.mark.parametrize(("between", "products"), [(False, 1), (True, 2)])
def test_products_are_joined_unless_their_inputs_are_written_between_them(between: bool, products: int) -> None:
    model = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(2)]).bfloat16().float()
    packed = PackedLinears(model)

    def call(x: Tensor) -> list[Tensor]:
        hidden, other = x * 3, x.cos()
        first = model[0](hidden)
        (hidden if between else other).mul_(2)
        return [first, model[1](hidden), other]

    inputs = torch.randn(3, 128)
    with packed.in_use():
        program = program_of(call, torch.randn(3, 128), joint=packed.joint)
        assert operations(program, inputs)["quantized::linear_dynamic_fp16"] == products
        assert the_same(program, call, inputs)


@needs_library
def test_the_operations_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a Llama over the cache, one row: what computes something, attention and cache included."""

    def launches(layers: int, *, after: int) -> int:
        monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", after)
        runner = ModelRunner(llama_from_16_bits(layers), max_batch_size=1, max_length=40, max_nodes=3)
        tree = DraftTree.from_shape(TreeShape.chain(1), torch.tensor([[1, 2]]))
        with torch.inference_mode():
            for _ in range(2):
                verify(runner, tree, np.array([4]))
            with counted() as work:
                verify(runner, tree, np.array([5]))
        return work.launches

    eager = (launches(5, after=10**9) - launches(2, after=10**9)) / 3
    replayed = (launches(5, after=1) - launches(2, after=1)) / 3
    assert eager >= 40
    assert replayed <= 30
