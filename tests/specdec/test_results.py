"""What a completion tells besides its tokens: log-probabilities, speed, and when things happened."""

import time
from dataclasses import replace

import pytest
import torch

from specdec import Completion, Engine, SamplingParams, Step, Target
from specdec.engine import output
from specdec.engine.read_back import Fetch
from tests.components import DRAFTERS, fitting

VOCAB = 64
PROMPTS = [[3, 4, 5, 3, 4, 5, 3], [7, 8], [9, 1, 9, 1, 9]]


def make(model, *, size: int = 3, **options: object) -> Engine:
    drafter = DRAFTERS["model_tree_without_replacement"](model)
    return Engine(Target(model), drafter, fitting(drafter), max_length=64, max_batch_size=size, **options)  # type: ignore[arg-type]


def reference(model, completion: Completion) -> torch.Tensor:
    """Log-softmax of the logits before every output token, from one plain forward: [token, vocab]."""
    tokens = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.inference_mode():
        logits = model(tokens).logits[0, len(completion.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)


SAMPLINGS = [
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, repetition_penalty=1.3, logprobs=3),
    SamplingParams(max_new_tokens=9, temperature=1.0, logprobs=0),
    SamplingParams(max_new_tokens=11, logprobs=5),
]


def test_raw_log_probabilities_are_the_models_own_and_those_of_p_are_others(model) -> None:
    completions = make(model).generate(PROMPTS, SAMPLINGS)
    processed, plain, _ = completions
    assert max(abs(a - b) for a, b in zip(processed.logprobs, processed.raw_logprobs, strict=True)) > 0.1
    assert plain.logprobs == pytest.approx(plain.raw_logprobs, abs=1e-5)  # temperature 1, nothing else
    unasked = make(model).generate(PROMPTS, [replace(each, logprobs=None) for each in SAMPLINGS])
    assert [each.token_ids for each in unasked] == [each.token_ids for each in completions]
    assert all(each.raw_logprobs == each.top_logprobs == () for each in unasked)
    for wanted, done in zip(SAMPLINGS, completions, strict=True):
        expected = reference(model, done)
        chosen = expected[torch.arange(len(done.token_ids)), list(done.token_ids)]
        assert torch.allclose(torch.tensor(done.raw_logprobs), chosen, atol=1e-5)
        if not wanted.logprobs:
            assert done.top_logprobs == ()
            continue
        values, tokens = expected.topk(wanted.logprobs)
        assert [[token for token, _ in row] for row in done.top_logprobs] == tokens.tolist()
        told = torch.tensor([[value for _, value in row] for row in done.top_logprobs])
        assert torch.allclose(told, values, atol=1e-5)


def test_cuts_shorten_everything_alike(model) -> None:
    first = make(model).generate([PROMPTS[0]], SamplingParams(max_new_tokens=12, logprobs=2))[0]
    end = first.token_ids[4]
    sampling = SamplingParams(max_new_tokens=12, logprobs=2, stop_token_ids=(end,))
    (done,) = make(model).generate([PROMPTS[0]], sampling)
    kept = first.token_ids.index(end) + 1
    assert done.token_ids == first.token_ids[:kept]
    assert done.raw_logprobs == pytest.approx(first.raw_logprobs[:kept], abs=1e-6)
    assert len(done.logprobs) == len(done.top_logprobs) == kept


STEPS = (
    Step(
        request=4, round=0, token_ids=(1, 2, 3), text="abc", accepted=2, proposed_depth=4, proposed_nodes=6, elapsed=0.5
    ),
    Step(request=4, round=1, token_ids=(9,), text="d", accepted=0, elapsed=2.0, finish_reason="stop"),
)  # fmt: skip
DONE = Completion(prompt_ids=(7,), token_ids=(1, 2, 3, 9), text="abcd", finish_reason="stop", steps=STEPS)


def test_a_completion_adds_up_its_steps() -> None:
    assert DONE.mean_acceptance_length == 2  # 3 + 1 tokens in two rounds
    assert (DONE.seconds, DONE.tokens_per_second) == (2.0, 2.0)
    empty = Completion(prompt_ids=(7,), token_ids=(), text="", finish_reason="error", steps=(), error="no room")
    assert (empty.mean_acceptance_length, empty.tokens_per_second) == (None, None)


GREEDY = SamplingParams(max_new_tokens=9)


def test_moments_are_in_order_and_between_the_calls_ends(model) -> None:
    before = time.perf_counter()
    completions = make(model, prefill_chunk=2).generate([*PROMPTS, [4]], GREEDY)
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
    wait, cut = Fetch.wait, output._cut

    def watched_wait(self: Fetch):
        found = wait(self)
        read.append(time.perf_counter())
        return found

    def watched_cut(request, tokens):
        text.append(time.perf_counter())
        return cut(request, tokens)

    monkeypatch.setattr(Fetch, "wait", watched_wait)
    monkeypatch.setattr(output, "_cut", watched_cut)
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
