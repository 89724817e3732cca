"""The fields of a request: which are understood, which are refused, and the sampling parameters that they become."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.arguments import flag, shown, whole
from specdec.engine.intake import encode
from specdec.requests import Grammar, SamplingParams

MOST_LOGPROBS = 20
"""The most alternatives per token that a request may ask for, as with other servers."""
OF_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")},
    **{
        name: name
        for name in ("stop_token_ids", "n", "ignore_eos", "priority", "deadline", "user", "grammar", "adapter")
    },
    "stream_id": "stream",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""Fields of a request, and the parameter of ``SamplingParams`` that each one sets."""
READ = {
    *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "best_of", "response_format"),
    *("prompt_logprobs", "return_tokens_as_token_ids"),
}
"""Fields that are read here."""
HARMLESS = {
    *("model", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key"),
    "include_metrics",
}
"""Fields that change nothing about the output, and are not looked at."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output", "early_stopping"), (False,)),
    **dict.fromkeys(("typical_p", "length_penalty"), (1,)),
    **dict.fromkeys(("tools", "functions", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("allowed_token_ids", "truncate_prompt_tokens", "reasoning_effort"), ()),
    **dict.fromkeys(("chat_template", "regex", "json_schema", "ebnf"), ()),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Known fields that would change the output and are not supported, and the values with which they change nothing."""
OPTIONS = ("include_usage", "continuous_usage_stats")


class RequestError(Exception):
    """An error that is the answer to a request."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = {429: "rate_limit_error"}.get(self.status, "server_error" if self.status >= 500 else None)
        error = {"message": str(self), "type": kind or "invalid_request_error", "param": self.param}
        return {"error": error | {"code": self.status}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was understood.

    Attributes:
        chat: Whether it is answered as a message of a chat.
        sampling: The parameters of every choice, ``n`` for each prompt: one sample each, with a stream of its own.
        stream: Whether the answer comes in events.
        usage: Whether a last event says how many tokens there were.
        usage_always: Whether every event does.
        prompt_logprobs: The number of alternatives at every token of the prompts; None for no log-probabilities there.
        spells_ids: Whether tokens with log-probabilities are spelled ``token_id:5``, which no two tokens share.
    """

    chat: bool
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    stream: bool
    usage: bool
    usage_always: bool
    logprobs: bool
    prompt_logprobs: int | None
    token_ids: bool
    spells_ids: bool

    @property
    def samples(self) -> int:
        """The number of choices for each prompt."""
        return len(self.sampling) // len(self.prompts)


def understand(
    body: object, tokenizer: PreTrainedTokenizerBase | None, defaults: SamplingParams, *, chat: bool, most: int
) -> Asked:
    """Return a request from the JSON of its body.

    Args:
        defaults: Parameters that the request says nothing about.
        chat: Whether there are messages in it, or else a prompt.
        most: The number of choices that it may have.

    Raises:
        RequestError: A field is unknown, unsupported or wrong.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}: send a JSON object")
    given = {str(name): value for name, value in body.items() if value is not None}
    content = "messages" if chat else "prompt"
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            unlike = f"{name}={shown(value)} is not supported, and would change the output: leave it out"
            raise RequestError(unlike, param=name)
        if not (name == content or name in NEUTRAL or name in HARMLESS or name in READ or name in OF_SAMPLING):
            raise RequestError(f"there is no field {name!r} here: leave it out", param=name)
    if content not in given:
        raise RequestError(f"there is no {content!r} in the request: give one", param=content)
    options = given.get("stream_options", {})
    switches = options.items() if isinstance(options, dict) else [("", options)]
    if not all(name in OPTIONS and isinstance(value, bool) for name, value in switches):
        wanted = " or ".join(f"{{{name}: true}}" for name in OPTIONS)
        raise RequestError(f"stream_options={shown(options)}: give {wanted}", param="stream_options")
    logprobs = _logprobs(given, chat=chat)
    sampling = _sampling(given, defaults, logprobs)
    prompts = (_messages if chat else _prompts)(given[content])
    if (count := sampling.n * len(prompts)) > most:
        raise RequestError(f"{count} choices at once are too many for this server: ask for at most {most}", param="n")
    with _refusing(content):
        json.dumps(given[content], ensure_ascii=False).encode()  # tokenizers have no sentence for halves of characters
        encoded = [list(encode(tokenizer, prompt)) for prompt in prompts]
    return Asked(
        chat=chat,
        prompts=encoded,
        sampling=_choices(sampling, len(prompts)),
        stream=_flag(given, "stream"),
        usage=options.get("include_usage", False),
        usage_always=options.get("continuous_usage_stats", False),
        logprobs=logprobs is not None,
        prompt_logprobs=_prompt_logprobs(given, chat=chat),
        token_ids=_flag(given, "return_token_ids"),
        spells_ids=_flag(given, "return_tokens_as_token_ids"),
    )


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many alternatives per token are wanted; None for no log-probabilities."""
    most = given.get("top_logprobs") if chat else given.get("logprobs")
    name = "top_logprobs" if chat else "logprobs"
    if chat and not _flag(given, "logprobs"):
        if most:
            raise RequestError("top_logprobs without logprobs: give logprobs=true, too", param=name)
        return None
    if not chat and "top_logprobs" in given:
        raise RequestError("top_logprobs belongs to a chat: give logprobs=COUNT", param="top_logprobs")
    if most is None:
        return 0 if chat else None
    return _alternatives(name, most)


def _prompt_logprobs(given: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many alternatives per token of the prompt are wanted; None for no log-probabilities."""
    name = "prompt_logprobs"
    if name in given and (chat or given.get("stream")):
        raise RequestError(f"{name} belongs to a completion that is not streamed: leave it out", param=name)
    return _alternatives(name, given[name]) if name in given else None


def _alternatives(name: str, given: Any) -> int:
    with _refusing(name):
        count = whole(name, given, least=0)
    if count > MOST_LOGPROBS:
        raise RequestError(f"{name}={count}: give at most {MOST_LOGPROBS}", param=name)
    return count


def _sampling(given: Mapping[str, Any], defaults: SamplingParams, logprobs: int | None) -> SamplingParams:
    named = {name: given[name] for name in OF_SAMPLING if name in given}
    if named.get("max_tokens", (most := named.get("max_completion_tokens"))) != most and most is not None:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    if named.get("top_k") == -1:  # other servers' word for "off"
        named["top_k"] = 0
    sampling = replace(defaults, logprobs=logprobs, seed=None, stream=None)
    for name, value in named.items():  # one by one, so that the answer names the field
        with _refusing(name):
            sampling = replace(sampling, **{OF_SAMPLING[name]: value})
    with _refusing("response_format"):
        if (grammar := _grammar(given.get("response_format", {"type": "text"}))) is not None:
            if "grammar" in given:
                raise ValueError("response_format and grammar both say what the output may be: leave one of them out")
            sampling = replace(sampling, grammar=grammar)
    with _refusing("best_of"):
        if whole("best_of", given.get("best_of", sampling.n)) != sampling.n:
            raise ValueError(f"best_of={given['best_of']} is not supported: leave it out, or give it the value of n")
    return sampling


def _grammar(wanted: Any) -> Grammar | None:
    """Return the grammar of a ``response_format`` as OpenAI's clients send it; None for any text."""
    match wanted:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar(json_schema={"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Grammar(json_schema=schema)
    raise ValueError(
        f"response_format={shown(wanted)}: give {{type: text}}, {{type: json_object}} or "
        f"{{type: json_schema, json_schema: {{schema: …}}}}"
    )


def _choices(sampling: SamplingParams, prompts: int) -> list[SamplingParams]:
    """Return the parameters of every choice; ``Engine.generate`` gives the same streams to the same prompts."""
    first, count = sampling.stream, sampling.n
    with _refusing("stream_id"):
        return [
            replace(sampling, n=1, stream=prompt * count + sample if first is None else first + (sample << 40))
            for prompt in range(prompts)
            for sample in range(count)
        ]


def _messages(content: Any) -> list[Any]:
    """Return the only prompt of a chat."""
    if not isinstance(content, list) or not content or not all(isinstance(each, dict) for each in content):
        raise RequestError(f"messages={shown(content)}: give a list of messages", param="messages")
    with _refusing("messages"):
        return [[_flat(each) for each in content]]


def _prompts(content: Any) -> list[Any]:
    """Return one or several prompts as a list."""
    single = isinstance(content, str) or (isinstance(content, list) and all(type(each) is int for each in content))
    several = [content] if single else content
    if not isinstance(several, list) or not all(isinstance(each, str | list) for each in several):
        wanted = "give a text, a list of token ids, or a list of either"
        raise RequestError(f"prompt={shown(content)}: {wanted}", param="prompt")
    return several


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text; clients may send it in parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("a message has parts that are no texts: give parts such as {'type': 'text', 'text': 'Hello'}")
    return message | {"content": "".join(part["text"] for part in parts)}


def _flag(given: Mapping[str, Any], name: str) -> bool:
    with _refusing(name):
        return flag(name, given.get(name, False))


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Make a refusal of a ValueError about a field."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace(f"{OF_SAMPLING.get(name, name)}=", f"{name}=", 1)
        raise RequestError(message, param=name) from error
