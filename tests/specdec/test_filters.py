"""Top-k and top-p against sorting the whole vocabulary, which is slow and obvious."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.filters import keep_top, largest, nucleus_by_search, nucleus_by_sorting


def by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The logits with -inf at tokens that go; and how far every row's decisions are from rounding."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab)
    dropped = rank >= top_k.where(top_k > 0, vocab)[:, None, None]
    mass = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
    before = mass.cumsum(-1) - mass
    margin = (before - top_p[:, None, None]).abs().where(~dropped & (rank > 0), 1.0).amin(-1)
    dropped = dropped | ((before >= top_p[:, None, None]) & (rank > 0) & (top_p < 1)[:, None, None])
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(-1, ids, dropped), -torch.inf), margin


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with and without ties, infinities and zeros of both signs; and parameters at the ends of their ranges."""
    batch, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(batch, nodes, vocab, generator=generator) * draw(st.sampled_from([0.0, 1e-3, 1.0, 4.0, 40.0]))
    step = draw(st.sampled_from([None, 1.0, 0.25]))
    if step is not None:
        logits = (logits / step).round() * step  # ties, and zeros of both signs
    excluded = torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    excluded[..., draw(st.integers(0, vocab - 1))] = False
    top_k = draw(st.lists(st.sampled_from([0, 1, 2, 7, vocab, vocab + 5]), min_size=batch, max_size=batch))
    chances = [1e-9, 0.05, 0.31, 0.5, 0.77, 0.9, 0.999, 1.0]
    top_p = draw(st.lists(st.sampled_from(chances), min_size=batch, max_size=batch))
    return logits.masked_fill(excluded, -torch.inf), torch.tensor(top_k), torch.tensor(top_p)


def both_ways(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """What stays if the host knows the parameters, and if it does not."""
    most, every, some = int(top_k.max()), bool((top_k > 0).all()), bool((top_p < 1).any())
    told = keep_top(logits, top_k, top_p, largest_top_k=most, all_top_k=every, any_top_p=some)
    return told, keep_top(logits, top_k, top_p)


def by_search(logits: Tensor, top_p: Tensor) -> Tensor:
    return logits.masked_fill(~nucleus_by_search(logits, top_p), -torch.inf)


@settings(max_examples=25)
@given(rows())
def test_the_same_tokens_stay(case: tuple[Tensor, Tensor, Tensor]) -> None:
    """To the token, also within ties; but for sums of mass that are p up to rounding (1e-6)."""
    logits, top_k, top_p = case
    expected, margin = by_sorting(logits, top_k, top_p)
    clear = margin > 1e-6
    for kept in both_ways(logits, top_k, top_p):
        assert torch.equal(kept[clear], expected[clear])
    expected, margin = by_sorting(logits, torch.zeros_like(top_k), top_p)
    clear = margin > 1e-6
    for way in (by_search, nucleus_by_sorting):
        assert torch.equal(way(logits, top_p)[clear], expected[clear]), way


def test_a_row_with_nan_keeps_it() -> None:
    """Else a request that went wrong would go on as if nothing had happened."""
    logits = torch.tensor([[[1.0, torch.nan, 3.0, 0.0]], [[1.0, 2.0, 3.0, 0.0]]])
    for top_k, top_p in (([2, 2], [1.0, 1.0]), ([0, 0], [0.5, 0.5]), ([2, 2], [0.5, 0.5]), ([1, 0], [1.0, 0.9])):
        k, p = torch.tensor(top_k), torch.tensor(top_p)
        for kept in both_ways(logits, k, p):
            assert kept[0].isnan().any()
            assert torch.equal(kept[1:], by_sorting(logits, k, p)[0][1:])
    assert nucleus_by_sorting(logits, torch.tensor([0.5, 0.5]))[0].isnan().any()


@settings(max_examples=25)
@given(rows(), st.integers(1, 40))
def test_the_largest_values_are_those_of_a_stable_sort(case: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    """Also within ties, where ``topk`` may return any of them, and among tokens that cannot be drawn."""
    logits = case[0]
    count = min(count, logits.shape[-1])
    values, ids = largest(logits, count)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, ordered[..., :count]) and torch.equal(ids, order[..., :count])
