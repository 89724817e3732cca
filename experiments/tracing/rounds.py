"""Single rounds of a trace, node by node, and the outputs of a run with them, for those who look at them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.results.records import Record
from experiments.results.sources import SourcedToken, sourced
from experiments.tracing.trace import FOLDER, LIKELY, Shard, TraceKey, read_trace, shards

MOST_LIKELY = 5
"""Tokens that are listed at a node of the accepted path, at most."""


@dataclass(frozen=True)
class Odds:
    """A token at a place of the tree, and its probabilities there.

    Attributes:
        p: The target's probability, None where it was not kept.
        q: The drafter's, None where nothing was drawn from a distribution, or where it was not kept.
    """

    token: int
    p: float | None
    q: float | None


@dataclass(frozen=True)
class Node:
    """A node of a draft tree.

    Attributes:
        odds: Its token, with its probabilities after its parent; of the root, the token alone.
        parent: Number of its parent in the round's list, -1 for the root.
    """

    odds: Odds
    parent: int


@dataclass(frozen=True)
class DraftedRound:
    """The draft of one round, and the part of it that was accepted.

    Attributes:
        round: Its number, from 0.
        nodes: The root, and the drafted nodes; every parent stands before its children.
        path: Numbers of the accepted nodes, the root left out.
        next: The recovered or bonus token, after the path's end.
        likely: The target's most probable tokens at the root and at every node of the path.
    """

    round: int
    nodes: tuple[Node, ...]
    path: tuple[int, ...]
    next: Odds
    likely: tuple[tuple[Odds, ...], ...]
    expected_accepted: float

    def tokens(self) -> Iterator[Odds]:
        """Yields all tokens that the round names."""
        yield from (node.odds for node in self.nodes)
        yield self.next
        for likely in self.likely:
            yield from likely

    @property
    def stop(self) -> int:
        """Number of the node at which the path ends."""
        return self.path[-1] if self.path else 0

    @property
    def at_leaf(self) -> bool:
        """Nothing was drafted below the end of the path."""
        return all(node.parent != self.stop for node in self.nodes)


OutputKey = tuple[str, float, str, int, int]
"""Identifies an output of a run: method, temperature, prompt, turn, sample."""


def read_rounds(folder: Path, wanted: Callable[[OutputKey], bool]) -> dict[OutputKey, list[DraftedRound]]:
    """The rounds of some outputs of a run, in their order."""
    found: dict[OutputKey, list[DraftedRound]] = {}
    for shard in read_trace(folder):
        for row, key in enumerate(shard.keys):
            output = (key.method, key.temperature, key.prompt, key.turn, key.sample)
            if wanted(output):
                found.setdefault(output, []).append(_round(shard, row, key))
    for rounds in found.values():
        rounds.sort(key=lambda each: each.round)
    return found


def _round(shard: Shard, row: int, key: TraceKey) -> DraftedRound:
    tokens, parents = (shard.of(name, row).tolist() for name in ("tokens", "parents"))
    tables = _Tables(shard, row)
    place: dict[int, int] = {}
    nodes: list[Node] = []
    for index in np.flatnonzero(shard.of("valid", row)).tolist():
        parent = parents[index]
        odds = Odds(tokens[index], None, None) if parent < 0 else tables.odds(parent, tokens[index])
        place[index] = len(nodes)
        nodes.append(Node(odds, place[parent] if parent >= 0 else -1))
    path = []
    end = key.stop
    while end > 0:
        path.append(end)
        end = parents[end]
    path.reverse()
    return DraftedRound(
        round=key.round,
        nodes=tuple(nodes),
        path=tuple(place[index] for index in path),
        next=tables.odds(key.stop, key.next_token),
        likely=tuple(tables.likely(index) for index in (0, *path)),
        expected_accepted=key.expected_accepted,
    )


class _Tables:
    """p and q at the nodes of one row, as far as they were kept."""

    def __init__(self, shard: Shard, row: int):
        self._ids, self._p, self._q = (shard.of(name, row) for name in ("ids", "p", "q"))
        self._starts = np.concatenate([[0], shard.of("counts", row).cumsum()])
        self._has_q = shard.of("rest_q", row) >= 0
        self._all_p = shard.of("rest_p", row) == 0  # then what was not kept has no probability
        self._all_q = shard.of("rest_q", row) == 0

    def odds(self, node: int, token: int) -> Odds:
        """A token after a node."""
        begin, end = self._starts[[node, node + 1]]
        at = begin + int(np.searchsorted(self._ids[begin:end], token))
        if at < end and self._ids[at] == token:
            return self._at(node, at)
        return Odds(token, 0.0 if self._all_p[node] else None, 0.0 if self._all_q[node] else None)

    def likely(self, node: int) -> tuple[Odds, ...]:
        """The most probable tokens after a node."""
        begin, end = self._starts[[node, node + 1]]
        order = np.argsort(-self._p[begin:end], kind="stable")[:MOST_LIKELY]
        return tuple(self._at(node, begin + place) for place in order if self._p[begin + place] >= LIKELY)

    def _at(self, node: int, at: int) -> Odds:
        q = float(self._q[at]) if self._has_q[node] else None
        return Odds(int(self._ids[at]), float(self._p[at]), q)


@dataclass(frozen=True)
class Output:
    """One output of a run.

    Attributes:
        tokens: Its tokens, each with its source.
        rounds: What each of its rounds drafted; empty without a trace.
    """

    record: Record
    tokens: Sequence[SourcedToken]
    rounds: Sequence[DraftedRound] = ()


def outputs_of(folder: Path, records: Sequence[Record]) -> tuple[list[Output], list[str]]:
    """Some outputs of a run, and sentences on what is not to be seen and why."""

    def key(record: Record) -> OutputKey:
        return record.method, record.temperature, record.prompt, record.turn, record.sample

    rounds: dict[OutputKey, list[DraftedRound]] = {}
    notes: list[str] = []
    if not shards(folder / FOLDER):
        notes.append("No trace: drafts, rejected proposals, p and q are kept by experiments.run trace=true.")
    else:
        wanted = {key(record) for record in records if not record.failed}
        try:
            rounds = read_rounds(folder, wanted.__contains__)
        except ValueError as error:
            notes.append(f"No drafts: {error}")
    outputs, unfit = [], 0
    for record in records:
        drafted = rounds.get(key(record), [])
        if drafted and [len(one.path) for one in drafted] != list(record.accepted):
            drafted, unfit = [], unfit + 1
        outputs.append(Output(record, sourced(record, [one.at_leaf for one in drafted]), drafted))
    if unfit:
        notes.append(f"{unfit} outputs have rounds that failed or were not traced: their drafts are not shown.")
    return outputs, notes
