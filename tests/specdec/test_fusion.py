"""Rewriting of captured forwards: fewer operations, the very same numbers, and nothing written that is still read."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from specdec.execution.counting import counted
from specdec.execution.fusion import Joint, fuse
from specdec.execution.half_weights import half_products
from specdec.execution.packing import PackedLinears, can_pack
from specdec.execution.program import Program, noted, write_program
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree, TreeShape
from tests.forwards import verify
from tests.specdec.test_packing import llama_from_16_bits

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


CONSTANT = torch.ones(3, 8)


def writes_over(x: Tensor) -> list[Tensor]:
    first = x.cos()
    first.mul_(2)
    return [norm(x), first + x.cos()]


@pytest.mark.parametrize(
    ("call", "name", "times"),
    [
        # What is no norm: another power, no float32, no constant, its square is read twice, its root is wanted.
        (lambda x: [norm(x.abs(), power=3)], "_fused_rms_norm", 0),
        (lambda x: [norm(x.bfloat16(), weight=None)], "_fused_rms_norm", 0),
        (lambda x: [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.abs())], "_fused_rms_norm", 0),
        (lambda x: [norm(x), x.pow(2).mean(-1, keepdim=True)], "_fused_rms_norm", 0),
        (lambda x: [root := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), x * root], "_fused_rms_norm", 0),
        # What is no rotation: uneven, the other way, by one angle.
        (lambda x: [rotated(x, x.cos(), x.sin(), half=3)], "flip", 0),
        (lambda x: [x * x.cos() + torch.cat((x[..., 4:], -x[..., :4]), dim=-1) * x.sin()], "flip", 0),
        (lambda x: [x * x.cos() + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * x.sin()[..., :1]], "flip", 0),
        # Memory is reused only if nobody reads it.
        (lambda x: [(x * 2) + x], "_", 1),
        (lambda x: [x + x, x * 2], "_", 0),  # inputs stay
        (lambda x: [x * 2, (x * 2) + 1], "_", 0),  # outputs stay
        (lambda x: [CONSTANT + x, CONSTANT * x], "_", 0),  # constants stay
        (lambda x: [(y := x * 2)[:, :1], y + 1], "_", 0),  # a view of it is read later
        (lambda x: [((y := x * 2) + 1) + y.flip(0)], "_", 1),  # it is read later itself
        (lambda x: [(x[:1] * 2) + x], "_", 0),  # the sum is larger
        (lambda x: [(x * 2).t() + x.new_ones(8, 3)], "_", 0),  # it is a view itself
        (lambda x: [torch.add(x, x * 3, alpha=2.0)], "_", 0),  # this does not commute
        # The same operation runs once, but where a forward writes over tensors.
        (lambda x: [(x.cos() + x.cos().float()) * x.contiguous()], "cos", 1),
        (lambda x: [x.sum(-1) + x.sum(0, keepdim=True).sum(-1)], "sum", 3),
        (writes_over, "cos", 2),
    ],
)
def test_what_is_rewritten_and_what_stays(call: Callable[..., list[Tensor]], name: str, times: int) -> None:
    inputs = torch.randn(3, 8)
    program = program_of(call, inputs)
    found = operations(program, inputs)
    assert sum(count for each, count in found.items() if each == name or (name == "_" and each.endswith("_"))) == times
    assert the_same(program, call, torch.randn(3, 8))
    assert torch.equal(CONSTANT, torch.ones(3, 8))


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
def test_a_captured_layer_has_fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a Llama over the cache, one row: what computes something, attention and cache included."""
    runner = ModelRunner(llama_from_16_bits(3), max_batch_size=1, max_length=40, max_nodes=3)
    tree, launches = DraftTree.from_shape(TreeShape.chain(1), torch.tensor([[1, 2]])), []
    for after in (10**9, 1):
        monkeypatch.setattr("specdec.execution.replay.CAPTURE_AFTER", after)
        for _ in range(3):
            with torch.inference_mode(), counted() as work:
                verify(runner, tree, np.array([4]))
        launches.append(work.launches)
    assert launches[0] >= 3 * 40 and launches[1] <= 3 * 30 + 20, launches
