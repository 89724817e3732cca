"""The calls that are open, and their answers in OpenAI's form; speculation's figures are in vLLM's."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.serving.fields import Asked, RequestError
from specdec.requests import SamplingParams
from specdec.types import Step, Timestamps

MOST_PENDING = 64
"""Rounds of a call that may wait for a client to read; then they are put together, and sent as one event."""
LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON has no word for; vLLM writes the same."""
_UNIX = time.time() - time.perf_counter()
"""What makes seconds since 1970 of the engine's clock."""


@dataclass(eq=False)
class Choice:
    """One request of the engine.

    Attributes:
        id: The engine's number for it; the engine's thread sets it.
        begun: Whether an event of it was written.
        spelled: Characters of the tokens that were spelled one by one, with their log-probabilities.
        drafts: How often its rounds drafted so deep and had so many tokens accepted.
        first, last: When its first and its last tokens were visible; 0 before.
        timestamps: When what happened, once it has ended.
    """

    call: "Call"
    index: int
    prompt: list[int]
    sampling: SamplingParams
    id: int = -1
    begun: bool = False
    spelled: int = 0
    tokens: int = 0
    rounds: int = 0
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    nodes: int = 0
    first: float = 0.0
    last: float = 0.0
    timestamps: Timestamps | None = None

    def take(self, step: Step) -> None:
        """Note what a round has done."""
        self.tokens += len(step.token_ids)
        self.rounds += 1
        if step.proposed_depth and step.error is None:
            self.drafts[step.proposed_depth, step.accepted] += 1
            self.nodes += step.proposed_nodes
        self.timestamps = step.timestamps
        if step.token_ids:
            self.first, self.last = self.first or step.visible, step.visible


class Call:
    """A request of a client, until it has its answer.

    Attributes:
        pending: Rounds that the client was not sent, in their order.
        running: The number of choices that have not ended.
        news: Set when something has happened.
        gone: Whether the client has left.
    """

    def __init__(self, asked: Asked, arrived: float):
        self.asked, self.arrived = asked, arrived
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        samples = len(asked.sampling) // len(asked.prompts)
        self.choices = [
            Choice(self, index, asked.prompts[index // samples], sampling)
            for index, sampling in enumerate(asked.sampling)
        ]
        self.pending: list[tuple[Choice, Step]] = []
        self.running = len(self.choices)
        self.news = asyncio.Event()
        self.gone = False
        self.refusal: RequestError | None = None

    def take(self, choice: Choice, step: Step) -> None:
        """Keep a round until the client reads it."""
        self.pending.append((choice, step))
        if step.finish_reason is not None:
            self.running -= 1
            if step.finish_reason == "error":
                self.refusal = RequestError(step.error or "the request has failed", status=500)
        if len(self.pending) > MOST_PENDING + len(self.choices):
            self.pending = self.joined()

    def refuse(self, refusal: RequestError) -> None:
        """End it with an error."""
        self.refusal, self.running = refusal, 0
        self.news.set()

    def joined(self) -> list[tuple[Choice, Step]]:
        """Return the pending rounds, those of each choice as one."""
        steps: dict[Choice, list[Step]] = {}
        for choice, step in self.pending:
            steps.setdefault(choice, []).append(step)
        return [(choice, _joined(several)) for choice, several in steps.items()]


def _joined(steps: Sequence[Step]) -> Step:
    """Return the last of several rounds with the output of all."""
    names = ("token_ids", "logprobs", "raw_logprobs", "top_logprobs")
    whole = {name: tuple(value for step in steps for value in getattr(step, name)) for name in names}
    return replace(steps[-1], text="".join(step.text for step in steps), **whole)


class Writer:
    """Writes what clients read.

    Args:
        max_depth: The depth of the deepest drafts; 0 for plain decoding.
    """

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase | None, *, max_depth: int):
        self._model, self._tokenizer, self._max_depth = model, tokenizer, max_depth

    def whole(self, call: Call) -> dict[str, Any]:
        """Return the answer of a call whose choices have ended."""
        joined = sorted(call.joined(), key=lambda pair: pair[0].index)
        choices = [self._choice(choice, step, whole=True) for choice, step in joined]
        answer = self._head(call, "") | {"choices": choices} | self._end(call)
        if call.asked.chat and call.asked.fields.return_token_ids:
            answer["prompt_token_ids"] = call.asked.prompts[0]
        return answer

    def event(self, choice: Choice, step: Step) -> dict[str, Any]:
        """Return the event of a round."""
        call = choice.call
        event = self._head(call, ".chunk") | {"choices": [self._choice(choice, step, whole=False)]}
        if call.asked.chat and call.asked.fields.return_token_ids and not choice.begun:
            event["prompt_token_ids"] = choice.prompt
        if call.asked.fields.stream_options.continuous_usage_stats:
            event["usage"] = self._usage(call)
        choice.begun = True
        return event

    def last_event(self, call: Call) -> dict[str, Any]:
        """Return the event that follows the last round, with what is known of the whole."""
        return self._head(call, ".chunk") | {"choices": []} | self._end(call)

    def _head(self, call: Call, part: str) -> dict[str, Any]:
        kind = f"chat.completion{part}" if call.asked.chat else "text_completion"
        return {"id": call.id, "object": kind, "created": call.created, "model": self._model}

    def _end(self, call: Call) -> dict[str, Any]:
        end: dict[str, Any] = {"usage": self._usage(call)}
        if len(call.choices) == 1:  # as in vLLM: they describe a single sequence
            (choice,), stamps = call.choices, call.choices[0].timestamps
            assert stamps is not None, "it has ended"
            times = {name: getattr(stamps, name) for name in ("arrived", "admitted", "finished")}
            times = {name: _UNIX + at for name, at in (times | {"first_token": choice.first}).items()}
            end["metrics"] = {"times": times, "speculative_decoding": self._speculation(choice)}
        return end

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
            made["logprobs"] = self._chat_logprobs(step) if asked.chat else self._logprobs(choice, step)
        if asked.fields.return_token_ids:
            made["token_ids"] = step.token_ids
            if not asked.chat and not choice.begun:
                made["prompt_token_ids"] = choice.prompt
        return made

    def _logprobs(self, choice: Choice, step: Step) -> dict[str, Any]:
        tokens = [self._spelled(token) for token in step.token_ids]
        values = [_finite(value) for value in step.raw_logprobs]
        most = [
            {self._spelled(other): _finite(likely) for other, likely in pairs} | {token: value}
            for token, value, pairs in zip(tokens, values, step.top_logprobs, strict=False)  # none without any
        ]
        offsets = []
        for token in tokens:
            offsets.append(choice.spelled)
            choice.spelled += len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": most or None, "text_offset": offsets}

    def _chat_logprobs(self, step: Step) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._spelled(token)
            return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}

        most = step.top_logprobs or [()] * len(step.token_ids)
        return {
            "content": [
                entry(token, value) | {"top_logprobs": [entry(*pair) for pair in pairs]}
                for token, value, pairs in zip(step.token_ids, step.raw_logprobs, most, strict=True)
            ]
        }

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

    def _speculation(self, choice: Choice) -> dict[str, Any] | None:
        """Return vLLM's figures (its docs/features/speculative_decoding/acceptance_metrics.md), and two of our own.

        Rounds without a draft are left out of all but ``num_rounds``. A tree counts as its depth. None without drafts.
        """
        if not self._max_depth:
            return None
        by_depth = {depth: [0] * (depth + 1) for depth in sorted({depth for depth, _ in choice.drafts})}
        histogram = [0] * (self._max_depth + 1)
        for (depth, accepted), count in choice.drafts.items():
            by_depth[depth][accepted] = count
            histogram[accepted] += count
        steps, accepted = choice.drafts.total(), sum(count * number for number, count in enumerate(histogram))
        drafted = sum(depth * count for (depth, _), count in choice.drafts.items())
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": by_depth,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self._max_depth,
            "num_draft_nodes": choice.nodes,
            "num_rounds": choice.rounds,
        }


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
