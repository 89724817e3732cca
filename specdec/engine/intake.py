"""From prompts to requests: everything is checked before any work starts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from specdec.engine.text import encode_prompt
from specdec.modeling.target import Target
from specdec.requests import Request, SamplingParams

Prompt = str | Sequence[int]


class Intake:
    """Makes requests for an engine.

    Args:
        target: Encodes prompts, and knows the tokens that end an output.
        max_length: The largest number of tokens of prompt and output together.
        can_speculate: Whether the engine has a drafter.
    """

    def __init__(self, target: Target, *, max_length: int, can_speculate: bool):
        self._target = target
        self._max_length = max_length
        self._can_speculate = can_speculate
        self._ids: Iterator[int] = count()

    def requests(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams], *, speculate: bool
    ) -> list[Request]:
        """Returns the requests of a call, in the prompts' order, the samples of a prompt side by side.

        Raises:
            ValueError: A prompt or its parameters do not fit; names the prompt.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is one string: give a list of prompts")
        if any(isinstance(prompt, int) for prompt in prompts):
            raise ValueError(
                "prompts is a flat list of token ids: give a list of prompts, such as [[1, 2, 3]] for a single one"
            )
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} SamplingParams: give one for all, or one each")
        made: list[Request] = []
        for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                for sample in range(wanted.n):
                    # Further samples of a given stream get streams of their own, far from those of other prompts.
                    stream = len(made) if wanted.stream is None else wanted.stream + (sample << 40)
                    made.append(self._request(prompt, replace(wanted, stream=stream), speculate=speculate))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from error
        return made

    def request(self, prompt: Prompt, sampling: SamplingParams, *, speculate: bool) -> Request:
        """Returns one request, whose id is also its default stream.

        Raises:
            ValueError: The prompt or the parameters do not fit.
        """
        if sampling.n != 1:
            raise ValueError(
                f"n={sampling.n}: submit takes one sample per call; use generate, or submit it {sampling.n} times"
            )
        return self._request(prompt, sampling, speculate=speculate)

    def _request(self, prompt: Prompt, sampling: SamplingParams, *, speculate: bool) -> Request:
        target = self._target
        ids = encode_prompt(target.tokenizer, prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
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
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= target.eos_token_ids
        number = next(self._ids)
        return Request(
            id=number,
            prompt_ids=ids,
            sampling=sampling.seeded(number),
            speculate=speculate and self._can_speculate,
            stop_ids=stop_ids,
        )
