"""Single rounds of a trace, node by node, and the outputs of a run with them, for those who look at them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.results.records import Record, SourcedToken, sourced
from experiments.tracing.trace import LIKELY, TracedRound, read_trace

MOST_LIKELY = 5
"""Tokens that are listed at a node of the accepted path, at most."""


class Odds(NamedTuple):
    """A token at a place of the tree, and its probabilities there, as far as they were kept."""

    token: int
    p: float | None
    q: float | None


@dataclass(frozen=True)
class DraftedRound:
    """The draft of one round, and the part of it that was accepted.

    Attributes:
        nodes: The root's token, and every drafted node's with its probabilities after its parent.
        parents: Every node's parent by its place in ``nodes``, where it stands before its children; the root's is -1.
        path: The accepted nodes, likewise, the root left out.
        next: The recovered or bonus token, after the path's end.
        likely: The target's most probable tokens at the root and at every node of the path.
    """

    round: int
    nodes: tuple[Odds, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    next: Odds
    likely: tuple[tuple[Odds, ...], ...]
    expected_accepted: float

    def tokens(self) -> Iterator[Odds]:
        """Yields all tokens that the round names."""
        yield from (*self.nodes, self.next, *chain.from_iterable(self.likely))

    @property
    def at_leaf(self) -> bool:
        """Nothing was drafted below the end of the path."""
        return (self.path[-1] if self.path else 0) not in self.parents


OutputKey = tuple[str, float, str, int, int]
"""Identifies an output of a run: method, temperature, prompt, turn, sample."""


def read_rounds(folder: Path, wanted: Callable[[OutputKey], bool]) -> dict[OutputKey, list[DraftedRound]]:
    """The rounds of some outputs of a run, in their order."""
    outputs: dict[OutputKey, list[DraftedRound]] = {}
    for traced in chain.from_iterable(read_trace(folder)):
        key = traced.key
        output = (key.method, key.temperature, key.prompt, key.turn, key.sample)
        if wanted(output):
            outputs.setdefault(output, []).append(_drafted(traced))
    return {output: sorted(rounds, key=lambda drafted: drafted.round) for output, rounds in outputs.items()}


def _drafted(traced: TracedRound) -> DraftedRound:
    key, parents = traced.key, traced.parents.tolist()
    starts = np.concatenate([[0], traced.counts.cumsum()])

    def kept(node: int, at: int) -> Odds:
        return Odds(int(traced.ids[at]), float(traced.p[at]), float(traced.q[at]) if traced.rest_q[node] >= 0 else None)

    def odds(node: int, token: int) -> Odds:
        begin, end = starts[[node, node + 1]]
        at = begin + int(np.searchsorted(traced.ids[begin:end], token))
        if at < end and traced.ids[at] == token:
            return kept(node, at)
        # What was not kept has no probability where nothing is left.
        return Odds(token, *(0.0 if rest[node] == 0 else None for rest in (traced.rest_p, traced.rest_q)))

    def likely(node: int) -> tuple[Odds, ...]:
        begin, end = starts[[node, node + 1]]
        order = begin + np.argsort(-traced.p[begin:end], kind="stable")[:MOST_LIKELY]
        return tuple(kept(node, at) for at in order.tolist() if traced.p[at] >= LIKELY)

    valid = np.flatnonzero(traced.valid).tolist()
    place = {-1: -1} | {node: number for number, node in enumerate(valid)}
    path, end = [], key.stop
    while end > 0:
        path.insert(0, end)
        end = parents[end]
    root = Odds(int(traced.tokens[0]), None, None)
    return DraftedRound(
        round=key.round,
        nodes=(root, *(odds(parents[node], int(traced.tokens[node])) for node in valid if parents[node] >= 0)),
        parents=tuple(place[parents[node]] for node in valid),
        path=tuple(place[node] for node in path),
        next=odds(key.stop, key.next_token),
        likely=tuple(likely(node) for node in (0, *path)),
        expected_accepted=key.expected_accepted,
    )


@dataclass(frozen=True)
class Output:
    """One output of a run."""

    record: Record
    tokens: Sequence[SourcedToken]
    rounds: Sequence[DraftedRound] = ()  # empty without a trace


def outputs_of(folder: Path, records: Sequence[Record]) -> tuple[list[Output], list[str]]:
    """Some outputs of a run, and sentences on what is not to be seen and why."""

    def key(record: Record) -> OutputKey:
        return record.method, record.temperature, record.prompt, record.turn, record.sample

    rounds, notes, wanted = {}, list[str](), {key(record) for record in records if not record.failed}
    try:
        rounds = read_rounds(folder, wanted.__contains__)
    except ValueError as error:
        notes.append(f"No trace, so no rejected proposals, p and q: {error}")
    outputs, unfit = [], 0
    for record in records:
        drafted = rounds.get(key(record), [])
        if drafted and [len(one.path) for one in drafted] != list(record.accepted):
            drafted, unfit = [], unfit + 1
        outputs.append(Output(record, sourced(record, [one.at_leaf for one in drafted]), drafted))
    if unfit:
        notes.append(f"{unfit} outputs have rounds that failed or were not traced: their drafts are not shown.")
    return outputs, notes
