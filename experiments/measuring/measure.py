"""The measuring loop: every method on every prompt, interleaved batch by batch, on the clock."""

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from experiments.contenders.base import OtherEngine
from experiments.measuring.accounting import Accountant
from experiments.measuring.jobs import Job, follow, too_long
from experiments.measuring.meters import LoadMeter, joules_of
from experiments.measuring.rounds import now
from experiments.measuring.watch import Watch, watching
from experiments.results import metrics
from experiments.results.lossless import OTHER_TARGET, THERE, promises_equality, stated_exactness
from experiments.results.records import MEMORY, PLAIN, Record
from experiments.tracing.trace import TraceWriter
from specdec.checks.ties import Tie, examine
from specdec.engine.clock import COMPLETION
from specdec.engine.engine import Engine
from specdec.origin import described
from specdec.placement import is_spread
from specdec.types import Completion

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contender:
    """A method as it is measured.

    Attributes:
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
    first: int = 0,
    template: Mapping[str, Any] | None = None,
    trace: TraceWriter | None = None,
) -> Iterator[int]:
    """Run every job with every contender and write their records; yields the number of finished jobs, 0 first.

    Contenders take turns batch by batch, and in each batch another one goes first, so that drift of the machine
    meets all alike. A batch is written when all contenders have run it. Where prompts have several turns this holds
    turn by turn, and every contender leads a conversation of its own.

    Args:
        contenders: The baseline first. Those with fewer slots than others decode the same prompts in turns.
        warmup: Prompts that every contender decodes first, without a record; an exception there is not caught.
        finished: Numbers of batches that an earlier call has measured, and that this one passes over.
        first: The number of the first batch.
    """
    size = slots_of(contenders)
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    if any(isinstance(each.engine, OtherEngine) and each.engine.failure for each in contenders[1:]):
        contenders = contenders[1:]  # nothing is to be compared, and a resumed run tries again
    if not set(range(first, first + len(batches))).issubset(finished):
        _warm_up(contenders, warmup, jobs)
    yield (done := 0)
    for number, batch in enumerate(batches, first):
        if number not in finished:
            _measure_batch(contenders, batch, number, write, template, trace)
        done += len(batch)
        yield done


def blocks_of(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """The contenders that take turns with each other: those of this process, then each engine apart with the clock.

    The clock is plain decoding: it decodes every prompt again, in turn with each engine apart.
    """
    apart = [each for each in contenders if isinstance(each.engine, OtherEngine) and each.engine.apart]
    return [[each for each in contenders if each not in apart], *([contenders[0], each] for each in apart)]


@contextmanager
def started(contenders: Iterable[Contender]) -> Iterator[None]:
    """Other engines run during the ``with`` block; one that cannot start fails its prompts."""
    others = [each.engine for each in contenders if isinstance(each.engine, OtherEngine)]
    try:
        for engine in others:
            try:
                engine.start()
            except ValueError as error:
                engine.failure = str(error)
        yield
    finally:
        for engine in others:
            engine.stop()


def slots_of(contenders: Sequence[Contender]) -> int:
    """Return how many prompts make a batch: as many as the largest engine has slots."""
    return max(contender.engine.max_batch_size for contender in contenders)


_FEW = 512
"""Tokens of a run in which hardly any size of drafts comes so often that its forward would be captured."""


def _warm_up(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], jobs: Sequence[Job]) -> None:
    size, sampling = slots_of(contenders), replace(jobs[0].sampling, stream=None)
    many = sum(job.sampling.max_new_tokens for job in jobs) >= _FEW
    for contender in contenders:
        for batch in (prompts[start : start + size] for start in range(0, len(prompts), size)):
            contender.engine.generate(batch, [sampling] * len(batch), speculate=contender.speculate)
        if prompts and many and isinstance(contender.engine, Engine):
            contender.engine.warm_up(sampling=sampling)  # sizes of drafts that the prompts did not show


def _measure_batch(
    contenders: Sequence[Contender],
    batch: Sequence[Job],
    number: int,
    write: Callable[[Record], None],
    template: Mapping[str, Any] | None,
    trace: TraceWriter | None,
) -> None:
    first = number % len(contenders)
    engines = [contender.engine for contender in contenders]
    conversations = {c.method: [_Conversation(job) for job in batch] for c in contenders}
    for turn in range(max(len(job.prompt.turns) for job in batch)):
        answers = {}
        for c in [*contenders[first:], *contenders[:first]]:
            if isinstance(c.engine, Engine) and engines.count(c.engine) > 1:
                c.engine.forget()  # otherwise a method would find the prompts that another one has prefilled
            answers[c.method] = _take_turn(c, conversations[c.method], turn, template, trace)
        for contender in contenders:
            known = {} if contender.reference == contender.method else answers.get(contender.reference or "", {})
            for row, answer in answers[contender.method].items():
                write(_record(contender, answer, number, known.get(row)))


@dataclass(frozen=True)
class _Answer:
    """The outcome of one turn; ``error`` says why it counts for nothing."""

    job: Job
    done: Completion | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    load: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.error is not None or self.done is None or self.done.finish_reason == "error"


@dataclass
class _Conversation:
    """One contender's course of one job: the first turn's job, the texts of its answers, and why it cannot go on."""

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
            tokenizer = contender.engine.target.tokenizer
            assert tokenizer is not None, "the first turn was tokenized"
            job = follow(job, conversation.answers, tokenizer, template)
            conversation.broken = too_long(job, contender.engine.max_length)
        if conversation.broken is None:
            jobs[row] = job
        else:
            answers[row] = _Answer(replace(job, turn=turn), error=conversation.broken)
    for row, answer in _run(contender, jobs, trace).items():
        answers[row] = answer
        if answer.failed or answer.done is None:
            conversations[row].broken = f"turn {turn + 1} failed"
        else:
            conversations[row].answers.append(answer.done.text)
    return dict(sorted(answers.items()))


def _run(contender: Contender, jobs: Mapping[int, Job], trace: TraceWriter | None) -> dict[int, _Answer]:
    """One timed call of the engine."""
    if not jobs:
        return {}
    engine, device, batch = contender.engine, contender.engine.target.device, list(jobs.values())
    prompts, sampling = [job.prompt_ids for job in batch], [job.sampling for job in batch]
    # Energy is that of the device which the target is said to be on: it says nothing of a target on several.
    own = isinstance(engine, Engine) and not is_spread(engine.target.model) and not engine.runner.agreement.shared
    now(device)
    try:
        with watching(engine, contender.method, batch, trace, speculate=contender.speculate) as watch:
            load, before = LoadMeter(), joules_of(device) if own else None
            watch.began = now(device)
            completions = engine.generate(prompts, sampling, speculate=contender.speculate)
            seconds = now(device) - watch.began - watch.seconds
            after = None if before is None or watch.seconds else joules_of(device)  # looking uses energy, too
            watch.joules = None if before is None or after is None else after - before
            busy = load.stop()
    except Exception as error:  # a failed prompt must not end a run of hours; it is counted and shown
        if isinstance(engine, Engine) and engine.runner.agreement.shared:
            raise  # the other processes of this target may be in the middle of a forward that needs this one
        text, where = described(error), traceback.format_exc()
        return {row: _Answer(job, error=text, traceback=where) for row, job in jobs.items()}
    stages = metrics.stage_seconds(step for done in completions for step in done.steps)
    if COMPLETION in stages:  # our engine's begin with the checks of its prompts
        stages["ingestion"] = sum(done.timestamps.ingestion for done in completions if done.timestamps is not None)
    work = {} if contender.accountant is None else contender.accountant.of_call(completions)
    shared = {"seconds": seconds, "stage_seconds": stages, "watch": watch, "load": busy, "work": work}
    return {row: _Answer(job, done, **shared) for (row, job), done in zip(jobs.items(), completions, strict=True)}


def _record(contender: Contender, answer: _Answer, batch: int, plain: _Answer | None) -> Record:
    job, done = answer.job, answer.done
    known = {"prompt": job.prompt.id, "turn": job.turn, "category": job.prompt.category, "sample": job.sample}
    known |= {"method": contender.method, "exactness": contender.exactness, "temperature": job.sampling.temperature}
    known |= {"batch": batch, "prompt_tokens": len(job.prompt_ids)}
    if done is None:
        return Record(**known, finish_reason="error", error=answer.error, traceback=answer.traceback)
    rounds = metrics.decided(done.steps)
    far = answer.watch.distances.get(job.sampling.stream or 0, [])[: len(rounds)]
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
        **_compared(contender, answer, plain),
        accepted=tuple(step.accepted for step in rounds),
        expected_accepted=_rounded(step.expected_accepted for step in rounds),
        proposed_depth=tuple(step.proposed_depth for step in rounds),
        proposed_nodes=tuple(step.proposed_nodes for step in rounds),
        distance_tv=_rounded(each.tv for each in far),
        distance_kl=_rounded(each.kl for each in far),
        work={name: float(f"{value:.6g}") for name, value in answer.work.items()},
    )


def _rounded(values: Iterable[float | None]) -> tuple[Any, ...]:
    return tuple(None if value is None else round(value, 6) for value in values)


def _compared(contender: Contender, answer: _Answer, plain: _Answer | None) -> dict[str, Any]:
    """The comparison with plain decoding, where the output should equal it: greedy, and to the very same prompt."""
    engine, done = contender.engine, answer.done
    if isinstance(engine, OtherEngine) and not engine.tells_tokens:
        return {}
    if plain is None or plain.failed or answer.failed or not answer.job.sampling.greedy:
        return {}
    # Different answers make different prompts of the next turn, after which nothing is to be compared.
    if plain.done is None or done is None or plain.job.prompt_ids != answer.job.prompt_ids:
        return {}
    found = find_divergence(engine, answer.job, done.token_ids, plain.done.token_ids, exactness=contender.exactness)
    return {"equals_plain": not found, **found}


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
        "memory": {name: getattr(found, name) for name in MEMORY if getattr(found, name)},
    }


# ---------------------------------------------------------------- the first token that differs


def find_divergence(
    engine: Engine | OtherEngine, job: Job, tokens: Sequence[int], plain: Sequence[int], *, exactness: str | None
) -> dict[str, Any]:
    """Return where an output first differs from plain decoding's, as fields of ``Record``; empty where they are equal.

    The model runs again only if they differ.
    ``tie_bound`` is 0 on an invariant engine, which has no rounding to explain, and None without a margin, and for a
    rule that is not exact and is therefore not judged.
    """
    pairs = enumerate(zip_longest(tokens, plain))
    index, pair = next(((index, pair) for index, pair in pairs if pair[0] != pair[1]), (None, None))
    if index is None or pair is None:
        return {}
    tokenizer = engine.target.tokenizer
    tie = _tie(engine, job, tokens[:index], pair, judged=promises_equality(exactness))
    return {
        "divergence": index,
        "tokens_at_divergence": pair,
        "texts_at_divergence": tuple(
            None if token is None or tokenizer is None else str(tokenizer.decode([token])) for token in pair
        ),
        "margin": tie.margin,
        "tie_bound": tie.bound,
    }


def _tie(
    engine: Engine | OtherEngine, job: Job, before: Sequence[int], pair: tuple[int | None, int | None], *, judged: bool
) -> Tie:
    ours, plains = pair
    if ours is None or plains is None:
        return Tie(None, None)
    runner = engine.runner if isinstance(engine, Engine) else None
    invariant = runner is not None and runner.invariant
    try:
        tie = examine(
            engine.target.model,
            [*job.prompt_ids, *before],
            (ours, plains),
            job.sampling,
            prompt_length=len(job.prompt_ids),
            kv_cache=None if runner is None else runner.kv_cache,
            bounded=judged and not invariant,
        )
    except Exception as error:  # the run of hours goes on; a divergence that nothing explains counts as a fault
        logger.warning(
            "the divergence on %s could not be examined, and counts as one that the dtype does not explain (%s: %s)",
            *(job.prompt.id, type(error).__name__, error),
        )
        return Tie(None, None)
    # An invariant engine computes the same logits for every method, so nothing is left for rounding to explain.
    return replace(tie, bound=0.0) if invariant and judged and tie.margin is not None else tie
