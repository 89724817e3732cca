"""Losses and weights of whole drafts: block verification and expected rounds, against enumerations."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from drafters.heads.training import Anchors, TargetStates, TextBatch
from experiments.training import losses
from experiments.training.comparison import Comparison
from experiments.training.edr import ExpectedRounds, drawn, everywhere, occupied
from experiments.training.losses import Compared, Places
from experiments.training.weights import ExpectedLength, Power
from tests.experiments.tracing.test_along import EOS, Chain
from tests.experiments.training.test_losses import DEPTHS, REDUCED, VOCAB, Linear, example, told
from verifiers import RejectionVerifier


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


def test_the_mean_over_texts_is_the_number_of_rounds() -> None:
    """As by enumeration. The mutant: the mean over what costs a round is one over all tokens."""
    chain, found = Chain("one"), torch.zeros(2).double()
    for text, chance in chain.texts():
        length, (p, q) = len(text), (table[0].log() for table in chain.tables(0, 0, text[:-1]))
        supervised = torch.arange(length + 1)[None] > 0
        batch = TextBatch(supervised.long(), supervised, torch.zeros_like(supervised).long(), supervised.cumsum(1))
        valid = Anchors.everywhere(batch, 2, before=0).valid
        at, rounds = (torch.arange(length)[:, None] + torch.arange(2)).clamp(max=length - 1), []
        for ends in ((EOS,), ()):
            all_places = Compared(q, p, torch.tensor(text), 0.0, ends=ends)
            parts = all_places.cost[at], all_places.accepted[at], valid
            ahead, *_ = occupied(*(nn.functional.pad(each, (0, 0, 0, 1))[None] for each in parts))
            rounds.append(1 + float(ahead[0, 0]))
        found += chance * torch.tensor(rounds).double()
        assert text != (1, 1, EOS) or rounds[0] == pytest.approx(1.5625)
    true = chain.mean(RejectionVerifier())
    assert float(found[0]) == pytest.approx(true, abs=1e-6) and abs(float(found[1]) - true) > 0.05


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
