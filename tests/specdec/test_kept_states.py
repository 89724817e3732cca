"""Beginnings that are shared between requests on targets with recurrent layers: states are kept at page boundaries.

Outputs are those of requests alone, fewer tokens are prefilled, and states of other tokens are noticed.
"""

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine, ForwardBatch, ModelRunner, Paging, SamplingParams, Target
from specdec.cache.pages import KeptStates
from specdec.cache.states import StateKey, States, StateShape
from specdec.memory import NoRoomError
from tests.architectures import tiny
from tests.components import DRAFTERS
from tests.specdec.test_pages import PROMPTS, SAMPLING
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

pytestmark = pytest.mark.usefixtures("untried")

LAYOUTS = {
    "rows": Paging(shared=True),
    "pages": Paging(page_size=4, shared=True),
    "few states": Paging(page_size=4, pages=48, shared=True, states=6),
}


@functools.cache
def target(kind: str) -> Target:
    return Target(tiny(kind))


def engine_of(kind: str, drafter: str, **options: Any) -> Engine:
    made = DRAFTERS[drafter](target(kind).model)
    options = {"max_batch_size": 8, "max_length": 64, "prefill_chunk": 5, **options}
    return Engine(target(kind), made, RejectionVerifier(), **options)


def conversations(engine: Engine) -> list[tuple[int, ...]]:
    """Two answers to each prompt: every second prompt is a first one, its answer, and a little more."""
    answers = [each.token_ids for each in engine.generate(PROMPTS[:4], SAMPLING[:4])]
    turns = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(PROMPTS, answers, strict=False)]
    return [*answers, *(each.token_ids for each in engine.generate(turns, SAMPLING[:4]))]


@functools.cache
def alone(kind: str, drafter: str) -> list[tuple[int, ...]]:
    return conversations(engine_of(kind, drafter, max_batch_size=1))


@pytest.mark.parametrize(
    ("kind", "drafter", "layout", "least"),
    [
        ("qwen3_next", "eagle3_expansion", "pages", 0.15),
        ("lfm2", "recycling", "rows", 0.3),
        *(
            complete(kind, drafter, layout, least, strong=False)
            for kind in ("qwen3_next", "mamba", "recurrent_gemma", "zaya", "falcon_h1")
            for drafter, layout, least in (("ngram", "few states", 0.3), ("recycling", "rows", 0.3))
        ),
    ],
)
def test_outputs_are_those_of_requests_alone(kind: str, drafter: str, layout: str, least: float) -> None:
    """Also where a prompt is another one and its answer."""
    engine = engine_of(kind, drafter, cache=LAYOUTS[layout])
    assert conversations(engine) == alone(kind, drafter)
    counts = engine.page_counts
    assert counts.reused > least * counts.queried


def test_plain_requests_begin_where_drafts_were_and_not_the_other_way_round() -> None:
    engine = engine_of("qwen3_next", "eagle3_expansion", cache=LAYOUTS["pages"])
    prompt, greedy = [PROMPTS[0] * 2], SamplingParams(max_new_tokens=2)
    found = []
    for speculate in (False, True, True, False):
        before = engine.page_counts.reused
        engine.generate(prompt, greedy, speculate=speculate)
        found.append(engine.page_counts.reused - before)
    assert found[0] == found[1] == 0 < found[2] < found[3]


def test_a_hit_saves_the_prefill_and_a_common_beginning_is_kept_where_prompts_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two of a family are prefilled whole, by the second of them it is known where they part."""
    engine = engine_of("qwen3_next", "recycling", cache=LAYOUTS["pages"], prefill_chunk=64)
    counts, run = Counter[str](), ModelRunner.run

    def counting(runner: ModelRunner, batch: ForwardBatch, *rest: Any) -> Any:
        if batch.counts is not None:
            counts["tokens"] += int(batch.counts.sum())
        return run(runner, batch, *rest)

    monkeypatch.setattr(ModelRunner, "run", counting)
    rng = np.random.default_rng(1)
    common = rng.integers(1, 24, 26).tolist()
    prefilled = []
    for own in (8, 9, 10):
        counts.clear()
        engine.generate([[*common, own, *rng.integers(1, 24, 10).tolist()]], SamplingParams(max_new_tokens=1))
        prefilled.append(counts["tokens"])
    assert prefilled == [36, 36, 36 - 24]


WRONG_STATES = ("another beginning's state", "the state of the end")


def mistake_states(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one of the ``WRONG_STATES`` that of every beginning."""
    if mutant == WRONG_STATES[0]:
        begin = States.begin
        monkeypatch.setattr(
            States, "begin", lambda states, slot, number, length: begin(states, slot, (number + 1) % 16, length)
        )
    else:
        monkeypatch.setattr(States, "save", lambda states, slot: [tensor[:, slot, 0] for tensor in states.tensors])


@pytest.mark.parametrize("mutant", WRONG_STATES)
def test_states_of_other_tokens_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake_states(mutant, monkeypatch)
    engine = engine_of("qwen3_next", "recycling", cache=LAYOUTS["pages"])
    assert conversations(engine) != alone("qwen3_next", "recycling")


def test_what_went_wrong_is_not_begun_with() -> None:
    """A request whose logits are not finite leaves no states; what was kept before the weights changed is dropped."""
    kept = KeptStates(2)
    one, other = np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert (kept.keep(one, drafted=True), kept.keep(other, drafted=True)) == (1, 0)
    assert kept.find(other[:7], drafted=True) == (4, 1)
    kept.forget(other[:6])
    assert kept.find(other[:7], drafted=False) == (0, None)
    assert kept.find(other, drafted=False) == (8, 0)
    kept.clear()
    assert kept.find(other, drafted=False) == (0, None)
    engine = engine_of("qwen3_next", "recycling", cache=LAYOUTS["pages"])
    for reused in (False, True):
        before = engine.page_counts.reused
        engine.generate([PROMPTS[0]], SAMPLING[0])
        assert (engine.page_counts.reused > before) == reused
    engine.weights_changed()
    before = engine.page_counts.reused
    engine.submit(PROMPTS[0], SAMPLING[0])
    engine.step()
    (request,) = engine._running
    engine._running.leave(request, sound=False)
    engine.generate([PROMPTS[0]], SAMPLING[0])
    assert engine.page_counts.reused == before


def test_that_used_longest_ago_is_given_up() -> None:
    kept = KeptStates(2)
    first, second, third = (np.arange(start, start + 4) for start in (0, 10, 20))
    for tokens in (first, second):
        kept.keep(tokens, drafted=False)
    assert kept.keep(first, drafted=False) is None  # known, and used again
    assert kept.find(first, drafted=True) == (0, None)  # without the session's part
    assert kept.keep(third, drafted=False) == 0
    assert [kept.find(each, drafted=False)[0] for each in (first, second, third)] == [4, 0, 4]
    assert KeptStates(0).keep(first, drafted=False) is None


def test_the_last_boundary_has_the_state_of_its_token() -> None:
    """States are numbers here: a node's is the sum of its path. Pieces, trees and chains, in random order."""
    every, nodes = 3, 5
    layer = {StateKey("conv", 0): StateShape((), torch.float64)}
    states = States([layer], slots=3, length=99, nodes=nodes, device=torch.device("cpu"), every=every)
    rng, sums = np.random.default_rng(0), [[0.0] for _ in range(3)]
    (tensor,) = states.tensors
    for turn in range(60):
        slots = np.sort(rng.permutation(3)[: rng.integers(1, 4)])
        index, paths = torch.from_numpy(slots), torch.full((len(slots), nodes), -1)
        counts = torch.zeros(len(slots), dtype=torch.long)
        for row, slot in enumerate(slots):
            values = rng.integers(1, 100, nodes + 1)
            if turn % 3 == 0:  # a piece of a prompt
                counts[row] = int(rng.integers(1, 6))
                ends = sums[slot][-1] + values.repeat(2)[: counts[row]].cumsum()
                tensor[0, slot, 1] = ends[-1]
            else:
                counts[row] = int(rng.integers(0, nodes + 2))
                path = np.sort(rng.permutation(np.arange(1, nodes + 1))[: max(int(counts[row]) - 1, 0)])
                paths[row, : len(path)] = torch.from_numpy(path)
                ends = sums[slot][-1] + values[[0, *path]].cumsum()[: counts[row]]
                tensor[0, slot, 1 : nodes + 2] = 1e9
                tensor[0, slot, torch.from_numpy(np.array([0, *path]) + 1)] = torch.from_numpy(
                    (sums[slot][-1] + values[[0, *path]].cumsum()).astype(float)
                )
            sums[slot] += ends.tolist()
        states.commit(index, paths if turn % 3 else paths[:, :0], counts)
        for slot in range(3):
            boundary = states.boundary(slot)
            assert states.lengths[slot] == len(sums[slot]) - 1
            assert float(tensor[0, slot, 0]) == sums[slot][-1]
            assert float(tensor[0, slot, -1]) == sums[slot][boundary]
            assert boundary % every == 0 and (turn % 3 == 0 or boundary <= len(sums[slot]) - 1)
        if turn % 3 and (counts > 0).all():
            ends = (states.lengths[index] // every * every).tolist()
            reached = [states.boundary(slot) for slot in slots]
            before = (states.lengths[index] - counts).tolist()
            assert all(end == found or end <= old for end, found, old in zip(ends, reached, before, strict=True))


def test_kept_states_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more per slot for its last boundary, and those beside the slots; refused together if they do not fit."""
    model = target("qwen3_next").model
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_length": 8, "max_nodes": 2, "paging": Paging(shared=True)}
    states = ModelRunner(model, **sizes).cache.states
    assert states is not None
    assert states.bytes == (2 * (2 + 2 + 1) + 16) * states.bytes_per_state
    monkeypatch.setattr("specdec.cache.states.free_memory", lambda device: 23 * states.bytes_per_state)
    with pytest.raises(NoRoomError, match=r"of one layer for every node and 16 beginnings are kept"):
        ModelRunner(model, **sizes)
