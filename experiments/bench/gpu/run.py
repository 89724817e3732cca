"""The benchmark that needs a GPU, in four parts of at most eight minutes: ``part=1 out=FOLDER``, or all in order.

1 smoke: recorded rounds give the tokens of the same rounds as they are. 2 measure: an 8B's forwards, rounds, products,
attention and prompts, beside what they must reach. 3 tests: those marked gpu. 4 profile: the kernels of a round. Each
prints its table and writes its JSON into the folder, where nothing goes on behind a red part 1.

It runs in the Python that it is started with, whose packages it leaves as they are, and needs neither hydra nor wandb.
device=cpu rehearses everything in tiny sizes: its times mean nothing.
"""

import importlib
import importlib.util
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.options import option, read_options, refuse

NEEDED = ("torch", "transformers", "numpy", "scipy", "jaxtyping", "psutil", "safetensors", "rich", "yaml")
"""The modules that every part imports."""
NEEDED_BY_TESTS = ("pytest", "hypothesis", "matplotlib")
ITEMS = ("peaks", "steps", "rounds", "products", "attention", "prefill", "batches", "kernels")
"""The items of part 2, the most telling first."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    part: int | None = option(None, "1 smoke, 2 measure, 3 tests, 4 profile; null: all of them", choices=(1, 2, 3, 4))
    out: Path = option(Path("outputs/gpu"), "folder for the results of all parts")
    device: str = option("cuda", "cuda; cpu rehearses in tiny sizes", choices=("cuda", "cpu"))
    only: tuple[str, ...] = option(ITEMS, "what part 2 measures", choices=ITEMS)
    force: bool = option(False, "go on behind a red part 1")
    commit: str | None = option(None, "the commit of a copy that has no repository")


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed, as one installs them."""
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    return [{"yaml": "pyyaml"}.get(module, module) for module in lacking]


def main() -> None:
    """Run a part, or all of them, each in a process of its own: an error of CUDA would spoil those that follow."""
    options = read_options(Options, __doc__)
    if lacking := missing(NEEDED + (NEEDED_BY_TESTS if options.part == 3 else ())):
        packages = " ".join(lacking)
        refuse(ValueError(f"{' and '.join(lacking)} not installed in {sys.executable}: pip install {packages}"))
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        refuse(ValueError(f"torch {torch.__version__} sees no GPU here: device=cpu rehearses everything in tiny sizes"))
    if options.part is not None:
        sys.exit(play(options, options.part))
    codes: list[int] = []
    for part in (1, 2, 3, 4):
        words = [*(word for word in sys.argv[1:] if not word.startswith("part=")), f"part={part}"]
        codes.append(subprocess.run([sys.executable, "-m", "experiments.bench", "gpu", *words]).returncode)
        if part == 1 and codes[0] and not options.force:
            break
    sys.exit(max(map(abs, codes)))


def play(options: Options, part: int) -> int:
    """Play a part; return 1 if it is red, else 0. Whatever ends it, what it has found is written and shown."""
    import torch
    import transformers

    from experiments.bench.gpu.outcome import PARTS, Outcome, file_of, was_red

    if part > 1 and not options.force and was_red(options.out):
        refuse(
            ValueError(
                f"part 1 is red in {file_of(options.out, 1)}, so part {part} would be worth nothing: mend that and "
                f"play part 1 again, or go on all the same with force=true (make gpu FORCE=1)"
            )
        )
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.device == "cpu":
        torch.set_num_threads(1)  # in tiny sizes several would wait for each other
    outcome = Outcome(options.out, part, torch.device(options.device), commit=options.commit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit from outside: show what there is
    try:
        importlib.import_module(f"experiments.bench.gpu.{PARTS[part]}").run(outcome, *([options.only] * (part == 2)))
        outcome.ended = True
    finally:
        outcome.write()
        outcome.show()
    if outcome.red:
        missed = ", ".join(each["what"] for each in outcome.expected if each["stops"] and each["met"] is False)
        print(f"error: part {part} is red ({missed}): see {file_of(options.out, part)}", file=sys.stderr)
    return int(outcome.red)
