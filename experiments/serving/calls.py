"""The calls that are open: their requests in the engine, and what the clients have not been sent yet."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from experiments.serving.fields import Asked, RequestError
from experiments.serving.prompts import Told
from specdec.requests import SamplingParams
from specdec.types import Step, Timestamps

MOST_PENDING = 64
"""Rounds of a call that may wait for a client to read; then they are put together, and sent as one event."""


@dataclass(eq=False)
class Choice:
    """One request of the engine.

    Attributes:
        index: Its number among the choices of its call.
        id: The engine's number for it; the engine's thread sets it.
        begun: Whether an event of it was written.
        spelled: The number of characters of the tokens that were spelled one by one, with their log-probabilities.
        tokens: The number of its output tokens.
        drafts: How often its rounds drafted so deep and had so many tokens accepted.
        first: When its first tokens were visible; 0 before.
        last: When its last ones were.
        timestamps: When what happened, once it has ended.
    """

    call: "Call"
    index: int
    prompt: list[int]
    sampling: SamplingParams
    id: int = -1
    begun: bool = False
    spelled: int = 0
    tokens: int = 0
    rounds: int = 0
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    nodes: int = 0
    first: float = 0.0
    last: float = 0.0
    timestamps: Timestamps | None = None

    def take(self, step: Step) -> None:
        """Note what a round has done."""
        self.tokens += len(step.token_ids)
        self.rounds += 1
        if step.proposed_depth and step.error is None:
            self.drafts[step.proposed_depth, step.accepted] += 1
            self.nodes += step.proposed_nodes
        self.timestamps = step.timestamps
        if step.token_ids:
            self.first, self.last = self.first or step.visible, step.visible


class Call:
    """A request of a client, until it has its answer.

    Attributes:
        pending: Rounds that the client was not sent, in their order.
        running: The number of choices that have not ended.
        news: Set when something has happened.
        gone: Whether the client has left.
        told: The log-probabilities of each prompt's tokens, where they are wanted.
    """

    def __init__(self, asked: Asked, arrived: float):
        self.asked, self.arrived = asked, arrived
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = [
            Choice(self, index, asked.prompts[index // asked.samples], sampling)
            for index, sampling in enumerate(asked.sampling)
        ]
        self.pending: list[tuple[Choice, Step]] = []
        self.running = len(self.choices)
        self.news = asyncio.Event()
        self.gone = False
        self.told: list[list[Told]] = []
        self.refusal: RequestError | None = None

    def take(self, choice: Choice, step: Step) -> None:
        """Keep a round until the client reads it."""
        self.pending.append((choice, step))
        if step.finish_reason is not None:
            self.running -= 1
            if step.finish_reason == "error":
                self.refusal = RequestError(step.error or "the request has failed", status=500)
        if len(self.pending) > MOST_PENDING + len(self.choices):
            self.pending = self.joined()

    def refuse(self, refusal: RequestError) -> None:
        """End it with an error."""
        self.refusal, self.running = refusal, 0
        self.news.set()

    def joined(self) -> list[tuple[Choice, Step]]:
        """Return the pending rounds, those of each choice as one."""
        steps: dict[Choice, list[Step]] = {}
        for choice, step in self.pending:
            steps.setdefault(choice, []).append(step)
        return [(choice, _joined(own)) for choice, own in steps.items()]


def _joined(steps: Sequence[Step]) -> Step:
    """Return the last of several rounds with the output of all."""
    names = ("token_ids", "logprobs", "raw_logprobs", "top_logprobs")
    whole = {name: tuple(value for step in steps for value in getattr(step, name)) for name in names}
    return replace(steps[-1], text="".join(step.text for step in steps), **whole)
