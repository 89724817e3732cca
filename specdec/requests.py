"""What a user asks for: sampling parameters, and the request that carries them through the engine."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32

from specdec.arguments import flag, instance, number, shown, text, whole, wholes
from specdec.random import fresh_seed

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, for targets and drafters."""

_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "deadline")
_INT64 = -(2**63), 2**63 - 1
_RANGES: dict[str, tuple[float, float, str]] = {
    # A larger number would be infinite in float32, which the temperatures of a batch are.
    "temperature": (0, (2 - 2**-23) * 2.0**127, "0 (greedy) or a positive number, at most 3.4e38"),
    "top_k": (0, _INT64[1], "a positive count below 2**63, or 0 (off)"),
    "top_p": (5e-324, 1, "a mass in (0, 1]"),
    "min_p": (0, 1, "a fraction in [0, 1]"),
    # Even a logit of 65504 (float16's largest), penalized so and divided by the smallest temperature, is finite.
    "repetition_penalty": (1e-20, 1e20, "a number from 1e-20 to 1e20; 1 is off"),
    "presence_penalty": (-2, 2, "a number from -2 to 2; 0 is off"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2; 0 is off"),
    "max_new_tokens": (1, math.inf, "a whole number of at least 1"),
    "min_new_tokens": (0, math.inf, "a whole number of at least 0"),
    "n": (1, math.inf, "at least 1 sample per prompt, a whole number"),
    "seed": (*_INT64, "a 64-bit integer (signed) or None"),
    "stream": (*_INT64, "a 64-bit integer (signed) or None"),
    "logprobs": (0, math.inf, "a count of tokens from 0 on, or None"),
    "priority": (-math.inf, math.inf, "a whole number, without a decimal point"),
    "deadline": (0, math.inf, "seconds after the arrival, or None"),
}
"""Smallest and largest value of every number in the parameters, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The language that an output must belong to, given in one of three ways; xgrammar reads them.

    Attributes:
        json_schema: A JSON schema, as a mapping or as JSON; kept as JSON.
        regex: A regular expression for the whole output.
        ebnf: Rules in xgrammar's EBNF, of which the first is ``root``.
        mask_drafts: Whether drafting models choose only tokens that the grammar allows at their node. Both ways are
            exact. Under the mask more drafts are accepted, and the host is asked at every depth.
        any_whitespace: Whether there may be any whitespace between the parts of JSON, which small models may go on
            writing to the end; False: one space behind commas and colons.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    mask_drafts: bool = True
    any_whitespace: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        ways = [name for name in ("json_schema", "regex", "ebnf") if getattr(self, name) is not None]
        if len(ways) != 1:
            raise ValueError(
                f"a grammar is given as {' and '.join(ways) or 'nothing'}: give json_schema, regex or ebnf"
            )
        text(f"grammar.{ways[0]}", getattr(self, ways[0]))
        for name in ("mask_drafts", "any_whitespace"):
            object.__setattr__(self, name, flag(f"grammar.{name}", getattr(self, name)))

    @property
    def written(self) -> str:
        return str(self.json_schema or self.regex or self.ebnf)

    @classmethod
    def of(cls, grammar: Any) -> "Grammar":
        """Returns a grammar, or one of its fields: ``{"regex": "[0-9]+"}``."""
        remedy = "a Grammar, or one of {json_schema: …}, {regex: …} and {ebnf: …}"
        if isinstance(grammar, Mapping):
            try:
                return cls(**grammar)
            except TypeError as error:
                raise ValueError(f"grammar={shown(dict(grammar))}: give {remedy}") from error
        instance("grammar", grammar, cls, remedy)
        return grammar


class Matcher(ABC):
    """Where a request's output has come to in its grammar; ``masks_drafts`` as in ``Grammar``."""

    masks_drafts: bool

    @abstractmethod
    def masks(
        self, tokens: Int[np.ndarray, " node"], paths: Bool[np.ndarray, "some node"]
    ) -> Int32[np.ndarray, "some word"]:
        """Returns which tokens may follow some nodes of a tree whose root is the output's last token: a bit each.

        ``paths`` marks the nodes that are above or at each of them.
        """

    @abstractmethod
    def follow(self, tokens: Sequence[int]) -> str | None:
        """Go on by tokens of the output; returns what is wrong if the grammar does not allow them, or ends nowhere."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most probable tokens; 0 keeps all. In ties the lower id wins.
        top_p: Keep the most probable tokens that together reach this probability. Applied after top-k.
        min_p: Drop tokens less probable than this fraction of the most probable one. Applied after top-p.
        repetition_penalty: Divides positive logits, multiplies negative ones, of every token in prompt or output
            (Keskar et al. 2019); 1 is off.
        presence_penalty: Is subtracted from the logit of every token in the output so far, the prompt apart.
        frequency_penalty: The same times the number of times that the token is there.
        logit_bias: Is added before all penalties: -100 to 100, or -inf, by token id. Kept as a tuple of pairs.
        bad_words_ids: Sequences of tokens that must not come, as in transformers (a string, as in vLLM, has several
            spellings). One of several tokens goes the slow way of a ``logits_processor``. Kept as tuples.
        min_new_tokens: What would end the output earlier is forbidden, unless a grammar or a processor leaves nothing
            else; stop strings count only behind so many tokens.
        stop: One string or several that end the output and are left out of its text, which shows no special tokens: one
            of these may be given as a string by itself. Kept as a tuple.
        stop_token_ids: Tokens that end the output, besides the target's EOS.
        n: Samples per prompt.
        seed: Seed of the random numbers; None draws one, which the request records.
        stream: Which of the seed's independent streams of numbers to use; None means the request's index in its call.
        logprobs: The number of most probable tokens to return at every output token's place, with their
            log-probabilities before all processing (``Step.top_logprobs``, ``Step.raw_logprobs``); 0 returns the
            output token's alone, None neither. It costs a pass over the vocabulary per round.
        logits_processor: transformers' ``LogitsProcessor`` (or any callable of its form), or a sequence of them,
            applied after the repetition penalty and before the temperature, at every node on its own path
            (``specdec.engine.processors``: exact, but a slow path). Kept as a tuple.
        grammar: The ``Grammar`` (or its fields) that the output must belong to: a mask at every node, on its own path,
            after all processors. A token that ends the request is allowed where the grammar may end, and nowhere else.
        adapter: The name of one of the target's adapters, whose law the output follows; None for the target's own.
        priority: Lower ones are served first, by schedulers that know priorities.
        deadline: Seconds after its arrival by which a request should have ended, for schedulers that know deadlines;
            None for no deadline. It is never dropped for being late.

    numpy's numbers are accepted and turned into Python's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = 0
    stream: int | None = None
    logprobs: int | None = None
    logits_processor: Any = None
    grammar: Any = None
    adapter: str | None = None
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name, (low, high, remedy) in _RANGES.items():
            value = getattr(self, name)
            if value is None and remedy.endswith("or None"):
                continue
            value = (number if name in _REAL else whole)(name, value, remedy=f"give {remedy}")
            if not low <= value <= high:
                raise ValueError(f"{name}={value}: give {remedy}")
            object.__setattr__(self, name, value)
        processors = () if self.logits_processor is None else self.logits_processor
        # transformers' LogitsProcessorList is a list that is callable, too: take it apart.
        processors = tuple(processors) if isinstance(processors, Sequence) else (processors,)
        if any(not callable(processor) or isinstance(processor, type) for processor in processors):
            raise ValueError(
                f"logits_processor={processors!r} has a class itself, or what cannot be called: give callables of "
                f"input_ids and scores, such as an instance with its arguments"
            )
        if self.adapter is not None:
            text("adapter", self.adapter, "give the name of one of the target's adapters, or None")
        for name, value in {
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "stop": _strings(self.stop),
            "stop_token_ids": wholes("stop_token_ids", self.stop_token_ids, "give token ids; strings go into stop"),
            "logit_bias": _biases(self.logit_bias),
            "bad_words_ids": _words(self.bad_words_ids),
            "logits_processor": processors or None,
            "grammar": None if self.grammar is None else Grammar.of(self.grammar),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def processors(self) -> tuple[Callable[..., Any], ...]:
        return self.logits_processor or ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def seeded(self, index: int) -> "SamplingParams":
        """Returns the parameters with seed and stream filled in, for the request of this index in its call."""
        if self.seed is not None and self.stream is not None:
            return self
        seed = fresh_seed() if self.seed is None else self.seed
        return replace(self, seed=seed, stream=index if self.stream is None else self.stream)


def _strings(stop: object) -> tuple[str, ...]:
    several = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else None
    if several is None or any(not isinstance(string, str) or not string for string in several):
        raise ValueError(f"stop={stop!r}: give strings, none of them empty; tokens go into stop_token_ids")
    return several


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    name, remedy = "logit_bias", "give numbers from -100 to 100, or -inf, by token id: {13: -5.0}"
    try:
        pairs = dict(given or ()).items()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={shown(given)}: {remedy}") from error
    ids = [whole(name, token, least=0, remedy=remedy, few=remedy) for token, _ in pairs]
    values = [number(name, value, remedy, lambda v: -100 <= v <= 100 or v == -math.inf) for _, value in pairs]
    return tuple(zip(ids, values, strict=True))


def _words(given: Any) -> tuple[tuple[int, ...], ...]:
    remedy = "give sequences of token ids, such as [[13], [5, 7]]"
    words = [wholes("bad_words_ids", word, remedy) for word in (given if isinstance(given, Iterable) else [given])]
    if not all(words):
        raise ValueError(f"bad_words_ids={shown(given)}: {remedy}")
    return tuple(words)


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine. Times are on the clock of ``time.perf_counter``, 0 before."""

    id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams  # with seed and stream filled in
    speculate: bool
    stop_ids: frozenset[int]  # every token that ends it
    matcher: Matcher | None = None  # where its output is in its grammar
    adapter: int = 0  # the number of its adapter, 0 for none
    output_ids: list[int] = field(default_factory=list)
    slot: int = -1
    prefilled: int = 0  # tokens put into the cache before its rounds began, after a preemption of the output too
    to_prefill: int = field(init=False)  # tokens still to be put there before it can take part in a round
    pages: int = 0  # that it holds; 0 where every slot has its own row
    rounds: int = 0  # verify forwards so far
    computed: int = 0  # tokens, the first ones, that have been in the cache at some time
    reused: int = 0  # tokens found in the cache when it was first admitted
    recomputed: int = 0  # see ``Timestamps``, like the next two, ``preempted`` and ``ingestion``
    swapped: int = 0
    swap_seconds: float = 0.0
    preemptions: int = 0
    preempted_at: float = 0.0
    preempted: float = 0.0
    arrived: float = 0.0
    admitted: float = 0.0
    prefill_ended: float = 0.0
    ingestion: float = 0.0
    detokenizer: Any = None  # makes text of its output
    drafted: bool = False  # the drafting session has admitted it
    stale: bool = False  # the weights have changed since it was admitted
    reach: int = 0  # how far its prompt was written into the cache, padding included

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Note that nothing of the request is in the cache."""
        self.slot, self.pages, self.prefilled, self.to_prefill = -1, 0, 0, self.length - 1
        self.drafted, self.stale, self.reach = False, False, 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far: everything that must be in the cache before the next round, but the last token."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        return self.sampling.max_new_tokens - len(self.output_ids)
