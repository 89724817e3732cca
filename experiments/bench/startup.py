"""What a start costs: ``python -m experiments.bench startup repeats=5``.

Times fresh processes, one after the other in turns: ``import torch, transformers``, which is what any program on these
two pays; the imports of this project; and questions to its commands, which import neither. The times include Python's
own start, which the first row shows. The ratio is of medians.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.bench.options import option, read_options
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table

BASE = "import torch, transformers"
CODE = {
    "Python alone": "pass",
    BASE: BASE,
    "import specdec": "import specdec, drafters, verifiers",
    "use specdec.Engine": "from specdec import Engine, SamplingParams, Target; from verifiers import RejectionVerifier",
    "load a model's class": f"{BASE}; transformers.AutoModelForCausalLM, transformers.PreTrainedModel",
}
QUESTIONS = {
    "run --help": ("run", "--help"),
    "run --cfg job": ("run", "--cfg", "job"),
    "run drafter=ngrm": ("run", "drafter=ngrm"),
    "replay --help": ("replay", "--help"),
    "check_verifier verifier=blok": ("check_verifier", "verifier=blok"),
}


@dataclass(frozen=True)
class Options:
    """The options."""

    repeats: int = option(5, "times that every process is started", least=1)


def commands() -> dict[str, list[str]]:
    """The command line of every process that is timed, by what it does."""
    return {
        **{name: [sys.executable, "-c", code] for name, code in CODE.items()},
        **{name: [sys.executable, "-m", f"experiments.{words[0]}", *words[1:]] for name, words in QUESTIONS.items()},
    }


def seconds(command: Sequence[str]) -> float:
    """How long a process takes from its start to its end. What it prints is thrown away."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def main() -> None:
    """Time all processes and print the table."""
    options = read_options(Options, __doc__)
    listed = commands()
    for command in listed.values():
        seconds(command)  # byte code and the system's file cache
    times: dict[str, list[float]] = {name: [] for name in listed}
    for _ in range(options.repeats):
        for name, command in listed.items():
            times[name].append(seconds(command))
    base = statistics.median(times[BASE])
    table = Table(
        [Column("process", align="left"), Column("seconds"), Column("of the base")],
        f"Starts of processes, medians of {options.repeats}; load average {os.getloadavg()[0]:.1f}",
        notes=[f"base: {BASE}"],
    )
    for name, taken in times.items():
        median = statistics.median(taken)
        table.add(name, f"{median:.2f}", f"{median / base:.2f}")
    terminal.console().print(terminal.render(table))


if __name__ == "__main__":
    main()
