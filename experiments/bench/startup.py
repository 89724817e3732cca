"""What a start costs.

Times fresh processes, one after the other in turns: ``import torch, transformers``, which is what any program on these
two pays; the imports of this project; and questions to its commands, which import neither. The times include Python's
own start, which the first row shows. The ratio is of medians.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from experiments.bench.options import option, read_options
from experiments.bench.timing import in_turns, show

BASE = "import torch, transformers"
CODE = {
    "Python alone": "pass",
    BASE: BASE,
    "import specdec": "import specdec, drafters, verifiers",
    "use specdec.Engine": "from specdec import Engine, SamplingParams, Target; from verifiers import RejectionVerifier",
    "load a model's class": f"{BASE}; transformers.AutoModelForCausalLM, transformers.PreTrainedModel",
}
QUESTIONS = ("run --help", "run --cfg job", "run drafter=ngrm", "replay --help", "check_verifier verifier=blok")


@dataclass(frozen=True)
class Options:
    """The options."""

    repeats: int = option(5, "times that every process is started", least=1)


def main() -> None:
    """Time all processes and print the table."""
    options = read_options(Options, __doc__)
    commands = {name: ["-c", code] for name, code in CODE.items()}
    commands |= {words: ["-m", *f"experiments.{words}".split()] for words in QUESTIONS}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    sides = [lambda w=words: subprocess.run([sys.executable, *w], **silent) for words in commands.values()]
    # The first turn is for byte code and the system's file cache.
    medians = dict(zip(commands, map(statistics.median, in_turns(sides, options.repeats)), strict=True))
    rows = [
        {"process": name, "seconds": f"{found:.2f}", "of the base": f"{found / medians[BASE]:.2f}"}
        for name, found in medians.items()
    ]
    title = f"Starts of processes, medians of {options.repeats}; load average {os.getloadavg()[0]:.1f}"
    show(title, rows, f"base: {BASE}")
