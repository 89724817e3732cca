"""Requests: their classes, lengths, priorities and common beginnings."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from experiments.datasets.joined import Pieces, Texts
from experiments.load.run import Frame
from specdec.arguments import number
from specdec.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What one request asks for."""

    klass: str  # that it is reported under
    pieces: Pieces  # of its prompt
    output_tokens: int
    priority: int = 0  # see ``SamplingParams``, like the next one
    deadline: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)


class Workload(ABC):
    """Plans requests. The same seed gives the same requests to every method and at every rate."""

    @abstractmethod
    def plan(self, rng: np.random.Generator, count: int, recorded: Frame | None = None) -> list[Planned]:
        """Return what the first ``count`` requests ask for; ``recorded`` is the ``Trace`` that they arrive by."""


@dataclass(frozen=True, kw_only=True)
class Klass:
    """Requests of one kind."""

    share: float = 1.0  # how many there are, relative to the other classes
    input: int = 128  # tokens of the prompt, on average
    output: int = 64  # tokens of the answer, on average
    spread: float = 0.0  # standard deviation of both lengths over their mean, which are log-normal; 0: all alike
    priority: int = 0  # lower is served first, by schedulers that know priorities
    deadline: float | None = None  # seconds after arrival, for schedulers that know deadlines

    @classmethod
    def of(cls, settings: Any, where: str) -> "Klass":
        """Return a class from its fields. Raises ValueError: names the one that there is not, or that is too low."""
        for name, value in dict(settings).items():
            if name not in (known := [one.name for one in fields(cls)]):
                raise ValueError(f"there is no {where}.{name}: choose among {', '.join(known)}")
            least = {"share": 0, "spread": 0, "priority": -np.inf, "deadline": 0}.get(name, 1)
            if value is not None or name != "deadline":
                number(f"{where}.{name}", value, f"give a number of at least {least}", lambda at, low=least: at >= low)
        return cls(**settings)

    def length(self, mean: int, z: float) -> int:
        """Return a length with a log-normal distribution, from a standard normal number."""
        variance = np.log1p(self.spread**2)
        return max(1, round(float(mean * np.exp(np.sqrt(variance) * z - variance / 2))))


class Mix(Workload):
    """Requests of one class or of several.

    Args:
        classes: By name, the fields of ``Klass``.
    """

    def __init__(self, classes: Mapping[str, Any]):
        self.classes = {str(name): Klass.of(given, f"workload.classes.{name}") for name, given in classes.items()}
        if not sum(kind.share for kind in self.classes.values()):
            raise ValueError("workload.classes: no class has a share of the requests: give one a share above 0")

    def plan(self, rng: np.random.Generator, count: int, recorded: Frame | None = None) -> list[Planned]:
        kinds = list(self.classes.items())
        shares = np.array([kind.share for _, kind in kinds], dtype=np.float64)
        drawn = rng.choice(len(kinds), count, p=shares / shares.sum())
        noise = rng.standard_normal((count, 2))
        return [
            Planned(
                klass=name,
                pieces=((index, kind.length(kind.input, noise[index, 0])),),
                output_tokens=kind.length(kind.output, noise[index, 1]),
                priority=kind.priority,
                deadline=kind.deadline,
            )
            for index, (name, kind) in enumerate(kinds[place] for place in drawn)
        ]


@dataclass(frozen=True, kw_only=True)
class Chats(Workload):
    """Conversations of several turns behind a few system prompts: prompts begin like earlier ones.

    Every request is the next turn of a conversation. What was said before, answers included, is written in advance, as
    in recorded traces. So the tokens of an earlier *answer* are found in a cache only if the target has answered the
    same.
    """

    systems: int = 2  # system prompts
    system: int = 192  # tokens of a system prompt
    turns: int = 4  # of a conversation
    said: int = 32  # tokens that a user says in a turn
    output: int = 32  # tokens of an answer
    open: int = 8  # conversations that go on side by side; whose turn is next is drawn

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"workload.{name}={value}: give at least 1")

    def plan(self, rng: np.random.Generator, count: int, recorded: Frame | None = None) -> list[Planned]:
        going: list[tuple[Pieces, int]] = []  # what was said so far, and turns so far
        planned = []
        for index in range(count):
            while len(going) < self.open:
                going.append((((int(rng.integers(self.systems)), self.system),), 0))
            place = int(rng.integers(self.open))
            before, turn = going.pop(place)
            number = self.systems + 2 * index
            prompt = (*before, (number, self.said))
            planned.append(Planned(klass=f"turn {turn + 1}", pieces=prompt, output_tokens=self.output))
            if turn + 1 < self.turns:
                going.append(((*prompt, (number + 1, self.output)), turn + 1))
        return planned


class AsRecorded(Workload):
    """Lengths as the trace has them that requests arrive by."""

    def plan(self, rng: np.random.Generator, count: int, recorded: Frame | None = None) -> list[Planned]:
        if recorded is None:
            raise ValueError("workload=trace takes its lengths from the arrivals: give arrival=trace")
        sizes = zip(recorded.inputs[:count].tolist(), recorded.outputs[:count].tolist(), strict=True)
        return [
            Planned(klass="trace", pieces=((index, tokens),), output_tokens=output)
            for index, (tokens, output) in enumerate(sizes)
        ]


def fitted(planned: Sequence[Planned], room: int, scale: float) -> tuple[list[Planned], int]:
    """Return requests as an engine with ``room`` positions takes them, and how many of them were cut.

    All lengths are multiplied by ``scale``. The answer of a request that has no room even so is cut to half of the
    room at most, and then its prompt to the rest, from its end on.
    """
    made, cut = [], 0
    for request in planned:
        pieces = tuple((number, max(1, round(tokens * scale))) for number, tokens in request.pieces)
        output, prompt = max(1, round(request.output_tokens * scale)), sum(tokens for _, tokens in pieces)
        if prompt + output > room:
            cut, output = cut + 1, min(output, max(room // 2, room - prompt))
            ends = np.cumsum([tokens for _, tokens in pieces]).clip(max=room - output)
            pieces = tuple((pieces[place][0], int(size)) for place, size in enumerate(np.diff(ends, prepend=0)) if size)
        made.append(replace(request, pieces=pieces, output_tokens=output))
    return made, cut


@dataclass(frozen=True)
class Asked:
    """A request with its tokens, ready for an engine."""

    planned: Planned
    prompt_ids: Sequence[int]
    sampling: SamplingParams


def ask(planned: Sequence[Planned], texts: Texts | None, sampling: SamplingParams) -> list[Asked]:
    """Return requests with their parameters, and with tokens if there are texts; the random stream is the number."""
    asked = []
    for stream, request in enumerate(planned):
        params = {"priority": request.priority, "deadline": request.deadline, "max_new_tokens": request.output_tokens}
        ids = () if texts is None else texts.prompt(request.pieces)
        asked.append(Asked(request, ids, replace(sampling, stream=stream, n=1, **params)))
    return asked
