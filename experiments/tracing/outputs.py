"""The outputs of a run, token by token, with the drafts of its trace where there is one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.results.records import Record
from experiments.results.sources import SourcedToken, sourced
from experiments.tracing.rounds import DraftedRound, read_rounds
from experiments.tracing.trace import FOLDER, shards


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
    """Some outputs of a run, and sentences on what is not to be seen and why.

    Raises:
        ValueError: A shard of the trace is damaged.
    """
    wanted = {_key(record) for record in records if not record.failed}
    rounds, notes = _traced(folder, wanted.__contains__)
    found = []
    unfit = 0
    for record in records:
        own = rounds.get(_key(record), [])
        if own and not _fits(own, record):
            unfit += 1
            own = []
        found.append(Output(record, sourced(record, [each.at_leaf for each in own]), own))
    if unfit:
        notes.append(f"{unfit} outputs have rounds that failed or were not traced: their drafts are not shown.")
    return found, notes


def has_trace(folder: Path) -> bool:
    """Whether the run has a trace."""
    return bool(shards(folder / FOLDER))


def _traced(folder: Path, wanted: Callable[[tuple], bool]) -> tuple[dict, list[str]]:
    if not has_trace(folder):
        return {}, ["No trace: drafts, rejected proposals, p and q are kept by experiments.run trace=true."]
    try:
        return read_rounds(folder, wanted), []
    except ValueError as error:
        return {}, [f"No drafts: {error}"]


def _key(record: Record) -> tuple[str, float, str, int, int]:
    return record.method, record.temperature, record.prompt, record.turn, record.sample


def _fits(rounds: Sequence[DraftedRound], record: Record) -> bool:
    return [len(each.path) for each in rounds] == list(record.accepted)
