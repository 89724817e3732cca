"""The fields of a request: which are understood, which are refused, and the sampling parameters that they become."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from transformers import PreTrainedTokenizerBase

from specdec.arguments import shown
from specdec.engine.intake import encode, encode_chat
from specdec.requests import Grammar, SamplingParams

OF_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")},
    **{name: name for name in ("stop_token_ids", "n", "ignore_eos", "priority", "deadline", "grammar", "adapter")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "logit_bias")},
    "min_tokens": "min_new_tokens",
    "stream_id": "stream",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
}
"""Fields of a request, and the parameter of ``SamplingParams`` that each one sets."""
HARMLESS = ("model", "user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key")
"""Fields that change nothing about the output, and are not looked at."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output", "early_stopping"), (False,)),
    **dict.fromkeys(("typical_p", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("functions", "bad_words", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    "return_tokens_as_token_ids": (False,),
}
"""Fields that would change the output and are not supported, and the values with which they change nothing."""


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


def _neutral(name: str, value: Any) -> Any:
    if value not in NEUTRAL[name]:
        raise ValueError(f"{name}={shown(value)} is not supported, and would change the output: leave it out")
    return value


def _parameter(name: str, value: Any) -> Any:
    value = 0 if name == "top_k" and value == -1 else value  # other servers' word for "off"
    if name == "logit_bias" and isinstance(value, Mapping):  # JSON's keys are texts
        value = {int(token) if str(token).isdecimal() else token: bias for token, bias in value.items()}
    try:
        SamplingParams(**{OF_SAMPLING[name]: value})
    except ValueError as error:
        raise ValueError(str(error).replace(f"{OF_SAMPLING[name]}=", f"{name}=", 1)) from error
    return value


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


def _several(prompt: Any) -> list[Any]:
    """Return one or several prompts as a list."""
    return [prompt] if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt) else prompt


_STRICT = ConfigDict(extra="forbid", strict=True)
_OTHERS: dict[str, Any] = {
    **dict.fromkeys(HARMLESS, (Any, None)),
    **{name: (Annotated[Any, AfterValidator(partial(_neutral, name))], None) for name in NEUTRAL},
    **{name: (Annotated[Any, AfterValidator(partial(_parameter, name))], None) for name in OF_SAMPLING},
}
Alternatives = Annotated[int, Field(ge=0, le=20)]  # tokens beside each one, as many as with other servers


class StreamOptions(BaseModel):
    """Which events of a stream say how many tokens there were: a last one more, or every one."""

    model_config = _STRICT
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Fields(create_model("Others", __config__=_STRICT, **_OTHERS)):
    """The fields that completions and chats share."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    response_format: Annotated[Any, AfterValidator(_grammar)] = None


class Completion(Fields):
    """The fields of a completion."""

    prompts: Annotated[str | list[int] | list[str | list[int]], AfterValidator(_several)] = Field(alias="prompt")
    logprobs: Alternatives | None = None


class Chat(Fields):
    """The fields of a chat, whose messages are its only prompt; its template shows the tools, and reads the rest."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was understood."""

    fields: Fields
    chat: bool
    prompts: list[list[int]]
    sampling: list[SamplingParams]  # of every choice, ``n`` for each prompt, with a stream of its own


def understand(
    body: object, tokenizer: PreTrainedTokenizerBase | None, defaults: SamplingParams, *, chat: bool, most: int
) -> Asked:
    """Return a request from its JSON, of at most so many choices, with ``defaults``; raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is {shown(body)}: send a JSON object")
    given = {str(name): value for name, value in body.items() if value is not None}
    try:
        fields = (Chat if chat else Completion).model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from error
    content, logprobs = ("messages", None) if isinstance(fields, Chat) else ("prompt", fields.logprobs)
    prompts: list[Any] = [fields.messages] if isinstance(fields, Chat) else list(fields.prompts)
    if isinstance(fields, Chat) and fields.logprobs:
        logprobs = fields.top_logprobs or 0
    elif isinstance(fields, Chat) and fields.top_logprobs:
        raise RequestError("top_logprobs without logprobs: give logprobs=true, too", param="top_logprobs")
    sampling = _sampling(fields, given, replace(defaults, logprobs=logprobs, seed=None, stream=None))
    if (count := sampling.n * len(prompts)) > most:
        raise RequestError(f"{count} choices at once are too many for this server: ask for at most {most}", param="n")
    first, samples = sampling.stream, sampling.n
    # The streams that ``Engine.generate`` gives to the same prompts.
    streams = [number if first is None else first + (number % samples << 40) for number in range(count)]
    try:
        json.dumps(given[content], ensure_ascii=False).encode()  # tokenizers have no sentence for halves of characters
        if isinstance(fields, Chat):
            options = (fields.chat_template_kwargs or {}) | ({"tools": fields.tools} if fields.tools else {})
            encoded = [encode_chat(tokenizer, fields.messages, options)]
        else:
            encoded = [list(encode(tokenizer, prompt)) for prompt in prompts]
        choices = [replace(sampling, n=1, stream=stream) for stream in streams]
    except ValueError as error:
        raise RequestError(str(error), param=content) from error
    return Asked(fields=fields, chat=chat, prompts=encoded, sampling=choices)


def _refusal(error: ValidationError, given: Mapping[str, Any]) -> RequestError:
    """Return the first of pydantic's errors in a sentence that names the field."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    messages = {
        "extra_forbidden": f"there is no field {'.'.join(map(str, first['loc']))!r} here: leave it out",
        "missing": f"there is no {name!r} in the request: give one",
        "value_error": str(first.get("ctx", {}).get("error")),
    }
    return RequestError(messages.get(first["type"], f"{name}={shown(given.get(name))}: {first['msg']}"), param=name)


def _sampling(fields: Fields, given: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    named = {name: getattr(fields, name) for name in OF_SAMPLING if name in given}
    if named.get("max_tokens", (most := named.get("max_completion_tokens"))) != most and most is not None:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    sampling = replace(sampling, **{OF_SAMPLING[name]: value for name, value in named.items()})
    if fields.response_format is not None and "grammar" in given:
        unlike = "response_format and grammar both say what the output may be: leave one of them out"
        raise RequestError(unlike, param="response_format")
    return replace(sampling, grammar=fields.response_format or sampling.grammar)
