"""What a user's code may do in the middle of a turn: call the engine, raise anything, or be interrupted there."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
from torch import Tensor

from drafters import BlockDrafter, BlockHead, ChoiceDrafter, MergedDrafter, NGramDrafter, SuffixDrafter
from specdec import Drafter, Engine, SamplingParams, Session, Step, Target
from specdec.engine.scheduler import FirstCome
from specdec.engine.text import Detokenizer
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from verifiers import RejectionVerifier

VOCAB, SAMPLING = 64, SamplingParams(max_new_tokens=12)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [output.token_ids for output in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


class Fuse:
    """Raises an error once, when a seam is passed for a certain time."""

    def __init__(self, seam: str, after: int, error: BaseException):
        self.seam, self.left, self.error = seam, after, error

    def passes(self, seam: str) -> None:
        if seam == self.seam:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.passes("processor")
        return scores

    def before(self, owner: Any, name: str, seam: str) -> None:
        """Lay a seam before every call of a method."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (self.passes(seam), method(*args, **kwargs))[1])


class Watched(Wrapped):
    """A session whose every method passes a seam before it does its work, and one behind what it observes."""

    def __init__(self, inner: Session, fuse: Fuse):
        super().__init__(inner)
        self.observe = lambda outcome: (inner.observe(outcome), fuse.passes("observed"))
        for name in ("admit", "prepare", "propose", "observe", "release"):
            fuse.before(self, name, name)


SEAMS = (
    "admit", "prepare", "propose", "observe", "observed", "release", "rule", "plan", "forward", "on_round", "on_turn",
    "text", "processor",
)  # fmt: skip


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_every_request_has_one_last_step_wherever_a_turn_is_broken_off(target, wanted, seam, kind, monkeypatch) -> None:
    """Those that end have their tokens; those that ran end with the error and its place; those that wait go on."""
    broken = 0
    for after in (1, 2, 5):
        fuse = Fuse(seam, after, kind("broken off"))
        drafter, rule = Wrapping(NGramDrafter(), partial(Watched, fuse=fuse)), RejectionVerifier()
        rule.walks_greedily = False  # it is asked at temperature 0, too
        engine = Engine(target, drafter, rule, max_batch_size=2, max_length=64, scheduler=(schedule := FirstCome()))
        sampling = replace(SAMPLING, logits_processor=fuse.processed if seam == "processor" else None)
        if seam in ("on_round", "on_turn"):
            setattr(engine, seam, lambda *seen: None)
        with monkeypatch.context() as patched:
            patched.setattr(Detokenizer, "push", Detokenizer.push)
            for owner, name, at in (
                (rule, "laws", "rule"), (schedule, "plan", "plan"), (engine.runner, "run", "forward"),
                (engine.runner, "run_together", "forward"),
                (engine, "on_round", "on_round"), (engine, "on_turn", "on_turn"), (Detokenizer, "push", "text"),
            ):  # fmt: skip
                if getattr(owner, name) is not None:
                    fuse.before(owner, name, at)
            requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
            steps, raised = played(engine)
        fuse.seam = ""
        ends = [step for step in steps if step.finish_reason is not None]
        assert sorted(step.request for step in ends) == requests, "each has its last step, and no other"
        for request, tokens in zip(requests, wanted, strict=True):
            row = [step for step in steps if step.request == request]
            found = tuple(chain.from_iterable(step.token_ids for step in row))
            if row[-1].finish_reason == "error":
                failed = {"text": "the tokenizer failed: ", "processor": "a logits processor failed: "}.get(seam, "")
                words = (failed if kind is RuntimeError else "") + kind.__name__
                assert re.fullmatch(rf"{words}: broken off \(at \S*test_seams\.py:\d+ in Fuse\.passes\)", row[-1].error)
                assert found == tokens[: len(found)], "what was decoded before is kept"
            else:
                assert found == tokens
        broken += fuse.left <= 0
        # An ordinary error of a processor or of a tokenizer is its request's own.
        assert raised == (fuse.left <= 0 and not (kind is RuntimeError and seam in ("processor", "text")))
        assert [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)] == wanted, "as good as new"
    assert broken, "the seam is passed"


def played(engine: Engine) -> tuple[list[Step], bool]:
    """All steps up to the end, through errors, and whether there were any."""
    steps, raised = [], False
    for _ in range(60):
        try:
            steps += engine.step()
        except BaseException:
            raised = True
        if not engine.unfinished and not engine._steps:
            break
    return steps, raised


def test_an_engine_in_a_turn_refuses_other_calls_takes_requests_and_drops_them_at_its_end(target, wanted) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=2, max_length=64)
    outer, refused, submitted = 0, [], []
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(PROMPTS[:1], SAMPLING),
        lambda: next(engine.stream(PROMPTS[:1], SAMPLING)),
        engine.step, engine.warm_up, engine.forget, engine.weights_changed,
    ]  # fmt: skip

    def call() -> None:
        for function in calls:
            with pytest.raises(RuntimeError, match="in the middle of a turn"):
                function()
            refused.append(function)

    def look(seen: object) -> None:
        if not refused:
            call()
            other = threading.Thread(target=call)
            other.start()
            other.join()
            submitted.extend(engine.submit(prompt, SAMPLING) for prompt in PROMPTS[1:])
            engine.abort(outer)

    outer = engine.submit([3, 4, 3, 4], SAMPLING)
    engine.on_round = look
    assert engine.step() == [] and engine.unfinished == 2 and len(refused) == 2 * len(calls)
    steps, _ = played(engine)
    found = [tuple(chain.from_iterable(s.token_ids for s in steps if s.request == request)) for request in submitted]
    assert found == wanted[1:]


def test_a_turn_begins_when_an_abort_from_another_thread_is_done(target: Target, wanted: list[tuple[int, ...]]) -> None:
    begun, goes_on, order = threading.Event(), threading.Event(), []

    class Slow(NGramDrafter):
        def release(self, slot: int) -> None:
            begun.set()
            assert goes_on.wait(30)
            order.append("released")

    engine = Engine(target, Slow(), RejectionVerifier(), max_batch_size=2, max_length=64)
    first, second = (engine.submit(prompt, SAMPLING) for prompt in PROMPTS[:2])
    steps = engine.step()
    engine.on_round = lambda seen: order.append("round")
    aborting = threading.Thread(target=lambda: engine.abort(first))
    stepping = threading.Thread(target=lambda: steps.extend(engine.step()))
    aborting.start()
    assert begun.wait(30)
    stepping.start()
    stepping.join(0.5)
    goes_on.set()
    aborting.join()
    stepping.join()
    assert order[:2] == ["released", "round"]
    steps += played(engine)[0]
    assert tuple(chain.from_iterable(s.token_ids for s in steps if s.request == second)) == wanted[1]


@pytest.mark.parametrize("kind", [MergedDrafter, ChoiceDrafter])
def test_a_look_up_that_is_deeper_than_a_head_drafts_up_to_a_slots_end(kind: Callable[..., Drafter]) -> None:
    """What the head is shown may be wider than its own trees, and padding may fall off the end of its row."""
    model = tiny_model(vocab_size=16, layers=2)
    head = BlockDrafter(BlockHead.for_target(model, layers=1, block_size=4))
    prompts = [[first, *range(16), *range(15, 0, -1)] for first in range(6)]
    engines = [
        Engine(Target(model), *parts, max_length=56, recording="rounds")
        for parts in ((), (kind(SuffixDrafter(8, tree_depth=10), head), RejectionVerifier()))
    ]
    plain, drafted = ([e.generate([p], SamplingParams(max_new_tokens=24))[0] for p in prompts] for e in engines)
    assert [output.token_ids for output in plain] == [output.token_ids for output in drafted]
