"""The tokens that drafts of virtual time have accepted, from the trace of a run (``experiments.run trace=true``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.load.driver import Rows
from experiments.tracing.trace import read_trace
from specdec.drafting.policies.lengths import LengthPolicy


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Acceptance of a drafter's rounds at every position of some outputs, all one behind the other.

    Rounds of shorter drafts begin where none began in the trace. There a draft is what was left of the recorded one: it
    is accepted as far, and ends where that one was rejected. Behind a draft that was accepted whole, the next token is
    right as often as the deepest ones were, and then it goes on as the next round did.

    Attributes:
        lengths: The tokens of every output.
        able: How many tokens of the deepest draft from there would be accepted.
        proposed: How deep that draft is.
        nodes: How many nodes it has down to every depth: as many as it is deep, in a chain.
    """

    lengths: Int[np.ndarray, " output"]
    able: Int[np.ndarray, " position"]
    proposed: Int[np.ndarray, " position"]
    nodes: Int[np.ndarray, "position depth"]

    @classmethod
    def of(cls, outputs: Sequence[Sequence[tuple[int, Sequence[int]]]], seed: int = 0) -> "Accepted":
        """Return it by rounds in their order: how many tokens were accepted, and the drafted nodes of every depth."""
        rounds = [(accepted, len(levels)) for output in outputs for accepted, levels in output if levels]
        if not rounds:
            raise ValueError("the trace has no round with a draft: trace a method that drafts")
        deepest = max(depth for _, depth in rounds)
        whole_drafts = sum(accepted == depth for accepted, depth in rounds)
        right = whole_drafts / max(sum(accepted >= depth - 1 for accepted, depth in rounds), 1)
        rng = np.random.default_rng(seed)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for output in outputs:
            for (accepted, levels), (following, _) in zip(output, [*output[1:], (0, [])], strict=True):
                able = np.arange(accepted, -1, -1)
                if levels and accepted == len(levels) and rng.random() < right:
                    able[1:] += 1 + following
                nodes = np.pad(np.cumsum(levels, dtype=np.int64), (0, deepest - len(levels)))
                parts.append((able, np.full(len(able), len(levels)), np.tile(nodes, (len(able), 1))))
        able, proposed, nodes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        lengths = np.array([sum(accepted + 1 for accepted, _ in output) for output in outputs])
        return cls(lengths=lengths, able=np.minimum(able, proposed), proposed=proposed, nodes=nodes)

    @classmethod
    def read(cls, folder: Path, method: str) -> "Accepted":
        """Return that of a method in a run's trace, or of its only one.

        Raises:
            ValueError: There is no trace, none of this method among several, or it is of several temperatures.
        """
        traced: dict[tuple[str, float], dict[tuple[Any, ...], dict[int, tuple[int, list[int]]]]] = {}
        for one in chain.from_iterable(read_trace(folder, tables=False)):
            key, levels = one.key, np.bincount(one.depths, minlength=1)[1:].tolist()
            rounds = traced.setdefault((key.method, key.temperature), {})
            rounds.setdefault((key.prompt, key.turn, key.sample), {})[key.round] = key.accepted, levels
        methods = {name for name, _ in traced}
        wanted = [rounds for (name, _), rounds in traced.items() if name == method or methods == {name}]
        if len(wanted) != 1:
            names = ", ".join(f"{name} at T={temperature:g}" for name, temperature in traced)
            raise ValueError(f"the trace in {folder} has {names}, and not {method} at one temperature: give another")
        outputs = [rounds for rounds in wanted[0].values() if len(rounds) > max(rounds)]
        return cls.of([[rounds[number] for number in range(len(rounds))] for rounds in outputs])


class Drafts:
    """The drafts of requests: request i is accepted as output i is, from the front again where outputs are fewer."""

    def __init__(self, accepted: Accepted, outputs: Rows, policy: LengthPolicy | None):
        self._accepted, self._policy = accepted, policy
        place = np.arange(len(outputs)) % len(accepted.lengths)
        # Where an output is longer than its trace, it goes on from the front, and leaves out the end, where drafts
        # were cut because the output was about to end.
        lengths = accepted.lengths[place]
        shorter = np.maximum(lengths - accepted.nodes.shape[1], 1)
        self._around = np.where(outputs > lengths, shorter, np.maximum(lengths, 1))
        self._begin = (accepted.lengths.cumsum() - accepted.lengths)[place]

    def round(self, rows: Rows, slots: Rows, lengths: Rows, output: Rows, most: Rows) -> tuple[Rows, Rows, Rows]:
        """Return how deep the drafts of a round are, how many nodes they have, and how many tokens are accepted.

        ``lengths`` tokens are in the caches, ``output`` in the outputs so far; drafts may be as deep as ``most``.
        """
        place = self._begin[rows] + output % self._around[rows]
        able, policy = self._accepted.able[place], self._policy
        if policy is not None:
            if policy.foresees is not None:
                policy.foresee(slots, np.minimum(able, most))
            most = np.minimum(policy.depths(slots, lengths), most)
        proposed = np.minimum(most, self._accepted.proposed[place])
        accepted = np.minimum(able, proposed)
        if policy is not None:
            policy.note(slots, proposed, accepted)
        return proposed, np.where(proposed > 0, self._accepted.nodes[place, proposed - 1], 0), accepted
