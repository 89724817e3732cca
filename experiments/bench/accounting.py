"""The cost per round of counting bytes, operations and predictions.

The bundled target decodes some requests, with and without drafts. Then the calls' steps are counted, as a run does
after every call. The table compares the time of that with the time of the rounds: it has to be below 1 %.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.bench.models import small_model
from experiments.bench.options import option, read_options
from experiments.bench.timing import ms, show, timed
from experiments.measuring.accounting import Accountant
from specdec.engine.engine import Engine
from specdec.machine import recommended_threads
from specdec.physics.calibrated import CalibratedRounds
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier


@dataclass(frozen=True)
class Options:
    """The command line."""

    inflate: str = option("", "inflate the target to this size, such as 110m; empty: as it is, the hardest case")
    costs: Path | None = option(None, "a file of experiments.calibrate, to predict rounds, too")
    batch: tuple[int, ...] = option((1, 8), "numbers of rows", least=1)
    tokens: int = option(96, "tokens per request", least=2)
    repeats: int = option(20, "how often a call is counted", least=1)


def main() -> None:
    """Measure and print the table."""
    options = read_options(Options, __doc__)
    torch.set_num_threads(recommended_threads())
    target = Target.from_pretrained("bundled/target", inflate=options.inflate or None)
    costs = None if options.costs is None else CalibratedRounds.load(options.costs)
    rows = []
    for batch in options.batch:
        with Engine(target, small_model(target), RejectionVerifier(), max_batch_size=batch, timing=True) as engine:
            rows += [_measure(engine, options, costs, speculate=speculate) for speculate in (False, True)]
    show(f"Counting after the fact, {target.name}", rows, "to reach: below 1%")


def _measure(engine: Engine, options: Options, costs: CalibratedRounds | None, *, speculate: bool) -> dict[str, str]:
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    prompts = ["def area(self):\n    return self.width * self.height\n"] * engine.max_batch_size
    engine.generate(prompts, sampling, speculate=speculate)
    done = engine.generate(prompts, sampling, speculate=speculate)
    accountant = Accountant.of(engine, speculate=speculate, costs=costs)
    rounds = {id(step.seconds): sum(step.seconds.values()) for each in done for step in each.steps}
    whole = timed(lambda: accountant.of_call(done), repeats=options.repeats, limit=1e9, warm_up=0)["seconds"]
    counting, playing = whole / len(rounds), statistics.median(rounds.values())
    return {
        "rows": str(engine.max_batch_size),
        "method": "draft model" if speculate else "plain",
        "rounds": str(len(rounds)),
        "a round, ms": ms(playing),
        "counting it, µs": f"{1e6 * counting:.1f}",
        "share": f"{counting / playing:.2%}",
    }
