"""The tables of ``experiments.check_verifier``, narrow enough for 80 columns, and its progress."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console

from experiments.measuring.exactness import LAWS, SHARED_LAWS, Case, Part, SharedCase, Work, roughly
from experiments.reporting import terminal
from experiments.reporting.cells import NOTHING
from experiments.reporting.table import Column, Table
from specdec.interfaces import Verifier
from specdec.types import Exactness

_LONG = 10.0
"""Seconds from which on a check shows its progress."""

HEADERS = {
    "rejection": "RS",
    "traversal": "trav.",
    "k-seq": "k-seq",
    "target walk": "walk",
    "two drafts": "two",
    "weighted transport": "w. tr",
    "greedy multi-path": "paths",
}
"""Short headings of the known rules: with all of them a row has 80 characters. Block has none, because it equals
traversal on chains and takes nothing else."""


def exactness_table(rule: Verifier, done: Sequence[Case]) -> Table:
    """A row per case."""
    others = [name for name in HEADERS if any(name in case.known for case in done)]
    mixture = rule.exactness is Exactness.EXACT_WRT
    if mixture:
        others = others[:1]  # what the same drafts give towards p
    headings = ["T", "TV", *(["TV to\np"] if mixture else []), "this", *(HEADERS[name] for name in others)]
    stated = "the distribution that the rule states" if mixture else "the target"
    table = _empty_table(
        rule,
        headings,
        f"TV: largest total variation to {stated}; all else: expected accepted tokens per round. "
        "Drafts: branches by level; drawn iid, without replacement, or the top k. RS: rejection; trav.: traversal (on "
        "chains: block); walk: target walk; two: two drafts; w. tr: weighted transport; paths: greedy multi-path.",
    )
    for case in done:
        table.add(
            f"{case.shape} {LAWS[case.law]}",
            case.rows,
            f"{case.temperature:g}",
            f"{case.tv:.0e}",
            *([f"{case.target_tv:.3f}"] if mixture else []),
            f"{case.accepted:.3f}",
            *(f"{case.known[name]:.3f}" if name in case.known else NOTHING for name in others),
        )
    return table


def shared_table(rule: Verifier, done: Sequence[SharedCase]) -> Table:
    """A row per case of a rule with shared noise."""
    table = _empty_table(
        rule,
        ["T", "differ", "p", "this", "rejec-\ntion"],
        "differ: outputs that are not plain decoding's; p: smallest p-value of plain decoding against the target; "
        "this: accepted tokens per round; rejec-tion: the same for rejection sampling, drafts without replacement.",
    )
    for case in done:
        table.add(
            f"{case.shape} {SHARED_LAWS[case.law]}",
            case.rows,
            f"{case.temperature:g}",
            str(case.differing),
            f"{case.p_value:.2g}",
            f"{case.accepted:.3f}",
            f"{case.rejection:.3f}",
        )
    return table


class Progress:
    """How far a long check is: a bar on a terminal, a line per tenth elsewhere. A short check shows nothing.

    Args:
        work: What the check is going to do.
        clock: Tells the time in seconds.
    """

    def __init__(self, work: Work, clock: Callable[[], float] = time.monotonic):
        self._work, self._clock = work, clock
        self._console = Console(stderr=True)
        self._long = work.seconds is not None and work.seconds >= _LONG
        self._total = work.turns * sum(work.turn_seconds(part) for part in work.drafts)
        self._done = 0.0
        self._shown = 0
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            console=self._console,
            transient=True,
            disable=not (self._long and self._console.is_terminal),
        )
        self._task = self._bar.add_task("drafts", total=self._total)

    def __enter__(self) -> Self:
        self._begin = self._clock()
        if self._long:
            assert self._work.seconds is not None
            text = f"about {self._work.total:,} drafts to verify, estimated at {roughly(self._work.seconds)}"
            terminal.say(self._console, text)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, part: Part) -> None:
        """Note that one table of a part is done."""
        self._done += self._work.turn_seconds(part)
        self._bar.update(self._task, completed=self._done)
        tenths = int(10 * self._done / self._total + 1e-9)
        if self._long and not self._console.is_terminal and tenths > self._shown:
            self._shown = tenths
            passed = roughly(self._clock() - self._begin)
            terminal.say(self._console, f"{tenths * 10}% of the drafts verified in {passed}")


def _empty_table(rule: Verifier, headings: Sequence[str], note: str) -> Table:
    """The columns that say what was drafted, and those of the figures."""
    columns = [*(Column(name, "left") for name in ("draft", "tables")), *(Column(name) for name in headings)]
    return Table(columns, f"{type(rule).__name__} ({rule.exactness.value})", [note])
