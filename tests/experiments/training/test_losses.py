"""Losses and weights of places against formulas, batches against slow loops; figures of drafts by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, TrainedHead
from experiments.training import losses
from experiments.training.comparison import ALL, Comparison, counted
from experiments.training.figures import Tally, binned, calibration_errors, sequential_temperatures
from experiments.training.losses import Compared, CrossEntropy, ForwardKL, Loss, Places, TotalVariation
from experiments.training.weights import DPace, Power, Weights
from specdec.requests import SamplingParams
from specdec.sampling import distribution
from tests.forwards import slots_of

PLACES, COLUMNS = 6, 11
Formula = Callable[[np.ndarray, np.ndarray, int], float]


def tv(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum()) / 2


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def hybrid(p: np.ndarray, q: np.ndarray) -> float:
    share = math.exp(-3 * (1 - tv(p, q)))
    return share * kl(p, q) + (1 - share) * tv(p, q)


LOSSES: dict[str, tuple[Loss, Formula]] = {
    "text": (CrossEntropy(), lambda p, q, label: -math.log(q[label]) if label >= 0 else 0.0),
    "argmax": (CrossEntropy("argmax"), lambda p, q, _: -math.log(q[p.argmax()])),
    "kl": (ForwardKL(), lambda p, q, _: kl(p, q)),
    "reverse_kl": (losses.ReverseKL(), lambda p, q, _: kl(q, p)),
    "tv": (TotalVariation(), lambda p, q, _: tv(p, q)),
    "nla": (losses.NegativeLogAcceptance(), lambda p, q, _: -math.log(1 - tv(p, q))),
    "hybrid": (losses.HybridLK(), lambda p, q, _: hybrid(p, q)),
    "scheduled": (losses.Scheduled(ForwardKL(), TotalVariation()), lambda p, q, _: 0.75 * kl(p, q) + 0.25 * tv(p, q)),
    "dspark": (
        losses.WeightedSum([CrossEntropy(), TotalVariation()], [0.1, 1.8]),
        lambda p, q, label: (-0.1 * math.log(q[label]) if label >= 0 else 0.0) + 0.9 * float(np.abs(p - q).sum()),
    ),
}


def compared(logits: Tensor) -> Compared:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(PLACES, COLUMNS, generator=generator, dtype=torch.float64) * 2
    labels = torch.tensor([0, 3, -1, 10, 5, 5])
    return Compared(logits.log_softmax(-1), target.log_softmax(-1), labels, 0.25)


def some_logits() -> Tensor:
    return torch.randn(PLACES, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formulas(name: str) -> None:
    loss, formula = LOSSES[name]
    given = compared(some_logits())
    places = zip(given.p.numpy(), given.q.numpy(), given.labels.tolist(), strict=True)
    wanted = [formula(p, q, label) for p, q, label in places]
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
    one, other = (some_logits().requires_grad_() for _ in "ab")
    share = (-3 * compared(one.detach()).acceptance).exp()
    losses.HybridLK()(compared(one)).sum().backward()
    (share * ForwardKL()(compared(other)) + (1 - share) * TotalVariation()(compared(other))).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def told(values: Tensor, valid: Tensor | None = None, **others: Any) -> Places:
    """Drafts one position after the other, whose acceptance, likelihood, ratio and cost are the values given."""
    there = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    known: dict[str, Any] = {"anchors": Anchors(torch.arange(len(values)), there, there)}
    known |= dict.fromkeys(("acceptance", "likelihood", "ratio", "cost"), values)
    return Places(**known | {"agrees": there, "covered": there} | others)


def test_weights_by_depth() -> None:
    for weights, wanted in (
        (Power(1.0), [1.0, 1.0, 1.0]),
        (Power(0.5), [1.0, 0.5, 0.25]),
        (Power(0.6, normalized=True), [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]),
        (Power.exponential(4.0), [1.0, math.exp(-0.25), math.exp(-0.5)]),
    ):
        found = weights(told(torch.zeros(2, 3)))
        torch.testing.assert_close(found, torch.tensor([wanted] * 2))


def test_d_pace_weighs_by_what_is_reached() -> None:
    """Depth j weighs the sum over k ≥ j of the product of s_1 … s_k, with s = (q + 1) / 2; the last draft is short."""
    q = torch.tensor([[0.5, 0.25, 1.0], [0.8, 0.4, 0.2]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    a, b, c = 0.75, 0.75 * 0.625, 0.75 * 0.625 * 1.0
    d, e = 0.9, 0.9 * 0.7
    wanted = torch.tensor([[a + b + c, b + c, c], [d + e, e, 0.0]])
    torch.testing.assert_close(DPace(0.5)(told(q, valid)), wanted)


WIDTH, VOCAB, DEPTHS = 4, 7, 3


class Linear(TrainedHead):
    """One matrix per depth over the state before the root, and a confidence."""

    def __init__(self, columns: Tensor | None = None, *, confident: bool = False):
        super().__init__(DEPTHS)
        self.head = SimpleNamespace(draft_ids=columns)
        self.confidence_weight = 0.5 if confident else 0.0
        width = VOCAB if columns is None else len(columns)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(DEPTHS)).double()
        self.judge = nn.Linear(WIDTH, DEPTHS).double()

    def begin(self, target: Any, counts: Any) -> None: ...

    def forward(self, batch: TextBatch, states: TargetStates, anchors: Anchors) -> Prediction:
        hidden = states.hidden[-1].flatten(0, 1)[anchors.index - 1]
        return Prediction([hidden] * DEPTHS, self.judge(hidden) if self.confidence_weight else None)

    def logits(self, states: Tensor, previous: Tensor, depth: int) -> Tensor:
        return self.layers[depth - 1](states)

    def drafter(self) -> Any: ...

    def save(self, folder: Any, facts: Any) -> None: ...


def example() -> tuple[TextBatch, TargetStates]:
    """Two rows of two documents each, some tokens not supervised."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], list(range(9))])
    supervised = torch.ones(2, 9, dtype=torch.bool)
    supervised[1, 3] = False
    layer = nn.Linear(WIDTH, VOCAB).double().requires_grad_(False)
    torch.nn.init.normal_(layer.weight, generator=generator)
    hidden = torch.randn(2, 9, WIDTH, generator=generator, dtype=torch.float64)
    output = lambda hidden: layer(hidden).float()  # noqa: E731
    return TextBatch(tokens, supervised, documents, positions), TargetStates({-1: hidden}, output)


def slow_loss(head: Linear, batch: TextBatch, states: TargetStates, loss: str, weights: Weights, law) -> Tensor:
    """The loss, place by place: the sum over depths of the mean over that depth's places."""
    sums: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
    requests = slots_of([[0]], vocab_size=VOCAB, params=[law]).sampling
    p_all = distribution(states.logits(torch.arange(18))[None], requests).double().view(2, 9, VOCAB)
    ids = torch.arange(VOCAB) if head.columns is None else head.columns
    for row in range(2):
        for root in range(1, 9):
            if batch.documents[row, root] < 0 or batch.documents[row, root - 1] != batch.documents[row, root]:
                continue
            found, likely = [], []
            for depth in range(1, DEPTHS + 1):
                at = root + depth
                if at == 9 or batch.documents[row, at] != batch.documents[row, root] or not batch.supervised[row, at]:
                    break
                q = (head.layers[depth - 1](states.hidden[-1][row, root - 1]) / law.temperature).softmax(-1)
                whole = p_all[row, at - 1]
                p = whole[ids] / whole[ids].sum()
                label = (ids == batch.tokens[row, at]).nonzero()[:, 0].tolist()
                entropy = -q[label[0]].log() if label else q.new_zeros(())
                likely.append(float((-entropy.detach()).exp()) if label else 0.0)
                value = (p * (p.clamp(min=1e-30) / q).log()).sum() if loss == "kl" else entropy
                alpha = torch.minimum(whole[ids], q).sum().detach()
                if head.confidence_weight:
                    c = head.judge(states.hidden[-1][row, root - 1])[depth - 1].sigmoid()
                    value = value - 0.5 * (alpha * c.log() + (1 - alpha) * (1 - c).log())
                found.append((value, bool((ids == whole.argmax()).any())))
            given = torch.tensor([likely + [0.0] * (DEPTHS - len(likely))], dtype=torch.float64)
            factor = weights(told(given, torch.arange(DEPTHS)[None] < len(likely)))[0]
            for depth, (value, inside) in enumerate(found):
                if inside:
                    sums[depth].append(factor[depth] * value)
    return sum((torch.stack(each).mean() for each in sums), torch.zeros((), dtype=torch.float64))


REDUCED = torch.tensor([0, 2, 3, 6])
WARM = SamplingParams(temperature=0.7, top_k=5, top_p=0.8)


@pytest.mark.parametrize(
    ("loss", "weights", "columns", "confident", "chunk", "law"),
    [
        ("kl", Power(1.0), None, False, 100, ALL),
        ("text", Power(0.5), None, True, 3, ALL),
        ("kl", DPace(0.5), REDUCED, False, 3, ALL),
        ("text", Power(0.8), REDUCED, True, 100, WARM),
        ("kl", Power(1.0), None, True, 3, WARM),
    ],
)
def test_the_loss_is_the_sum_of_the_depths_means(loss, weights, columns, confident, chunk, law) -> None:
    torch.manual_seed(2)
    head, (batch, states) = Linear(columns, confident=confident), example()
    rule: Loss = ForwardKL() if loss == "kl" else CrossEntropy()
    comparison = Comparison(head, rule, weights, chunk=chunk, law=law)
    anchors = counted(Anchors.everywhere(batch, DEPTHS), batch, states, columns, chunk)
    value, _ = comparison(batch, states, anchors, anchors.counted.sum(0).double(), 0.0)
    wanted = slow_loss(head, batch, states, loss, weights, law)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    mine, slow = (torch.autograd.grad(loss, list(head.layers.parameters())) for loss in (value, wanted))
    torch.testing.assert_close(mine, slow, rtol=1e-5, atol=1e-6)


def test_a_batch_with_nothing_to_learn_costs_nothing() -> None:
    head, (batch, states) = Linear(), example()
    empty = replace(batch, supervised=torch.zeros_like(batch.supervised))
    anchors = Anchors.everywhere(empty, DEPTHS)
    value, places = Comparison(head, ForwardKL(), Power(1.0), chunk=8)(empty, states, anchors, torch.zeros(3), 0.0)
    assert float(value) == 0 and places.acceptance.shape == (0, DEPTHS)


ONES = torch.ones(3, 1).bool()
FIGURES: list[tuple[Places, dict[str, float]]] = [
    (  # The second draft is one token long: its depth 2 says nothing.
        told(torch.tensor([[0.8, 0.5], [0.4, 9.0]]), torch.tensor([[1, 1], [1, 0]]) > 0, agrees=torch.eye(2) > 0),
        {"acceptance/1": 0.6, "acceptance/2": 0.5, "reached/1": 0.6, "reached/2": 0.4, "simulated_length": 2.0}
        | {"accuracy/1": 0.5, "accuracy/2": 0.0, "simulated_length_greedy": 1.5, "coverage": 1.0},
    ),
    (  # Depth 2 of a small model is depth 1 at the next anchor, within the document: one has two tokens behind it.
        told(torch.tensor([[0.5], [0.25], [0.8]]), anchors=Anchors(torch.tensor([0, 1, 3]), ONES, ONES)),
        {"acceptance/1": (0.5 + 0.25 + 0.8) / 3, "acceptance/2": 0.25, "reached/2": 0.125},
    ),
    (  # Both drafts predict 0.9 and 0.9 · 0.5; they get there with 0.8, 0.6 and with 0.4, 0.3 (the products of α).
        told(torch.tensor([[0.8, 0.5], [0.6, 0.5]]), confidence=torch.tensor([[0.9, 0.5], [0.9, 0.5]])),
        {"calibration_error/1": 0.9 - 0.7, "calibration_error/2": 0.45 - 0.35},
    ),
]


@pytest.mark.parametrize(("places", "wanted"), FIGURES)
def test_figures_of_drafts_by_hand(places: Places, wanted: dict[str, float]) -> None:
    tally = Tally(2, torch.device("cpu"))
    tally.add(places, autoregressive=places.acceptance.shape[1] == 1)
    assert {name: value for name, value in tally.figures().items() if name in wanted} == pytest.approx(wanted)


def test_sequential_temperatures_undo_what_was_done_to_the_logits() -> None:
    """Confidences that are right but for a factor: 2 at depth 1 (too sure), a half at depth 2 (not sure enough)."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    reached = true.sigmoid().cumprod(1)
    temperatures, errors = sequential_temperatures(true * torch.tensor([2.0, 0.5]), reached, torch.ones(4000, 2).bool())
    assert temperatures == pytest.approx([2.0, 0.5], rel=0.05)
    counts = torch.tensor([[[2.0, 2.0]], [[0.2, 1.8]], [[0.6, 1.4]]])
    assert calibration_errors(counts).tolist() == pytest.approx([(0.4 + 0.4) / 4])
    before = calibration_errors(binned((2 * true).sigmoid(), reached, torch.ones(4000, 2).bool()))[0]
    assert max(errors) < 0.01 < 0.05 < before
