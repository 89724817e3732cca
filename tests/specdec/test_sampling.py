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
from specdec.sampling import SamplingTensors, one_hot_argmax, path_tokens, probs

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

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([off if p.greedy else getattr(p, name) for p in params], dtype=dtype)

    return SamplingTensors.of(
        params,
        temperature=column("temperature", 0.0),
        top_k=column("top_k", 0, torch.long),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        repetition_penalty=torch.tensor([p.repetition_penalty for p in params]),
        seen=seen,
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


def test_every_row_is_as_in_transformers_and_as_if_it_were_alone() -> None:
    """Greedy and sampled, filtered and not, in one batch."""
    values = logits(len(PARAMS), 4, seed=2)
    p = probs(values, tensors(PARAMS))
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(len(PARAMS), 4))
    for row, params in enumerate(PARAMS):
        for node in range(4):
            expected = by_transformers(values[row, node], params, [0])
            torch.testing.assert_close(p[row, node], expected, atol=1e-6, rtol=1e-5)
            assert torch.equal(p[row, node] > 0, expected > 0), "another set of tokens was kept"
        alone = probs(values[row : row + 1], tensors([params]))
        torch.testing.assert_close(p[row : row + 1], alone, atol=1e-7, rtol=1e-6)
        assert torch.equal(p[row : row + 1] > 0, alone > 0)


@pytest.mark.parametrize(
    ("params", "values", "expected"),
    [
        ({}, [1.0, 3.0, 3.0, 3.0], [0, 1, 0, 0]),
        ({}, [5.0, 5.0, 5.0, 5.0], [1, 0, 0, 0]),
        ({"top_k": 2}, [1.0, 3.0, 3.0, 3.0], [0, 1 / 2, 1 / 2, 0]),
        ({"top_k": 1}, [3.0, 3.0, 3.0, 1.0], [1, 0, 0, 0]),
        # Four quarters: two are needed to reach .4, and two reach .5 exactly.
        ({"top_p": 0.4}, [0.0] * 4, [1 / 2, 1 / 2, 0, 0]),
        ({"top_p": 0.5}, [0.0] * 4, [1 / 2, 1 / 2, 0, 0]),
        ({"top_p": 0.51}, [0.0] * 4, [1 / 3, 1 / 3, 1 / 3, 0]),
        # top-p counts the mass after top-k: of three thirds, two reach .6.
        ({"top_k": 3, "top_p": 0.6}, [0.0] * 4, [1 / 2, 1 / 2, 0, 0]),
        # min-p compares equals as equals.
        ({"min_p": 1.0}, [2.0, 0.0, 2.0, 0.0], [1 / 2, 0, 1 / 2, 0]),
    ],
)
def test_ties_keep_the_lower_id(params: dict, values: list[float], expected: list[float]) -> None:
    """Beside another row, too."""
    sampling = SamplingParams(temperature=1.0 if params else 0.0, **params)
    p = probs(torch.tensor([[values]]), tensors([sampling]))
    torch.testing.assert_close(p[0, 0], torch.tensor(expected, dtype=torch.float32))
    mixed = probs(torch.tensor([[values], [values]]), tensors([sampling, SamplingParams(temperature=1.0)]))
    torch.testing.assert_close(mixed[0], p[0])


def test_a_temperature_towards_zero_is_greedy() -> None:
    values = logits(1, 4, seed=6)
    p = probs(values, tensors([SamplingParams(temperature=1e-4)]))
    torch.testing.assert_close(p, one_hot_argmax(values))


def test_the_repetition_penalty_follows_every_nodes_path() -> None:
    """The tree 0 - 1 - 2 with a second child 3 of node 1: node 3 does not see node 2's token."""
    prompts = [[4, 9, 4], [0, 1, 2, 3]]
    tokens = torch.tensor([[4, 11, 12, 13], [3, 20, 20, 21]])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]).bool().expand(2, -1, -1)
    paths = [[], [1], [1, 2], [1, 3]]
    sampled = SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.4)
    params = [sampled, SamplingParams(temperature=0.0, repetition_penalty=5.0)]
    seen = torch.zeros(2, VOCAB, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    values = logits(2, 4, seed=7)
    p = probs(values, tensors(params, seen), path_tokens(tokens, ancestors))
    plain = probs(values, tensors([replace(sampled, repetition_penalty=1.0)] * 2))
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
