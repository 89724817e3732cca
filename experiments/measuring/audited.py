"""The decoders that are audited: an engine, ours or another, or a function."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from experiments.contenders.base import OtherEngine
from experiments.contenders.openai import ServerError
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams

Subject = Callable[[Sequence[Sequence[int]], SamplingParams, Sequence[int]], list[list[int]]]
"""From prompts, their sampling and a stream for each to one output for each, as token ids."""


def of_engine(engine: Engine | OtherEngine, size: int) -> Subject:
    """An engine in batches of ``size``.

    Raises (when called):
        ValueError: A request fails, a server does not answer, or the tokens are not the engine's own.
    """

    def outputs(prompts: Sequence[Sequence[int]], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(streams), size):
            asked = [replace(sampling, stream=stream) for stream in streams[first : first + size]]
            try:
                done = engine.generate([list(each) for each in prompts[first : first + size]], asked)
            except ServerError as error:
                raise ValueError(str(error)) from error
            for each in done:
                if each.error is not None:
                    raise ValueError(f"a request failed: {each.error}")
            found += [list(each.token_ids) for each in done]
        if not getattr(engine, "tells_tokens", True):
            raise ValueError(
                "the tokens cannot be judged: a server has to return token ids, as text has several spellings (recent "
                "vLLM, SGLang and llama.cpp do; where another one needs a field: '+contenders.openai.extra="
                "{return_token_ids:true}'), and engines in processes of their own need target.dtype=float32"
            )
        return found

    return outputs


def of_function(function: Callable[..., Any], name: str) -> Subject:
    """A function ``generate(prompt_ids, sampling, n)`` that returns n lists of new token ids.

    It is called with a seed of its own for every block, whose prompts are one and the same.

    Raises:
        ValueError: It takes other arguments.
    """
    try:
        inspect.signature(function).bind([], SamplingParams(), 1)
    except TypeError as error:
        raise ValueError(f"function={name}: {error}; it is called with prompt_ids, sampling and n") from error

    def outputs(prompts: Sequence[Sequence[int]], sampling: SamplingParams, streams: Sequence[int]) -> list[list[int]]:
        given = replace(sampling, seed=((sampling.seed or 0) << 32) + streams[0])
        found = function(list(prompts[0]), given, len(streams))
        try:
            rows = [[int(token) for token in row] for row in found]
        except (TypeError, ValueError):
            rows = []
        if len(rows) != len(streams):
            raise ValueError(
                f"function={name} returned {type(found).__name__} where {len(streams)} outputs were asked for: "
                f"return a list of n lists of new token ids"
            )
        return rows

    return outputs
