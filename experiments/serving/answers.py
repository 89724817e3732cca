"""The calls that are open, and their answers in OpenAI's form."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.serving.fields import Asked, RequestError
from specdec.requests import SamplingParams
from specdec.target.spelling import token_bytes
from specdec.types import Step, Timestamps

LEAST_LOGPROB = -9999.0  # stands for the logarithm of 0, which JSON has no word for, as in vLLM


@dataclass(eq=False)
class Choice:
    """One request of the engine, and how many tokens it has so far.

    Attributes:
        id: The engine's number for it; the engine's thread sets it.
        begun: Whether an event of it was written.
        first: When its first tokens were visible, 0 before; ``last``: when its last ones were.
        timestamps: When what happened, once it has ended.
    """

    call: "Call"
    index: int
    prompt: list[int]
    sampling: SamplingParams
    id: int = -1
    begun: bool = False
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    timestamps: Timestamps | None = None

    def take(self, step: Step) -> None:
        """Note a round, and keep it until the client reads it."""
        self.call.pending.append((self, step))
        self.tokens += len(step.token_ids)
        self.timestamps = step.timestamps
        if step.token_ids:
            self.first, self.last = self.first or step.visible, step.visible
        self.call.running -= step.finish_reason is not None
        if step.finish_reason == "error":
            self.call.refusal = RequestError(step.error or "the request has failed", status=500)


class Call:
    """A request of a client, until it has its answer."""

    def __init__(self, asked: Asked, arrived: float):
        self.asked, self.arrived = asked, arrived
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        samples = len(asked.sampling) // len(asked.prompts)
        prompts = [prompt for prompt in asked.prompts for _ in range(samples)]
        pairs = zip(prompts, asked.sampling, strict=True)
        self.choices = [Choice(self, index, prompt, sampling) for index, (prompt, sampling) in enumerate(pairs)]
        self.pending: list[tuple[Choice, Step]] = []  # rounds that the client was not sent
        self.running = len(self.choices)  # those that have not ended
        self.news = asyncio.Event()  # set when something has happened
        self.gone = False  # whether the client has left
        self.refusal: RequestError | None = None

    def refuse(self, refusal: RequestError) -> None:
        """End it with an error."""
        self.refusal, self.running = refusal, 0
        self.news.set()


def _joined(steps: Sequence[Step]) -> Step:
    """Return the last of several rounds with the output of all."""
    names = ("token_ids", "logprobs", "raw_logprobs", "top_logprobs")
    whole = {name: tuple(value for step in steps for value in getattr(step, name)) for name in names}
    return replace(steps[-1], text="".join(step.text for step in steps), **whole)


class Writer:
    """Writes what clients read."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase | None):
        self._model, self._tokenizer = model, tokenizer

    def whole(self, call: Call) -> dict[str, Any]:
        """Return the answer of a call whose choices have ended."""
        steps: dict[Choice, list[Step]] = {choice: [] for choice in call.choices}
        for choice, step in call.pending:
            steps[choice].append(step)
        choices = [self._choice(choice, _joined(several), whole=True) for choice, several in steps.items()]
        return self._head(call, "") | {"choices": choices, "usage": self._usage(call)}

    def event(self, choice: Choice, step: Step) -> dict[str, Any]:
        """Return the event of a round."""
        call = choice.call
        event = self._head(call, ".chunk") | {"choices": [self._choice(choice, step, whole=False)]}
        if call.asked.fields.stream_options.continuous_usage_stats:
            event["usage"] = self._usage(call)
        choice.begun = True
        return event

    def last_event(self, call: Call) -> dict[str, Any]:
        """Return the event that follows the last round, with the tokens of the whole."""
        return self._head(call, ".chunk") | {"choices": [], "usage": self._usage(call)}

    def _head(self, call: Call, part: str) -> dict[str, Any]:
        kind = f"chat.completion{part}" if call.asked.chat else "text_completion"
        return {"id": call.id, "object": kind, "created": call.created, "model": self._model}

    def _choice(self, choice: Choice, step: Step, *, whole: bool) -> dict[str, Any]:
        asked = choice.call.asked
        made: dict[str, Any] = {"index": choice.index, "finish_reason": step.finish_reason, "logprobs": None}
        if not asked.chat:
            made["text"] = step.text
        elif whole:
            made["message"] = {"role": "assistant", "content": step.text}
        else:
            made["delta"] = {"content": step.text} | ({} if choice.begun else {"role": "assistant"})
        if choice.sampling.logprobs is not None:
            made["logprobs"] = self._chat_logprobs(step) if asked.chat else self._logprobs(step)
        if asked.fields.return_token_ids:
            made["token_ids"] = step.token_ids
        return made

    def _logprobs(self, step: Step) -> dict[str, Any]:
        tokens = [self._spelled(token) for token in step.token_ids]
        values = [max(value, LEAST_LOGPROB) for value in step.raw_logprobs]
        most = [
            {self._spelled(other): max(likely, LEAST_LOGPROB) for other, likely in pairs} | {token: value}
            for token, value, pairs in zip(tokens, values, step.top_logprobs, strict=False)  # none without any
        ]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": most or None}

    def _chat_logprobs(self, step: Step) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._spelled(token)
            raw = text.encode()
            if self._tokenizer is not None and text == f"token_id:{token}":  # clients join bytes
                raw = token_bytes([token], self._tokenizer).get(token, b"")
            return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(raw)}

        most = step.top_logprobs or [()] * len(step.token_ids)
        entries = zip(step.token_ids, step.raw_logprobs, most, strict=True)
        content = [
            entry(token, value) | {"top_logprobs": [entry(*one) for one in top]} for token, value, top in entries
        ]
        return {"content": content}

    def _spelled(self, token: int) -> str:
        """Return a token's text; its number where it has none of its own, being a part of a character."""
        text = "" if self._tokenizer is None else str(self._tokenizer.decode([token]))
        return f"token_id:{token}" if "\ufffd" in text or not text else text

    def _usage(self, call: Call) -> dict[str, Any]:
        prompt, output = sum(map(len, call.asked.prompts)), sum(choice.tokens for choice in call.choices)
        reused = sum(choice.timestamps.reused for choice in call.choices if choice.timestamps is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": reused},
        }
