"""One token at a time against a text in one piece, by the log-probabilities that a server tells.

The server decodes greedily and tells the log-probabilities of the likeliest tokens at every place. Then it is given
prompt and output as one text, and tells those of the same places.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import exp, inf
from typing import Any

from experiments.contenders.openai import ID, OpenAIServer, RefusedError
from experiments.measuring.parity import counted
from experiments.results.frame import Figures
from specdec.requests import SamplingParams

Place = dict[str, float]
"""Log-probabilities of the likeliest tokens at a place, by ``token_id:5``, or by their texts (SGLang)."""


@dataclass(frozen=True)
class Output:
    """A greedy output, what the server calls its tokens, and what they were chosen from."""

    tokens: list[int]
    names: list[str]
    places: list[Place]


def through_server(
    server: OpenAIServer, prompts: Sequence[Sequence[int]], *, tokens: int, batches: Sequence[int], alternatives: int
) -> Iterator[Figures]:
    """Yield how log-probabilities of whole texts differ from those of tokens that were generated (``told_apart``).

    Prompts go in groups of the largest batch, so that what is yielded for one group is there when the server fails in
    the next. Several requests at once are compared with a request alone, as far as they generate the same tokens. At
    the end the connections are closed.

    Args:
        tokens: The length of the outputs.
        batches: Requests that are sent at once.
        alternatives: Likeliest tokens to ask for at every place.

    Raises:
        ValueError: The server does not say what is needed.
        RuntimeError: It refuses a request, or does not answer.
    """
    most = max(batches)
    with closing(server), ThreadPoolExecutor(most) as pool:
        for start in range(0, len(prompts) // most * most, most):
            group = prompts[start : start + most]
            made: dict[int, list[Output]] = {}
            for batch in sorted({1, *batches}):
                made[batch] = []
                for first in range(0, most, batch):
                    some = group[first : first + batch]
                    made[batch] += pool.map(lambda each: generated(server, each, tokens, alternatives), some)
                if batch > 1:
                    pairs = zip(made[1], made[batch], strict=True)
                    told = told_apart([(one, _as_far_as_alike(one, several)) for one, several in pairs])
                    yield Figures(batch=batch, size=1) | told
            for batch in batches:
                again = [
                    (output, rescored(server, prompt, output.tokens, alternatives))
                    for prompt, output in zip(group, made[batch], strict=True)
                ]
                yield Figures(batch=batch, size=len(group[0]) + tokens) | told_apart(again)


def generated(server: OpenAIServer, prompt: Sequence[int], count: int, alternatives: int) -> Output:
    """Return a greedy output, one token at a time unless the server speculates.

    Raises:
        ValueError: The server does not name the tokens, or two of each place with their log-probabilities.
    """
    choice = server.ask(
        server.body(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True))
        | {"logprobs": alternatives, "return_token_ids": True, "return_tokens_as_token_ids": True}
    )
    places = _places(server, choice)
    if not places:
        raise ValueError(f"the server at {server.address} returns no log-probabilities of what it generates")
    tokens, names = choice["token_ids"] or [], _names(choice["logprobs"])
    if not len(tokens) == len(names) == len(places):
        raise ValueError(
            f"the server at {server.address} does not return the ids of all tokens, so the same tokens cannot be given "
            f"back to it: vLLM, SGLang and experiments.serve return them, llama.cpp none of a character's parts"
        )
    for name, place in zip(names, places, strict=True):
        if len(place) < 2:
            raise ValueError(
                f"the server at {server.address} does not tell of two tokens at every place, as a margin needs: let it "
                f"tell more (vLLM: --max-logprobs 20), or start it without speculation (llama.cpp)"
            )
        if place.get(name, -inf) < max(place.values()):
            raise ValueError(f"the server at {server.address} does not take the likeliest token at temperature=0")
    return Output(tokens, names, places)


def rescored(server: OpenAIServer, prompt: Sequence[int], output: Sequence[int], alternatives: int) -> list[Place]:
    """Return what the server says of an output's places when it is given what stands before each as one text.

    Raises:
        ValueError: It tells no log-probabilities of a prompt.
    """
    whole, first = [*prompt, *output], len(prompt)
    body = server.body(whole, SamplingParams(max_new_tokens=1, ignore_eos=True)) | {"return_tokens_as_token_ids": True}
    said = ""
    for form in ({"prompt_logprobs": alternatives}, {"echo": True, "logprobs": alternatives}):
        try:
            choice = server.ask(body | form)
        except RefusedError as error:
            said = f" ({error})"
            continue
        if "content" in (choice.get("logprobs") or {}):  # llama.cpp tells of no prompt: a request for every place
            again = body | {"logprobs": alternatives, "cache_prompt": False}
            texts = [whole[:end] for end in range(first, len(whole))]
            return [_places(server, server.ask(again | {"prompt": text}))[0] for text in texts]
        told = choice.get("prompt_logprobs")
        if told is not None:
            choice = {"logprobs": {"top_logprobs": [_of_ranks(each) for each in told]}}
        places = _places(server, choice)
        if len(places) >= len(whole):
            return places[first : len(whole)]
    raise ValueError(
        f"the server at {server.address} tells no log-probabilities of a prompt, by prompt_logprobs or by echo: vLLM "
        f"and experiments.serve do{said}"
    )


def told_apart(pairs: Sequence[tuple[Output, Sequence[Place]]]) -> Figures:
    """Return how log-probabilities differ from those of generated tokens, in the form of ``compared``.

    ``logits`` is the share of log-probabilities that both sides tell, and that differ. There are no ``bits``. ``lost``
    is a lower bound: what is not told counts as one token.
    """
    margins, flips, told, changed, largest, lost = [], [], 0, 0, 0.0, 0.0
    for output, other in pairs:
        margins.append([])
        flips.append([])
        for own, one, two in zip(output.names, output.places, other, strict=False):
            both = [(value, two[name]) for name, value in one.items() if name in two]
            told, changed = told + len(both), changed + sum(a != b for a, b in both)
            largest = max([largest, *(abs(a - b) for a, b in both)])
            kept = [[exp(value) for value in side] for side in zip(*both, strict=True)] or [[], []]
            rest = [max(1 - sum(side), 0.0) for side in kept]
            lost += (sum(abs(p - q) for p, q in zip(*kept, strict=True)) + abs(rest[0] - rest[1])) / 2
            first, second = sorted(one.values(), reverse=True)[:2]
            margins[-1].append(first - second)
            flips[-1].append(two.get(own, -inf) < max(two.values()))
    if not told:
        raise ValueError("the server spells the tokens of a prompt otherwise than those that it generates")
    figures = counted(margins, flips)
    return Figures(logits=changed / told, bits=None, largest=largest, lost=lost / figures.places) | figures


def _as_far_as_alike(one: Output, other: Output) -> list[Place]:
    """The other one's places behind the same text."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    return other.places[: next((at + 1 for at, (a, b) in pairs if a != b), None)]


def _places(server: OpenAIServer, choice: Mapping[str, Any]) -> list[Place]:
    """The places of a choice with log-probabilities, in OpenAI's form or in llama.cpp's, which is that of chats."""
    told = choice.get("logprobs") or {}
    try:
        if "content" in told:
            return [{_key(each["id"]): float(each["logprob"]) for each in at["top_logprobs"]} for at in told["content"]]
        return [
            {str(name): float(value) for name, value in (at or {}).items()} for at in told.get("top_logprobs") or ()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the server at {server.address} has log-probabilities in an unknown form: {error}") from error


def _of_ranks(place: Mapping[str, Any] | None) -> dict[str, Any]:
    """A place of a prompt in vLLM's form, in the form of an output's."""
    return {_key(int(token)): each["logprob"] for token, each in (place or {}).items()}


def _names(told: Mapping[str, Any]) -> list[str]:
    """The generated tokens, as they are called beside their log-probabilities."""
    return [_key(at["id"]) for at in told["content"]] if "content" in told else list(map(str, told.get("tokens") or ()))


def _key(token: int) -> str:
    return f"{ID}{token}"
