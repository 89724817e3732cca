"""Answers in OpenAI's form: whole ones and events, with the figures of speculation in vLLM's."""

import time
from typing import Any

from transformers import PreTrainedTokenizerBase

from experiments.serving.calls import Call, Choice
from experiments.serving.prompts import Told
from specdec.types import Step

LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON has no word for; vLLM writes the same."""
_UNIX = time.time() - time.perf_counter()
"""What makes seconds since 1970 of the engine's clock."""


class Writer:
    """Writes what clients read.

    Args:
        max_depth: The depth of the deepest drafts; 0 for plain decoding.
    """

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase | None, *, max_depth: int):
        self._model, self._tokenizer, self._max_depth = model, tokenizer, max_depth

    def whole(self, call: Call) -> dict[str, Any]:
        """Return the answer of a call whose choices have ended."""
        asked = call.asked
        answer = self._head(call, "chat.completion" if asked.chat else "text_completion")
        joined = sorted(call.joined(), key=lambda pair: pair[0].index)
        answer["choices"] = [self._choice(*each, whole=True) for each in joined]
        if asked.chat and asked.token_ids:
            answer["prompt_token_ids"] = asked.prompts[0]
        return answer | self._end(call)

    def event(self, choice: Choice, step: Step) -> dict[str, Any]:
        """Return the event of a round."""
        call = choice.call
        event = self._head(call, "chat.completion.chunk" if call.asked.chat else "text_completion")
        event["choices"] = [self._choice(choice, step, whole=False)]
        if call.asked.chat and call.asked.token_ids and not choice.begun:
            event["prompt_token_ids"] = choice.prompt
        if call.asked.usage_always:
            event["usage"] = self._usage(call)
        choice.begun = True
        return event

    def last_event(self, call: Call) -> dict[str, Any]:
        """Return the event that follows the last round, with what is known of the whole."""
        head = self._head(call, "chat.completion.chunk" if call.asked.chat else "text_completion")
        return head | {"choices": []} | self._end(call)

    def _head(self, call: Call, kind: str) -> dict[str, Any]:
        return {"id": call.id, "object": kind, "created": call.created, "model": self._model}

    def _end(self, call: Call) -> dict[str, Any]:
        end: dict[str, Any] = {"usage": self._usage(call)}
        if len(call.choices) == 1:  # as in vLLM: they describe a single sequence
            end["metrics"] = self._metrics(call.choices[0])
        return end

    def _choice(self, choice: Choice, step: Step, *, whole: bool) -> dict[str, Any]:
        asked = choice.call.asked
        made: dict[str, Any] = {"index": choice.index, "finish_reason": step.finish_reason}
        if not asked.chat:
            made["text"] = step.text
        elif whole:
            made["message"] = {"role": "assistant", "content": step.text}
        else:
            made["delta"] = {"content": step.text} | ({} if choice.begun else {"role": "assistant"})
        made["logprobs"] = (
            (self._chat_logprobs if asked.chat else self._logprobs)(choice, step) if asked.logprobs else None
        )
        if asked.token_ids:
            made["token_ids"] = step.token_ids
            if not asked.chat and not choice.begun:
                made["prompt_token_ids"] = choice.prompt
        if asked.prompt_logprobs is not None:
            made["prompt_logprobs"] = [None, *map(self._alternatives, choice.call.told[choice.index // asked.samples])]
        return made

    def _alternatives(self, told: Told) -> dict[str, Any]:
        """Return the likeliest tokens at a place of the prompt, and its own, in vLLM's form."""
        return {
            str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": self._spelled(token)}
            for token, (value, rank) in told.items()
        }

    def _logprobs(self, choice: Choice, step: Step) -> dict[str, Any]:
        spelled = _numbered if choice.call.asked.spells_ids else self._spelled
        tokens = [spelled(token) for token in step.token_ids]
        values = [_finite(value) for value in step.raw_logprobs]
        most = [
            {spelled(other): _finite(each) for other, each in pairs} | {token: value}
            for token, value, pairs in zip(tokens, values, step.top_logprobs, strict=False)  # none without any
        ]
        offsets = []
        for token in tokens:
            offsets.append(choice.spelled)
            choice.spelled += len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": most or None, "text_offset": offsets}

    def _chat_logprobs(self, choice: Choice, step: Step) -> dict[str, Any]:
        most = step.top_logprobs or [()] * len(step.token_ids)
        ids = choice.call.asked.spells_ids
        return {
            "content": [
                self._told(token, value, ids) | {"top_logprobs": [self._told(*pair, ids) for pair in pairs]}
                for token, value, pairs in zip(step.token_ids, step.raw_logprobs, most, strict=True)
            ]
        }

    def _told(self, token: int, value: float, ids: bool) -> dict[str, Any]:
        text = _numbered(token) if ids else self._spelled(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}

    def _spelled(self, token: int) -> str:
        """Return a token's text; its number where it has none of its own, being a part of a character."""
        text = "" if self._tokenizer is None else str(self._tokenizer.decode([token]))
        return _numbered(token) if "\ufffd" in text or not text else text

    def _usage(self, call: Call) -> dict[str, Any]:
        prompt, output = sum(map(len, call.asked.prompts)), sum(choice.tokens for choice in call.choices)
        reused = sum(choice.timestamps.reused for choice in call.choices if choice.timestamps is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def _metrics(self, choice: Choice) -> dict[str, Any]:
        stamps = choice.timestamps
        assert stamps is not None, "it has ended"
        times = {"arrived": stamps.arrived, "admitted": stamps.admitted, "first_token": choice.first}
        times = {name: _UNIX + at for name, at in (times | {"finished": stamps.finished}).items()}
        return {"times": times, "speculative_decoding": self._speculation(choice) if self._max_depth else None}

    def _speculation(self, choice: Choice) -> dict[str, Any]:
        """Return vLLM's figures (its docs/features/speculative_decoding/acceptance_metrics.md), and two of our own.

        Rounds without a draft are left out of all but ``num_rounds``. A tree counts as its depth.
        """
        by_depth = {depth: [0] * (depth + 1) for depth in sorted({depth for depth, _ in choice.drafts})}
        for (depth, accepted), count in choice.drafts.items():
            by_depth[depth][accepted] = count
        histogram = [
            sum(row[accepted] for row in by_depth.values() if accepted < len(row))
            for accepted in range(self._max_depth + 1)
        ]
        steps, accepted = sum(histogram), sum(count * each for count, each in enumerate(histogram))
        drafted = sum(depth * sum(row) for depth, row in by_depth.items())
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


def _numbered(token: int) -> str:
    return f"token_id:{token}"


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
