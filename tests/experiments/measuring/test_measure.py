"""The measuring loop: order, warm-up, divergences, records that survive it; every contender answers its own answers.

The verdict on whole methods is that of the bundled models, because it rests on what a dtype does to trained logits.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from drafters import ModelDrafter
from drafters.ngram import NGramDrafter
from experiments.datasets.prompt import Prompt
from experiments.datasets.stdlib import Stdlib
from experiments.measuring import measure as loop
from experiments.measuring.jobs import Job, fit, needed_tokens, prepare, render, stream_of
from experiments.measuring.measure import Contender, find_divergence, measure
from experiments.results.lossless import Divergence, Verdict, judge, worst
from experiments.results.records import PLAIN, Record, keep_record
from specdec import Completion, DraftTree, Engine, Exactness, Laws, Paging, SamplingParams, Step, Target
from tests.changed_rule import ChangedRule
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.made_runs import run_of
from tests.experiments.test_run import WrongRoot
from tests.models import tiny_model
from verifiers.block import TraversalVerifier
from verifiers.rejection import RejectionVerifier


class FakeEngine:
    """Answers "p" plainly and "s" otherwise, if it is not told to emit other tokens; keeps a log of its calls."""

    def __init__(self, *, max_batch_size: int = 1):
        self.log: list[tuple[bool, list[Sequence[int]]]] = []
        self.streams: list[int | None] = []
        self.max_batch_size, self.max_length = max_batch_size, 200
        self.verifier = SimpleNamespace(exactness=Exactness.LOSSY)
        self.target = Target(tiny_model(vocab_size=257), byte_tokenizer())
        self.runner = None
        self.outputs = {False: byte_tokenizer()("p")["input_ids"], True: byte_tokenizer()("s")["input_ids"]}
        self.raise_at: dict[int, BaseException] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any, *, speculate: bool) -> list[Completion]:
        self.log.append((speculate, list(prompts)))
        self.streams += [params.stream for params in sampling]
        done = []
        for prompt in prompts:
            if speculate and prompt[0] in self.raise_at:
                raise self.raise_at[prompt[0]]
            tokens, accepted = tuple(self.outputs[speculate]), int(speculate)
            steps = tuple(
                Step(request=0, round=n, token_ids=(token,), accepted=accepted, proposed_depth=2 * accepted)
                for n, token in enumerate(tokens)
            )
            shown: dict[str, Any] = {"text": text_of(tokens), "finish_reason": "length", "steps": steps}
            done.append(Completion(prompt_ids=tuple(prompt), token_ids=tokens, **shown))
        return done


GREEDY = SamplingParams(max_new_tokens=3)


def jobs(count: int, sampling: SamplingParams = GREEDY) -> list[Job]:
    return [Job(Prompt(id=f"p{n}", turns=("x",)), 0, (n + 1, 1), sampling) for n in range(count)]


def contenders(engine: Any) -> list[Contender]:
    return [Contender(PLAIN, engine, speculate=False), Contender("fast", engine)]


def measured(engine: Any, asked: list[Job], **more: Any) -> list[Record]:
    records: list[Record] = []
    assert list(measure(contenders(engine), asked, write=records.append, **more))[-1] == len(asked)
    return records


def test_methods_take_turns_at_going_first_after_a_warm_up_that_is_not_recorded() -> None:
    engine = FakeEngine()
    records = measured(engine, jobs(3), warmup=[[91]])
    asked = [(prompts[0][0], speculate) for speculate, prompts in engine.log]
    assert asked == [(91, False), (91, True), (1, False), (1, True), (2, True), (2, False), (3, False), (3, True)]
    # Whichever went first, plain decoding is written first.
    assert [(r.prompt, r.method) for r in records] == [(f"p{n}", m) for n in range(3) for m in (PLAIN, "fast")]


def test_divergences() -> None:
    for tokens, index in (([5, 9, 7], 1), ([5, 6], 2), ([5, 6, 7, 8], 3), ([], 0)):
        engine = FakeEngine()
        plain = engine.outputs[False] = [5, 6, 7] if tokens else [5]
        engine.outputs[True] = tokens
        record = measured(engine, jobs(1))[1]
        assert (record.equals_plain, record.divergence) == (False, index)
        pair = (tokens[index] if index < len(tokens) else None, plain[index] if index < len(plain) else None)
        assert record.tokens_at_divergence == pair
        assert record.tie_bound is None, "a lossy rule is not judged"
        assert (record.margin is None) is (None in pair)
    sampled = measured(engine, jobs(1, replace(GREEDY, temperature=1.0)))[1]
    assert sampled.equals_plain is sampled.divergence is None, "sampled outputs are not compared"


def test_ctrl_c_passes_and_keeps_what_was_written(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.raise_at[3] = KeyboardInterrupt()
    path = tmp_path / "records.jsonl"
    running = measure(contenders(engine), jobs(5), write=partial(keep_record, path))
    assert next(running) == 0, "what was warmed up before is told apart"
    for done in (1, 2):
        assert next(running) == done
        assert len(path.read_text().splitlines()) == 2 * done, "on the disk before the next prompt begins"
    with pytest.raises(KeyboardInterrupt):
        next(running)


def test_jobs_for_samples() -> None:
    sampling = SamplingParams(temperature=1.0, n=2, max_new_tokens=10, seed=3)
    made = prepare([Prompt(id="short", turns=("ab",))], sampling, byte_tokenizer())
    assert [(job.prompt.id, job.sample, len(job.prompt_ids)) for job in made] == [("short", 0, 2), ("short", 1, 2)]
    assert [job.sampling.stream for job in made] == [stream_of("short", 0, 0), stream_of("short", 0, 1)]
    # Streams come from prompt, turn and sample. Pinned: a change would change every sampled result.
    assert stream_of("argparse.py:12", 0, 0) == 886276966058186968
    streams = {stream_of(name, turn, sample) for name in ("a", "a1", "b") for turn in (0, 1, 11) for sample in (0, 1)}
    assert len(streams) == 18 and all(0 <= stream < 2**62 for stream in streams)


def text_of(ids: Sequence[int]) -> str:
    return byte_tokenizer().decode(ids)


def talk(engine: FakeEngine, *prompts: Prompt) -> tuple[list[Record], list[list[str]]]:
    """The records of conversations, and the texts of the calls that speculate."""
    records = measured(engine, prepare(prompts, GREEDY, byte_tokenizer()))
    return records, [[text_of(ids) for ids in prompts] for speculate, prompts in engine.log if speculate]


TWO = Prompt(id="a", turns=("one", "two"), chat=True)
ONE = Prompt(id="b", turns=("uno",), chat=True)


def test_later_turns_hold_what_was_said() -> None:
    tokenizer = byte_tokenizer()
    prompt = Prompt(id="a", turns=("one", "two", "three"), chat=True)
    assert text_of(render(prompt, tokenizer, ["A", "B"])) == "oneA\n\ntwoB\n\nthree"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert text_of(render(prompt, tokenizer, ["A"])) == "[user]one[assistant]A[user]two"


def test_every_contender_answers_its_own_answers_in_batches_of_prompts_with_different_numbers_of_turns() -> None:
    engine = FakeEngine(max_batch_size=3)
    records, asked = talk(engine, ONE, TWO, Prompt(id="c", turns=("x", "y"), chat=True))
    assert asked == [["uno", "one", "x"], ["ones\n\ntwo", "xs\n\ny"]]
    assert ["onep\n\ntwo", "xp\n\ny"] in [[text_of(ids) for ids in prompts] for _, prompts in engine.log]
    said = [(name, turn) for turn, names in enumerate(("bac", "ac")) for name in names * 2]
    assert engine.streams == [stream_of(*each, 0) for each in said]
    assert len(records) == 2 * 5 and {record.batch for record in records} == {0}
    fast = run_of(records, planned=5).rows[1]
    assert fast["complete"] and (fast["finished"], fast["timed_prompts"]) == (5, 5)
    assert fast["speedup_low"] is None, "both turns of one batch are one observation"


def test_a_failed_turn_ends_that_conversation_only() -> None:
    engine = FakeEngine()
    engine.raise_at[byte_tokenizer()("o")["input_ids"][0]] = RuntimeError("boom")
    records, _ = talk(engine, TWO, ONE)
    failed = [(r.prompt, r.turn, (r.error or "").partition(" (at ")[0]) for r in records if r.failed]
    assert failed == [("a", 0, "RuntimeError: boom"), ("a", 1, "turn 1 failed")]
    assert len(records) == 6, "planned turns are all accounted for"
    # Turns that failed in one count for neither in speed.
    assert run_of(records, planned=3).rows[1]["timed_prompts"] == 1


def test_a_method_finds_in_the_cache_what_it_has_computed_itself() -> None:
    """Of an engine that methods share, nothing; of its own, the turn before."""
    target = Target(tiny_model(vocab_size=257), byte_tokenizer())
    cache = Paging(page_size=1, shared=True)
    options: Any = {"max_batch_size": 3, "max_length": 96, "cache": cache}
    shared = Engine(target, NGramDrafter(max_draft_tokens=3), RejectionVerifier(), **options)
    alone = Engine(target, NGramDrafter(max_draft_tokens=3), RejectionVerifier(), **options)
    listed = prepare([TWO, ONE], replace(GREEDY, max_new_tokens=30, ignore_eos=True), target.tokenizer)
    records: list[Record] = []
    sides = [Contender(PLAIN, shared, speculate=False), Contender("beside", shared), Contender("alone", alone)]
    list(measure(sides, listed, write=records.append))
    names = [side.method for side in sides]
    found = {name: [r.memory.get("reused", 0) for r in records if r.method == name] for name in names}
    assert found[PLAIN] == found["beside"] == [0, 0, 0] and max(found["alone"]) > 0


TEN = SamplingParams(max_new_tokens=10)
SHORT = Prompt(id="short", turns=("ab",))
LONG = Prompt(id="long", turns=("0123456789" * 10,))
CHAT = Prompt(id="chat", turns=("begin " + "x" * 100 + " end", "more"), chat=True)


def fitted(*prompts: Prompt, policy: str, room: int = 60) -> tuple[list[Prompt], str | None]:
    found = fit(prompts, TEN, byte_tokenizer(), max_length=room, policy=policy)
    return found.prompts, found.sentence


def test_a_token_before_every_text_stays_in_front() -> None:
    tokenizer = byte_tokenizer()
    plain = tokenizer("wxyz")["input_ids"]
    first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    marked = Prompt(id="a", turns=("<|endoftext|>wxyz",), last_tokens=3)
    assert render(marked, tokenizer) == (first, *plain[-2:])
    assert render(Prompt(id="a", turns=("wxyz",), last_tokens=3), tokenizer) == tuple(plain[-3:])
    with pytest.raises(ValueError, match="prompt a has 4 tokens, and 5 were asked for"):
        render(Prompt(id="a", turns=("wxyz",), last_tokens=5), byte_tokenizer())


def test_what_is_too_long_is_left_out_or_loses_its_beginning_or_the_middle_of_its_longest_turn() -> None:
    prompts, sentence = fitted(SHORT, LONG, policy="skip", room=109)
    assert prompts == [SHORT] and sentence is not None
    for words in ("1 of 2 prompts", "engine.max_length=109", "the longest needs 110", "1 left out", "too_long=cut"):
        assert words in sentence
    (prompt,), sentence = fitted(LONG, policy="cut")
    assert text_of(render(prompt, byte_tokenizer())) == "0123456789" * 5
    assert sentence is not None and "1 shortened; dataset.too_long=skip leaves them out" in sentence
    (prompt,), _ = fitted(CHAT, policy="cut", room=90)
    long, short = prompt.turns
    assert short == "more" and long.startswith("begin x") and long.endswith("x end") and "[...]" in long
    assert 80 < needed_tokens(prompt, TEN, byte_tokenizer()) <= 90, "not more than it must"
    prompts, sentence = fitted(SHORT, CHAT, policy="cut", room=45)
    assert prompts == [SHORT] and sentence is not None and "1 left out" in sentence, "nothing would be left of it"


@cache
def target(dtype: str = "float32", quantization: str | None = None) -> Target:
    return Target.from_pretrained("bundled/target", dtype=dtype, quantization=quantization)


def texts(count: int, tokens: int) -> list[Job]:
    every = Stdlib(prompt_tokens=48).load()
    prompts = every[:: len(every) // count][:count]
    return prepare(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True), target().tokenizer)


def verdict(engine: Engine, tokens: int = 16) -> tuple[dict[str, Any], Divergence | None]:
    """The verdict on the method's records, next to plain decoding on the same engine, and the worst divergence."""
    with engine:
        outputs = [record for record in measured(engine, texts(2, tokens)) if record.method != PLAIN]
    found = judge(outputs)
    assert found is not None and len(outputs) == 2 and all(each.equals_plain is not None for each in outputs)
    return found, worst(outputs)


def engine_of(dtype: str = "float32", quantization: str | None = None, **options: Any) -> Engine:
    """An engine with the bundled pair, if the options name no other parts."""
    drafter = ModelDrafter.from_pretrained("bundled/drafter", shape=[2, 2, 1], dtype=dtype)
    usual = {"drafter": drafter, "verifier": TraversalVerifier(), "max_batch_size": 2, "max_length": 256}
    return Engine(target(dtype, quantization), **usual | options)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.full)])
def test_an_honest_method_is_never_called_broken(quantization: str | None) -> None:
    found, _ = verdict(engine_of("bfloat16", quantization))
    assert found["lossless"] != Verdict.NOT_LOSSLESS, found


def test_on_an_invariant_engine_nothing_explains_another_token() -> None:
    found = find_divergence(engine_of(invariant=True), texts(1, 4)[0], [1], [2], exactness="exact")
    assert found["tie_bound"] == 0.0 and found["margin"] > 0


def accepts_all(tree: DraftTree, p: Tensor, laws: Laws) -> Tensor:
    """Whatever is drafted first, by a rule that says that it is exact."""
    deepest = torch.where(tree.valid, tree.depth, -1).argmax(-1, keepdim=True)
    return torch.zeros_like(laws.stop).scatter_(1, deepest, 1.0)


@pytest.mark.parametrize(
    ("broken", "setting"),
    [("rule", []), ("commit", []), pytest.param("commit", ["bfloat16", "int8"], marks=pytest.mark.full)],
)
def test_a_broken_method_is_not_lossless(broken: str, setting: list[str]) -> None:
    """Or keys and values of an accepted path stay where the tree had them, instead of moving to their places."""
    rule = ChangedRule(TraversalVerifier(), stop=accepts_all) if broken == "rule" else TraversalVerifier()
    engine = engine_of(*setting, verifier=rule)
    if broken == "commit":
        engine.runner.cache.commit = lambda *_: None  # type: ignore[method-assign]
    found, largest = verdict(engine, tokens=24)
    assert found["lossless"] == Verdict.NOT_LOSSLESS and largest is not None, found
    assert largest.margin == found["largest_margin"] and largest.tie_bound == found["tie_bound"]
    ours, plains = largest.tokens
    assert ours != plains
    assert largest.texts == (target().tokenizer.decode([ours]), target().tokenizer.decode([plains]))


def test_an_examination_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(loop, "examine", Mock(side_effect=RuntimeError("out of memory")))
    found, _ = verdict(engine_of(drafter=WrongRoot(max_draft_tokens=4)), 8)
    assert found["lossless"] == Verdict.NOT_LOSSLESS and found["largest_margin"] is None
    assert "could not be examined" in caplog.text and "RuntimeError: out of memory" in caplog.text
