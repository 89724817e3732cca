"""What requests ask for, without texts: classes, lengths, priorities, and which beginnings prompts have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from experiments.load.recorded import BLOCK, Recorded

Pieces = tuple[tuple[int, int], ...]
"""The parts of a prompt in order: a number and a count of tokens each. Parts of one number begin alike."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What one request asks for.

    Attributes:
        klass: The class that it is reported under.
        pieces: The parts of its prompt.
        priority: See ``SamplingParams``, like the next two.
        deadline: Seconds.
        fits: Whether the engine has room for it; one that does not fit fails at once.
    """

    klass: str
    pieces: Pieces
    output_tokens: int
    priority: int = 0
    deadline: float | None = None
    user: str = ""
    fits: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(tokens for _, tokens in self.pieces)


class Workload(ABC):
    """Plans requests. The same seed gives the same requests to every method and at every rate."""

    @abstractmethod
    def plan(self, rng: np.random.Generator, count: int, recorded: Recorded | None = None) -> list[Planned]:
        """Return what the first ``count`` requests ask for.

        Args:
            recorded: The trace that they arrive by; None where they come by a process.
        """


@dataclass(frozen=True, kw_only=True)
class Klass:
    """Requests of one kind.

    Attributes:
        share: How many there are, relative to the other classes.
        input: Tokens of the prompt, on average.
        output: Tokens of the answer, on average.
        spread: Standard deviation of both lengths over their mean, which are log-normal; 0: all alike.
        priority: Lower is served first, by schedulers that know priorities.
        deadline: Seconds after arrival, for schedulers that know deadlines; None for none.
        users: The number of users who ask.
    """

    share: float = 1.0
    input: int = 128
    output: int = 64
    spread: float = 0.0
    priority: int = 0
    deadline: float | None = None
    users: int = 1

    @classmethod
    def of(cls, settings: Any, where: str) -> "Klass":
        """Return a class from its fields. Raises ValueError: names the one that there is not, or that is too low."""
        known = [one.name for one in fields(cls)]
        for name, value in dict(settings).items():
            if name not in known:
                raise ValueError(f"there is no {where}.{name}: choose among {', '.join(known)}")
            least = {"share": 0, "spread": 0, "priority": -np.inf, "deadline": 0}.get(name, 1)
            number = isinstance(value, int | float) and value >= least
            if not number and not (name == "deadline" and value is None):
                raise ValueError(f"{where}.{name}={value!r}: give a number of at least {least}")
        return cls(**settings)


class Mix(Workload):
    """Requests of one class or of several.

    Args:
        classes: By name, the fields of ``Klass``.
    """

    def __init__(self, classes: Mapping[str, Any]):
        self.classes = {str(name): Klass.of(given, f"workload.classes.{name}") for name, given in classes.items()}
        if not sum(kind.share for kind in self.classes.values()):
            raise ValueError("workload.classes: no class has a share of the requests: give one a share above 0")

    def plan(self, rng: np.random.Generator, count: int, recorded: Recorded | None = None) -> list[Planned]:
        kinds = list(self.classes.items())
        shares = np.array([kind.share for _, kind in kinds], dtype=np.float64)
        drawn = rng.choice(len(kinds), count, p=shares / shares.sum())
        noise, users = rng.standard_normal((count, 2)), rng.random(count)
        planned = []
        for index in range(count):
            name, kind = kinds[drawn[index]]
            prompt, output = (
                _length(mean, kind.spread, z) for mean, z in zip((kind.input, kind.output), noise[index], strict=True)
            )
            about = {
                "priority": kind.priority,
                "deadline": kind.deadline,
                "user": f"{name} {int(users[index] * kind.users)}",
            }
            planned.append(Planned(klass=name, pieces=((index, prompt),), output_tokens=output, **about))
        return planned


def _length(mean: float, spread: float, z: float) -> int:
    """Return a length with a log-normal distribution, from a standard normal number."""
    variance = np.log1p(spread**2)
    return max(1, round(float(mean * np.exp(np.sqrt(variance) * z - variance / 2))))


@dataclass(frozen=True, kw_only=True)
class Chats(Workload):
    """Conversations of several turns behind a few system prompts: prompts begin like earlier ones.

    Every request is the next turn of a conversation. What was said before, answers included, is written in advance, as
    in recorded traces. So the tokens of an earlier *answer* are found in a cache only if the target has answered the
    same.

    Attributes:
        systems: The number of system prompts.
        system: Tokens of a system prompt.
        turns: Turns of a conversation.
        said: Tokens that a user says in a turn.
        output: Tokens of an answer.
        open: Conversations that go on side by side; whose turn is next is drawn.
    """

    systems: int = 2
    system: int = 192
    turns: int = 4
    said: int = 32
    output: int = 32
    open: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"workload.{name}={value}: give at least 1")

    def plan(self, rng: np.random.Generator, count: int, recorded: Recorded | None = None) -> list[Planned]:
        going: list[tuple[str, Pieces, int]] = []  # user, what was said so far, turns so far
        started, number, planned = 0, self.systems, []
        for _ in range(count):
            while len(going) < self.open:
                going.append((f"chat {started}", ((int(rng.integers(self.systems)), self.system),), 0))
                started += 1
            place = int(rng.integers(self.open))
            user, before, turn = going[place]
            prompt = (*before, (number, self.said))
            planned.append(Planned(klass=f"turn {turn + 1}", pieces=prompt, output_tokens=self.output, user=user))
            going[place] = (user, (*prompt, (number + 1, self.output)), turn + 1)
            if turn + 1 == self.turns:
                going.pop(place)
            number += 2
        return planned


@dataclass(frozen=True, kw_only=True)
class AsRecorded(Workload):
    """Lengths as the trace has them that requests arrive by; its blocks, if any, say what prompts have in common."""

    klass: str = "trace"

    def plan(self, rng: np.random.Generator, count: int, recorded: Recorded | None = None) -> list[Planned]:
        if recorded is None:
            raise ValueError(
                "workload=trace takes its lengths from the arrivals: give arrival=trace, or another workload"
            )
        blocks = recorded.blocks or [[]] * len(recorded.times)
        own = 1 + max((number for prompt in blocks for number in prompt), default=-1)  # numbers that no block has
        planned = []
        for index in range(min(count, len(recorded.times))):
            tokens, output = int(recorded.inputs[index]), int(recorded.outputs[index])
            pieces = _first(tokens, *((block, BLOCK) for block in blocks[index]), (own + index, tokens))
            planned.append(Planned(klass=self.klass, pieces=pieces, output_tokens=output))
        return planned


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How planned lengths are fitted to a model.

    Attributes:
        scale: All lengths are multiplied by this; 0.1 makes 4,000 tokens 400.
        too_long: What becomes of a request that has no room even so: ``"cut"`` shortens it (the answer to at most half
            of the room, the prompt to the rest, from its end on), ``"refuse"`` has it fail.
    """

    scale: float = 1.0
    too_long: str = "cut"

    def __post_init__(self) -> None:
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"lengths.scale={self.scale:g}: give a number above 0, such as 0.1")
        if self.too_long not in ("cut", "refuse"):
            raise ValueError(f"lengths.too_long={self.too_long!r}: give cut or refuse")

    def fit(self, planned: Sequence[Planned], room: int) -> tuple[list[Planned], dict[str, int]]:
        """Return the requests as an engine with ``room`` positions takes them, and how many do not fit as they are."""
        made, counts = [], {"cut": 0, "refused": 0}
        for request in planned:
            scaled = replace(
                request,
                pieces=tuple((number, max(1, round(tokens * self.scale))) for number, tokens in request.pieces),
                output_tokens=max(1, round(request.output_tokens * self.scale)),
            )
            if scaled.prompt_tokens + scaled.output_tokens > room and self.too_long == "refuse":
                counts["refused"] += 1
                scaled = replace(scaled, fits=False)
            elif scaled.prompt_tokens + scaled.output_tokens > room:
                counts["cut"] += 1
                output = min(scaled.output_tokens, max(room // 2, room - scaled.prompt_tokens))
                scaled = replace(scaled, pieces=_first(room - output, *scaled.pieces), output_tokens=output)
            made.append(scaled)
        return made, counts


def _first(tokens: int, *pieces: tuple[int, int]) -> Pieces:
    """Return the first pieces, as far as these tokens reach."""
    first = []
    for number, size in pieces:
        if tokens:
            first.append((number, min(size, tokens)))
            tokens -= first[-1][1]
    return tuple(first)
