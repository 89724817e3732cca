"""From logits to p: against transformers' own processors, on rows of every kind in one batch."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.requests import SamplingParams
from specdec.sampling import SamplingTensors, one_hot_argmax, path_tokens, penalize, probs

VOCAB = 50

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_k=VOCAB + 10),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.1),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.5, min_p=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=10, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5),
]


def tensors(params: list[SamplingParams], seen: torch.Tensor | None = None) -> SamplingTensors:
    """The parameters as the slots of a batch hold them: filters are off where a row is greedy."""

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([off if p.greedy else getattr(p, name) for p in params], dtype=dtype)

    sampled = [p for p in params if not p.greedy]
    return SamplingTensors(
        temperature=column("temperature", 0.0, torch.float32),
        top_k=column("top_k", 0, torch.long),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        repetition_penalty=torch.tensor([p.repetition_penalty for p in params]),
        seen=seen,
        any_greedy=len(sampled) < len(params),
        any_sampled=bool(sampled),
        any_filtered=any(p.top_k > 0 or p.top_p < 1 for p in sampled),
        any_min_p=any(p.min_p > 0 for p in sampled),
    )


def by_transformers(logits: torch.Tensor, params: SamplingParams, sequence: list[int]) -> torch.Tensor:
    """What ``generate`` would sample from after a sequence: float32[vocab]."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.greedy:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            processors.append(MinPLogitsWarper(params.min_p))
    scores = processors(torch.tensor([sequence]), logits[None])[0]
    if params.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), VOCAB).float()
    return scores.softmax(-1)


def logits(rows: int, nodes: int, seed: int) -> torch.Tensor:
    """Without ties: those are broken by the lower id here, and otherwise there."""
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(rows, nodes, VOCAB, generator=generator)
    assert all(row.unique().numel() == VOCAB for row in values.flatten(0, 1))
    return values


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_one_row_against_transformers(params: SamplingParams) -> None:
    values = logits(1, 8, seed=1)
    p = probs(values, tensors([params]))
    for node in range(8):
        expected = by_transformers(values[0, node], params, [0])
        torch.testing.assert_close(p[0, node], expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(p[0, node] > 0, expected > 0), "another set of tokens was kept"


def test_all_rows_in_one_batch_against_transformers() -> None:
    """Greedy and sampled, filtered and not, each as if it were alone."""
    values = logits(len(PARAMS), 4, seed=2)
    p = probs(values, tensors(PARAMS))
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(len(PARAMS), 4))
    for row, params in enumerate(PARAMS):
        for node in range(4):
            expected = by_transformers(values[row, node], params, [0])
            torch.testing.assert_close(p[row, node], expected, atol=1e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    values = logits(len(PARAMS), 3, seed=3)
    p = probs(values, tensors(PARAMS))
    for row, params in enumerate(PARAMS):
        alone = probs(values[row : row + 1], tensors([params]))
        torch.testing.assert_close(p[row : row + 1], alone, atol=1e-7, rtol=1e-6)
        assert torch.equal(p[row : row + 1] > 0, alone > 0)


def test_low_precision_logits_are_processed_in_float32() -> None:
    values = logits(1, 2, seed=4).bfloat16()
    params = tensors([SamplingParams(temperature=0.7, top_p=0.9)])
    assert torch.equal(probs(values, params), probs(values.float(), params))


# Ties keep the lower id.


@pytest.mark.parametrize(
    ("params", "values", "expected"),
    [
        (SamplingParams(), [1.0, 3.0, 3.0, 3.0], [0, 1, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=2), [1.0, 3.0, 3.0, 3.0], [0, 1 / 2, 1 / 2, 0]),
        (SamplingParams(temperature=1.0, top_k=1), [3.0, 3.0, 3.0, 1.0], [1, 0, 0, 0]),
        # Four quarters: two are needed to reach .4, and two reach .5 exactly.
        (SamplingParams(temperature=1.0, top_p=0.4), [0.0, 0.0, 0.0, 0.0], [1 / 2, 1 / 2, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.5), [0.0, 0.0, 0.0, 0.0], [1 / 2, 1 / 2, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.51), [0.0, 0.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3, 0]),
        # top-p counts the mass after top-k: of three thirds, two reach .6.
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.6), [0.0, 0.0, 0.0, 0.0], [1 / 2, 1 / 2, 0, 0]),
        # min-p compares equals as equals.
        (SamplingParams(temperature=1.0, min_p=1.0), [2.0, 0.0, 2.0, 0.0], [1 / 2, 0, 1 / 2, 0]),
    ],
)
def test_ties(params: SamplingParams, values: list[float], expected: list[float]) -> None:
    p = probs(torch.tensor([[values]]), tensors([params]))
    torch.testing.assert_close(p[0, 0], torch.tensor(expected, dtype=torch.float32))
    # The same beside another row.
    mixed = probs(torch.tensor([[values], [values]]), tensors([params, SamplingParams(temperature=1.0)]))
    torch.testing.assert_close(mixed[0], p[0])


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    values = logits(3, 2, seed=5)
    p = probs(values, tensors([SamplingParams(), SamplingParams(temperature=1.0), SamplingParams()]))
    assert torch.equal(p[[0, 2]], one_hot_argmax(values[[0, 2]]))
    torch.testing.assert_close(p[1], values[1].softmax(-1))


def test_a_temperature_towards_zero_is_greedy() -> None:
    values = logits(1, 4, seed=6)
    p = probs(values, tensors([SamplingParams(temperature=1e-4)]))
    torch.testing.assert_close(p, one_hot_argmax(values))


# Repetition penalty


def test_the_repetition_penalty_follows_every_nodes_path() -> None:
    """The tree 0 - 1 - 2 with a second child 3 of node 1: node 3 does not see node 2's token."""
    prompts = [[4, 9, 4], [0, 1, 2, 3]]
    tokens = torch.tensor([[4, 11, 12, 13], [3, 20, 20, 21]])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]).bool().expand(2, -1, -1)
    paths = [[], [1], [1, 2], [1, 3]]
    params = [
        SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, repetition_penalty=5.0),
    ]
    seen = torch.zeros(2, VOCAB, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    values = logits(2, 4, seed=7)
    p = probs(values, tensors(params, seen), path_tokens(tokens, ancestors))
    plain = probs(values, tensors([replace(params[0], repetition_penalty=1.0)] * 2))
    assert not torch.allclose(p[0], plain[0])
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(paths):
            sequence = prompt + [int(tokens[row, above]) for above in path]
            expected = by_transformers(values[row, node], params[row], sequence)
            torch.testing.assert_close(p[row, node], expected, atol=1e-6, rtol=1e-5)
    # Rows without a penalty are left alone in such a batch.
    params[1] = SamplingParams(temperature=1.0)
    p = probs(values, tensors(params, seen), path_tokens(tokens, ancestors))
    torch.testing.assert_close(p[1], values[1].softmax(-1))


def test_path_tokens_are_padded_with_the_root() -> None:
    tokens = torch.tensor([[7, 1, 2, 3]])
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]).bool()
    assert path_tokens(tokens, ancestors).tolist() == [[[7, 7, 7, 7], [7, 1, 7, 7], [7, 1, 2, 7], [7, 1, 7, 3]]]


def test_penalize_literally() -> None:
    values = torch.tensor([[[2.0, -2.0, 2.0, -2.0, 0.0]]])
    seen = torch.tensor([[True, True, False, False, True]])
    penalized = penalize(values, torch.tensor([2.0]), seen, torch.tensor([[[0, 3]]]))
    assert penalized.tolist() == [[[1.0, -4.0, 2.0, -4.0, 0.0]]]


def test_one_hot_argmax_keeps_the_lower_id() -> None:
    assert one_hot_argmax(torch.tensor([[1.0, 2.0, 2.0], [5.0, 5.0, 5.0]])).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_the_host_tells_penalized_batches_from_others() -> None:
    one = torch.zeros(1)
    plain = SamplingTensors.of([SamplingParams()], temperature=one, top_k=one.long(), top_p=one, min_p=one,
                               repetition_penalty=one, seen=None)  # fmt: skip
    assert plain.flags != replace(plain, seen=torch.zeros(1, 8, dtype=torch.bool)).flags
    assert plain.flags != replace(plain, any_sampled=True).flags
    assert plain.flags == replace(plain, temperature=one + 1).flags
