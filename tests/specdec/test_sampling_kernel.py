"""The kernel that makes p of logits, against sorting and softmax: in Triton's interpreter, and on a GPU."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors
from specdec.sampling import distribution as by_torch
from tests.specdec.test_sampling import PARAMS, by_sorting, logits, rows, tensors

triton = pytest.importorskip("triton")
kernel = pytest.importorskip("specdec.kernels.sampling")

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="triton was imported for a GPU")


def by_kernel(values: Tensor, state: SamplingTensors, device: str = "cpu") -> Tensor:
    parameters = (state.temperature, state.top_k, state.top_p, state.min_p)
    return kernel.distribution(values.to(device), *(each.to(device) for each in parameters)).cpu()


def check_kept(values: Tensor, top_k: Tensor, top_p: Tensor, device: str) -> None:
    """The very tokens that a stable sort keeps, but for sums of mass that are p up to rounding; and their p."""
    expected, margin = by_sorting(values, top_k, top_p)
    clear, one = margin > 1e-6, torch.ones_like(top_p)
    found = kernel.distribution(*(each.to(device) for each in (values, one, top_k, top_p, 0 * one))).cpu()
    kept = expected.softmax(-1)
    assert torch.equal((found > 0)[clear], (kept > 0)[clear])
    torch.testing.assert_close(found[clear], kept[clear], atol=1e-6, rtol=1e-5)
    assert float((found.sum(-1) - 1).abs().max()) < 1e-5


def check_parameters(device: str) -> None:
    """Every parameter, greedy rows among sampled ones, parts of wider tables, rows that are the same everywhere."""
    values = logits(len(PARAMS), 1, seed=2)
    wide = torch.nn.functional.pad(values, (0, 3), value=9.0)
    part, alike = wide.to(device)[..., : values.shape[2]], values[::3].to(device, torch.bfloat16).expand(-1, 2, -1)
    for table, state in ((part, tensors(PARAMS)), (alike, tensors(PARAMS[::3]))):
        expected, found = by_torch(table.cpu().float(), state), by_kernel(table, state, device)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        if table.dtype is torch.float32:  # others have ties, of which min-p keeps all
            assert torch.equal(found > 0, expected > 0)


def check_what_went_wrong(device: str) -> None:
    values = torch.tensor([[1.0, torch.nan, 3.0], [1.0, torch.inf, 0.0], [-torch.inf] * 3, [1.0, -torch.inf, 0.0]])
    table = values[None].expand(2, -1, -1)
    state = tensors([SamplingParams(temperature=1.0, top_p=0.9), SamplingParams()])
    found = by_kernel(table, state, device)
    assert found[0, :3].isnan().all() and found[0, 3].isfinite().all() and float(found[0, 3, 1]) == 0
    assert torch.equal(found[1], by_torch(table, state)[1]), "a greedy row gets its arg-max, NaN before all numbers"


@interpreted
def test_the_kernel_is_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    check_what_went_wrong("cpu")
    monkeypatch.setattr(kernel, "_PIECE", 32)  # two pieces to a row, the last one not full
    monkeypatch.setattr(kernel, "_COLUMNS", 4)
    check_parameters("cpu")


@settings(max_examples=8, deadline=None)
@given(rows(), st.sampled_from([4, 64]))
def _kept_by_sorting(case: tuple[Tensor, Tensor, Tensor], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_PIECE", block)
        check_kept(*case, "cpu")


KEPT = (
    (64, torch.zeros(1, 1, 9), 0.999999),  # all stay
    (4, torch.zeros(1, 1, 9), 0.5),  # five of equal ones, in two pieces
    (64, torch.tensor([[[0.0, -60.0, -60.0, -9.0, -0.0]]]), 0.999999),
    (64, -3e38 * torch.ones(1, 1, 2), 0.999999),
    (64, 1e-3 * torch.randn(1, 1, 30, generator=torch.Generator().manual_seed(1)), 0.5),
)
"""Tokens per piece, logits and top-p: ties, supports of one token, p near 1, and numbers next to each other."""


def check_hard_cases() -> None:
    for block, values, top_p in KEPT:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "_PIECE", block)
            check_kept(values, torch.tensor([0]), torch.tensor([top_p]), "cpu")


@interpreted
def test_the_same_tokens_stay_as_by_sorting() -> None:
    _kept_by_sorting()
    check_hard_cases()
    none = kernel.distribution(
        torch.tensor([[[0.0, 1.0, 1.0]]]), torch.ones(1), torch.zeros(1).long(), torch.zeros(1), torch.zeros(1)
    )
    assert none.tolist() == [[[0.0, 1.0, 0.0]]], "the most probable token stays, whatever p is in float32"
    # p that is next to 1, and a tail of 80 tokens that has less than that together: mass is counted to 2^-40.
    tail = torch.full((1, 1, 81), -20.0)
    tail[0, 0, 7] = 0
    mass = tail.double().softmax(-1)[0, 0]
    expected = 1 + int((mass[7] + torch.arange(80) * mass[0] < 1 - 2**-24).sum())
    top_p = torch.tensor([1 - 2**-24])
    one = torch.ones(1)
    found = kernel.distribution(tail, one, torch.tensor([0]), top_p, 0 * one)
    assert int((found > 0).sum()) == expected and 1 < expected < 81


class _NoTies:
    """Says that no piece has a token that equals the last one that stays."""

    def __getitem__(self, grid: object) -> Callable:
        return lambda *given, **sizes: given[7].zero_()


@interpreted
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_count_equal", lambda right: _NoTies()),
        ("_STEPS", lambda right: right - 1),
        ("_UNIT", lambda right: triton.language.constexpr(8.0)),
        ("_NEGLIGIBLE", lambda right: triton.language.constexpr(0.5)),
    ],
)
def test_a_kernel_that_keeps_others_is_found(name: str, wrong: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, name, wrong(getattr(kernel, name)))
    with pytest.raises(AssertionError):
        check_hard_cases()


@pytest.mark.gpu
def test_the_compiled_kernel_is_the_distribution() -> None:
    check_parameters("cuda")
    check_what_went_wrong("cuda")
    generator = torch.Generator().manual_seed(1)
    for vocab in (1, 31, 32_000, 151_936):
        values = torch.randn(4, 2, vocab, generator=generator) * torch.tensor([0.5, 2.0, 5.0, 0.0])[:, None, None]
        for step in (None, 0.25):
            values = values if step is None else (values / step).round() * step
            check_kept(values, torch.tensor([0, 50, 0, 7]), torch.tensor([0.9, 1.0, 0.31, 0.77]), "cuda")
