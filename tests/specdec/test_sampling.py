"""From what a user asks for to p: against transformers' own processors, and against sorting the vocabulary."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process

from specdec.engine.slot_table import SlotTable
from specdec.filters import first_largest, keep_top, largest
from specdec.requests import GREEDY_BELOW, Request, SamplingParams
from specdec.sampling import SamplingTensors, adjust, distribution, forbid_ends, path_tokens
from tests.forwards import slots_of
from tests.shapes import shapes_unchecked

WRONG = {
    "temperature": [-0.1, math.nan, 10**400, True, "0.7"],
    "top_k": [-1, 2**63, 1.5, np.bool_(True)],
    "top_p": [0.0, 1.01, None],
    "repetition_penalty": [0.0, math.inf, 1e-30],
    "logit_bias": [{1: 101}, {1: math.inf}, {-1: 1.0}, {1: "a"}, 5],
    "bad_words_ids": [5, "5", [[]], [["a"]]],
    "max_new_tokens": [0, 2.0],
    "stop": [("end", ""), (13,), 13],
    "stop_token_ids": [13, "13", [1.5]],
    "seed": [2**64, 1.0],
    "ignore_eos": ["no"],
    "logits_processor": [object()],
}


def probs(logits: Tensor, sampling: SamplingTensors, paths: Tensor | None = None) -> Tensor:
    return distribution(adjust(logits, sampling, paths), sampling)


@pytest.mark.parametrize("name", WRONG)
def test_every_bad_parameter_is_refused_by_name(name: str) -> None:
    for value in WRONG[name]:
        with shapes_unchecked(), pytest.raises(ValueError, match=rf"^{name}\b.*(give|remove)"):
            SamplingParams(**{name: value})


def test_numbers_are_taken_as_they_are_meant_up_to_the_largest() -> None:
    given = {"top_k": np.int64(3), "seed": np.uint8(7), "temperature": np.float32(0.5), "stop_token_ids": np.arange(2)}
    with shapes_unchecked():
        params = SamplingParams(**given)
    assert params == SamplingParams(top_k=3, seed=7, temperature=0.5, stop_token_ids=(0, 1))
    logits = torch.tensor([[[65504.0, -65504.0, 1.0, 0.0]]])
    for temperature, penalty in ((3.4028234e38, 1.0), (GREEDY_BELOW, 1e20), (GREEDY_BELOW, 1e-20)):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
        state = slots_of([[0, 1]], vocab_size=4, params=[params]).sampling
        p = probs(logits, state, torch.tensor([[[0]]]))
        assert p.isfinite().all() and abs(float(p.sum()) - 1) < 1e-6, params
    assert SamplingParams().greedy and SamplingParams(temperature=GREEDY_BELOW / 2).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy
    params = SamplingParams(temperature=0.5, seed=None)
    one, other = params.seeded(4), params.seeded(4)
    assert one.stream == 4 and one.temperature == 0.5
    assert one.seed is not None and one.seed != other.seed, "two fresh seeds agree with probability 2**-62"
    assert SamplingParams(seed=9, stream=2).seeded(4) == SamplingParams(seed=9, stream=2)


VOCAB = 50

PARAMS = [
    *(SamplingParams(temperature=temperature) for temperature in (0.0, 0.3, 1.0, 2.5)),
    *(SamplingParams(temperature=1.0, top_k=top_k) for top_k in (1, 7, VOCAB + 10)),
    *(SamplingParams(temperature=1.0, top_p=top_p) for top_p in (0.9, 1e-6)),
    SamplingParams(temperature=0.7, top_p=0.1),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.5, min_p=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=10, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5),
]


def tensors(params: list[SamplingParams]) -> SamplingTensors:
    """The parameters as the slots of a batch hold them: filters are off where a row is greedy."""
    columns = {
        name: torch.tensor([off if p.greedy else getattr(p, name) for p in params])
        for name, off in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        columns[name] = torch.tensor([getattr(p, name) for p in params])
    return SamplingTensors.of(params, **columns, tables={})


def by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What ``generate`` would sample from: float32[vocab]."""
    processors = logits_process.LogitsProcessorList()
    for name, kind, off in (
        ("temperature", logits_process.TemperatureLogitsWarper, None),
        ("top_k", logits_process.TopKLogitsWarper, 0),
        ("top_p", logits_process.TopPLogitsWarper, 1.0),
        ("min_p", logits_process.MinPLogitsWarper, 0.0),
    ):
        if not params.greedy and getattr(params, name) != off:
            processors.append(kind(getattr(params, name)))
    scores = processors(torch.tensor([[0]]), logits[None])[0]
    if params.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), VOCAB).float()
    return scores.softmax(-1)


def logits(rows: int, nodes: int, seed: int) -> torch.Tensor:
    """Without ties: those are broken by the lower id here, and otherwise there."""
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(rows, nodes, VOCAB, generator=generator)
    assert all(row.unique().numel() == VOCAB for row in values.flatten(0, 1))
    return values


def test_every_row_is_as_in_transformers_and_as_if_it_were_alone() -> None:
    """Greedy and sampled, filtered and not, in one batch."""
    values = logits(len(PARAMS), 4, seed=2)
    p = probs(values, tensors(PARAMS))
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(len(PARAMS), 4))
    for row, params in enumerate(PARAMS):
        for node in range(4):
            expected = by_transformers(values[row, node], params)
            torch.testing.assert_close(p[row, node], expected, atol=1e-6, rtol=1e-5)
            assert torch.equal(p[row, node] > 0, expected > 0), "another set of tokens was kept"
        alone = probs(values[row : row + 1], tensors([params]))
        torch.testing.assert_close(p[row : row + 1], alone, atol=1e-7, rtol=1e-6)
        assert torch.equal(p[row : row + 1] > 0, alone > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_of_the_largest_is_what_argmax_finds(dtype: torch.dtype) -> None:
    """Of widths around those of vectors, with ties, infinities and NaN, and of numbers that do not lie side by side."""
    generator = torch.Generator().manual_seed(3)
    for width in (1, 2, 7, 8, 9, 15, 16, 17, 33, 100, 1000):
        values = torch.randint(-4, 0, (2, 3, width), generator=generator).to(dtype)
        odd = values.clone()
        odd[0, 0], odd[0, 1, -1], odd[1, 0, width // 2], odd[1, 1, 0] = -torch.inf, torch.inf, torch.nan, torch.nan
        odd[1, 1, -1], odd[1, 2, width // 3 :] = torch.inf, torch.nan
        for each in (values, odd, odd.transpose(0, 1), odd[:, ::2]):
            assert torch.equal(first_largest(each), each.double().argmax(-1)), (width, each)


def test_output_penalties_bias_and_early_ends_follow_every_nodes_path() -> None:
    """OpenAI's formula, token by token, over a tree of which node 3 does not see node 2; the prompt does not count."""
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=-0.4, logit_bias={5: 2.5}, bad_words_ids=[[6], [1, 2]], min_new_tokens=5
    )
    prompt, output, ends = [4, 9, 12], [12, 7, 12, 11], frozenset([8, 13])
    tokens, values = torch.tensor([[11, 11, 12, 8]]), logits(1, 4, seed=7)
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]).bool()
    table = SlotTable(1, 20, VOCAB, torch.device("cpu"))
    table.admit(0, Request(0, prompt, params.seeded(0), speculate=True, stop_ids=ends, output_ids=output))
    rows = table.rows(np.zeros(1, dtype=np.int64))
    scores = adjust(values, rows.sampling, path_tokens(tokens, ancestors))
    scores = forbid_ends(scores, rows.sampling, torch.tensor([[6, 7, 8, 8]]))
    assert len(rows.processors[0]) == 1, "the bad word of two tokens"
    for node, path in enumerate([[], [1], [1, 2], [1, 3]]):
        before = output + [int(tokens[0, above]) for above in path]
        for token in range(VOCAB):
            wanted = float(values[0, node, token]) + 2.5 * (token == 5) + 0.4 * before.count(token)
            wanted -= 0.7 * (token in before)
            gone = token == 6 or (token in ends and len(before) < 5)
            assert scores[0, node, token] == pytest.approx(-math.inf if gone else wanted, abs=1e-5), (node, token)
    only = torch.full((1, 1, VOCAB), -math.inf).index_fill(2, torch.tensor([8]), 1.0)
    assert torch.equal(forbid_ends(only, rows.sampling, torch.tensor([[6]])), only), "nothing else is left"


def by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The logits with -inf at tokens that go; and how far every row's decisions are from rounding."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab)
    dropped = rank >= top_k.where(top_k > 0, vocab)[:, None, None]
    mass = ordered.double().masked_fill(dropped, -torch.inf).softmax(-1)
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


@settings(max_examples=25)
@given(rows())
def test_the_same_tokens_stay(case: tuple[Tensor, Tensor, Tensor]) -> None:
    """To the token, also within ties; but for sums of mass that are p up to rounding (1e-6)."""
    logits, top_k, top_p = case
    for most in (top_k, torch.zeros_like(top_k)):
        expected, margin = by_sorting(logits, most, top_p)
        clear = margin > 1e-6
        for kept in both_ways(logits, most, top_p):
            assert torch.equal(kept[clear], expected[clear])


def test_the_same_tokens_stay_where_many_are_likely() -> None:
    """Rows of a large vocabulary, flat and steep, with ties, beside one with top-k and one without filters."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.0, 0.1, 1.0, 3.0, 9.0, 1.0])[:, None, None]
    logits = torch.randn(6, 2, 20_001, generator=generator) * sizes
    logits[:, 1] = logits[:, 1].bfloat16().float()
    logits[..., 7] = -torch.inf
    k, p = torch.tensor([0, 0, 0, 0, 50, 0]), torch.tensor([1 / 3, 0.9, 0.31, 0.95, 0.8, 1.0])
    expected, margin = by_sorting(logits, k, p)
    assert (margin[:5] > 1e-8).all(), "choose p so that no sum of mass is p up to rounding"
    assert torch.equal(keep_top(logits, k, p)[:5], expected[:5])
    assert torch.equal(keep_top(logits, k, p)[5], logits[5])


def test_a_row_with_nan_keeps_it() -> None:
    """Else a request that went wrong would go on as if nothing had happened."""
    logits = torch.tensor([[[1.0, torch.nan, 3.0, 0.0]], [[1.0, 2.0, 3.0, 0.0]]])
    for top_k, top_p in (([2, 2], [1.0, 1.0]), ([0, 0], [0.5, 0.5]), ([2, 2], [0.5, 0.5]), ([1, 0], [1.0, 0.9])):
        k, p = torch.tensor(top_k), torch.tensor(top_p)
        for kept in both_ways(logits, k, p):
            assert kept[0].isnan().any()
            assert torch.equal(kept[1:], by_sorting(logits, k, p)[0][1:])


@settings(max_examples=25)
@given(rows(), st.integers(1, 40))
def test_the_largest_values_are_those_of_a_stable_sort(case: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    """Also within ties, where ``topk`` may return any of them, and among tokens that cannot be drawn."""
    logits = case[0]
    count = min(count, logits.shape[-1])
    values, ids = largest(logits, count)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, ordered[..., :count]) and torch.equal(ids, order[..., :count])
