"""What a user asks for: sampling parameters, and the request that carries them through the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.random import fresh_seed

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, for target and drafter alike."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most probable tokens; 0 keeps all. Ties keep the lower id.
        top_p: Keep the fewest most probable tokens whose mass reaches it, in (0, 1]. After top-k.
        min_p: Drop tokens below this fraction of the most probable one, in [0, 1]. After top-p.
        repetition_penalty: Divides positive logits, multiplies negative ones, of every token in prompt or output
            (Keskar et al. 2019); 1 is off.
        max_new_tokens: Length of the output at most.
        stop: Strings (or one) that end the output, and are left out of its text. Kept as a tuple.
        stop_token_ids: Tokens that end the output, besides the target's EOS.
        ignore_eos: Go on after EOS.
        n: Samples per prompt.
        seed: Of the random numbers; None draws one, which the request records.
        stream: Which of the seed's independent streams; None means the request's index in its call.
        logits_processor: transformers' ``LogitsProcessor`` (or any callable of its form), or a sequence of them,
            applied after the repetition penalty and before the temperature, at every node on its own path
            (``specdec.engine.processors``: exact, but a slow path). Kept as a tuple.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = 0
    stream: int | None = None
    logits_processor: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        given = self.logits_processor
        if given is not None:
            # transformers' LogitsProcessorList is a list that is callable, too: take it apart.
            several = tuple(given) if isinstance(given, Sequence) else (given,)
            object.__setattr__(self, "logits_processor", several or None)
        infinity = float("inf")
        temperature, penalty, processors = self.temperature, self.repetition_penalty, self.logits_processor
        for wrong, message in (
            (not 0 <= temperature < infinity, f"{temperature=}: give 0 (greedy) or a positive number"),
            (self.top_k < 0, f"top_k={self.top_k}: give 0 (off) or a positive count"),
            (not 0 < self.top_p <= 1, f"top_p={self.top_p}: give a mass in (0, 1]"),
            (not 0 <= self.min_p <= 1, f"min_p={self.min_p}: give a fraction in [0, 1]"),
            (not 0 < penalty < infinity, f"repetition_penalty={penalty}: give a positive number, 1 is off"),
            (self.max_new_tokens < 1, f"max_new_tokens={self.max_new_tokens}: give at least 1"),
            (self.n < 1, f"n={self.n}: give at least 1 sample per prompt"),
            (not _is_int64(self.seed), f"seed={self.seed}: give a 64-bit integer (signed) or None"),
            (not _is_int64(self.stream), f"stream={self.stream}: give a 64-bit integer (signed) or None"),
            ("" in self.stop, "stop contains an empty string, which would end every output at once: remove it"),
            (any(not isinstance(s, str) for s in self.stop),
             f"stop={self.stop!r}: give strings; tokens go into stop_token_ids"),
            (any(not callable(p) for p in processors or ()),
             f"logits_processor={processors!r}: give callables of input_ids and scores"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(message)

    @property
    def processors(self) -> tuple[Callable[..., Any], ...]:
        """The logits processors as a tuple."""
        return self.logits_processor or ()

    @property
    def greedy(self) -> bool:
        """Whether the temperature is (next to) zero."""
        return self.temperature < GREEDY_BELOW

    def seeded(self, index: int) -> "SamplingParams":
        """The same with seed and stream filled in, for the request of this index in its call."""
        return replace(
            self,
            seed=fresh_seed() if self.seed is None else self.seed,
            stream=index if self.stream is None else self.stream,
        )


def _is_int64(number: int | None) -> bool:
    return number is None or -(2**63) <= number < 2**63


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    Attributes:
        id: Given by the engine.
        prompt_ids: The prompt's tokens, at least one.
        sampling: With seed and stream filled in.
        speculate: False decodes plainly.
        stop_ids: Every token that ends it.
        output_ids: Tokens so far.
        slot: Its slot while it is running.
        prefilled: Prompt tokens whose keys and values are in the cache.
        rounds: Verify forwards so far.
    """

    id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    speculate: bool
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    slot: int = -1
    prefilled: int = 0
    rounds: int = 0

    @property
    def remaining(self) -> int:
        """Tokens still wanted."""
        return self.sampling.max_new_tokens - len(self.output_ids)
