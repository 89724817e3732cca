"""The outputs of a run, token by token, with the drafts of its trace where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.results.records import Record
from experiments.results.sources import SourcedToken, sourced
from experiments.tracing.rounds import DraftedRound, OutputKey, read_rounds
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
    """Some outputs of a run, and sentences on what is not to be seen and why."""
    rounds: dict[OutputKey, list[DraftedRound]] = {}
    notes: list[str] = []
    if not shards(folder / FOLDER):
        notes.append("No trace: drafts, rejected proposals, p and q are kept by experiments.run trace=true.")
    else:
        wanted = {_key(record) for record in records if not record.failed}
        try:
            rounds = read_rounds(folder, wanted.__contains__)
        except ValueError as error:
            notes.append(f"No drafts: {error}")
    found, unfit = [], 0
    for record in records:
        own = rounds.get(_key(record), [])
        if own and [len(each.path) for each in own] != list(record.accepted):
            own, unfit = [], unfit + 1
        found.append(Output(record, sourced(record, [each.at_leaf for each in own]), own))
    if unfit:
        notes.append(f"{unfit} outputs have rounds that failed or were not traced: their drafts are not shown.")
    return found, notes


def _key(record: Record) -> OutputKey:
    return record.method, record.temperature, record.prompt, record.turn, record.sample
