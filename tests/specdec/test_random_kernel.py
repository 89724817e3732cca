"""The kernel of random numbers: the very numbers of the operations of torch."""

import pytest
import torch
from torch import Tensor

from specdec.host import without_looking
from specdec.random import Purpose, request_key, uniforms

triton = pytest.importorskip("triton")
kernel = pytest.importorskip("specdec.kernels.random")


def drawn(device: str, *, by_kernel: bool, later: int = 0) -> list[Tensor]:
    """Numbers of several requests, rounds and purposes: fewer than a program makes, and more."""
    keys = torch.tensor([request_key(seed, 5) for seed in (0, 1, -7)], device=device)
    rounds = torch.tensor([0, 3, 10**6], device=device) + later
    with pytest.MonkeyPatch.context() as patch, without_looking():
        patch.setattr("specdec.random.usable", lambda tensor: by_kernel)
        found = [uniforms(keys, rounds, purpose, count) for purpose in Purpose for count in (1, 2, 700)]
        return [each.cpu() for each in (*found, uniforms(keys[::2], rounds[::2], Purpose.DRAFT, 9))]


def equal(device: str, *, later: int = 0) -> bool:
    pairs = zip(drawn(device, by_kernel=True, later=later), drawn("cpu", by_kernel=False), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")
def test_the_numbers_are_those_of_torch() -> None:
    assert equal("cpu") and not equal("cpu", later=1)


@pytest.mark.gpu
def test_the_compiled_kernel_makes_the_same_numbers() -> None:
    assert equal("cuda")
