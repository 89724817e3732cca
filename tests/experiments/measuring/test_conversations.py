"""Prompts of several turns: every contender answers its own answers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from drafters.ngram import NGramDrafter
from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import prepare, render, stream_of
from experiments.measuring.measure import Contender, measure
from experiments.results.records import PLAIN, Record
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize
from specdec.checks.reference import reference_decode
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Completion, Step
from tests.experiments.conftest import byte_tokenizer
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[bot{{ mood }}]{% endif %}"
)
GREEDY = SamplingParams(max_new_tokens=6)
Configure = Callable[..., DictConfig]


def text_of(ids: Sequence[int]) -> str:
    return byte_tokenizer().decode(ids)


class Parrot:
    """An engine that answers "p" plainly and ``loud`` otherwise."""

    def __init__(self, loud: str = "s", *, size: int = 1, max_length: int = 200):
        self.target = Target(tiny_model(vocab_size=257), byte_tokenizer())
        self.loud, self.max_batch_size, self.max_length = loud, size, max_length
        self.verifier = RejectionVerifier()
        self.asked: list[tuple[bool, list[str]]] = []
        self.streams: list[int | None] = []
        self.fail_at: set[str] = set()

    def generate(self, prompts: Any, sampling: Any, *, speculate: bool = True) -> list[Completion]:
        texts = [text_of(ids) for ids in prompts]
        self.asked.append((speculate, texts))
        self.streams += [params.stream for params in sampling]
        if speculate and self.fail_at.intersection(texts):
            raise RuntimeError("boom")
        answer = self.loud if speculate else "p"
        ids = tuple(byte_tokenizer()(answer)["input_ids"])
        step = Step(request=0, round=0, token_ids=ids, proposed_depth=int(speculate), proposed_nodes=int(speculate))
        return [
            Completion(prompt_ids=tuple(prompt), token_ids=ids, text=answer, finish_reason="stop", steps=(step,))
            for prompt in prompts
        ]


def talk(engine: Parrot, prompts: list[Prompt], sampling: SamplingParams = GREEDY) -> list[Record]:
    records: list[Record] = []
    both: Any = [Contender(PLAIN, engine, speculate=False), Contender("fast", engine)]  # type: ignore[arg-type]
    jobs, _ = prepare(prompts, sampling, byte_tokenizer(), max_length=engine.max_length)
    assert list(measure(both, jobs, write=records.append))[-1] == len(jobs)
    return records


TWO = Prompt(id="a", turns=("one", "two"), chat=True)
ONE = Prompt(id="b", turns=("uno",), chat=True)


def test_later_turns_hold_what_was_said() -> None:
    tokenizer = byte_tokenizer()
    prompt = Prompt(id="a", turns=("one", "two", "three"), chat=True)
    assert text_of(render(prompt, tokenizer, ["A", "B"])) == "oneA\n\ntwoB\n\nthree"
    tokenizer.chat_template = TEMPLATE
    assert text_of(render(prompt, tokenizer, ["A"])) == "[user]one[assistant]A[user]two[bot]"
    assert text_of(render(prompt, tokenizer, ["A"], template={"mood": "!"})).endswith("[user]two[bot!]")


def test_every_contender_answers_its_own_answers() -> None:
    engine = Parrot()
    records = talk(engine, [TWO])
    asked = [["one"], ["one"], ["onep\n\ntwo"], ["ones\n\ntwo"]]
    assert engine.asked == list(zip((False, True) * 2, asked, strict=True))
    seen = [(r.prompt, r.turn, r.method, r.batch) for r in records]
    assert seen == [("a", turn, method, 0) for turn in (0, 1) for method in (PLAIN, "fast")]
    assert engine.streams == [stream_of("a", turn, 0) for turn in (0, 0, 1, 1)]


def test_batches_of_prompts_with_different_numbers_of_turns() -> None:
    engine = Parrot(size=3)
    records = talk(engine, [ONE, TWO, Prompt(id="c", turns=("x", "y"), chat=True)])
    asked = [["uno", "one", "x"], ["ones\n\ntwo", "xs\n\ny"]]
    assert [texts for speculate, texts in engine.asked if speculate] == asked
    assert len(records) == 2 * 5
    summary = summarize(records, planned=5, bootstrap=Bootstrap(resamples=100))
    fast = summary.methods[1]
    assert summary.complete and (fast.finished, fast.timed_prompts) == (5, 5)
    assert fast.speedup_interval is None, "both turns of one batch are one observation"


def test_a_failed_turn_ends_that_conversation_only() -> None:
    engine = Parrot()
    engine.fail_at.add("one")
    records = talk(engine, [TWO, ONE])
    failed = [(r.prompt, r.turn, (r.error or "").partition(" (at ")[0]) for r in records if r.failed]
    assert failed == [("a", 0, "RuntimeError: boom"), ("a", 1, "turn 1 failed")]
    assert len(records) == 6, "planned turns are all accounted for"
    # Turns that failed in one count for neither in speed.
    assert summarize(records, planned=3, bootstrap=Bootstrap(resamples=100)).methods[1].timed_prompts == 1


def test_a_turn_that_grew_too_long_is_a_failure() -> None:
    records = talk(Parrot("s" * 20, max_length=30), [TWO])
    errors = {(r.method, r.turn): r.error for r in records}
    assert errors[PLAIN, 1] is None
    assert errors["fast", 1] == "28 prompt tokens and max_new_tokens=6 exceed the engine's max_length=30"


def test_real_conversations_follow_the_reference() -> None:
    target = Target(tiny_model(vocab_size=257), byte_tokenizer())
    engine = Engine(target, NGramDrafter(max_draft_tokens=3), RejectionVerifier(), max_batch_size=2, max_length=96)
    records: list[Record] = []
    jobs, _ = prepare([TWO, ONE], GREEDY, target.tokenizer, max_length=96)
    list(measure([Contender(PLAIN, engine, speculate=False), Contender("ngram", engine)], jobs, write=records.append))
    assert all(r.equals_plain for r in records if r.method == "ngram")
    first, second = (r for r in records if r.method == "ngram" and r.prompt == "a")
    ids = render(TWO, target.tokenizer, [first.text])
    assert second.prompt_tokens == len(ids)
    with torch.inference_mode():
        expected = reference_decode(target.model, ids, GREEDY, stop_ids=target.eos_token_ids)
    assert second.token_ids == tuple(expected)
