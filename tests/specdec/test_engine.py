"""The engine's own duties, and what a completion tells besides its tokens: steps, log-probabilities, moments."""

from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import specdec.engine.output
from drafters import MarginalDrafter, NGramDrafter
from specdec import Completion, DraftSampling, Engine, SamplingParams, Target, Verifier
from specdec.engine.read_back import Fetch
from specdec.host import without_looking
from tests.components import DRAFTERS, STRONGEST, fitting
from tests.honest import Honest
from tests.launches import counted
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB = 64
GREEDY = SamplingParams(max_new_tokens=9)
PROMPTS = [[1, 2, 3], [5] * 20, [7], [8, 9] * 6, [4, 2]]
REPEATED = [[3, 4, 5, 3, 4, 5, 3], [7, 8], [9, 1, 9, 1, 9]]
LOOKED_AT = {None, "ngram", "eagle3_expansion", "block_by_confidence", STRONGEST["rejection"]}
CUT_SHORT = {"model_by_confidence", "block_by_confidence", "mtp_priced", "eagle3_looped"}
"""Drafters whose policy decides on the device how many nodes are verified: what is cut off saves more than the look."""
WAITS_IN_DRAFTS = ("slem", "staged_chain_iid")
"""Drafters whose drafts are made on the host: it waits for every forward of a drafting model that it reads."""
ON_THE_HOST = {"lookahead"}
"""Drafters that keep on the host what the target said of their nodes, which they read for themselves."""
SAMPLINGS = [
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, repetition_penalty=1.3, logprobs=3),
    SamplingParams(max_new_tokens=9, temperature=1.0, logprobs=0),
]


def make(target: Target, drafter: str | None = "model_tree_without_replacement", **options: Any) -> Engine:
    made = None if drafter is None else DRAFTERS[drafter](target.model)
    rule = None if made is None else fitting(made)
    return Engine(target, made, rule, **{"max_batch_size": 3, "max_length": 64, **options})


def test_steps_add_up(target) -> None:
    engine = make(target, timing=True)
    for output in engine.generate(PROMPTS, SamplingParams(max_new_tokens=11)):
        assert tuple(token for step in output.steps for token in step.token_ids) == output.token_ids
        assert [step.round for step in output.steps] == list(range(len(output.steps)))
        assert [step.finish_reason for step in output.steps[:-1]] == [None] * (len(output.steps) - 1)
        assert output.finish_reason == "length"
        for step in output.steps:
            assert len(step.logprobs) == len(step.token_ids)
            assert all(logprob <= 1e-6 for logprob in step.logprobs)
            assert 0 <= step.accepted <= step.proposed_depth <= 3
            assert step.proposed_nodes <= 7
            assert 0 <= step.expected_accepted <= step.proposed_depth + 1e-5
            assert {"draft", "accept", "commit"} <= step.seconds.keys() and {"verify", "prefill"} & step.seconds.keys()
        assert output.steps[0].seconds.get("prefill", 0.0) > 0 or len(output.prompt_ids) == 1


@pytest.mark.parametrize("drafter", ["ngram", "medusa"])
def test_a_prompt_takes_a_pass_over_the_weights_for_each_of_its_pieces(model, drafter, monkeypatch) -> None:
    """The last one's has the first token, and requests that decode go along; heads draft from the second round on."""
    engine = Engine(Target(model), DRAFTERS[drafter](model), RejectionVerifier(), max_batch_size=2, prefill_chunk=4)
    passes = []
    for name in ("run", "run_together"):
        own = getattr(engine.runner, name)
        monkeypatch.setattr(engine.runner, name, lambda given, own=own: (passes.append(given), own(given))[1])
    first = engine.submit(REPEATED[0][:1] * 9, GREEDY)
    turns = [engine.step() for _ in range(3)]
    second = engine.submit(REPEATED[0][:1] * 9, GREEDY)
    turns += [engine.step() for _ in range(3)]
    assert [[step.request for step in steps] for steps in turns] == [
        [], [first], [first], [first], [first, second], [first, second],
    ]  # fmt: skip
    assert len(passes) == len(turns)
    assert all((steps[-1].proposed_nodes > 0) == (drafter == "ngram") for steps in (turns[1], turns[4]))
    assert drafter == "ngram" or turns[2][0].proposed_nodes > 0 < turns[4][0].proposed_nodes


@pytest.mark.parametrize("drafter", ["ngram", "eagle3_expansion", "model_chain_iid"])
def test_prompts_of_several_lengths_share_a_pass_without_padding(model, drafter, monkeypatch) -> None:
    """Beside a round or not, greedy and drawn, with the outputs of each by itself; not so in each other's slots."""
    prompts, passes = [[1] * 9, [2, 3, 2, 3, 2], [4] * 9, [5, 6, 7]], []
    asked = [replace(GREEDY, temperature=float(number % 2), seed=1, stream=number) for number in range(len(prompts))]
    single, engine = (make(Target(model), drafter, max_batch_size=size, recording="off") for size in (1, 5))
    alone = [single.generate([prompt], each)[0].token_ids for prompt, each in zip(prompts, asked, strict=True)]
    own = engine.runner.run_together
    monkeypatch.setattr(engine.runner, "run_together", lambda given: (passes.append(given), own(given))[1])
    for others in ([], [[8, 9]]):
        for other in others:
            engine.submit(other, SamplingParams(max_new_tokens=20))
            engine.step()
        passes.clear()
        assert [done.token_ids for done in engine.generate(prompts, asked)] == alone
        pieces = [tuple(each.given.shape) for each in passes[0] if each.counts is not None]
        assert pieces == [(1, 2), (1, 4), (2, 8)] and len(passes) == 1
        assert passes[0][-1].batch == len(prompts) + len(others), "which begin to decode in the same pass"

    def turned(given: Any) -> Any:
        one, two, *more = given
        return own([replace(one, slots=two.slots), replace(two, slots=one.slots), *more] if more else given)

    monkeypatch.setattr(engine.runner, "run_together", turned)
    assert [done.token_ids for done in engine.generate(prompts, asked)] != alone


def test_eos_is_what_the_first_source_names_that_names_any(model, caplog, monkeypatch) -> None:
    whole = Engine(Target(model), max_length=64).generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0].token_ids
    late = max(set(whole), key=whole.index)
    two, default = [VOCAB - 1, late], type(model.config).eos_token_id  # a class's default, which nobody named
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})), eos_token="b")
    for generation, config, tokenizer, ends in (
        (torch.tensor(late), default, None, {late}),
        (None, 7, other, {7}),
        (None, default, other, {1}),
        (two, default, other, {*two}),
    ):
        caplog.clear()
        monkeypatch.setattr(model.generation_config, "eos_token_id", generation)
        monkeypatch.setattr(model.config, "eos_token_id", config)
        assert Target(model, tokenizer).eos_token_ids == ends
    assert "also name [1]" in caplog.text
    caplog.clear()
    engine = make(Target(model), "model_chain_iid")
    output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12))[0]
    assert (output.token_ids, output.finish_reason) == (whole[: whole.index(late) + 1], "stop")
    ignoring = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, ignore_eos=True))[0]
    assert ignoring.token_ids == whole and not caplog.records


@pytest.mark.parametrize("drafter", [complete(name, strong=name in LOOKED_AT) for name in (None, *DRAFTERS)])
def test_one_synchronization_per_round(target, drafter) -> None:
    engine = make(target, drafter, max_batch_size=2)
    for prompt in ([1, 2, 1, 2], [3, 4, 3, 4]):
        engine.submit(prompt, SamplingParams(max_new_tokens=20, temperature=1.0))
    with without_looking():  # as on a GPU
        engine.step()
        engine.step()
        with counted() as work:
            engine.step()
    if drafter in WAITS_IN_DRAFTS:
        assert work.synchronizations > 1, "then it belongs to the others"
        return
    # How many nodes a policy has left, where there is one; and the one table that the host reads.
    assert work.reads == {"numpy": 1 + (drafter in ON_THE_HOST)} | ({"item": 1} if drafter in CUT_SHORT else {})


def test_missing_and_wrong_attributes_are_named(target: Target) -> None:
    for kind, attributes, words in (
        (Verifier, {"samplings": frozenset([DraftSampling.IID]), "laws": None}, " has no exactness: "),
        (Honest, {"max_nodes": 2.5}, ".max_nodes=2.5: "),
        (Honest, {"hidden_layers": (7,)}, ".hidden_layers names layer 7 "),
    ):
        component: Any = type("Changed", (kind,), attributes)()
        pair = (component, RejectionVerifier()) if kind is Honest else (Honest(), component)
        with pytest.raises(ValueError, match=f"^Changed{words}") as caught:
            Engine(target, *pair, max_length=32)
        assert "\n" not in str(caught.value)


def check_logprobs(model, completion: Completion, top: int) -> None:
    """Compare with the log-softmax of the logits before every output token, from one plain forward."""
    prompt, output = completion.prompt_ids, torch.tensor(completion.token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, output[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.raw_logprobs), chosen, atol=1e-5, rtol=1e-5)
    if not top:
        assert completion.top_logprobs == ()
        return
    values, tokens = expected.topk(top)
    assert [[token for token, _ in row] for row in completion.top_logprobs] == tokens.tolist()
    told = torch.tensor([[value for _, value in row] for row in completion.top_logprobs])
    torch.testing.assert_close(told, values, atol=1e-5, rtol=1e-5)


def test_raw_logprobs_are_those_of_a_plain_forward(model, target) -> None:
    """Also where a session's own forwards are steps of a recorded commit, with no result."""
    for drafter in (MarginalDrafter(2, samples=3), DRAFTERS["model_tree_iid"](model), NGramDrafter(3)):
        engine = Engine(target, drafter, RejectionVerifier(), max_length=40, recording="rounds")
        (done,) = engine.generate([[59]], SamplingParams(max_new_tokens=39, logprobs=3, ignore_eos=True))
        check_logprobs(model, done, 3)


def test_raw_log_probabilities_are_before_processing_and_are_cut_with_the_tokens(model, target) -> None:
    processed, plain = completions = make(target).generate(REPEATED[:2], SAMPLINGS)
    assert max(abs(a - b) for a, b in zip(processed.logprobs, processed.raw_logprobs, strict=True)) > 0.1
    assert plain.logprobs == pytest.approx(plain.raw_logprobs, abs=1e-5)  # temperature 1, nothing else
    unasked = make(target).generate(REPEATED[:2], [replace(each, logprobs=None) for each in SAMPLINGS])
    assert [each.token_ids for each in unasked] == [each.token_ids for each in completions]
    assert all(each.raw_logprobs == each.top_logprobs == () for each in unasked)
    for wanted, done in zip(SAMPLINGS, completions, strict=True):
        check_logprobs(model, done, wanted.logprobs or 0)
    greedy = SamplingParams(max_new_tokens=12, logprobs=2)
    (whole,) = make(target).generate(REPEATED[:1], greedy)
    end = whole.token_ids[4]
    (done,) = make(target).generate(REPEATED[:1], replace(greedy, stop_token_ids=(end,)))
    check_logprobs(model, done, 2)
    assert done.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert len(done.logprobs) == len(done.top_logprobs) == len(done.token_ids)


def test_requests_of_a_call_arrive_together_and_wait_for_their_slot(target) -> None:
    before = perf_counter()
    alike = make(target, max_batch_size=2, prefill_chunk=2).generate([REPEATED[0]] * 3, GREEDY)
    after = perf_counter()
    for done in alike:
        found = done.timestamps
        visible = [step.visible for step in done.steps]
        moments = [before, found.arrived, found.admitted, found.prefilled, *visible, found.finished, after]
        assert moments == sorted(moments)
        assert 0 < found.ingestion < found.admitted - found.arrived
        assert found.finished == done.emissions[-1][0]
        assert sum(count for _, count in done.emissions) == len(done.token_ids) == 9
        assert done.seconds == found.finished - found.admitted == pytest.approx(9 / done.tokens_per_second)
        assert all(step.timestamps is None for step in done.steps[:-1])
    first, second, third = (done.timestamps for done in alike)
    assert first.arrived == second.arrived == third.arrived
    assert first.admitted < first.finished < third.admitted
    shown = [tuple(step.visible for step in done.steps) for done in alike]
    assert shown[0] == shown[1] != shown[2], "rows of a round become visible together"
    (again,) = make(target, max_batch_size=2, prefill_chunk=2).generate([REPEATED[0]], GREEDY)
    assert again.timestamps != first and again == alike[0]


def test_tokens_are_visible_when_they_were_read_and_before_text_is_made(target, monkeypatch) -> None:
    read, text = [], []
    wait, cut = Fetch.wait, specdec.engine.output._cut
    monkeypatch.setattr(Fetch, "wait", lambda fetch: (wait(fetch), read.append(perf_counter()))[0])
    monkeypatch.setattr(specdec.engine.output, "_cut", lambda *given: (text.append(perf_counter()), cut(*given))[1])
    (done,) = make(target).generate([REPEATED[0]], GREEDY)
    assert len(read) == len(text) == len(done.steps)
    for after, step, before in zip(read, done.steps, text, strict=True):
        assert after <= step.visible <= before
