"""From prompts to requests: everything is checked before any work starts."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from itertools import count
from numbers import Number
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from specdec.arguments import flag, instance, kind_of, number, shown, whole
from specdec.engine.text import Detokenizer, encode_prompt, unseen_tokens, whole_text
from specdec.origin import first_sentence
from specdec.requests import Matcher, Request, SamplingParams
from specdec.target.target import Target

Message = Mapping[str, Any]
"""A side's turn in a conversation: ``{"role": "user", "content": "Hello"}`` (``chat_message``)."""
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages. Token ids may be an array or a tensor of one dimension, too."""

_ONE = "give a text, a list of token ids or a list of chat messages"


class Intake:
    """Makes requests for an engine, which may have a drafter and a rule that follows the target's distribution."""

    def __init__(self, target: Target, *, max_length: int, can_speculate: bool, exact: bool = True):
        self._target, self._max_length = target, max_length
        self._can_speculate, self._exact = can_speculate, exact
        self._ids: Iterator[int] = count()

    def requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        speculate: bool,
    ) -> list[Request]:
        """Returns the requests of an ``Engine.generate``, in the prompts' order, samples of a prompt side by side."""
        arrived = time.perf_counter()
        speculate = flag("speculate", speculate)
        listed = list_prompts(prompts)
        made: list[Request] = []
        for index, (prompt, params) in enumerate(zip(listed, _for_all(sampling, len(listed)), strict=True)):
            try:
                for sample in range(params.n):
                    # Further samples of a given stream get streams of their own, far from those of other prompts.
                    stream = len(made) if params.stream is None else params.stream + (sample << 40)
                    made.append(self._request(prompt, replace(params, stream=stream), arrived, speculate=speculate))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return made

    def request(
        self, prompt: Prompt, sampling: SamplingParams, *, speculate: bool, arrived: float | None = None
    ) -> Request:
        """Returns one request, whose id is also its default stream; see ``Engine.submit``."""
        arrived = time.perf_counter() if arrived is None else number("arrived", arrived)
        speculate = flag("speculate", speculate)
        _check_sampling("sampling", sampling)
        if sampling.n != 1:
            raise ValueError(f"n={sampling.n}: submit takes one sample; use generate, or submit it {sampling.n} times")
        return self._request(prompt, sampling, arrived, speculate=speculate)

    def matcher(self, sampling: SamplingParams, *, speculate: bool) -> Matcher | None:
        """Returns a matcher that follows a request's output in its grammar; None without one."""
        if sampling.grammar is None:
            return None
        if speculate and self._can_speculate and not self._exact:
            said = "a grammar needs a rule that follows the target's distribution, as this engine's does not"
            raise ValueError(f"{said}: use an exact rule, or speculate=False")
        return self._target.grammars.matcher(sampling.grammar, self._stop_ids(sampling))

    def adapter(self, sampling: SamplingParams) -> int:
        if self._target.adapters is not None:
            return self._target.adapters.number(sampling.adapter)
        if sampling.adapter is not None:
            raise ValueError(f"adapter={sampling.adapter!r}: the target has none; load it with adapters={{…}}")
        return 0

    @cached_property
    def _unseen(self) -> dict[str, int]:
        return {} if self._target.tokenizer is None else unseen_tokens(self._target.tokenizer)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        named = frozenset(self._unseen[string] for string in sampling.stop if string in self._unseen)
        return named.union(sampling.stop_token_ids, () if sampling.ignore_eos else self._target.eos_token_ids)

    def _request(self, prompt: Prompt, sampling: SamplingParams, arrived: float, *, speculate: bool) -> Request:
        begin = time.perf_counter()  # other prompts of the call may have been before it
        target = self._target
        ids = encode(target.tokenizer, prompt)
        banned = (token for word in sampling.bad_words_ids for token in word)
        for what, tokens in ("", ids), ("logit_bias: ", dict(sampling.logit_bias)), ("bad_words_ids: ", banned):
            wrong = [token for token in tokens if not 0 <= token < target.vocab_size]
            if wrong:
                raise ValueError(f"{what}token id {wrong[0]} is outside the target's vocabulary of {target.vocab_size}")
        if (least := sampling.min_new_tokens) > sampling.max_new_tokens:
            raise ValueError(f"min_new_tokens={least}: give at most max_new_tokens={sampling.max_new_tokens}")
        if len(ids) + sampling.max_new_tokens > self._max_length:
            most = f"max_length={self._max_length}: shorten either, or raise max_length"
            both = f"{len(ids)} prompt tokens + max_new_tokens={sampling.max_new_tokens}"
            raise ValueError(f"{both} exceed the engine's {most} (the model has {target.max_length} positions)")
        if (sampling.logprobs or 0) > target.vocab_size:
            raise ValueError(f"logprobs={sampling.logprobs}: the target has {target.vocab_size} tokens, ask for fewer")
        if sampling.stop and target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the Target one, or use stop_token_ids")
        for string in (whole_text("stop", string) for string in sampling.stop if string not in self._unseen):
            special = next((name for name in self._unseen if name and name in string), None)
            if special is not None:
                raise ValueError(f"stop={string!r} has text around the special token {special!r}: give that by itself")
        matcher = self.matcher(sampling, speculate=speculate)
        identity = next(self._ids)
        return Request(
            id=identity, prompt_ids=ids, sampling=sampling.seeded(identity),
            speculate=speculate and self._can_speculate, stop_ids=self._stop_ids(sampling), matcher=matcher,
            adapter=self.adapter(sampling),
            detokenizer=Detokenizer(target.tokenizer, ids, stop=tuple(sampling.stop), least=least), arrived=arrived,
            ingestion=time.perf_counter() - begin,
        )  # fmt: skip


def _for_all(sampling: Any, count: int) -> list[SamplingParams]:
    """Returns the parameters of every prompt."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if isinstance(sampling, str | Mapping) or not isinstance(sampling, Iterable):
        _check_sampling("sampling", sampling)
    params: list[Any] = list(sampling)
    for index, given in enumerate(params):
        _check_sampling(f"sampling {index}", given)
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} SamplingParams: give one for all, or one each")
    return params


def _check_sampling(name: str, sampling: Any) -> None:
    remedy = "SamplingParams(…)"
    if isinstance(sampling, Mapping) and sampling:
        remedy = f"SamplingParams({', '.join(f'{key}=…' for key in sampling)})"
    elif any(kind.__name__ == "GenerationConfig" for kind in type(sampling).__mro__):
        remedy = "specdec.generation.from_generation_config(…)"
    instance(name, sampling, SamplingParams, remedy)


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns the prompts of a call as a list. A single prompt may stand alone: a text, token ids, chat messages."""
    if isinstance(prompts, str):
        return [prompts]
    parts = _listed("prompts", prompts, f"{_ONE}; or several of these in a list")
    return [parts] if parts and (_all(parts, Number) or _all(parts, Mapping)) else parts


def encode(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> list[int]:
    """Returns a prompt's tokens; a text's with the special ones that the tokenizer adds."""
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt)
    parts = _listed("the prompt", prompt, _ONE)
    if not parts:
        raise ValueError("the prompt is empty: give at least one token")
    if _all(parts, Mapping):
        return encode_chat(tokenizer, parts)
    if any(isinstance(part, str | bytes | Sequence | Mapping | np.ndarray) for part in parts):
        raise ValueError(f"the prompt is a list with {kind_of(parts[0])} in it: {_ONE}")
    if all(type(part) is int for part in parts):  # thousands of them, as a rule
        return parts
    return [whole("token id", part, remedy="give whole numbers as token ids") for part in parts]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Returns a conversation's tokens by the tokenizer's chat template, up to where the assistant speaks next.

    If the last message is what the assistant has said so far, the output goes on with it. ``options`` are more
    arguments of the template: ``tools``, and what the template itself names.
    """
    said = [chat_message(message, f"chat message {index}") for index, message in enumerate(messages)]
    if tokenizer is None:
        raise ValueError("chat messages need a tokenizer: give the Target one, or pass token ids")
    if not (template := str(tokenizer.chat_template or "")):
        said = "the target's tokenizer has no chat template, so chat messages cannot become a prompt"
        raise ValueError(f"{said}: give text, or set tokenizer.chat_template")
    if unread := [name for name in options or () if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise ValueError(
            f"chat_template: the target's template does not read {unread[0]!r}, so it would change nothing: leave it "
            f"out, or give the name that the model's page says"
        )
    goes_on = said[-1]["role"] == "assistant" and bool(said[-1].get("content"))
    try:
        ends: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        text = tokenizer.apply_chat_template(said, tokenize=False, **ends, **(options or {}))
    except Exception as error:  # a template may raise anything, and often it says which roles it takes
        reason = first_sentence(error) or type(error).__name__
        raise ValueError(f"the target's chat template does not take these messages: {reason}") from error
    ids = tokenizer(whole_text("the conversation", str(text)), add_special_tokens=False)["input_ids"]
    if not ids:  # the template has written the special ones
        raise ValueError("the chat template made an empty prompt of these messages: give text")
    return list(ids)


def chat_message(given: Message, where: str) -> dict[str, Any]:
    """Returns a message as chat templates read it: content in parts as one text, arguments of calls as objects."""
    try:
        message = deepcopy({name: given[name] for name in given if given[name] is not None or name == "content"})
        calls = message.get("tool_calls") or ()
        if isinstance(content := message.get("content"), list):
            message["content"] = "".join(part["text"] for part in content)
        for function in (call.get("function", call) for call in calls):
            if isinstance(function["arguments"], str):  # as OpenAI's clients send them
                function["arguments"] = json.loads(function["arguments"])
        if isinstance(message["role"], str) and isinstance(message.get("content"), str | None if calls else str):
            return message
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # refused with all others
    remedy = "{'role': 'user', 'content': 'text'}, and the arguments of tool calls as JSON"
    raise ValueError(f"{where} is {shown(given)}: give {remedy}")


def _listed(what: str, given: Any, wanted: str) -> list[Any]:
    """Returns what stands in a list, an array or the like; refuses anything else."""
    given = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if isinstance(given, Mapping) and "input_ids" in given:
        raise ValueError(f"{what} is what a tokenizer returns: give its input_ids")
    if isinstance(given, Mapping) and "role" in given:
        raise ValueError(f"{what} is a single chat message: give a list of messages")
    if isinstance(given, bytes):
        raise ValueError(f"{what} is bytes: give text or token ids, prompt.decode() or list(prompt)")
    if isinstance(given, Mapping | Set) or not isinstance(given, Iterable):
        raise ValueError(f"{what} is {kind_of(given)}: {wanted}")
    return list(given)


def _all(parts: Sequence[object], kind: type) -> bool:
    return all(isinstance(part, kind) for part in parts)
