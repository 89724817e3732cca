"""The command ``python -m specdec.doctor``."""

import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from specdec.doctor.check import TOKENS, measure, verdicts, ways
from specdec.doctor.findings import Rows, chosen, found
from specdec.target.loading import resolve_device

HELP = """\
usage: python -m specdec.doctor [quick=true] [device=auto]

Shows what this machine has and what specdec does because of it, and measures for half a minute whether that is the
fast way here. A wrong choice is shown as a warning, and the exit code is 0 all the same.

  quick=true   show only, measure nothing
  device=cpu   where models would run: auto (the GPU if there is one), cpu, cuda, cuda:1
  --help       this text
"""


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """Run the command.

    Args:
        arguments: As on the command line.
        console: Where to print; None for the standard output.

    Returns:
        The exit code: 2 for an argument that is not understood.
    """
    console = console or Console(soft_wrap=True)
    if {"-h", "--help"} & set(arguments):
        console.print(HELP, end="", markup=False, highlight=False)
        return 0
    try:
        quick, device = parse(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    default_threads = torch.get_num_threads()
    show(console, "found", found())
    show(console, "chosen", chosen(device, default_threads=default_threads))
    if not quick:
        check(console, device, default_threads=default_threads)
    return 0


def parse(arguments: Sequence[str]) -> tuple[bool, torch.device]:
    """Returns whether to be quick, and the device."""
    quick, device = False, resolve_device("auto")
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "quick" and value in ("true", "false"):
            quick = value == "true"
        elif name == "device":
            device = resolve_device(value)
            if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
                raise ValueError(f"{argument}: this machine, or this check, has no such device; give device=cpu")
        else:
            raise ValueError(f"{argument!r} is not understood: give quick=true, quick=false or device=cpu")
    return quick, device


def check(console: Console, device: torch.device, *, default_threads: int) -> None:
    """Measure, and say of each choice whether it was the fast one."""
    if console.is_terminal:
        console.print("measuring for half a minute …")
    try:
        times = measure(ways(device, default_threads=default_threads), device)
    except ValueError as error:
        console.print(f"warning: nothing was measured: {error}", markup=False, highlight=False)
        return
    headline = "measured: milliseconds of a forward of " + " and ".join(map(str, TOKENS)) + " tokens"
    show(console, headline, [(str(way), " and ".join(f"{1000 * t:.2f}" for t in times[way])) for way in times])
    for right, text in verdicts(times):
        prefix, style = ("ok", "green") if right else ("warning", "bold yellow")
        console.print(f"{prefix}: {text}", style=style, markup=False, highlight=False)


def show(console: Console, title: str, rows: Rows) -> None:
    """Print rows as plain lines."""
    lines = [f"{title}:", *(f"  {name}: {value}" for name, value in rows), ""]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
