"""Turns a round's results into steps: where the output ends, and its text. Adds steps up to a completion."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.engine.read_back import DeviceRound, ReadBack
from specdec.origin import described
from specdec.requests import Request
from specdec.types import Completion, Step, Timestamps


def make_step(request: Request, played: DeviceRound, row: int, seconds: Mapping[str, float], visible: float) -> Step:
    """Returns a request's step of a round, where it has this row, and adds the tokens to the request (see ``Step``)."""
    read, number = played.read, request.rounds
    accepted = int(read.num_accepted[row])
    tokens = read.tokens[row, : accepted + 1].tolist()
    request.rounds += 1

    def made(count: int, **more: Any) -> Step:
        return Step(
            request=request.id, round=number, token_ids=tuple(tokens[:count]),
            logprobs=tuple(read.logprobs[row, :count].tolist()), **_raw(request, read, row, count),
            proposed_nodes=int(read.proposed_nodes[row]), proposed_depth=int(read.proposed_depth[row]),
            accepted=accepted, expected_accepted=float(read.expected_accepted[row]), **more, seconds=seconds,
            elapsed=visible - request.admitted, visible=visible,
        )  # fmt: skip

    if not read.valid[row]:
        unknown = f"the logits or the draft's probabilities were not finite in round {number}"
        return failed(request, played.batch.faults.get(row, unknown), made(0))
    try:
        count, reason, text = _cut(request, tokens)
    except Exception as error:  # a tokenizer is the user's: its error ends this request and no other
        return failed(request, f"the tokenizer failed: {described(error)}", made(0))
    if request.matcher is not None and (wrong := request.matcher.follow(tokens[:count])):
        return failed(request, wrong, made(0))
    request.output_ids += tokens[:count]
    ended = {} if reason is None else {"finish_reason": reason, "timestamps": _timestamps(request, visible)}
    return made(count, text=text, **ended)


def failed(request: Request, message: str, step: Step | None = None) -> Step:
    """Returns the last step of a request that ends in an error, in the round of ``step`` if there was one."""
    try:
        text = request.detokenizer.flush()
    except Exception:  # it was the tokenizer that failed, so there is no text
        text = ""
    if step is None:
        now = time.perf_counter()
        elapsed = now - request.admitted if request.admitted else 0.0
        step = Step(request=request.id, round=request.rounds, token_ids=(), elapsed=elapsed, visible=now)
    ended = {"finish_reason": "error", "error": message, "timestamps": _timestamps(request, step.visible)}
    return replace(step, text=text, **ended)


def _cut(request: Request, tokens: Sequence[int]) -> tuple[int, str | None, str]:
    """Returns how many of the emitted tokens belong to the request, why it ends with them, and their text."""
    ends = next((place for place, token in enumerate(tokens, start=1) if token in request.stop_ids), None)
    reason, count = ("stop", ends) if ends is not None else (None, len(tokens))
    if count >= request.remaining:
        reason = "length" if count > request.remaining else reason or "length"
        count = request.remaining
    text = request.detokenizer.push(tokens[:count])
    if request.detokenizer.stopped_at is not None:
        reason, count = "stop", request.detokenizer.stopped_at - len(request.output_ids)
    elif reason is not None:
        text += request.detokenizer.flush()
    return count, reason, text


def completion(request: Request, steps: Sequence[Step]) -> Completion:
    """Returns what a request's steps add up to. A request that was dropped before its end is an error."""
    reason = steps[-1].finish_reason if steps else None
    return Completion(
        prompt_ids=tuple(request.prompt_ids), token_ids=tuple(request.output_ids),
        text="".join(step.text for step in steps), finish_reason=reason or "error", steps=tuple(steps),
        error=steps[-1].error if steps and reason is not None else "the request was aborted before it ended",
    )  # fmt: skip


def _timestamps(request: Request, finished: float) -> Timestamps:
    """Returns when what happened to a request that has ended; what never happened has the time of the end."""
    same = ("arrived", "ingestion", "reused", "preemptions", "preempted", "recomputed", "swapped", "swap_seconds")
    admitted, prefilled = request.admitted or finished, request.prefill_ended or finished
    taken = {name: getattr(request, name) for name in same}
    return Timestamps(**taken, admitted=admitted, prefilled=prefilled, finished=finished)


def _raw(request: Request, read: ReadBack, row: int, count: int) -> dict[str, Any]:
    """Returns the fields of a step that only ``SamplingParams.logprobs`` asks for."""
    wanted = request.sampling.logprobs
    if wanted is None or read.raw is None:
        return {}
    figures = read.raw[row, :count]
    most = (figures.shape[1] - 1) // 2  # another request of the batch may want more
    tokens, values = figures[:, 1 : 1 + wanted].astype(np.int64), figures[:, 1 + most : 1 + most + wanted]
    pairs = tuple(tuple(zip(*both, strict=True)) for both in zip(tokens.tolist(), values.tolist(), strict=True))
    return {"raw_logprobs": tuple(figures[:, 0].tolist()), "top_logprobs": pairs if wanted else ()}
