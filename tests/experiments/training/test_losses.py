"""Every loss and every weight against its formula, written with numpy's float64; gradients against differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.training.losses import (
    Compared,
    CrossEntropy,
    ForwardKL,
    HybridLK,
    Loss,
    NegativeLogAcceptance,
    ReverseKL,
    Scheduled,
    TotalVariation,
    WeightedSum,
)
from experiments.training.weights import DPace, Exponential, Power

PLACES, COLUMNS = 6, 11
Formula = Callable[[np.ndarray, np.ndarray, int], float]


def tv(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum()) / 2


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def accepted(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.minimum(p, q).sum())


def hybrid(p: np.ndarray, q: np.ndarray) -> float:
    share = math.exp(-3 * accepted(p, q))
    return share * kl(p, q) + (1 - share) * tv(p, q)


LOSSES: dict[str, tuple[Loss, Formula]] = {
    "text": (CrossEntropy(), lambda p, q, label: -math.log(q[label]) if label >= 0 else 0.0),
    "argmax": (CrossEntropy("argmax"), lambda p, q, label: -math.log(q[p.argmax()])),
    "kl": (ForwardKL(), lambda p, q, label: kl(p, q)),
    "reverse_kl": (ReverseKL(), lambda p, q, label: kl(q, p)),
    "tv": (TotalVariation(), lambda p, q, label: tv(p, q)),
    "nla": (NegativeLogAcceptance(), lambda p, q, label: -math.log(accepted(p, q))),
    "hybrid": (HybridLK(), lambda p, q, label: hybrid(p, q)),
    "scheduled": (Scheduled(ForwardKL(), TotalVariation()), lambda p, q, label: 0.75 * kl(p, q) + 0.25 * tv(p, q)),
    "dspark": (
        WeightedSum([CrossEntropy(), TotalVariation()], [0.1, 1.8]),
        lambda p, q, label: (-0.1 * math.log(q[label]) if label >= 0 else 0.0) + 0.9 * float(np.abs(p - q).sum()),
    ),
}


def compared(logits: Tensor, seed: int = 0) -> Compared:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(PLACES, COLUMNS, generator=generator, dtype=torch.float64) * 2
    labels = torch.tensor([0, 3, -1, 10, 5, 5])
    return Compared(logits.log_softmax(-1), target.log_softmax(-1), labels, 0.25)


def some_logits() -> Tensor:
    return torch.randn(PLACES, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formulas(name: str) -> None:
    loss, formula = LOSSES[name]
    given = compared(some_logits())
    wanted = [
        formula(p, q, int(label))
        for p, q, label in zip(given.p.numpy(), given.q.numpy(), given.labels.numpy(), strict=True)
    ]
    np.testing.assert_allclose(loss(given).numpy(), wanted, rtol=1e-12, atol=1e-14)
    if name != "hybrid":
        assert torch.autograd.gradcheck(lambda logits: loss(compared(logits)), some_logits().requires_grad_())
    # Tokens of no probability are no trouble: a target that excludes a token, and a head that all but does.
    logits = torch.tensor([[0.0, 1.0, -200.0]]).requires_grad_()
    given = Compared(logits.log_softmax(-1), torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([0]), 0.5)
    value = loss(given).sum()
    value.backward()
    assert value.isfinite() and logits.grad is not None and logits.grad.isfinite().all()


def test_no_gradient_goes_through_the_hybrids_share() -> None:
    logits = some_logits().requires_grad_()
    HybridLK()(compared(logits)).sum().backward()
    given = compared(logits.detach())
    share = (-3 * given.acceptance).exp()
    other = some_logits().requires_grad_()
    again = compared(other)
    (share * ForwardKL()(again) + (1 - share) * TotalVariation()(again)).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_weights_by_depth() -> None:
    losses, valid = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert Power(1.0)(losses, valid).tolist() == [[1.0] * 3] * 2
    torch.testing.assert_close(Power(0.5)(losses, valid), torch.tensor([[1.0, 0.5, 0.25]] * 2))
    torch.testing.assert_close(
        Power(0.6, normalized=True)(losses, valid)[0], torch.tensor([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    )
    torch.testing.assert_close(Exponential(4.0)(losses, valid)[0], torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]))


def test_d_pace_weighs_by_what_is_reached() -> None:
    """Depth j weighs the sum over k ≥ j of the product of s_1 … s_k, with s = (q + 1) / 2; the last draft is short."""
    q = torch.tensor([[0.5, 0.25, 1.0], [0.8, 0.4, 0.2]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    a, b, c = 0.75, 0.75 * 0.625, 0.75 * 0.625 * 1.0
    d, e = 0.9, 0.9 * 0.7
    wanted = torch.tensor([[a + b + c, b + c, c], [d + e, e, 0.0]])
    torch.testing.assert_close(DPace(0.5)(-q.log(), valid), wanted)
