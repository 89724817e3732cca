"""Jobs: one sample of one prompt each, tokenized turn by turn."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.datasets.prompt import Prompt
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams

BETWEEN_TURNS = "\n\n"
"""Separates an answer from the next turn where the target has no chat template."""


@dataclass(frozen=True)
class Job:
    """One turn of one sample of one prompt, tokenized.

    Attributes:
        prompt: The prompt.
        sample: Number of the sample, from 0.
        prompt_ids: What the engine is given.
        sampling: With the turn's own random stream.
        turn: Number of the turn, from 0.
        ingestion: How many seconds it took to make tokens of the text: chat template, tokenizer, check of the length.
    """

    prompt: Prompt
    sample: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    turn: int = 0
    ingestion: float = field(default=0.0, compare=False)


def prepare(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    template: Mapping[str, Any] | None = None,
) -> tuple[list[Job], list[tuple[Job, str]]]:
    """The first turn's job of every prompt and sample, and those that the engine would refuse, with the reason.

    A job's random stream comes from prompt, turn and sample, so its output does not depend on which other prompts
    are in the run.

    Raises:
        ValueError: No prompt fits, or one has no tokens.
    """
    jobs: list[Job] = []
    unfit: list[tuple[Job, str]] = []
    for prompt in prompts:
        begin = time.perf_counter()
        ids = render(prompt, tokenizer, template=template)
        spent = time.perf_counter() - begin
        for sample in range(sampling.n):
            own = replace(sampling, n=1, stream=stream_of(prompt.id, 0, sample))
            job = Job(prompt, sample, ids, own, ingestion=spent)
            reason = too_long(job, max_length)
            if reason is None:
                jobs.append(job)
            else:
                unfit.append((job, reason))
    if not jobs:
        raise ValueError(f"no prompt fits: {unfit[0][1]}" if unfit else "there are no prompts")
    return jobs, unfit


def follow(
    job: Job, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> Job:
    """The job of the turn that comes after these answers."""
    turn = len(answers)
    begin = time.perf_counter()
    ids = render(job.prompt, tokenizer, answers, template=template)
    return replace(
        job,
        turn=turn,
        prompt_ids=ids,
        ingestion=time.perf_counter() - begin,
        sampling=replace(job.sampling, stream=stream_of(job.prompt.id, turn, job.sample)),
    )


def too_long(job: Job, max_length: int) -> str | None:
    """Why the engine would refuse the job; None if it would not."""
    if len(job.prompt_ids) + job.sampling.max_new_tokens <= max_length:
        return None
    return (
        f"{len(job.prompt_ids)} prompt tokens and max_new_tokens={job.sampling.max_new_tokens} exceed "
        f"the engine's max_length={max_length}"
    )


def render(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[str] = (),
    *,
    template: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """The tokens of the turn that follows these answers, with all that was said before it.

    A conversation goes through the tokenizer's chat template if it has one. Otherwise the turns and answers are one
    running text, with a blank line before every later turn: turn, answer, blank line, turn.

    Args:
        prompt: The prompt, of more turns than there are answers.
        tokenizer: The target's.
        answers: Texts of the answers so far.
        template: Further arguments of the chat template, such as ``enable_thinking``.
    """
    said = prompt.turns[: len(answers) + 1]
    if prompt.chat and tokenizer.chat_template:
        if prompt.last_tokens is not None:  # of what the user says: the template comes on top
            said = (_cut(said[0], prompt, tokenizer), *said[1:])
        messages = [{"role": "user", "content": said[0]}]
        for answer, turn in zip(answers, said[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **dict(template or {})
        )
        return tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # the template wrote them
    pairs = zip(answers, said[1:], strict=True)
    ids = tuple(encode_prompt(tokenizer, said[0] + "".join(a + BETWEEN_TURNS + turn for a, turn in pairs)))
    return ids if prompt.last_tokens is None else last_of(ids, prompt, tokenizer)


def last_of(ids: tuple[int, ...], prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The last ``prompt.last_tokens`` tokens. One that the tokenizer puts before every text stays in front of them.

    Raises:
        ValueError: The text has fewer.
    """
    size = prompt.last_tokens
    assert size is not None
    if len(ids) < size:
        raise ValueError(f"prompt {prompt.id} has {len(ids)} tokens, and {size} were asked for: give a smaller number")
    first = ids[: 1 if ids[0] in tokenizer.all_special_ids and size > 1 else 0]
    return first + ids[len(ids) - (size - len(first)) :]


def _cut(text: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """The last ``prompt.last_tokens`` tokens of a text, as text."""
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return str(tokenizer.decode(list(last_of(ids, prompt, tokenizer))))


def stream_of(prompt_id: str, turn: int, sample: int) -> int:
    """A random stream's number, the same on every machine: 62 bits of a hash."""
    digest = hashlib.blake2b(f"{prompt_id}\0{turn}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
