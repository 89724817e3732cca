"""The engine's own duties: batching, refill, cuts, errors, streaming, one synchronization per round."""

import random

import pytest
import torch
from torch.overrides import TorchFunctionMode

from drafters.ngram import NGramDrafter
from specdec.engine.engine import Engine
from specdec.host import without_looking
from specdec.interfaces import Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import DraftSampling, Exactness
from tests.components import DRAFTERS, STRONGEST, fitting, learns
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers.rejection import RejectionVerifier

VOCAB = 64


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(model):
    return Target(model)


def make(target: Target, drafter: str | None = "model_tree_without_replacement", **kwargs: object) -> Engine:
    if drafter is None:
        return Engine(target, max_length=64, **kwargs)  # type: ignore[arg-type]
    made = DRAFTERS[drafter](target.model)
    return Engine(target, made, fitting(made), max_length=64, **kwargs)  # type: ignore[arg-type]


def some_prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


MIXED = [
    SamplingParams(max_new_tokens=10 + i, temperature=t, top_p=p, repetition_penalty=r)
    for i, (t, p, r) in enumerate(
        [
            (0.0, 1.0, 1.0),
            (1.0, 1.0, 1.0),
            (0.8, 0.9, 1.2),
            (1.0, 1.0, 1.0),
            (0.0, 1.0, 1.1),
            (1.5, 0.7, 1.0),
            (1.0, 1.0, 1.0),
        ]
    )
]


@pytest.mark.parametrize(
    "drafter",
    [complete(name, strong=name in ("ngram", "medusa", STRONGEST["rejection"])) for name in (None, *DRAFTERS)],
)
def test_a_request_does_not_depend_on_its_company(target, drafter) -> None:
    """Batch size, slot, order of admission and prefill chunk change nothing, sampled rows included."""
    prompts = some_prompts(len(MIXED))
    streams = [SamplingParams(**{**vars(s), "stream": 100 + i}) for i, s in enumerate(MIXED)]
    engine = make(target, drafter)
    if getattr(engine.drafter, "shared", False) or learns(engine.drafter):
        pytest.skip("it learns from other requests, as it was told to")
    alone = [engine.generate([p], s)[0].token_ids for p, s in zip(prompts, streams, strict=True)]
    for batch, chunk, order in ((1, 3, -1), (3, 512, 1), (7, 4, -1)):
        engine = make(target, drafter, max_batch_size=batch, prefill_chunk=chunk)
        together = [output.token_ids for output in engine.generate(prompts[::order], streams[::order])]
        assert together[::order] == alone, (batch, chunk, order)


def test_equal_prompts_get_different_samples_and_seeds_repeat(target) -> None:
    engine = make(target)
    sampling = SamplingParams(temperature=1.5, max_new_tokens=12, n=3)
    first = [output.token_ids for output in engine.generate([[1, 2, 3]] * 2, sampling)]
    assert len(first) == 6
    assert len(set(first)) == 6
    assert [output.token_ids for output in engine.generate([[1, 2, 3]] * 2, sampling)] == first
    other = SamplingParams(temperature=1.5, max_new_tokens=12, n=3, seed=1)
    assert [output.token_ids for output in engine.generate([[1, 2, 3]] * 2, other)] != first


def test_steps_add_up(target) -> None:
    engine = make(target, max_batch_size=3, timing=True)
    for output in engine.generate(some_prompts(5), SamplingParams(max_new_tokens=11)):
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
            assert {"draft", "verify", "accept", "commit"} <= step.seconds.keys()
        assert output.steps[0].seconds.get("prefill", 0.0) > 0 or len(output.prompt_ids) == 1


def test_logprobs_are_the_targets(target) -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0)
    output = make(target).generate([[5, 6, 7]], sampling)[0]
    logprobs = [value for step in output.steps for value in step.logprobs]
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*output.prompt_ids, *output.token_ids]])).logits[0, 2:-1]
    wanted = logits.log_softmax(-1)[range(8), list(output.token_ids)]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=1e-4)


def test_speculation_takes_fewer_rounds(target) -> None:
    engine = make(target)
    sampling = SamplingParams(max_new_tokens=24)
    fast = engine.generate([[1, 2, 3]], sampling)[0]
    plain = engine.generate([[1, 2, 3]], sampling, speculate=False)[0]
    assert fast.token_ids == plain.token_ids
    assert len(plain.steps) == 24
    assert len(fast.steps) < 16
    assert all(step.proposed_nodes == 0 for step in plain.steps)


@pytest.mark.parametrize("drafter", [None, "model_chain_iid", "ngram"])
def test_cuts_inside_an_accepted_path(target, drafter) -> None:
    whole = make(target, None).generate([[1, 2, 3]], SamplingParams(max_new_tokens=30))[0].token_ids
    engine = make(target, drafter)
    for length in range(1, 9):
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=length))[0]
        assert (output.token_ids, output.finish_reason) == (whole[:length], "length")
    for stop in dict.fromkeys(whole):
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)))[0]
        assert (output.token_ids, output.finish_reason) == (whole[: whole.index(stop) + 1], "stop")


def test_eos_is_the_union_of_all_sources(model) -> None:
    whole = Engine(Target(model), max_length=64).generate([[1, 2, 3]], SamplingParams(max_new_tokens=20))[0].token_ids
    late = max(set(whole), key=whole.index)
    model.generation_config.eos_token_id = [VOCAB - 1, late]
    try:
        target = Target(model)
        assert target.eos_token_ids == {VOCAB - 1, late}
        engine = make(target, "model_chain_iid")
        output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=20))[0]
        assert (output.token_ids, output.finish_reason) == (whole[: whole.index(late) + 1], "stop")
        ignoring = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
        assert ignoring.token_ids == whole
    finally:
        model.generation_config.eos_token_id = None


def test_the_last_position_of_the_row_can_be_filled(target) -> None:
    prompt = some_prompts(1)[0]
    engine = make(target, max_batch_size=2)
    wanted = SamplingParams(max_new_tokens=64 - len(prompt))
    fast, plain = engine.generate([prompt], wanted)[0], engine.generate([prompt], wanted, speculate=False)[0]
    assert fast.token_ids == plain.token_ids
    assert len(fast.prompt_ids) + len(fast.token_ids) == 64


def test_submit_and_step(target) -> None:
    engine = make(target, max_batch_size=2)
    sampling = SamplingParams(max_new_tokens=6)
    wanted = {i: out.token_ids for i, out in enumerate(engine.generate(some_prompts(4), sampling))}
    first = engine.submit(some_prompts(4)[0], sampling)
    got: dict[int, list[int]] = {}
    ids = [first]
    late = some_prompts(4)[1:]
    while engine.unfinished:
        for step in engine.step():
            got.setdefault(step.request, []).extend(step.token_ids)
        if late:  # requests arrive while others run
            ids.append(engine.submit(late.pop(0), sampling))
    assert [tuple(got[i]) for i in ids] == [wanted[i] for i in range(4)]


def test_generate_leaves_submitted_requests_to_step(target) -> None:
    engine = make(target, max_batch_size=2)
    sampling = SamplingParams(max_new_tokens=4)
    wanted = engine.generate([[1, 2], [1]], sampling)
    request = engine.submit([1, 2], sampling)
    assert engine.generate([[1]], sampling)[0].token_ids == wanted[1].token_ids
    steps = []
    while engine.unfinished or not steps or steps[-1].finish_reason is None:
        steps += engine.step()
    assert {step.request for step in steps} == {request}
    assert tuple(token for step in steps for token in step.token_ids) == wanted[0].token_ids
    assert engine.step() == []


def test_submitting_and_stepping_while_a_stream_is_read(target) -> None:
    """Every step goes to whoever asked for the request, whoever makes the engine go on."""
    engine = make(target, max_batch_size=2)
    sampling = SamplingParams(max_new_tokens=8)
    wanted = [output.token_ids for output in engine.generate([[1, 2, 3], [4, 5]], sampling)]
    stream = engine.stream([[1, 2, 3]], sampling)
    streamed = [next(stream)]
    request = engine.submit([4, 5], sampling)
    stepped = engine.step()
    streamed += stream
    while engine.unfinished:
        stepped += engine.step()
    stepped += engine.step()
    assert tuple(token for step in streamed for token in step.token_ids) == wanted[0]
    assert tuple(token for step in stepped for token in step.token_ids) == wanted[1]
    assert {step.request for step in stepped} == {request}


def test_an_abandoned_stream_leaves_nothing_behind(target) -> None:
    engine = make(target, max_batch_size=2)
    sampling = SamplingParams(max_new_tokens=9)
    wanted = [output.token_ids for output in engine.generate(some_prompts(4), sampling)]
    stream = engine.stream(some_prompts(4), sampling)
    next(stream)
    stream.close()
    assert engine.unfinished == 0
    assert [output.token_ids for output in engine.generate(some_prompts(4), sampling)] == wanted


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_logits_end_that_request_only(batch: int) -> None:
    model = tiny_model(vocab_size=VOCAB)
    bad = VOCAB - 1
    plain = Engine(Target(model), max_length=64)
    prompts = [p for p in some_prompts(12) if bad not in p]
    sampling = SamplingParams(max_new_tokens=10)
    prompts = [p for p in prompts if bad not in plain.generate([p], sampling)[0].token_ids][:3]
    wanted = [output.token_ids for output in plain.generate(prompts, sampling)]
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), NGramDrafter(), RejectionVerifier(), max_batch_size=batch, max_length=64)
    outputs = engine.generate([prompts[0], [1, 2, bad, 3], *prompts[1:]], sampling)
    failed = outputs.pop(1)
    assert failed.finish_reason == "error"
    assert failed.token_ids == ()
    assert "not finite in round 0" in str(failed.error)
    assert [output.token_ids for output in outputs] == wanted
    # The slot that held NaN is clean again.
    assert [output.token_ids for output in engine.generate(prompts, sampling)] == wanted


class Synchronizations(TorchFunctionMode):
    """Counts what would make the host wait for a GPU."""

    names = frozenset(
        ["item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "__array__"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.names:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


CUT_SHORT = {"model_by_confidence", "block_by_confidence"}
"""Drafters whose policy decides on the device how many nodes are verified: what is cut off saves more than the look."""


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_one_synchronization_per_round(target, drafter) -> None:
    engine = make(target, drafter, max_batch_size=2)
    for prompt in ([1, 2, 1, 2], [3, 4, 3, 4]):
        engine.submit(prompt, SamplingParams(max_new_tokens=20, temperature=1.0))
    with without_looking():  # as on a GPU
        engine.step()
        engine.step()
        with Synchronizations() as counted:
            engine.step()
    # How many nodes a policy has left, where there is one; and the one table that the host reads.
    assert counted.seen == ["__int__"] * (drafter in CUT_SHORT) + ["numpy"]


class ChainsOnly(RejectionVerifier):
    chain_only = True


class IidOnly(RejectionVerifier):
    samplings = frozenset([DraftSampling.IID])
    exactness = Exactness.EXACT


@pytest.mark.parametrize(
    ("drafter", "verifier", "words"),
    [
        ("medusa", ChainsOnly, "ChainsOnly takes chains only, and MedusaDrafter drafts trees: use RejectionVerifier"),
        (
            "medusa",
            IidOnly,
            "IidOnly is not made for drafts that are DETERMINISTIC, as MedusaDrafter draws them: use RejectionVerifier",
        ),
        ("medusa", None, "MedusaDrafter needs a verifier"),
    ],
)
def test_unfit_pairs_are_refused(target, drafter: str, verifier: type[Verifier] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(target, DRAFTERS[drafter](target.model), verifier() if verifier else None)


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ([[]], SamplingParams(), "prompt 0: the prompt is empty"),
        (
            [[1], [2, VOCAB]],
            SamplingParams(max_new_tokens=3),
            f"prompt 1: token id {VOCAB} is outside the target's vocabulary of {VOCAB}",
        ),
        ([[-1]], SamplingParams(max_new_tokens=3), "token id -1 is outside"),
        (
            [[1] * 60],
            SamplingParams(max_new_tokens=5),
            r"60 prompt tokens \+ max_new_tokens=5 exceed the engine's max_length=64",
        ),
        ("abc", SamplingParams(), "prompt 0: .*tokenizer"),
        (["abc"], SamplingParams(), "prompt 0: .*tokenizer"),
        ([[1]], SamplingParams(stop=("x",), max_new_tokens=3), "stop strings need a tokenizer"),
        ([[1]], [SamplingParams()] * 2, "1 prompts but 2 SamplingParams"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(target, prompts, sampling, words: str) -> None:
    engine = make(target)
    with pytest.raises(ValueError, match=words) as caught:
        engine.generate(prompts, sampling)
    assert "\n" not in str(caught.value)
    assert engine.unfinished == 0


def test_bad_engine_arguments(target) -> None:
    for kwargs, words in (
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"max_length": 1}, "max_length=1"),
        ({"max_length": 10_000}, "beyond the 256 positions"),
        ({"attention": "fast"}, "attention='fast'"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(target, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_greedy_round_without_drafts_needs_no_law_and_ends_as_with_one(target, penalty, monkeypatch) -> None:
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0, repetition_penalty=penalty, logprobs=2, stream=0)
    prompts = some_prompts(2)
    with make(target, None, max_batch_size=2) as engine:
        # A batch mate that samples for longer: every round computes p for all rows.
        mate = SamplingParams(max_new_tokens=15, temperature=1.0, stream=1, seed=0)
        with_law = engine.generate(prompts, [greedy, mate])[0]
    monkeypatch.setattr("specdec.engine.round.distribution", lambda *_: pytest.fail("p was computed"))
    with make(target, None) as engine:
        without = engine.generate(prompts[:1], greedy)[0]
    assert [each.token_ids for each in without.steps] == [each.token_ids for each in with_law.steps]
    assert [each.logprobs for each in without.steps] == [each.logprobs for each in with_law.steps]
    assert [each.expected_accepted for each in without.steps] == [0.0] * 9
    assert without.logprobs == (0.0,) * 9  # all of p is on the largest logit
    assert torch.allclose(torch.tensor(without.raw_logprobs), torch.tensor(with_law.raw_logprobs), atol=1e-5)
