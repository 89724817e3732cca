"""Timing that waits for the device, sides that take turns, a budget of seconds, and tables on the terminal."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import rich.box
import rich.table
import torch
from rich.console import Console
from rich.text import Text

from drafters.round_costs import now

CPU = torch.device("cpu")
NOTHING = "-"
"""The text of a cell without a figure."""


def timed(
    call: Callable[[], object], device: torch.device = CPU, *, repeats: int, limit: float = 10.0, warm_up: int = 3
) -> dict[str, Any]:
    """Time a call.

    Args:
        limit: Seconds for all calls together; at least one counts, however long it takes.
        warm_up: Calls before those that count. Where a single call takes a third of the limit, the first one is all.

    Returns:
        ``seconds``: the median over the ``calls`` that count, of which ``best`` is the shortest. ``first``: the first
        call of all. ``once``: what the calls before the counted ones took beyond the median, such as choosing kernels.
    """
    began = time.perf_counter()

    def one() -> float:
        start = now(device)
        call()
        return now(device) - start

    before, counted = [one()], []
    while len(before) < warm_up and time.perf_counter() - began < limit / 3:
        before.append(one())
    while not counted or (len(counted) < repeats and time.perf_counter() - began < limit):
        counted.append(one())
    middle = statistics.median(counted)
    once = max(0.0, sum(before) - middle * len(before))
    return {"seconds": middle, "best": min(counted), "first": before[0], "once": once, "calls": len(counted)}


def in_turns(
    sides: Sequence[Callable[[], object]], repeats: int, device: torch.device = CPU, *, warm_up: int = 1
) -> list[list[float]]:
    """Return the seconds of every call of some functions that take turns, the first ``warm_up`` left out.

    Who comes after whom changes from turn to turn, which matters for what is in the caches.
    """
    times: list[list[float]] = [[] for _ in sides]
    for repeat in range(warm_up + repeats):
        for step in range(len(sides)):
            index = (step + repeat) % len(sides)
            start = now(device)
            sides[index]()
            times[index].append(now(device) - start)
    return [each[warm_up:] for each in times]


@dataclass
class Budget:
    """Seconds that a benchmark may take, and what it ``left_out`` to keep to them, with the reasons."""

    total: float
    left_out: list[dict[str, str]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.total - (time.perf_counter() - self._began)

    def skip(self, what: str, why: object) -> None:
        """Note that something is not measured; of a reason, its first line."""
        self.left_out.append({"what": what, "why": str(why).split("\n", 1)[0]})

    def spent(self, what: str) -> bool:
        """Return whether no time is left, in which case something is noted as not measured."""
        if self.left > 0:
            return False
        self.skip(what, "no time left")
        return True

    def share(self, seconds: float) -> "Budget":
        """Return a part of this budget, whose list of what was left out is the same."""
        return Budget(max(0.0, min(seconds, self.left)), self.left_out)


@contextmanager
def runs_wrapped(parts: Sequence[object], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """During the ``with`` block, the method ``run`` of some objects is what ``wrap`` makes of it."""
    for part in parts:
        vars(part)["run"] = wrap(part.run)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("run", None)


def show(title: str, rows: Sequence[Mapping[str, str | Text]], *notes: str) -> None:
    """Print a table: a column per key of the first row, aligned to the left where it holds words."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left")
    table.caption = "\n".join(notes)
    for name in rows[0] if rows else ():
        words = any(str(row[name])[:1].isalpha() for row in rows)
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console(width=160).print(table)


def ms(seconds: float | None) -> str:
    """Return seconds as a number of milliseconds in three digits."""
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:.{3 if seconds < 1e-3 else 2 if seconds < 0.1 else 0}f}"


def missed(text: str, *, wrong: bool = True) -> Text:
    """Return a text, in red where it says that something is wrong."""
    return Text(text, style="red" if wrong else "")


def where() -> str:
    """Return the machine and the versions that a table's figures depend on, in words."""
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
