"""Jobs: one sample of one prompt each, tokenized turn by turn; and prompts that do not fit into the engine."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.datasets.prompt import Prompt
from specdec.engine.intake import encode_chat
from specdec.engine.text import encode_prompt
from specdec.requests import SamplingParams

BETWEEN_TURNS = "\n\n"
"""Separates an answer from the next turn where the target has no chat template."""
_LEAST = 16
"""Tokens that a shortened turn must keep; a conversation of which less would be left is left out."""
_GAP = "\n[...]\n"
"""Stands for the middle of a turn that was taken out."""


@dataclass(frozen=True)
class Job:
    """One turn of one sample of one prompt, tokenized; turns and samples are counted from 0.

    ``ingestion``: the seconds that making tokens of the text took: chat template, tokenizer, check of the length.
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
    template: Mapping[str, Any] | None = None,
) -> list[Job]:
    """Return the first turn's job of every prompt and sample."""
    jobs = (Job(prompt, sample, (), replace(sampling, n=1)) for prompt in prompts for sample in range(sampling.n))
    return [follow(job, (), tokenizer, template) for job in jobs]


def follow(
    job: Job, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> Job:
    """Return the job of the turn that comes after these answers.

    Its random stream comes from prompt, turn and sample, so the output does not depend on which other prompts are in
    the run.
    """
    begin = time.perf_counter()
    ids = render(job.prompt, tokenizer, answers, template=template)
    spent = time.perf_counter() - begin
    sampling = replace(job.sampling, stream=stream_of(job.prompt.id, len(answers), job.sample))
    return replace(job, turn=len(answers), prompt_ids=ids, ingestion=spent, sampling=sampling)


def too_long(job: Job, max_length: int) -> str | None:
    """Return why the engine would refuse the job; None if it would not."""
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
    """Return the tokens of the turn that follows these answers, with all that was said before it.

    A conversation goes through the tokenizer's chat template if it has one. Otherwise the turns and answers are one
    running text, with a blank line before every later turn: turn, answer, blank line, turn.
    """
    first, *later = prompt.turns[: len(answers) + 1]
    if not (prompt.chat and (tokenizer.chat_template or prompt.messages)):
        pairs = zip(answers, later, strict=True)
        ids = tuple(encode_prompt(tokenizer, first + "".join(a + BETWEEN_TURNS + turn for a, turn in pairs)))
        return ids if prompt.last_tokens is None else _last_of(ids, prompt, tokenizer)
    if prompt.last_tokens is not None:  # of what the user says: the template comes on top
        ids = tuple(tokenizer(first, add_special_tokens=False)["input_ids"])
        first = str(tokenizer.decode(list(_last_of(ids, prompt, tokenizer))))
    last = prompt.messages[-1] if prompt.messages else {"role": "user"}
    messages = [*prompt.messages[:-1], {**last, "content": first}]
    for answer, turn in zip(answers, later, strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    try:
        options = dict(template or {}) | ({"tools": list(prompt.tools)} if prompt.tools else {})
        return tuple(encode_chat(tokenizer, messages, options))
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error


def template_facts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return what shapes conversations: a hash of the chat template, and its arguments; None where nothing does.

    Raises:
        ValueError: There is no template that could read the arguments.
    """
    text = str(tokenizer.chat_template or "")
    if template and not text:
        raise ValueError(
            "chat_template: the target's tokenizer has none, so arguments would change nothing: leave them out"
        )
    if not text or not any(prompt.chat for prompt in prompts):
        return None
    return {"hash": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), **dict(template or {})}


def _last_of(ids: tuple[int, ...], prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The last ``prompt.last_tokens`` tokens. One that the tokenizer puts before every text stays in front of them."""
    size = prompt.last_tokens
    assert size is not None
    if len(ids) < size:
        raise ValueError(f"prompt {prompt.id} has {len(ids)} tokens, and {size} were asked for: give a smaller number")
    first = ids[: 1 if ids[0] in tokenizer.all_special_ids and size > 1 else 0]
    return first + ids[len(ids) - (size - len(first)) :]


def stream_of(prompt_id: str, turn: int, sample: int) -> int:
    """Return a random stream's number, the same on every machine: 62 bits of a hash."""
    digest = hashlib.blake2b(f"{prompt_id}\0{turn}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


# ---------------------------------------------------------------- prompts that are too long

_DONE = {"cut": "shortened", "skipped": "left out"}
"""The fates of long prompts, in words."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The prompts that are run, and the fate of those that are too long, in a sentence and for the manifest."""

    prompts: list[Prompt]
    sentence: str | None = None
    facts: dict[str, int] | None = None


def fit(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    policy: str = "skip",
    template: Mapping[str, Any] | None = None,
) -> Fitting:
    """Apply ``dataset.too_long`` to the prompts that do not fit.

    A conversation has to fit as a whole, with answers of full length. ``"skip"`` leaves a long prompt out. ``"cut"``
    keeps the end of a text that is to be continued; of a conversation it takes the middle out of the longest turn,
    because the task is stated at the beginning or at the end (the same is done in LongBench, Bai et al. 2023).

    Raises:
        ValueError: No prompt is left.
    """
    if not prompts:
        raise ValueError("there are no prompts")
    made: list[Prompt] = []
    counts, longest = dict.fromkeys(_DONE, 0), 0
    for prompt in prompts:
        needed, fitting = needed_tokens(prompt, sampling, tokenizer, template), prompt
        if needed > max_length:
            longest = max(longest, needed)
            fitting = _shorten(prompt, sampling, tokenizer, max_length, template) if policy == "cut" else None
            counts["skipped" if fitting is None else "cut"] += 1
        made += [] if fitting is None else [fitting]
    if not longest:
        return Fitting(prompts=made)
    sentence = (
        f"{sum(counts.values())} of {len(prompts)} prompts do not fit into engine.max_length={max_length} "
        f"with sampling.max_new_tokens={sampling.max_new_tokens} (the longest needs {longest}): "
        f"{', '.join(f'{count} {_DONE[name]}' for name, count in counts.items() if count)}; "
        f"dataset.too_long={'skip leaves them out' if counts['cut'] else 'cut shortens them'}"
    )
    if not made:
        raise ValueError(f"no prompt fits: {sentence}")
    facts = {**counts, "of": len(prompts), "longest": longest, "room": max_length}
    return Fitting(prompts=made, sentence=sentence, facts=facts)


def needed_tokens(
    prompt: Prompt, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, template: Any = None
) -> int:
    """Return the tokens that a prompt may come to: all of its turns, and an output of full length for each."""
    turns = len(prompt.turns)
    return len(render(prompt, tokenizer, [""] * (turns - 1), template=template)) + turns * sampling.max_new_tokens


def _shorten(
    prompt: Prompt, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, max_length: int, template: Any
) -> Prompt | None:
    """The prompt as it fits; None where hardly anything would be left of it."""
    if not prompt.chat:
        left = max_length - sampling.max_new_tokens
        return replace(prompt, last_tokens=left) if left >= _LEAST else None
    tokens = [list(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in prompt.turns]
    which = max(range(len(tokens)), key=lambda turn: len(tokens[turn]))
    ids, keep = tokens[which], len(tokens[which])
    while (over := needed_tokens(prompt, sampling, tokenizer, template) - max_length) > 0:
        keep -= over  # text that is tokenized again may have some tokens more, so this may take a second step
        if keep < _LEAST:
            return None
        head, tail = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
        text = str(tokenizer.decode(head)) + _GAP + str(tokenizer.decode(tail))
        prompt = replace(prompt, turns=(*prompt.turns[:which], text, *prompt.turns[which + 1 :]))
    return prompt
