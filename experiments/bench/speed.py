"""Is it fast? Speculation beside plain decoding; or this checkout beside another one: ``against=PATH repeats=6``.

Two sides take turns on the same prompts, after a warm-up. Printed are the ratio of total times and the spread of the
per-repeat ratios. Without ``against`` a ratio above 1 means that speculation is faster than plain decoding on the same
engine; the bars are those of two CPU cores. ``against=PATH`` compares with another checkout of this project: each has a
process of its own, and a ratio above 1 means that this checkout is the faster one. Use all cores (or a GPU:
``device=cuda``) and an otherwise idle machine. Other engines stand beside this one in ``experiment=engines``.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from experiments.bench.options import option, read_options, refuse
from experiments.bench.paired import WORKLOADS, Checkout, Player, Workload
from experiments.bench.timing import in_turns, missed, show
from specdec.target.loading import resolve_device


@dataclass(frozen=True)
class Options:
    """The command line."""

    only: tuple[str, ...] = option((), "parts of workloads' names, such as [n-gram,110m]; []: all workloads")
    repeats: int = option(8, "how often each comparison is repeated", least=1)
    device: str = option("cpu", "cpu, cuda, or auto for a GPU if there is one")
    against: Path | None = option(None, "another checkout of this project to compare this one with")


def chosen(parts: tuple[str, ...]) -> dict[str, Workload]:
    """Return the workloads in whose names all parts occur, at least one."""
    found = {name: each for name, each in WORKLOADS.items() if all(part in name for part in parts)}
    if not found:
        raise ValueError(f"only={list(parts)}: no workload's name has these parts; there are {'; '.join(WORKLOADS)}")
    return found


Comparison = tuple[str, float | None, Callable[[], object], Callable[[], object]]
"""A name, the least speedup that is wanted, and our side and theirs."""


def comparisons(options: Options, device: torch.device, open_until: ExitStack) -> Iterator[Comparison]:
    """Yield every workload beside plain decoding on the same engine, or beside itself in the other checkout."""
    workloads = chosen(options.only)
    if options.against is None:
        for name, workload in workloads.items():
            if workload.method != "plain":
                play = Player(workload, str(device)).play
                yield f"{name} / plain", workload.bar, play, partial(play, speculate=False)
        return
    paths = Path(__file__).parents[2], options.against
    ours, theirs = (open_until.enter_context(Checkout(path, str(device))) for path in paths)
    for name in workloads:
        about = f"this checkout / {options.against.name}: {name}"
        yield about, None, partial(ours.play, name), partial(theirs.play, name)


def main() -> None:
    """Run the comparisons and print one table."""
    options = read_options(Options, __doc__)
    rows = []
    try:
        device = resolve_device(options.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={options.device}: there is no GPU that this build of torch can use")
        with ExitStack() as open_until:
            for name, bar, *sides in comparisons(options, device, open_until):
                ours, theirs = in_turns(sides, options.repeats, device, warm_up=2)
                ratios, total = [b / a for a, b in zip(ours, theirs, strict=True)], sum(theirs) / sum(ours)
                spread = f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"
                verdict = "" if bar is None else f">= {bar} {'reached' if total >= bar else 'MISSED'}"
                row = {"comparison": name, "ratio of totals": f"{total:.2f}", "per repeat: min, median, max": spread}
                rows.append({**row, "bar": missed(verdict, wrong="MISSED" in verdict)})
                # The table comes at the end, which may be many minutes away.
                print(f"{name}: {total:.2f} ({spread}) {verdict}", flush=True)
    except ValueError as error:
        refuse(error)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    show(f"torch {torch.__version__}, {where}", rows)
