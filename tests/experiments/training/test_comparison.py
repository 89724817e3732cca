"""The loss of a batch from its places, and the figures of drafts, each against numbers worked out one by one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from drafters.heads.training import Anchors, Prediction, TargetStates, TextBatch, TrainedHead
from experiments.training.comparison import Comparison, Places, counted
from experiments.training.figures import Tally, calibration_error, calibration_errors, sequential_temperatures
from experiments.training.losses import CrossEntropy, ForwardKL, Loss
from experiments.training.weights import DPace, Power, Weights

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

    def logits(
        self, states: Float[Tensor, "place width"], previous: Int[Tensor, " place"], depth: int
    ) -> Float[Tensor, "place column"]:
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


def slow_loss(
    head: Linear, batch: TextBatch, states: TargetStates, loss: str, weights: Weights, columns: Tensor | None
) -> Tensor:
    """The loss, place by place: the sum over depths of the mean over that depth's places."""
    sums: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
    p_all = states.logits(torch.arange(18)).double().softmax(-1).view(2, 9, VOCAB)
    ids = torch.arange(VOCAB) if columns is None else columns
    for row in range(2):
        for root in range(1, 9):
            if batch.documents[row, root] < 0 or batch.documents[row, root - 1] != batch.documents[row, root]:
                continue
            told, valid, entropies = [], [], []
            for depth in range(1, DEPTHS + 1):
                at = root + depth
                there = at < 9 and bool(batch.documents[row, at] == batch.documents[row, root])
                there = there and bool(batch.supervised[row, at]) and all(valid)
                valid.append(there)
                if not there:
                    continue
                q = head.layers[depth - 1](states.hidden[-1][row, root - 1]).softmax(-1)
                whole = p_all[row, at - 1]
                p = whole[ids] / whole[ids].sum()
                label = (ids == batch.tokens[row, at]).nonzero()[:, 0].tolist()
                entropy = -q[label[0]].log() if label else q.new_zeros(())
                entropies.append(float(entropy.detach()))
                value = (p * (p / q).log()).sum() if loss == "kl" else entropy
                alpha = torch.minimum(whole[ids], q).sum().detach()
                if head.confidence_weight:
                    c = head.judge(states.hidden[-1][row, root - 1])[depth - 1].sigmoid()
                    value = value - 0.5 * (alpha * c.log() + (1 - alpha) * (1 - c).log())
                told.append((depth, value, bool((ids == whole.argmax()).any())))
            given = torch.tensor([entropies + [0.0] * (DEPTHS - len(entropies))], dtype=torch.float64)
            factor = weights(given, torch.tensor([valid]))[0]
            for depth, value, inside in told:
                if inside:
                    sums[depth - 1].append(factor[depth - 1] * value)
    return sum((torch.stack(each).mean() for each in sums), torch.zeros((), dtype=torch.float64))


COLUMNS = torch.tensor([0, 2, 3, 6])


@pytest.mark.parametrize(
    ("loss", "weights", "columns", "confident", "chunk"),
    [
        ("kl", Power(1.0), None, False, 100),
        ("text", Power(0.5), None, True, 3),
        ("kl", DPace(0.5), COLUMNS, False, 3),
        ("text", Power(0.8), COLUMNS, True, 100),
    ],
)
def test_the_loss_is_the_sum_of_the_depths_means(
    loss: str, weights: Weights, columns: Tensor | None, confident: bool, chunk: int
) -> None:
    torch.manual_seed(2)
    head, (batch, states) = Linear(columns, confident=confident), example()
    rule: Loss = ForwardKL() if loss == "kl" else CrossEntropy()
    comparison = Comparison(head, rule, weights, chunk=chunk)
    anchors = counted(Anchors.everywhere(batch, DEPTHS), batch, states, columns, chunk)
    value, _ = comparison(batch, states, anchors, anchors.counted.sum(0).double(), 0.0)
    wanted = slow_loss(head, batch, states, loss, weights, columns)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    mine = torch.autograd.grad(value, list(head.layers.parameters()))
    slow = torch.autograd.grad(wanted, list(head.layers.parameters()))
    for one, other in zip(mine, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_with_nothing_to_learn_costs_nothing() -> None:
    head, (batch, states) = Linear(), example()
    empty = replace(batch, supervised=torch.zeros_like(batch.supervised))
    anchors = Anchors.everywhere(empty, DEPTHS)
    value, places = Comparison(head, ForwardKL(), Power(1.0), chunk=8)(empty, states, anchors, torch.zeros(3), 0.0)
    assert float(value) == 0 and places.acceptance.shape == (0, DEPTHS)


def found(alpha: list, agrees: list, valid: list, confidence: list | None = None) -> Places:
    there = torch.tensor(valid).bool()
    anchors = Anchors(torch.arange(len(valid)) + 1, there, there)
    judged = None if confidence is None else torch.tensor(confidence)
    return Places(anchors, torch.tensor(alpha), torch.tensor(agrees).bool(), torch.ones_like(there), judged)


def test_figures_of_two_drafts() -> None:
    """The second draft is one token long: its depth 2 says nothing."""
    _, (batch, _) = Linear(), example()
    tally = Tally(2, torch.device("cpu"))
    tally.add(found([[0.8, 0.5], [0.4, 9.0]], [[1, 0], [1, 1]], [[1, 1], [1, 0]]), batch)
    figures = tally.figures()
    assert figures["acceptance/1"] == pytest.approx(0.6) and figures["acceptance/2"] == pytest.approx(0.5)
    assert figures["reached/1"] == pytest.approx(0.6) and figures["reached/2"] == pytest.approx(0.4)
    assert figures["simulated_length"] == pytest.approx(1 + 0.6 + 0.4)
    assert figures["accuracy/1"] == 1.0 and figures["accuracy/2"] == 0.0
    assert figures["simulated_length_greedy"] == pytest.approx(2.0) and figures["coverage"] == 1.0


def test_a_draft_of_a_small_model_is_a_walk_along_the_text() -> None:
    """Depth 2 at an anchor is depth 1 at the next one, within the document."""
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    batch = TextBatch(documents, documents >= 0, documents, torch.tensor([[0, 1, 2, 0, 1]]))
    anchors = Anchors(torch.tensor([0, 1, 3]), torch.ones(3, 1).bool(), torch.ones(3, 1).bool())
    ones = torch.ones(3, 1).bool()
    places = Places(anchors, torch.tensor([[0.5], [0.25], [0.8]]), ones, ones, None)
    tally = Tally(2, torch.device("cpu"))
    tally.add(places, batch, autoregressive=True)
    figures = tally.figures()
    assert figures["acceptance/1"] == pytest.approx((0.5 + 0.25 + 0.8) / 3)
    assert figures["acceptance/2"] == pytest.approx(0.25), "only the first anchor has two tokens behind it"
    assert figures["reached/2"] == pytest.approx(0.125)


def test_the_calibration_error_is_of_getting_that_far() -> None:
    """Both drafts predict 0.9 and 0.9 · 0.5; they get there with 0.8, 0.6 and with 0.4, 0.3 (the products of α)."""
    _, (batch, _) = Linear(), example()
    tally = Tally(2, torch.device("cpu"))
    tally.add(found([[0.8, 0.5], [0.6, 0.5]], [[1, 1], [1, 1]], [[1, 1], [1, 1]], [[0.9, 0.5], [0.9, 0.5]]), batch)
    figures = tally.figures()
    assert figures["calibration_error/1"] == pytest.approx(0.9 - 0.7)
    assert figures["calibration_error/2"] == pytest.approx(0.45 - 0.35)
    counts = torch.tensor([[[2.0, 2.0]], [[0.2, 1.8]], [[0.6, 1.4]]])
    assert calibration_errors(counts).tolist() == pytest.approx([(0.4 + 0.4) / 4])


def test_sequential_temperatures_undo_what_was_done_to_the_logits() -> None:
    """Confidences that are right but for a factor: 2 at depth 1 (too sure), a half at depth 2 (not sure enough)."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    reached = true.sigmoid().cumprod(1)
    temperatures, errors = sequential_temperatures(true * torch.tensor([2.0, 0.5]), reached, torch.ones(4000, 2).bool())
    assert temperatures == pytest.approx([2.0, 0.5], rel=0.05)
    before = calibration_error((2 * true[:, 0]).sigmoid(), reached[:, 0])
    assert max(errors) < 0.01 < 0.05 < before
