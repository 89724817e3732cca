"""Losses and weights against formulas and enumerations, batches against slow loops; figures of drafts by hand."""

import itertools
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
from experiments.training.edr import ExpectedRounds, drawn, everywhere, occupied
from experiments.training.figures import Tally, binned, calibration_errors, sequential_temperatures
from experiments.training.losses import Compared, CrossEntropy, ForwardKL, Loss, Places, TotalVariation
from experiments.training.weights import DPace, ExpectedLength, Power, Weights
from specdec.requests import SamplingParams

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
    "reverse_kl": (losses.ReverseKL(), lambda p, q, label: kl(q, p)),
    "tv": (TotalVariation(), lambda p, q, label: tv(p, q)),
    "nla": (losses.NegativeLogAcceptance(), lambda p, q, label: -math.log(accepted(p, q))),
    "hybrid": (losses.HybridLK(), lambda p, q, label: hybrid(p, q)),
    "scheduled": (
        losses.Scheduled(ForwardKL(), TotalVariation()),
        lambda p, q, label: 0.75 * kl(p, q) + 0.25 * tv(p, q),
    ),
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


def lawful(logits: Tensor, law: SamplingParams) -> Tensor:
    """The distributions of requests, token by token."""
    found = (logits / law.temperature).softmax(-1)
    for row in found:
        order = row.argsort(descending=True).tolist()
        kept = order[: law.top_k or None]
        while len(kept) > 1 and row[kept[:-1]].sum() / row[order[: law.top_k or None]].sum() >= law.top_p:
            kept.pop()
        row[[token for token in order if token not in kept]] = 0.0
    return found / found.sum(-1, keepdim=True)


def slow_loss(
    head: Linear, batch: TextBatch, states: TargetStates, loss: str, weights: Weights, columns: Tensor | None,
    law: SamplingParams,
) -> Tensor:  # fmt: skip
    """The loss, place by place: the sum over depths of the mean over that depth's places."""
    sums: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
    p_all = lawful(states.logits(torch.arange(18)).double(), law).view(2, 9, VOCAB)
    ids = torch.arange(VOCAB) if columns is None else columns
    for row in range(2):
        for root in range(1, 9):
            if batch.documents[row, root] < 0 or batch.documents[row, root - 1] != batch.documents[row, root]:
                continue
            found, valid, likely = [], [], []
            for depth in range(1, DEPTHS + 1):
                at = root + depth
                there = at < 9 and bool(batch.documents[row, at] == batch.documents[row, root])
                there = there and bool(batch.supervised[row, at]) and all(valid)
                valid.append(there)
                if not there:
                    continue
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
                found.append((depth, value, bool((ids == whole.argmax()).any())))
            given = torch.tensor([likely + [0.0] * (DEPTHS - len(likely))], dtype=torch.float64)
            factor = weights(told(given, torch.tensor([valid])))[0]
            for depth, value, inside in found:
                if inside:
                    sums[depth - 1].append(factor[depth - 1] * value)
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
    wanted = slow_loss(head, batch, states, loss, weights, columns, law)
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


def test_expected_length_weighs_by_its_derivative() -> None:
    """The gradient is that of the mean of α's products, over depths that are within the text."""
    alpha = torch.tensor([[0.5, 0.25, 0.8], [0.9, 0.0, 0.7], [0.6, 0.3, 9.0]], requires_grad=True)
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    (alpha.cumprod(1).where(valid, 0.0).sum() / 3).backward()
    found = ExpectedLength()(told(alpha.detach(), valid)).where(valid, 0.0)
    torch.testing.assert_close(found, alpha.grad)


P0, Q0 = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]], dtype=torch.float64)


def rolled(tokens: tuple[int, ...], tilt: Tensor | float = 0.0, progress: float = 0.5) -> list[Compared]:
    """A draft of two tokens along a text: the rows after a token x are the first ones rolled by x."""
    before = (0, tokens[0])
    q, p = [(Q0.roll(x).log() + tilt).log_softmax(-1)[None] for x in before], [P0.roll(x).log()[None] for x in before]
    return [Compared(*each, torch.tensor([token]), progress) for *each, token in zip(q, p, tokens, strict=True)]


def test_scores_are_what_block_verification_accepts() -> None:
    """On average over the target's texts: at least one token with 0.9 and two with 0.85; 0.81 token by token."""
    found, both = torch.zeros(2).double(), torch.ones(1, 2).bool()
    for text in itertools.product(range(3), repeat=2):
        chance = P0[text[0]] * P0.roll(text[0])[text[1]]
        found += chance * (-2 * losses.BlockVerification().over(rolled(text, progress=0.0), both, None)[0]).exp()
    assert found.tolist() == pytest.approx([0.9, 0.85], abs=1e-12)


def test_the_gradient_of_block_verification_is_that_of_its_mean() -> None:
    """From half of the steps on, it is −log of the mean score; places beyond the text are no part of it."""
    tilt, text = torch.tensor([0.3, -0.2, 0.1]).double().requires_grad_(), (2, 0)
    first, second = (((Q0.roll(x).log() + tilt).softmax(-1), P0.roll(x)) for x in (0, text[0]))
    ratio = (first[0] / first[1])[text[0]]
    rows = [torch.minimum(first[1], first[0]), torch.minimum(ratio.clamp(max=1) * second[1], ratio * second[0])]
    scores = torch.stack([row.sum() for row in rows])

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, tilt, retain_graph=True)[0]

    def found(valid: list[bool], counted: list[bool]) -> Tensor:
        loss = losses.BlockVerification().over(rolled(text, tilt), torch.tensor([valid]), None)
        return gradient(loss[0][torch.tensor(counted)].sum())

    for valid in ([True, True], [True, False]):
        torch.testing.assert_close(found(valid, valid), gradient(-scores[torch.tensor(valid)].mean().log()))
    # The mutant: a tail that is not valid belongs to the mean.
    assert (found([True, True], [True, False]) - found([True, False], [True, False])).abs().max() > 1e-2


@pytest.mark.parametrize("loss", [losses.BlockVerification(), ExpectedRounds()])
def test_tokens_without_probability_are_no_trouble(loss: losses.BlockVerification | ExpectedRounds) -> None:
    """A text's token without a column, a target that excludes tokens, a head that all but does."""
    logits = torch.tensor([[[0.0, 1.0, -200.0]], [[0.0, -300.0, 90.0]]]).requires_grad_()
    log_p = torch.tensor([[0.5, 0.5, 0.0]]).log()
    for labels in torch.tensor([[0, 1], [-1, 0], [1, -1]]):
        pairs = zip(logits.log_softmax(-1), labels[:, None], strict=True)
        drafts = [Compared(log_q, log_p, label, 0.3) for log_q, label in pairs]
        value = loss.over(drafts, torch.ones(1, 2).bool(), torch.ones(1, 2, 2)).sum()
        (gradient,) = torch.autograd.grad(value, logits)
        assert value.isfinite() and gradient.isfinite().all()


def walk(cost: Tensor, accepted: Tensor) -> tuple[Tensor, ...]:
    """The rounds along one text of as many tokens as the tables have rows, the last of which ends it."""
    length, depths = cost.shape
    supervised = torch.arange(length + 1)[None] > 0
    batch = TextBatch(supervised.long(), supervised, torch.zeros_like(supervised).long(), supervised.cumsum(1))
    valid = Anchors.everywhere(batch, depths, before=0).valid
    padded = [nn.functional.pad(each, (0, 0, 0, 1))[None] for each in (cost, accepted, valid)]
    return tuple(each[0] for each in occupied(*padded))


def test_the_mean_over_texts_is_the_number_of_rounds() -> None:
    """1.71675, by enumeration. The mutant: the mean over what costs a round is one over all tokens."""
    p = [[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.0, 0.0, 1.0]]
    q = [[0.3, 0.5, 0.2], [0.35, 0.35, 0.3], [0.0, 0.0, 1.0]]

    def rounds(before: list[int], text: tuple[int, ...], ends: tuple[int, ...]) -> float:
        log_q, log_p = (torch.tensor([table[x] for x in before]).double().log() for table in (q, p))
        all_places = Compared(log_q, log_p, torch.tensor(text), 0.0, ends=ends)
        at = (torch.arange(len(text))[:, None] + torch.arange(2)).clamp(max=len(text) - 1)
        return 1 + float(walk(all_places.cost[at], all_places.accepted[at])[0][0])

    found = torch.zeros(2).double()
    for length in range(1, 5):
        for text in itertools.product(range(2), repeat=length - 1):
            before, text = [0, *text][: 3 if length == 4 else 4] + [2] * (length == 4), (*text, 2)
            chance = math.prod(p[x][token] for x, token in zip(before, text, strict=True))
            each = [rounds(before, text, ends) for ends in ((2,), ())]
            found += chance * torch.tensor(each).double()
            assert text != (1, 1, 2) or each[0] == pytest.approx(1.5625)
    assert float(found[0]) == pytest.approx(1.716750, abs=1e-6) and abs(float(found[1]) - 1.716750) > 0.05


RUNS = [(0, 1, 3), (0, 6, 1), (1, 1, 1), (1, 3, 5)]
"""The texts of ``example``: row, first root, and number of tokens."""


def slow_rounds(head: Linear, batch: TextBatch, states: TargetStates, ends: list[int]) -> tuple[Tensor, Tensor]:
    """V at the beginning of all texts, summed; and the mutant of EDR, in which the occupancy has a gradient."""
    log_p = states.logits(torch.arange(18)).double().log_softmax(-1).view(2, 9, VOCAB)
    zero, keep = torch.zeros(()).double(), torch.tensor([token not in ends for token in range(VOCAB)])
    total = mutant = zero
    for row, first, length in RUNS:
        inner = length - 1
        places = [(n, k) for n in range(inner) for k in range(min(DEPTHS, inner - n))]
        cost, accepted, advantage = {}, {}, {}
        for n, k in places:
            p, hidden = log_p[row, first + n + k].exp(), states.hidden[-1][row, first + n - 1]
            q, columns = head.layers[k](hidden).softmax(-1), head.columns
            q = q if columns is None else torch.zeros_like(p).index_put((columns,), q)
            cost[n, k] = (p - q).clamp(min=0)[keep].sum() / p[keep].sum()
            accepted[n, k] = (q / p)[batch.tokens[row, first + n + k + 1]].clamp(max=1)
        value, begun = [zero] * (length + DEPTHS), [zero + 1] + [zero] * (length + DEPTHS)
        for n, k in reversed(places):
            last = k == min(DEPTHS, inner - n) - 1
            left = (zero + (n + DEPTHS + 1 <= inner)) * (1 + value[n + DEPTHS + 1]) if last else value[n]
            advantage[n, k] = (left - value[n + k + 1]).detach()
            value[n] = cost[n, k] + accepted[n, k] * left + (1 - accepted[n, k]) * value[n + k + 1]
        mass = zero
        for n, k in places:
            mass = begun[n] if k == 0 else mass
            mutant = mutant + mass * (cost[n, k] + accepted[n, k] * advantage[n, k])
            begun[n + k + 1] = begun[n + k + 1] + mass * (1 - accepted[n, k])
            mass = mass * accepted[n, k]
            if k == DEPTHS - 1:
                begun[n + DEPTHS + 1] = begun[n + DEPTHS + 1] + mass
        total = total + value[0]
    return total, mutant


@pytest.mark.parametrize(("columns", "chunk"), [(None, 100), (REDUCED, 3)])
def test_the_gradient_of_edr_is_that_of_the_rounds(columns: Tensor | None, chunk: int) -> None:
    torch.manual_seed(2)
    head, (batch, states) = Linear(columns), example()
    compare, anchors = Comparison(head, ExpectedRounds(), Power(1.0), chunk=chunk), head.anchors(batch, None)
    compare.ends = [2]
    loss, places = compare(batch, states, anchors, torch.full((DEPTHS,), 5.0), 0.0)
    every, layers = (5 * loss, *slow_rounds(head, batch, states, [2])), list(head.layers.parameters())
    mine, slow, wrong = (torch.autograd.grad(each, layers, retain_graph=True) for each in every)
    torch.testing.assert_close(mine, slow, rtol=1e-4, atol=1e-6)
    if columns is None:  # among these four, the texts' tokens are accepted for sure or never
        assert max(float((a - b).abs().max()) for a, b in zip(wrong, slow, strict=True)) > 1e-1
    assert places.anchors.index.tolist() == anchors.index.tolist(), "everything has a gradient"


def test_anchors_are_drawn_by_how_often_a_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of every row. Over the whole grid of draws, the mean is what all anchors have; without 1/π it is not."""
    (batch, _), generator, size = example(), torch.Generator().manual_seed(3), 250
    every = Anchors.everywhere(batch, DEPTHS)
    cost, ratio = torch.rand(2, 18, DEPTHS, generator=generator)

    def found(own: Anchors) -> list[Places]:
        parts = list(everywhere(Linear(), batch, own))
        return [told(cost[p.index], p.valid, ratio=ratio[p.index], anchors=p) for p in parts]

    whole_index, whole = drawn(found(every), batch, every)
    two, mean, counts = every.sampled(batch, 2, generator), torch.zeros(18, DEPTHS, 2), torch.zeros(18)
    parts = found(two)
    assert all(len(part.anchors.index) == 4 for part in parts)
    assert whole_index.index.tolist() == every.index.tolist()
    for u in (torch.arange(size) + 0.5) / size:
        monkeypatch.setattr(torch, "rand", lambda *shape, u=u, **_: torch.full(shape, float(u), dtype=torch.float64))
        anchors, factors = drawn(parts, batch, two)
        assert (anchors.index // 9).tolist() == [0, 0, 1, 1]
        mean[anchors.index] += factors / size
        counts[anchors.index] += (factors[:, 0, 0] > 0) / size
    wanted = torch.zeros(18, DEPTHS, 2).index_put((every.index,), whole)
    torch.testing.assert_close(mean, wanted, rtol=2e-2, atol=1e-2)
    assert 0 < counts[counts > 0].min() < 0.9, "some were left out at times"
    assert (mean * counts[:, None, None] - wanted).abs().max() > 0.05
