"""The measuring loop: order, warm-up, failures, divergences; and records that survive it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import Job, prepare, stream_of
from experiments.measuring.measure import Contender, measure
from experiments.measuring.watch import Watch
from experiments.results.records import PLAIN, Record, RecordWriter, read_records
from specdec.requests import SamplingParams
from specdec.types import Completion, Exactness, Step
from tests.experiments.conftest import byte_tokenizer
from tests.models import tiny_model


class FakeEngine:
    """Emits the tokens it is told to; keeps a log of its calls."""

    def __init__(self, log: list[tuple[str, bool, list[int]]], *, max_batch_size: int = 1, name: str = "e"):
        self.log = log
        self.name = name
        self.max_batch_size = max_batch_size
        self.verifier = SimpleNamespace(exactness=Exactness.LOSSY)
        self.target = SimpleNamespace(device=torch.device("cpu"), model=tiny_model(vocab_size=64), tokenizer=None)
        self.runner = None
        self.outputs: dict[bool, list[int]] = {False: [5, 6, 7], True: [5, 6, 7]}
        self.raise_at: dict[int, BaseException] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any, *, speculate: bool) -> list[Completion]:
        self.log.append((self.name, speculate, [prompt[0] for prompt in prompts]))
        done = []
        for prompt in prompts:
            if speculate and prompt[0] in self.raise_at:
                raise self.raise_at[prompt[0]]
            tokens = tuple(self.outputs[speculate])
            accepted = 1 if speculate else 0
            steps = tuple(
                Step(
                    request=0, round=number, token_ids=(token,), accepted=accepted, proposed_depth=2 * accepted,
                    proposed_nodes=3 * accepted, expected_accepted=0.75 * accepted, seconds={"verify": 0.5},
                    finish_reason="length" if number == len(tokens) - 1 else None,
                )
                for number, token in enumerate(tokens)
            )  # fmt: skip
            shown: dict[str, Any] = {"text": "x", "finish_reason": "length", "steps": steps}
            done.append(Completion(prompt_ids=tuple(prompt), token_ids=tokens, **shown))
        return done


GREEDY = SamplingParams(max_new_tokens=3)


def jobs(count: int, sampling: SamplingParams = GREEDY) -> list[Job]:
    return [Job(Prompt(id=f"p{n}", turns=("x",)), 0, (n + 1, 1), sampling) for n in range(count)]


def contenders(engine: FakeEngine) -> list[Contender]:
    return [Contender(PLAIN, engine, speculate=False), Contender("fast", engine)]  # type: ignore[arg-type]


def measured(engine: FakeEngine, count: int, *, sampling: SamplingParams = GREEDY, **more: Any) -> list[Record]:
    records: list[Record] = []
    assert list(measure(contenders(engine), jobs(count, sampling), write=records.append, **more))[-1] == count
    return records


def test_methods_alternate_prompt_by_prompt_and_take_turns_at_going_first() -> None:
    engine = FakeEngine([])
    records = measured(engine, 3)
    assert [(speculate, first) for _, speculate, first in engine.log] == [
        (False, [1]), (True, [1]), (True, [2]), (False, [2]), (False, [3]), (True, [3]),
    ]  # fmt: skip
    # Whichever went first, plain decoding is written first.
    assert [(r.prompt, r.method) for r in records] == [(f"p{n}", m) for n in range(3) for m in (PLAIN, "fast")]


def test_outputs_are_compared_with_the_method_of_the_same_law() -> None:
    engines = [FakeEngine([], name=name) for name in "abcd"]
    for engine in engines[1:3]:  # quantized, say: b plainly, and c with drafts
        engine.outputs = {False: [5, 8, 7], True: [5, 8, 7]}
    plain, quantized, drafted, alone = engines
    made: list[Any] = [
        Contender(PLAIN, plain, speculate=False),  # type: ignore[arg-type]
        Contender("b", quantized, speculate=False, reference=None),  # type: ignore[arg-type]
        Contender("c", drafted, reference="b"),  # type: ignore[arg-type]
        Contender("d", alone),  # type: ignore[arg-type]
    ]
    records: list[Record] = []
    list(measure(made, jobs(2), write=records.append))
    assert [record.equals_plain for record in records] == 2 * [None, None, True, True]


def test_warm_up_runs_all_methods_and_is_not_recorded() -> None:
    engine = FakeEngine([], max_batch_size=2)
    records = measured(engine, 2, warmup=[[91], [92], [93]])
    assert [(speculate, ids) for _, speculate, ids in engine.log[:4]] == [
        (False, [91, 92]), (False, [93]), (True, [91, 92]), (True, [93]),
    ]  # fmt: skip
    assert len(records) == 4


def test_divergences() -> None:
    for tokens, index in (([5, 9, 7], 1), ([5, 6], 2), ([5, 6, 7, 8], 3), ([], 0)):
        engine = FakeEngine([])
        plain = engine.outputs[False] = [5, 6, 7] if tokens else [5]
        engine.outputs[True] = tokens
        record = measured(engine, 1)[1]
        assert (record.equals_plain, record.divergence) == (False, index)
        pair = (tokens[index] if index < len(tokens) else None, plain[index] if index < len(plain) else None)
        assert record.tokens_at_divergence == pair
        assert record.tie_bound is None, "a lossy rule is not judged"
        if None in pair:
            assert record.margin is None
            continue
        with torch.inference_mode():
            logits = engine.target.model(torch.tensor([[1, 1, *tokens[:index]]])).logits[0, -1]
        assert record.margin == pytest.approx(float(logits.max() - logits[list(pair)].min()), abs=1e-5)
    sampled = measured(engine, 1, sampling=replace(GREEDY, temperature=1.0))[1]
    assert sampled.equals_plain is sampled.divergence is None, "sampled outputs are not compared"


def test_ctrl_c_passes_and_keeps_what_was_written(tmp_path: Path) -> None:
    engine = FakeEngine([])
    engine.raise_at[3] = KeyboardInterrupt()
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        running = measure(contenders(engine), jobs(5), write=writer.write)
        for done in (1, 2):
            # On the disk before the next prompt begins, not when the file is closed.
            assert next(running) == done
            assert len(path.read_text().splitlines()) == 2 * done
        with pytest.raises(KeyboardInterrupt):
            next(running)
    assert [record.prompt for record in read_records(path)] == ["p0", "p0", "p1", "p1"]


def test_jobs_for_samples_and_what_does_not_fit() -> None:
    tokenizer = byte_tokenizer()
    prompts = [Prompt(id="short", turns=("ab",)), Prompt(id="long", turns=("x" * 40,))]
    sampling = SamplingParams(temperature=1.0, n=2, max_new_tokens=10, seed=3)
    fit, unfit = prepare(prompts, sampling, tokenizer, max_length=30)
    assert [(job.prompt.id, job.sample, len(job.prompt_ids)) for job in fit] == [("short", 0, 2), ("short", 1, 2)]
    assert [job.sampling.stream for job in fit] == [stream_of("short", 0, 0), stream_of("short", 0, 1)]
    assert all(job.sampling.n == 1 and job.sampling.seed == 3 for job in fit)
    assert [job.prompt.id for job, _ in unfit] == ["long", "long"]
    assert unfit[0][1] == "40 prompt tokens and max_new_tokens=10 exceed the engine's max_length=30"
    with pytest.raises(ValueError, match="no prompt fits: 40 prompt tokens"):
        prepare(prompts[1:], sampling, tokenizer, max_length=30)
    # Streams come from prompt, turn and sample. Pinned: a change would change every sampled result.
    assert stream_of("argparse.py:12", 0, 0) == 886276966058186968
    streams = {stream_of(name, turn, sample) for name in ("a", "a1", "b") for turn in (0, 1, 11) for sample in (0, 1)}
    assert len(streams) == 18 and all(0 <= stream < 2**62 for stream in streams)


def test_moments_are_those_without_looking() -> None:
    """Looks from 1 to 2 and from 4 to 4.5: what comes after them would have come as much earlier."""
    watch = Watch(looks=[(2.0, 1.0), (4.5, 1.5)])
    assert [watch.without_looking(moment) for moment in (0.5, 2.0, 3.0, 5.0)] == [0.5, 1.0, 2.0, 3.5]
    assert Watch().without_looking(3.0) == 3.0
