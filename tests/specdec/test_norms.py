"""Root mean square norms in C: those of every class that computes them, and no other module."""

import pytest
import torch
from torch import Tensor, nn

from specdec.execution.norms import Forward, modules_in_c
from specdec.execution.packing import PackedLinears
from specdec.native import native_library
from tests.architectures import tiny

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler, or no AVX2")

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


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

    def forward(self, inputs: Tensor) -> Tensor:
        power = 3 if self.change == "power" else 2
        eps = 0.1 if self.change == "eps" else self.eps
        moved = inputs - inputs.mean(-1, keepdim=True) if self.change == "mean" else inputs
        root = (moved.abs().pow(power).mean(-1, keepdim=True) + eps).rsqrt()
        return moved * root * self.weight + (0.01 if self.change == "bias" else 0.0)


def test_what_is_something_else_stays_as_it_is() -> None:
    assert len(norms_in(OtherRMSNorm("nothing"))) == 1
    for change in ("power", "eps", "mean", "bias"):
        assert not norms_in(OtherRMSNorm(change)), change


def test_a_norm_reads_its_present_weight_and_leaves_autocast_alone() -> None:
    model = OtherRMSNorm("nothing")
    inputs = torch.randn(3, 32)
    with torch.inference_mode(), PackedLinears(model).in_use():
        before = model(inputs)
        model.weight.mul_(2)
        assert torch.equal(model(inputs), 2 * before)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(inputs), OtherRMSNorm.forward(model, inputs))
    assert "forward" not in vars(model)


class GatedRMSNorm(OtherRMSNorm):
    def forward(self, inputs: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(inputs if gate is None else inputs * gate)


@torch.inference_mode()
def test_a_gate_is_the_modules_own_affair() -> None:
    module = GatedRMSNorm("nothing")
    norm = norms_in(module)[module]
    inputs, gate = torch.randn(2, 3, 32)
    torch.testing.assert_close(norm(inputs), module(inputs))
    assert torch.equal(norm(inputs, gate=gate), module(inputs, gate))  # pyright: ignore[reportCallIssue]
