"""The measuring loop: every method on every prompt, interleaved batch by batch, on the clock."""

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from experiments.contenders.base import OtherEngine
from experiments.measuring.accounting import Account, Accountant
from experiments.measuring.divergence import find_divergence
from experiments.measuring.energy import EnergyMeter
from experiments.measuring.jobs import Job, follow, too_long
from experiments.measuring.load import LoadMeter
from experiments.measuring.watch import Watch, watching
from experiments.results import metrics
from experiments.results.checked import stated_exactness
from experiments.results.lossless import OTHER_TARGET, THERE
from experiments.results.records import PLAIN, Record
from experiments.tracing.trace import TraceWriter
from specdec.engine.clock import COMPLETION
from specdec.engine.engine import Engine
from specdec.origin import described
from specdec.placement import is_spread
from specdec.types import Completion


@dataclass(frozen=True)
class Contender:
    """A method as it is measured.

    Attributes:
        method: Its name in all results.
        engine: Where it runs.
        speculate: False for plain decoding, on the same engine.
        accountant: Works out what its calls had to do; None for nothing of the kind.
        reference: The method whose greedy outputs these have to equal: plain decoding of the same target. None where
            nothing is to be compared.
        other_target: Its target is another one than the baseline's: other weights, or another cache.
    """

    method: str
    engine: Engine | OtherEngine
    speculate: bool = True
    accountant: Accountant | None = None
    reference: str | None = PLAIN
    other_target: bool = False

    @cached_property
    def exactness(self) -> str | None:
        """The verifier's promise, and whether that is only declared; None for plain decoding of the same target."""
        if isinstance(self.engine, OtherEngine):
            return self.engine.exactness
        verifier = self.engine.verifier if self.speculate else None
        stated = stated_exactness(verifier) if verifier is not None else None
        if not self.other_target:
            return stated
        return OTHER_TARGET if stated is None else stated + THERE


def measure(
    contenders: Sequence[Contender],
    jobs: Sequence[Job],
    *,
    warmup: Sequence[Sequence[int]] = (),
    write: Callable[[Record], None],
    finished: Collection[int] = (),
    template: Mapping[str, Any] | None = None,
    trace: TraceWriter | None = None,
) -> Iterator[int]:
    """Run every job with every contender and write their records; yields the number of finished jobs.

    Contenders take turns batch by batch, and in each batch another one goes first, so that drift of the machine
    meets all alike. A batch is written when all contenders have run it. Where prompts have several turns this holds
    turn by turn, and every contender leads a conversation of its own: what it answered is part of its next prompt.

    Args:
        contenders: The baseline first. Those with fewer slots than others decode the same prompts in turns.
        jobs: What to measure.
        warmup: Prompts that every contender decodes first, without a record; an exception there is not caught.
        write: Takes the records.
        finished: Numbers of batches that an earlier call has measured, and that this one passes over.
        template: Further arguments of the chat template.
        trace: Takes the rounds of all methods that draft.
    """
    size = slots_of(contenders)
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    if any(number not in finished for number in range(len(batches))):
        _warm_up(contenders, warmup, jobs)
    done = 0
    for number, batch in enumerate(batches):
        if number not in finished:
            _measure_batch(contenders, batch, number, write, template, trace)
        done += len(batch)
        yield done


def slots_of(contenders: Sequence[Contender]) -> int:
    """Returns how many prompts make a batch of the measurement: as many as the largest engine has slots."""
    return max(contender.engine.max_batch_size for contender in contenders)


def failure(contender: Contender, job: Job, error: str) -> Record:
    """The record of a job that did not run; it belongs to no batch (-1)."""
    return _record(contender, _Answer(job, error=error), -1, None)


_FEW = 512
"""Tokens of a run in which hardly any size of drafts comes so often that its forward would be captured."""


def _warm_up(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], jobs: Sequence[Job]) -> None:
    size, sampling = slots_of(contenders), jobs[0].sampling
    many = sum(job.sampling.max_new_tokens for job in jobs) >= _FEW
    for contender in contenders:
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            own = [replace(sampling, stream=None)] * len(batch)
            contender.engine.generate(batch, own, speculate=contender.speculate)
        if prompts and many and isinstance(contender.engine, Engine):
            contender.engine.warm_up()  # sizes of drafts that the prompts did not show


def _measure_batch(
    contenders: Sequence[Contender],
    batch: Sequence[Job],
    number: int,
    write: Callable[[Record], None],
    template: Mapping[str, Any] | None,
    trace: TraceWriter | None,
) -> None:
    first = number % len(contenders)
    conversations = {c.method: [_Conversation(job) for job in batch] for c in contenders}
    for turn in range(max(len(job.prompt.turns) for job in batch)):
        answers = {
            c.method: _take_turn(c, conversations[c.method], turn, template, trace)
            for c in [*contenders[first:], *contenders[:first]]
        }
        for contender in contenders:
            for row, answer in answers[contender.method].items():
                known = {} if contender.reference == contender.method else answers.get(contender.reference or "", {})
                plain = known.get(row)
                write(_record(contender, answer, number, plain))


@dataclass(frozen=True)
class _Answer:
    """The outcome of one turn.

    Attributes:
        job: What the engine was given.
        done: What it returned; None if the call raised or was not made.
        error: Why it counts for nothing.
        traceback: Where an exception came from.
        seconds: Time of the whole call.
        stage_seconds: Time of each stage in the whole call.
        watch: What was seen of the whole call.
        load: How busy the machine was meanwhile.
        account: What the whole call had to do.
        row: Its place in the call.
    """

    job: Job
    done: Completion | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    load: Mapping[str, float] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    row: int = 0

    @property
    def failed(self) -> bool:
        return self.error is not None or self.done is None or self.done.finish_reason == "error"


@dataclass
class _Conversation:
    """One contender's course of one job.

    Attributes:
        first: The job of the first turn.
        answers: Texts of its answers.
        broken: Why it cannot go on.
    """

    first: Job
    answers: list[str] = field(default_factory=list)
    broken: str | None = None


def _take_turn(
    contender: Contender,
    conversations: Sequence[_Conversation],
    turn: int,
    template: Mapping[str, Any] | None,
    trace: TraceWriter | None,
) -> dict[int, _Answer]:
    """One turn of those conversations that have it, in one call of the engine; by row of the batch."""
    jobs: dict[int, Job] = {}
    answers: dict[int, _Answer] = {}
    for row, conversation in enumerate(conversations):
        job = conversation.first
        if turn >= len(job.prompt.turns):
            continue
        if turn and conversation.broken is None:
            job = _next(contender, conversation, template)
        if conversation.broken is None:
            jobs[row] = job
        else:
            answers[row] = _Answer(replace(job, turn=turn), error=conversation.broken)
    answers |= _run(contender, jobs, trace)
    for row in jobs:
        answer = answers[row]
        if answer.failed or answer.done is None:
            conversations[row].broken = f"turn {turn + 1} failed"
        else:
            conversations[row].answers.append(answer.done.text)
    return dict(sorted(answers.items()))


def _next(contender: Contender, conversation: _Conversation, template: Mapping[str, Any] | None) -> Job:
    """The conversation's next job; it is broken if that does not fit."""
    engine = contender.engine
    assert engine.target.tokenizer is not None, "the first turn was tokenized"
    job = follow(conversation.first, conversation.answers, engine.target.tokenizer, template)
    conversation.broken = too_long(job, engine.max_length)
    return job


def _run(contender: Contender, jobs: Mapping[int, Job], trace: TraceWriter | None) -> dict[int, _Answer]:
    """One timed call of the engine."""
    if not jobs:
        return {}
    engine = contender.engine
    prompts = [job.prompt_ids for job in jobs.values()]
    sampling = [job.sampling for job in jobs.values()]
    _synchronize(engine.target.device)
    try:
        batch = list(jobs.values())
        with watching(engine, contender.method, batch, trace, speculate=contender.speculate) as watch:
            meter = LoadMeter()
            energy = EnergyMeter(engine.target.device, None if _is_here(engine) else ())
            begin = watch.began = time.perf_counter()
            completions = engine.generate(prompts, sampling, speculate=contender.speculate)
            _synchronize(engine.target.device)
            seconds = time.perf_counter() - begin - watch.seconds
            watch.joules = energy.stop() if not watch.seconds else None  # looking uses energy, too
            load = meter.stop()
    except Exception as error:  # a failed prompt must not end a run of hours; it is counted and shown
        if isinstance(engine, Engine) and engine.runner.agreement.shared:
            raise  # the other processes of this target may be in the middle of a forward that needs this one
        text, where = described(error), traceback.format_exc()
        return {row: _Answer(job, error=text, traceback=where) for row, job in jobs.items()}
    stages = _stages(completions)
    account = Account() if contender.accountant is None else contender.accountant.of_call(completions)
    shared = {"seconds": seconds, "stage_seconds": stages, "watch": watch, "load": load, "account": account}
    return {
        row: _Answer(job, done, row=place, **shared)
        for place, ((row, job), done) in enumerate(zip(jobs.items(), completions, strict=True))
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(contender: Contender, answer: _Answer, batch: int, plain: _Answer | None) -> Record:
    job, done = answer.job, answer.done
    known = {
        "prompt": job.prompt.id,
        "turn": job.turn,
        "category": job.prompt.category,
        "sample": job.sample,
        "method": contender.method,
        "exactness": contender.exactness,
        "temperature": job.sampling.temperature,
        "batch": batch,
        "prompt_tokens": len(job.prompt_ids),
    }
    if done is None:
        return Record(**known, finish_reason="error", error=answer.error, traceback=answer.traceback)
    rounds = metrics.decided(done.steps)
    far = answer.watch.distances.get(job.sampling.stream or 0, [])[: len(rounds)]
    other = contender.engine
    compared = None if isinstance(other, OtherEngine) and not other.tells_tokens else _comparable(answer, plain)
    different = None
    if compared is not None:
        different = find_divergence(
            contender.engine, job, done.token_ids, compared.token_ids, exactness=contender.exactness
        )
    return Record(
        **known,
        token_ids=done.token_ids,
        text=done.text,
        finish_reason=done.finish_reason,
        error=done.error,
        seconds=answer.seconds,
        stage_seconds=answer.stage_seconds,
        load=answer.load,
        joules=answer.watch.joules,
        **_moments(answer, done),
        accepted=tuple(step.accepted for step in rounds),
        expected_accepted=tuple(round(step.expected_accepted, 6) for step in rounds),
        proposed_depth=tuple(step.proposed_depth for step in rounds),
        proposed_nodes=tuple(step.proposed_nodes for step in rounds),
        distance_tv=tuple(_rounded(each.tv) for each in far),
        distance_kl=tuple(_rounded(each.kl) for each in far),
        equals_plain=different is None if compared is not None else None,
        divergence=different.index if different is not None else None,
        tokens_at_divergence=different.tokens if different is not None else (),
        texts_at_divergence=different.texts if different is not None else (),
        margin=different.margin if different is not None else None,
        tie_bound=different.tie_bound if different is not None else None,
        work={name: float(f"{value:.6g}") for name, value in answer.account.work.items()},
        round_seconds=_row(answer.account.seconds, answer.row),
        predicted_seconds=_row(answer.account.predicted, answer.row),
    )


def _row(values: Sequence[Sequence[float | None]], row: int) -> tuple[Any, ...]:
    """One request's seconds, to a tenth of a microsecond; empty where there are none."""
    return tuple(None if value is None else round(value, 7) for value in values[row]) if values else ()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _comparable(answer: _Answer, plain: _Answer | None) -> Completion | None:
    """Plain decoding's answer, where the other one should equal it: greedy, and to the very same prompt."""
    if plain is None or plain.failed or answer.failed or not answer.job.sampling.greedy:
        return None
    # Different answers make different prompts of the next turn, after which nothing is to be compared.
    return plain.done if plain.job.prompt_ids == answer.job.prompt_ids else None


def _is_here(engine: Engine | OtherEngine) -> bool:
    """Whether all of the work is done by the one device that the target is said to be on."""
    return isinstance(engine, Engine) and not is_spread(engine.target.model) and not engine.runner.agreement.shared


def _stages(completions: Sequence[Completion]) -> dict[str, float]:
    """Seconds by stage in a call; those of our engine begin with the checks of its prompts."""
    stages = metrics.stage_seconds(step for done in completions for step in done.steps)
    if COMPLETION in stages:
        stages["ingestion"] = sum(done.timestamps.ingestion for done in completions if done.timestamps is not None)
    return stages


def _moments(answer: _Answer, done: Completion) -> dict[str, Any]:
    """The timestamps of a request as its record has them; nothing of an engine that does not tell."""
    found = done.timestamps
    if found is None:
        return {}

    def since(moment: float) -> float:
        return round(answer.watch.without_looking(moment) - answer.watch.began, 7)

    return {
        "arrived": since(found.arrived),
        "admitted": since(found.admitted),
        "prefilled": since(found.prefilled),
        "finished": since(found.finished),
        "emitted_at": tuple(since(moment) for moment, _ in done.emissions),
        "emitted": tuple(count for _, count in done.emissions),
        "ingestion": round(answer.job.ingestion, 7),
    }
