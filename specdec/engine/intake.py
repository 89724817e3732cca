"""From prompts to requests: everything is checked before any work starts."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from specdec.arguments import flag, instance, number
from specdec.engine.prompts import Prompt, encode, list_prompts
from specdec.requests import Matcher, Request, SamplingParams
from specdec.target.target import Target


class Intake:
    """Makes requests for an engine.

    Args:
        max_length: The largest number of tokens of prompt and output together.
        can_speculate: Whether the engine has a drafter.
        exact: Whether its rule follows the target's distribution.
    """

    def __init__(self, target: Target, *, max_length: int, can_speculate: bool, exact: bool = True):
        self._target = target
        self._max_length = max_length
        self._can_speculate, self._exact = can_speculate, exact
        self._ids: Iterator[int] = count()

    def requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        speculate: bool,
    ) -> list[Request]:
        """Returns the requests of an ``Engine.generate``, in the prompts' order, the samples of a prompt side by side.

        Raises:
            ValueError: A prompt or its parameters do not fit; names the prompt.
        """
        arrived = time.perf_counter()
        speculate = flag("speculate", speculate)
        listed = list_prompts(prompts)
        params = _each(sampling, len(listed))
        made: list[Request] = []
        for index, (prompt, wanted) in enumerate(zip(listed, params, strict=True)):
            try:
                for sample in range(wanted.n):
                    # Further samples of a given stream get streams of their own, far from those of other prompts.
                    stream = len(made) if wanted.stream is None else wanted.stream + (sample << 40)
                    own = replace(wanted, stream=stream)
                    made.append(self._request(prompt, own, arrived, speculate=speculate))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return made

    def request(
        self, prompt: Prompt, sampling: SamplingParams, *, speculate: bool, arrived: float | None = None
    ) -> Request:
        """Returns one request, whose id is also its default stream; see ``Engine.submit``.

        Raises:
            ValueError: The prompt or the parameters do not fit.
        """
        arrived = time.perf_counter() if arrived is None else number("arrived", arrived)
        speculate = flag("speculate", speculate)
        _check_sampling("sampling", sampling)
        if sampling.n != 1:
            raise ValueError(
                f"n={sampling.n}: submit takes one sample per call; use generate, or submit it {sampling.n} times"
            )
        return self._request(prompt, sampling, arrived, speculate=speculate)

    def matcher(self, sampling: SamplingParams, *, speculate: bool) -> Matcher | None:
        """Returns a matcher that follows a request's output in its grammar; None without one."""
        if sampling.grammar is None:
            return None
        if speculate and self._can_speculate and not self._exact:
            raise ValueError(
                "a grammar needs a rule that follows the target's distribution, and this engine's may accept tokens "
                "that the grammar forbids: use an exact rule, or speculate=False"
            )
        return self._target.grammars.matcher(sampling.grammar, self._stop_ids(sampling))

    def adapter(self, sampling: SamplingParams) -> int:
        """Returns the number of a request's adapter."""
        if self._target.adapters is not None:
            return self._target.adapters.number(sampling.adapter)
        if sampling.adapter is not None:
            raise ValueError(
                f"adapter={sampling.adapter!r}: the target has none; load it with adapters={{name: folder}}"
            )
        return 0

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._target.eos_token_ids)

    def _request(self, prompt: Prompt, sampling: SamplingParams, arrived: float, *, speculate: bool) -> Request:
        begin = time.perf_counter()  # other prompts of the call may have been before it
        target = self._target
        ids = encode(target.tokenizer, prompt)
        wrong = [token for token in ids if not 0 <= token < target.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the target's vocabulary of {target.vocab_size}")
        if len(ids) + sampling.max_new_tokens > self._max_length:
            raise ValueError(
                f"{len(ids)} prompt tokens + max_new_tokens={sampling.max_new_tokens} exceed the engine's "
                f"max_length={self._max_length}: shorten either, or raise max_length "
                f"(the model has {target.max_length} positions)"
            )
        if (sampling.logprobs or 0) > target.vocab_size:
            raise ValueError(
                f"logprobs={sampling.logprobs}: the target has {target.vocab_size} tokens, so ask for fewer"
            )
        if sampling.stop and target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the Target one, or use stop_token_ids")
        matcher = self.matcher(sampling, speculate=speculate)
        identity = next(self._ids)
        return Request(
            id=identity,
            prompt_ids=ids,
            sampling=sampling.seeded(identity),
            speculate=speculate and self._can_speculate,
            stop_ids=self._stop_ids(sampling),
            matcher=matcher,
            adapter=self.adapter(sampling),
            arrived=arrived,
            ingestion=time.perf_counter() - begin,
        )


def _each(sampling: Any, count: int) -> list[SamplingParams]:
    """Returns the parameters of every prompt.

    Raises:
        ValueError: They are no SamplingParams, or not as many as there are prompts.
    """
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if isinstance(sampling, str | Mapping) or not isinstance(sampling, Iterable):
        _check_sampling("sampling", sampling)
    params: list[Any] = list(sampling)
    for index, each in enumerate(params):
        _check_sampling(f"sampling {index}", each)
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} SamplingParams: give one for all, or one each")
    return params


def _check_sampling(name: str, sampling: Any) -> None:
    """Refuse anything that is not SamplingParams."""
    remedy = "SamplingParams(…)"
    if isinstance(sampling, Mapping) and sampling:
        remedy = f"SamplingParams({', '.join(f'{key}=…' for key in sampling)})"
    elif any(kind.__name__ == "GenerationConfig" for kind in type(sampling).__mro__):
        remedy = "specdec.generation.from_generation_config(…)"
    instance(name, sampling, SamplingParams, remedy)
