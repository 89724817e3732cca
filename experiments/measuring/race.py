"""Two methods on one prompt, each alone on the machine, with the time at which every round ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.results.records import Source
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams

_WARM = 16  # tokens


@dataclass(frozen=True)
class Emitted:
    """A token of an output, its source, and the seconds from when the request took its slot to its round's end."""

    token: int
    source: Source
    seconds: float


@dataclass(frozen=True)
class Lane:
    """One method's course: its output, how many target forwards it took, and how long, prefill included."""

    method: str
    tokens: tuple[Emitted, ...]
    rounds: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


def run_lane(method: str, engine: Engine, prompt: Sequence[int], sampling: SamplingParams, *, speculate: bool) -> Lane:
    """Decode a prompt; the first tokens are decoded twice, to warm up."""
    once = replace(sampling, n=1, stream=0)
    engine.generate([prompt], replace(once, max_new_tokens=min(_WARM, once.max_new_tokens)), speculate=speculate)
    steps = list(engine.stream([list(prompt)], once, speculate=speculate))
    if steps[-1].finish_reason == "error":
        raise RuntimeError(f"{method}: {steps[-1].error}")
    tokens: list[Emitted] = []
    for step in steps:
        # A recovered and a bonus token look the same here: drawn by the rule.
        drawn = Source.EITHER if step.proposed_nodes else Source.TARGET
        for place, token in enumerate(step.token_ids):
            tokens.append(Emitted(token, Source.ACCEPTED if place < step.accepted else drawn, step.elapsed))
    return Lane(method, tuple(tokens), len(steps), steps[-1].elapsed)
