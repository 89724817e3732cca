"""What goes wrong in an engine ends the requests that it concerns, shows its cause, and leaves the engine usable."""

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from drafters import ModelDrafter, NGramDrafter
from specdec.batch import Batch
from specdec.engine.engine import Engine
from specdec.engine.text import Detokenizer
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome
from tests.components import perturbed
from tests.models import tiny_model
from tests.specdec.gapped import PROMPTS, SAMPLING, VOCAB, Gapped
from verifiers import RejectionVerifier


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB, layers=2))


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


class Fragile(NGramDrafter):
    """Fails once, in one of its methods."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def _fail(self, here: str) -> None:
        if here == self.where:
            self.where = ""
            raise RuntimeError(f"broken in {here}")

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._fail("admit")

    def observe(self, outcome: Outcome) -> None:
        self._fail("prefill" if outcome.path is None else "observe")

    def propose(self, batch: Batch) -> DraftTree:
        self._fail("propose")
        return super().propose(batch)


def assert_named(error: str | None, message: str, function: Callable[..., object]) -> None:
    """Assert that an error has this message, and names a line of this function of this file."""
    code = function.__code__
    found = re.fullmatch(rf"{message} \(at (?P<file>\S+):(?P<line>\d+) in (?P<function>[\w.]+)\)", error or "")
    assert found is not None, error
    assert Path(found["file"]).resolve() == Path(__file__).resolve()
    lines = {line for _, _, line in code.co_lines() if line is not None}
    assert int(found["line"]) in lines and found["function"].endswith(code.co_name)


@pytest.mark.parametrize("where", ["admit", "prefill", "propose", "observe"])
def test_an_error_of_the_drafter_is_shown_and_ends_what_ran(
    target: Target, wanted: list[tuple[int, ...]], where: str
) -> None:
    """Submitted requests that ran end with the error; one that waited goes on, and so does the engine."""
    engine = Engine(target, Fragile(where), RejectionVerifier(), max_batch_size=1, max_length=64)
    first, second = (engine.submit(prompt, SAMPLING) for prompt in PROMPTS[:2])
    with pytest.raises(RuntimeError, match=f"broken in {where}"):
        engine.step()
    assert engine.unfinished == 1
    steps = []
    while engine.unfinished:
        steps += engine.step()
    (ended,) = (step for step in steps if step.request == first)
    assert ended.finish_reason == "error"
    assert_named(ended.error, f"RuntimeError: broken in {where}", Fragile._fail)
    assert tuple(t for step in steps if step.request == second for t in step.token_ids) == wanted[1]
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_tokenizer_that_raises_ends_its_request_alone(
    wanted: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = wanted[0][4]
    others = [i for i in (1, 2) if bad not in wanted[i]]
    assert others, "another token would show more"
    decode = Detokenizer._decode

    def raises(self: Detokenizer, token_ids: list[int]) -> str:
        if bad in token_ids:
            raise UnicodeError("no such piece")
        return decode(self, token_ids)

    target = Target(tiny_model(vocab_size=VOCAB, layers=2), words())
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=3, max_length=64)
    with monkeypatch.context() as broken:
        broken.setattr(Detokenizer, "_decode", raises)
        outputs = engine.generate(PROMPTS, SAMPLING)
    assert outputs[0].finish_reason == "error"
    assert_named(outputs[0].error, "the tokenizer failed: UnicodeError: no such piece", raises)
    assert outputs[0].token_ids == wanted[0][: len(outputs[0].token_ids)], "what was decoded before is kept"
    for i in others:
        assert outputs[i].token_ids == wanted[i]
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_an_observer_that_raises_and_a_release_that_does_too(target: Target, wanted: list[tuple[int, ...]]) -> None:
    class Both(NGramDrafter):
        def release(self, slot: int) -> None:
            if engine.on_round is not None:
                raise KeyError("release")

    def raises(seen: object) -> None:
        raise RuntimeError("the observer is broken")

    engine = Engine(target, Both(), RejectionVerifier(), max_batch_size=2, max_length=64)
    engine.on_round = raises
    with pytest.raises(RuntimeError, match="the observer is broken") as caught:
        engine.generate(PROMPTS, SAMPLING)
    assert any("on releasing request 0: KeyError" in note for note in caught.value.__notes__)
    engine.on_round = None
    assert engine.unfinished == 0
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_a_chain_behind_an_invalid_node_is_committed(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, Gapped(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == wanted
    assert all(len(o.steps) == 4 for o in outputs), "the drafts are the outputs, so all are accepted"


def test_more_nodes_than_announced_are_refused(target: Target, wanted: list[tuple[int, ...]]) -> None:
    drafter = Gapped(wanted)
    drafter.max_nodes = 1  # says nothing of most of its nodes
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=3, max_length=64)
    with pytest.raises(ValueError, match=r"Gapped .*max_nodes=1"):
        engine.generate(PROMPTS, SAMPLING)


def test_a_drafter_serves_several_engines_at_once(target: Target, wanted: list[tuple[int, ...]]) -> None:
    drafter = ModelDrafter(perturbed(target.model, 0.1), 3)
    engines = [Engine(target, drafter, RejectionVerifier(), max_batch_size=size, max_length=64) for size in (1, 2, 3)]
    streams = [engine.stream(PROMPTS, SAMPLING) for engine in engines]
    found: list[dict[int, list[int]]] = [{} for _ in engines]
    for steps in zip_longest(*streams):
        for number, step in enumerate(steps):
            if step is not None:
                found[number].setdefault(step.request, []).extend(step.token_ids)
    assert [[tuple(each[request]) for request in sorted(each)] for each in found] == [wanted] * 3


def test_a_closed_engine_takes_no_requests(target: Target) -> None:
    engine = Engine(target, max_length=64)
    engine.close()
    with pytest.raises(ValueError, match="this engine was closed"):
        engine.generate(PROMPTS, SAMPLING)


def test_an_aborted_request_is_complete_with_a_reason(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=1, max_length=64)
    engine.on_round = lambda seen: engine.abort(2)  # it waits, and never gets a step
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == [*wanted[:2], ()]
    assert outputs[2].finish_reason == "error" and outputs[2].steps == ()
    assert "aborted" in str(outputs[2].error)
    engine.on_round = None
    engine.abort(engine.submit([1, 2], SAMPLING))  # before its first step
    assert engine.unfinished == 0 and engine.step() == []


def test_an_engine_built_in_inference_mode(target: Target, wanted: list[tuple[int, ...]]) -> None:
    drafter = ModelDrafter(perturbed(target.model, 0.1), [2, 1])
    with torch.inference_mode():
        engine = Engine(target, drafter, RejectionVerifier(), max_length=64)
        inside = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in inside] == [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
