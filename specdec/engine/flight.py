"""A round that the device has been given, and what the host makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.batch import Batch
from specdec.engine.round import Played
from specdec.requests import Request
from specdec.tree import along_path
from specdec.types import Committed


@dataclass(frozen=True, eq=False)
class Flight:
    """A round that the device plays, and that the host has not read yet.

    Attributes:
        played: The round.
        slots: Its rows.
        requests: The request of every row when the round began.
    """

    played: Played
    slots: Batch
    requests: list[Request | None]

    def rows_in(self, running: Sequence[Request | None]) -> np.ndarray:
        """Returns which rows' requests still run; others have ended while the round was in flight."""
        slots = self.slots.host_index.tolist()
        return np.array([running[slot] is request for slot, request in zip(slots, self.requests, strict=True)])


def told_of(played: Played, slots: Batch) -> Committed:
    """Returns what a round has made final, for all of its rows."""
    verdict = played.judged.verdict
    path = verdict.path
    return Committed(
        slots=slots.index,
        host_slots=slots.host_index,
        tokens=played.judged.tokens,
        starts=slots.host_lengths.copy(),
        counts=1 + played.read.num_accepted,
        next_tokens=verdict.next_token,
        path=path,
        hidden_states={k: along_path(states, path) for k, states in played.said.hidden_states.items()},
        node_tokens=played.tree.tokens,
        host_path=played.read.path,
        host_emitted=played.read.tokens,
        host_proposed=played.read.proposed_depth,
        top_tokens=played.said.top_tokens,
    )
