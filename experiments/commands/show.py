"""The outputs of a run on the terminal, token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.text import Text

from experiments.config.checking import did_you_mean
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from experiments.reporting.tokens import colored, output_view, round_view
from experiments.results.origin import read_manifest
from experiments.results.records import PLAIN, RECORDS, Record, read_records
from experiments.results.runs import runs_at
from experiments.session.token_texts import texts_of_run
from experiments.tracing.outputs import outputs_of


def show(config: DictConfig) -> None:
    """Print the outputs that a checked configuration names."""
    folder = Path(config.run)
    jobs = runs_at(config.run) or [folder]
    if len(jobs) > 1:
        raise ValueError(f"{folder} is a sweep of {len(jobs)} jobs: give the folder of one, such as {jobs[0]}")
    manifest = read_manifest(jobs[0])
    path = jobs[0] / RECORDS
    records = read_records(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{folder} has no results: no prompt of that run has finished")
    console = terminal.console()
    if config.prompt is None:
        terminal.show(console, _prompt_table(records), frame=terminal.Frame.FULL)
        return
    chosen = choose_records(
        records,
        prompt=config.prompt,
        method=config.method,
        temperature=config.temperature,
        turn=config.turn,
        sample=config.sample,
    )
    outputs, notes = outputs_of(jobs[0], chosen)
    drafted = [odds.token for each in outputs for round_ in each.rounds for odds in round_.tokens()]
    tokens = {token for record in chosen for token in record.token_ids}.union(drafted)
    texts = texts_of_run(jobs[0], manifest, tokens)
    colors = colored(console)
    for output in outputs:
        if config.round is None:
            console.print(output_view(output, texts, colors=colors), highlight=False)
        elif config.round >= len(output.record.accepted):
            raise ValueError(f"round={config.round}: the output has rounds 0 to {len(output.record.accepted) - 1}")
        elif output.rounds:
            console.print(Text(f"{output.record.method} on {output.record.prompt}", "bold"))
            console.print(round_view(output.rounds[config.round], texts, colors=colors), highlight=False)
        else:
            reason = (
                notes[0][0].lower() + notes[0][1:].rstrip(".") if notes else "the output has no drafts in the trace"
            )
            raise ValueError(f"round={config.round}: {reason}")
    terminal.say(console, *notes)


def _prompt_table(records: list[Record]) -> Table:
    table = Table(
        [Column("number"), Column("prompt", "left", fold=True), Column("category", "left"), Column("turns")],
        "Prompts: add prompt=NUMBER or prompt=ID",
    )
    for number, (prompt, own) in enumerate(_by_prompt(records).items()):
        table.add(str(number), prompt, own[0].category, str(len({record.turn for record in own})))
    return table


def _by_prompt(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records by the ids of their prompts, in the run's order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.prompt, []).append(record)
    return found


def _of_prompt(records: Sequence[Record], asked: Any) -> list[Record]:
    """The records of the prompt that an id or a number from 0 names."""
    known = _by_prompt(records)
    if str(asked) in known:
        return known[str(asked)]
    if type(asked) is int:
        if 0 <= asked < len(known):
            return list(known.values())[asked]
        raise ValueError(f"prompt={asked}: the run has prompts 0 to {len(known) - 1}")
    raise ValueError(f"there is no prompt {str(asked)!r}{did_you_mean(str(asked), list(known)[:20])}")


def choose_records(
    records: Sequence[Record],
    *,
    prompt: Any,
    method: str | None,
    temperature: float | None,
    turn: int | None,
    sample: int,
) -> list[Record]:
    """The records that are asked for, in the run's order.

    Args:
        method: Its name; None for all that draft, or plain decoding where there is nothing else.
    """
    own = _of_prompt(records, prompt)
    methods = list(dict.fromkeys(record.method for record in own))
    wanted = [method] if method is not None else [name for name in methods if name != PLAIN] or methods
    if method is not None and method not in methods:
        raise ValueError(f"there is no method {method!r}{did_you_mean(str(method), methods)}")
    own = [record for record in own if record.method in wanted]
    for name, value in (("temperature", temperature), ("turn", turn), ("sample", sample)):
        there = sorted({getattr(record, name) for record in own})
        if value is not None and value not in there:
            raise ValueError(f"{name}={value:g}: the prompt's outputs have {', '.join(f'{each:g}' for each in there)}")
        own = [record for record in own if value is None or getattr(record, name) == value]
    return own
