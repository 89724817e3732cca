"""Another engine, so that the measuring loop can treat it like this one."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from experiments.results.records import DECLARED
from specdec.engine.text import Detokenizer, unseen_tokens
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Completion, Step, Timestamps


class OtherEngine(ABC):
    """An engine that is not ours, decoding with the same target.

    Its outputs count like all others: same prompts, same tokens, the wall time of the whole call. What happens inside
    it is known as far as it says so: where it reports no rounds, a figure that needs them is a dash.

    Attributes:
        exactness: What its authors promise about the output, in the words of ``Record.exactness``. Of one that rounds
            otherwise than ours, greedy outputs that are equal are only counted.
        tells_tokens: Whether the tokens of its outputs are its own. Else they are made from its text again, and are
            not compared with plain decoding's token for token.
        apart: It has memory of its own, and is started, measured over all prompts and stopped before the next one.
        failure: Why it could not be started; empty if it could, or was not tried.
        about: What it is, and the packages that it runs on, with their versions; empty if it does not say.
        start_seconds: How long it took to start, which no measured time contains; None for an engine of this process.
    """

    exactness: str = DECLARED
    tells_tokens = True
    apart = False
    failure = ""
    about = ""
    start_seconds: float | None = None
    verifier = None
    target: Target
    max_batch_size: int
    max_length: int

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Prepare for a run of calls of so many prompts, each of so many tokens, its output included."""
        self.target, self.max_batch_size, self.max_length = target, max_batch_size, max_length
        self.check()

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise ValueError, before any measurement, if it cannot decode with this target in batches of this size."""

    def check_sampling(self, sampling: SamplingParams) -> None:  # noqa: B027 - most have nothing to check
        """Raise ValueError, before any measurement, if it does not follow the target with such parameters."""

    def start(self) -> None:  # noqa: B027 - most live in this process
        """Load the target where it decodes. Raises ValueError: it cannot."""

    def stop(self) -> None:  # noqa: B027 - most live in this process
        """Give the memory back; ``start`` begins anew."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
    ) -> list[Completion]:
        """Decode prompts, at most ``max_batch_size`` of them, and return their completions in order.

        Args:
            speculate: Our engine's switch, which means nothing here.
        """

    def ends(self, sampling: SamplingParams) -> set[int]:
        """The tokens that end an output."""
        tokenizer = self.target.tokenizer
        unseen = unseen_tokens(tokenizer) if sampling.stop and tokenizer is not None else {}
        ends = {unseen[string] for string in sampling.stop if string in unseen}
        return ends.union(sampling.stop_token_ids, () if sampling.ignore_eos else self.target.eos_token_ids)

    def completion(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        output: Sequence[int],
        rounds: Sequence[int] = (),
        moments: Sequence[float] = (),
    ) -> Completion:
        """The completion of an output, cut at stop tokens, stop strings and the length like our engine's.

        Args:
            rounds: Tokens per round, the last one's before any cut if that is known; empty if the engine does not say.
            moments: When it was asked, and when each round's tokens came (``time.perf_counter``); empty if unknown.
        """
        output, ends = list(output)[: sampling.max_new_tokens], self.ends(sampling)
        stop = next((index + 1 for index, token in enumerate(output) if token in ends), None)
        tokens = output[:stop]
        text = Detokenizer(self.target.tokenizer, prompt, stop=tuple(sampling.stop))
        shown = text.push(tokens)
        if text.stopped_at is not None:
            tokens, stop = tokens[: text.stopped_at], text.stopped_at
        # What was drafted is not known: its depth is 0. An engine may go on behind the end.
        steps: list[Step] = []
        for number, (count, end) in enumerate(zip(rounds, accumulate(rounds), strict=True)):
            if part := tokens[end - count : end]:
                told = {"accepted": count - 1, "expected_accepted": float(count - 1)}
                visible = moments[1 + number] if moments else 0.0
                steps.append(Step(request=0, round=number, token_ids=tuple(part), visible=visible, **told))
        if steps and moments:
            times: dict[str, Any] = {"arrived": moments[0], "admitted": moments[0], "prefilled": moments[1]}
            known = Timestamps(**times, finished=steps[-1].visible, ingestion=0.0)
            steps[-1] = replace(steps[-1], timestamps=known)
        return Completion(
            prompt_ids=tuple(prompt),
            token_ids=tuple(tokens),
            text=shown + text.flush(),
            finish_reason="length" if stop is None else "stop",
            steps=tuple(steps),
        )


def seed_of(sampling: Sequence[SamplingParams]) -> int:
    """One seed of 63 bits, from the seeds and streams of all rows."""
    text = " ".join(f"{each.seed},{each.stream}" for each in sampling)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
