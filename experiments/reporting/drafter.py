"""The table of ``experiments.check_drafter``: a line per check."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table
from specdec.drafter_checks import Finding, Status
from specdec.drafter_checks.fit import LEVEL

_EMPHASIS = {Status.FAILED: Emphasis.MISSED, Status.NOT_TRIED: Emphasis.LOSSY}


@contextmanager
def steps_shown(first: str) -> Iterator[Callable[[str], None]]:
    """Shows which step a command is at: in one line of a terminal, and elsewhere in a line for each step.

    Args:
        first: The first step.
    """
    screen, begin = Console(stderr=True), time.monotonic()

    def say(step: str) -> None:
        terminal.say(screen, f"{time.monotonic() - begin:.0f} s: {step}")

    if not screen.is_terminal:
        say(first)
        yield say
        return
    with screen.status(first) as status:
        yield status.update


def drafter_table(drafter: str, target: str, findings: Sequence[Finding]) -> Table:
    """A row per check: how it ended, and what was found.

    Args:
        drafter: The drafter's name.
        target: The target's name.
        findings: What was found.
    """
    columns = [
        Column("check", "left", fold=True, max_width=36),
        Column("verdict", "left"),
        Column("what was found", "left", fold=True),
    ]
    counted = any("p-value" in finding.detail for finding in findings)
    by_chance = 2 * LEVEL * 100_000  # LEVEL for what is drawn, and as much for outputs
    notes = [
        f"p-values below the limit are mistakes: at most {by_chance:.0f} of 100,000 right drafters have one, by chance"
    ]
    table = Table(columns, f"{drafter}, tried with {target}", notes if counted else [])
    for finding in findings:
        emphasis = _EMPHASIS.get(finding.status, Emphasis.NONE)
        table.add(finding.check, Cell(str(finding.status), emphasis=emphasis), finding.detail)
    return table
