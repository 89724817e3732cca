"""The measuring loop: every method on every prompt, interleaved batch by batch, on the clock."""

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from transformers import PreTrainedTokenizerBase

from experiments.datasets.prompt import Prompt
from experiments.records import Record
from specdec import metrics
from specdec.engine import Engine
from specdec.reference import top_two_margin
from specdec.requests import SamplingParams
from specdec.text import encode_prompt
from specdec.types import Completion

PLAIN = "plain"


@dataclass(frozen=True)
class Contender:
    """A method as it is measured.

    Attributes:
        method: Its name in all results.
        engine: Where it runs.
        speculate: False for plain decoding, on the same engine.
    """

    method: str
    engine: Engine
    speculate: bool = True

    @property
    def exactness(self) -> str | None:
        """What the verifier promises; None where there is none."""
        verifier = self.engine.verifier if self.speculate else None
        return verifier.exactness.value if verifier is not None else None


@dataclass(frozen=True)
class Job:
    """One sample of one prompt, tokenized."""

    prompt: Prompt
    sample: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


def prepare(
    prompts: Sequence[Prompt], sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> tuple[list[Job], list[tuple[Job, str]]]:
    """One job per prompt and sample, and those that the engine would refuse, with the reason.

    A job's random stream comes from prompt, turn and sample, so its output does not depend on which other prompts
    are in the run.

    Raises:
        ValueError: No prompt fits, or one has no tokens.
    """
    jobs: list[Job] = []
    unfit: list[tuple[Job, str]] = []
    for prompt in prompts:
        ids = render(prompt, tokenizer)
        for sample in range(sampling.n):
            job = Job(prompt, sample, ids, replace(sampling, n=1, stream=stream_of(prompt.id, 0, sample)))
            if len(ids) + sampling.max_new_tokens > max_length:
                reason = (
                    f"{len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed "
                    f"the engine's max_length={max_length}"
                )
                unfit.append((job, reason))
            else:
                jobs.append(job)
    if not jobs:
        raise ValueError(f"no prompt fits: {unfit[0][1]}" if unfit else "there are no prompts")
    return jobs, unfit


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens of a prompt's first turn, through the chat template if it is a conversation and there is one."""
    if prompt.chat and tokenizer.chat_template:
        message = [{"role": "user", "content": prompt.turns[0]}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # the template wrote them
    return tuple(encode_prompt(tokenizer, prompt.turns[0]))


def stream_of(prompt_id: str, turn: int, sample: int) -> int:
    """A random stream's number, the same on every machine: 62 bits of a hash."""
    digest = hashlib.blake2b(f"{prompt_id}\0{turn}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def measure(
    contenders: Sequence[Contender],
    jobs: Sequence[Job],
    *,
    warmup: Sequence[Sequence[int]] = (),
    write: Callable[[Record], None],
) -> Iterator[int]:
    """Run every job with every contender and write their records; yields the number of finished jobs.

    Contenders take turns batch by batch, and in each batch another one goes first, so that drift of the machine
    meets all alike. A batch is written when all contenders have run it.

    Args:
        contenders: The baseline first. All with the same batch size.
        jobs: What to measure.
        warmup: Prompts that every contender decodes first, off the record; an exception there is not caught.
        write: Takes the records.
    """
    baseline = contenders[0]
    size = baseline.engine.max_batch_size
    for contender in contenders:
        for start in range(0, len(warmup), size):
            prompts = warmup[start : start + size]
            contender.engine.generate(prompts, replace(jobs[0].sampling, stream=None), speculate=contender.speculate)
    for number, start in enumerate(range(0, len(jobs), size)):
        batch = jobs[start : start + size]
        first = number % len(contenders)
        outcomes = {c.method: _run(c, batch) for c in [*contenders[first:], *contenders[:first]]}
        for contender in contenders:
            for row, job in enumerate(batch):
                plain = None if contender is baseline else outcomes[baseline.method].completion(row)
                write(_record(contender, job, number, row, outcomes[contender.method], plain))
        yield start + len(batch)


def failure(contender: Contender, job: Job, error: str) -> Record:
    """The record of a job that did not run; it belongs to no batch (-1)."""
    return _record(contender, job, -1, 0, _Outcome(error=error), None)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What one call of an engine returned, or how it failed."""

    completions: tuple[Completion, ...] = ()
    seconds: float | None = None
    error: str | None = None
    traceback: str | None = None

    def completion(self, row: int) -> Completion | None:
        """The row's, unless it failed."""
        done = self.completions[row] if self.error is None else None
        return None if done is None or done.finish_reason == "error" else done


def _run(contender: Contender, batch: Sequence[Job]) -> _Outcome:
    engine = contender.engine
    prompts = [job.prompt_ids for job in batch]
    sampling = [job.sampling for job in batch]
    _synchronize(engine.target.device)
    begin = time.perf_counter()
    try:
        completions = engine.generate(prompts, sampling, speculate=contender.speculate)
        _synchronize(engine.target.device)
    except Exception as error:  # a failed prompt must not end a run of hours; it is counted and shown
        return _Outcome(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    return _Outcome(completions=tuple(completions), seconds=time.perf_counter() - begin)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(
    contender: Contender, job: Job, batch: int, row: int, outcome: _Outcome, plain: Completion | None
) -> Record:
    known = {
        "prompt": job.prompt.id,
        "category": job.prompt.category,
        "sample": job.sample,
        "method": contender.method,
        "exactness": contender.exactness,
        "temperature": job.sampling.temperature,
        "batch": batch,
        "prompt_tokens": len(job.prompt_ids),
    }
    if outcome.error is not None:
        return Record(**known, finish_reason="error", error=outcome.error, traceback=outcome.traceback)
    done = outcome.completions[row]
    rounds = metrics.decided(done.steps)
    divergence = _divergence(done.token_ids, plain.token_ids) if plain is not None else None
    comparable = job.sampling.greedy and plain is not None and done.finish_reason != "error"
    margin = None
    if comparable and divergence is not None:
        sequence = (*job.prompt_ids, *done.token_ids[:divergence])
        margin = top_two_margin(contender.engine.target.model, sequence, job.sampling.repetition_penalty)
    return Record(
        **known,
        token_ids=done.token_ids,
        text=done.text,
        finish_reason=done.finish_reason,
        error=done.error,
        seconds=outcome.seconds,
        stage_seconds=metrics.stage_seconds(step for c in outcome.completions for step in c.steps),
        accepted=tuple(step.accepted for step in rounds),
        expected_accepted=tuple(round(step.expected_accepted, 6) for step in rounds),
        proposed_depth=tuple(step.proposed_depth for step in rounds),
        proposed_nodes=tuple(step.proposed_nodes for step in rounds),
        equals_plain=divergence is None if comparable else None,
        divergence=divergence if comparable else None,
        margin=margin,
    )


def _divergence(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two has ended; None if they are equal."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, plain, strict=False)))
    return None if same == len(tokens) == len(plain) else same
