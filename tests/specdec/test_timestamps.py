"""When things happen to a request: the order of its moments, what they are read at, and what reading them costs."""

import time

import pytest

from specdec.engine.engine import Engine
from specdec.engine.output import Outputs
from specdec.engine.read_back import Fetch
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model

VOCAB = 64
GREEDY = SamplingParams(max_new_tokens=9)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB, layers=2)


def make(model, *, size: int = 3, **options: object) -> Engine:
    drafter = DRAFTERS["model_tree_without_replacement"](model)
    return Engine(Target(model), drafter, fitting(drafter), max_length=64, max_batch_size=size, **options)  # type: ignore[arg-type]


PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [7, 8], [9, 1, 9, 1, 9], [4]]


def test_moments_are_in_order_and_between_the_calls_ends(model) -> None:
    before = time.perf_counter()
    completions = make(model, prefill_chunk=2).generate(PROMPTS, GREEDY)
    after = time.perf_counter()
    for done in completions:
        found = done.timestamps
        assert found is not None
        visible = [step.visible for step in done.steps]
        moments = [before, found.arrived, found.admitted, found.prefilled, *visible, found.finished, after]
        assert moments == sorted(moments)
        assert 0 < found.ingestion < found.admitted - found.arrived
        assert found.finished == done.emissions[-1][0]
        assert sum(count for _, count in done.emissions) == len(done.token_ids) == 9
        assert done.seconds == found.finished - found.admitted
        assert all(step.timestamps is None for step in done.steps[:-1])


def test_requests_of_a_call_arrive_together_and_wait_for_their_slot(model) -> None:
    alike = make(model, size=2).generate([PROMPTS[0]] * 3, GREEDY)
    first, second, third = (done.timestamps for done in alike)
    assert first is not None and second is not None and third is not None
    assert first.arrived == second.arrived == third.arrived
    assert first.admitted < first.finished < third.admitted
    shown = [tuple(step.visible for step in done.steps) for done in alike]
    assert shown[0] == shown[1] != shown[2], "rows of a round become visible together"
    (again,) = make(model, size=2).generate([PROMPTS[0]], GREEDY)
    assert again.timestamps != first and again == alike[0], "moments do not count in comparisons"


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


def test_an_error_has_a_time_and_an_abort_has_none(model, monkeypatch) -> None:
    engine = make(model)
    monkeypatch.setattr(engine.session, "propose", lambda batch: {}["broken"])
    engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(KeyError, match="broken"):
        engine.step()
    (failed,) = engine.step()
    found = failed.timestamps  # of a submitted request, in its last step
    assert found is not None
    assert found.arrived < found.admitted < found.prefilled < found.finished == failed.visible
    waiting = make(model, size=1)
    stream = waiting.stream(PROMPTS[:2], GREEDY)
    number = next(stream).request
    waiting.abort(number + 1)
    assert {step.request for step in stream} == {number}
