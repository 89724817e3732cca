"""When things happen to a request: the order of its moments, what they are read at, and what reading them costs."""

import time
from types import SimpleNamespace

import pytest

from specdec.engine import output, running, turns
from specdec.engine.engine import Engine
from specdec.engine.output import Outputs
from specdec.engine.read_back import Fetch
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Completion, Timestamps
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model

VOCAB = 64
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [7, 8], [9, 1, 9, 1, 9], [4]]
GREEDY = SamplingParams(max_new_tokens=9)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB)


def make(model, *, size: int = 3, **options: object) -> Engine:
    drafter = DRAFTERS["model_tree_without_replacement"](model)
    return Engine(Target(model), drafter, fitting(drafter), max_length=64, max_batch_size=size, **options)  # type: ignore[arg-type]


def moments(done: Completion) -> list[float]:
    found = done.timestamps
    assert found is not None
    return [found.arrived, found.admitted, found.prefilled, *(step.visible for step in done.steps), found.finished]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2}])
def test_moments_are_in_order_and_between_the_calls_ends(model, options: dict[str, int]) -> None:
    before = time.perf_counter()
    completions = make(model, **options).generate(PROMPTS, GREEDY)
    after = time.perf_counter()
    for done in completions:
        assert moments(done) == sorted(moments(done))
        assert before < moments(done)[0] and moments(done)[-1] < after
        assert done.timestamps is not None
        assert 0 < done.timestamps.ingestion < done.timestamps.admitted - done.timestamps.arrived
        assert done.timestamps.finished == done.emissions[-1][0]
        assert sum(count for _, count in done.emissions) == len(done.token_ids) == 9
        assert done.seconds == done.timestamps.finished - done.timestamps.admitted
        assert all(step.timestamps is None for step in done.steps[:-1])


def test_requests_of_a_call_arrive_together_and_wait_for_their_slot(model) -> None:
    first, second, third, _ = (done.timestamps for done in make(model, size=1).generate(PROMPTS, GREEDY))
    assert first is not None and second is not None and third is not None
    assert first.arrived == second.arrived == third.arrived
    assert first.admitted < first.finished < second.admitted < second.finished < third.admitted


def test_rows_of_a_round_become_visible_together(model) -> None:
    alike = make(model).generate([PROMPTS[0]] * 3, GREEDY)
    assert len({tuple(step.visible for step in done.steps) for done in alike}) == 1


def test_submitted_requests_have_them_in_their_last_step(model) -> None:
    engine = make(model)
    engine.submit(PROMPTS[0], GREEDY)
    steps = []
    while engine.unfinished:
        steps += engine.step()
    assert [step.timestamps is not None for step in steps] == [False] * (len(steps) - 1) + [True]


def test_tokens_are_visible_when_they_were_read_and_before_text_is_made(model, monkeypatch) -> None:
    read, text = [], []
    wait, cut = Fetch.wait, Outputs._cut

    def watched_wait(self: Fetch):
        found = wait(self)
        read.append(time.perf_counter())
        return found

    def watched_cut(self: Outputs, request, tokens):
        text.append(time.perf_counter())
        return cut(self, request, tokens)

    monkeypatch.setattr(Fetch, "wait", watched_wait)
    monkeypatch.setattr(Outputs, "_cut", watched_cut)
    (done,) = make(model).generate([PROMPTS[0]], GREEDY)
    assert len(read) == len(text) == len(done.steps)
    for after, step, before in zip(read, done.steps, text, strict=True):
        assert after <= step.visible <= before


@pytest.mark.parametrize("size", [1, 4])
def test_a_round_reads_the_clock_twice_whatever_its_rows(model, monkeypatch, size: int) -> None:
    reads = []

    def now() -> float:
        reads.append(None)
        return time.perf_counter()

    for module in (output, running, turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    done = make(model, size=size).generate([PROMPTS[0]] * size, GREEDY)
    rounds = max(len(each.steps) for each in done)
    # Once per request that takes a slot, once for the one forward that prefills all.
    assert len(reads) == 2 * rounds + size + 1


def test_the_time_of_making_text_is_a_stage(model) -> None:
    (timed,) = make(model, timing=True).generate([PROMPTS[0]], GREEDY)
    assert all(step.seconds["completion"] > 0 for step in timed.steps)
    (untimed,) = make(model).generate([PROMPTS[0]], GREEDY)
    assert all(not step.seconds for step in untimed.steps)


def test_an_error_has_a_time_and_an_abort_has_none(model, monkeypatch) -> None:
    engine = make(model)
    monkeypatch.setattr(engine.session, "propose", lambda batch: {}["broken"])
    engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(KeyError, match="broken"):
        engine.step()
    (failed,) = engine.step()
    found = failed.timestamps
    assert found is not None
    assert found.arrived < found.admitted < found.prefilled < found.finished == failed.visible
    waiting = make(model, size=1)
    stream = waiting.stream(PROMPTS[:2], GREEDY)
    number = next(stream).request
    waiting.abort(number + 1)
    assert {step.request for step in stream} == {number}


def test_moments_do_not_count_in_comparisons(model) -> None:
    first, second = (make(model).generate([PROMPTS[0]], GREEDY)[0] for _ in range(2))
    assert first.timestamps != second.timestamps
    assert isinstance(first.timestamps, Timestamps)
    assert first == second
