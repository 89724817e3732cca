"""Two methods on one prompt, each alone on the machine, with the time at which every round ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.results.sources import Source
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.types import Step


@dataclass(frozen=True)
class Emitted:
    """A token of an output.

    Attributes:
        token: Its id.
        source: Where it came from.
        seconds: When its round ended, from when the request took its slot.
    """

    token: int
    source: Source
    seconds: float


@dataclass(frozen=True)
class Lane:
    """One method's course.

    Attributes:
        method: Its name.
        tokens: Its output.
        rounds: How many target forwards it took.
        seconds: How long it took, prefill included.
    """

    method: str
    tokens: tuple[Emitted, ...]
    rounds: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


def run_lane(method: str, engine: Engine, prompt: Sequence[int], sampling: SamplingParams, *, speculate: bool) -> Lane:
    """Decode a prompt twice, and return the second course: the first one warms up.

    Raises:
        RuntimeError: The request ended in an error.
    """
    once = replace(sampling, n=1, stream=0)
    engine.generate([prompt], once, speculate=speculate)
    steps = list(engine.stream([list(prompt)], once, speculate=speculate))
    if steps[-1].finish_reason == "error":
        raise RuntimeError(f"{method}: {steps[-1].error}")
    tokens = [
        Emitted(token, _source(step, place), step.elapsed)
        for step in steps
        for place, token in enumerate(step.token_ids)
    ]
    return Lane(method, tuple(tokens), len(steps), steps[-1].elapsed)


def _source(step: Step, place: int) -> Source:
    """The source of one of a round's tokens; a recovered and a bonus token look the same here: drawn by the rule."""
    if place < step.accepted:
        return Source.ACCEPTED
    return Source.EITHER if step.proposed_nodes else Source.TARGET
