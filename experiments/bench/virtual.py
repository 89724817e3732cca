"""How fast is virtual time? Request-rounds per second of one process, by length policy, at few and at many rows.

Requests of 300 tokens in and 200 out arrive at 8 and at 40 a second at an engine of 64 slots, with published costs of
Llama-3.1-8B on an H100, and made-up traces in which 70 % of drafted tokens are accepted. The goal, 200,000, is that of
many rows: a turn costs the host about the same with few.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.bench.options import option, read_options
from experiments.bench.timing import missed, show, where
from experiments.load.arrivals import Poisson
from experiments.load.dense import Dense
from experiments.load.run import OPEN
from experiments.load.texts import Numbers, ask
from experiments.load.virtual import VirtualEngine
from experiments.load.workloads import Planned
from specdec.drafting import policies
from specdec.engine.scheduler import TokenBudget
from specdec.physics.published import LLAMA_8B_H100
from specdec.requests import SamplingParams

GOAL, DEPTH = 200_000, 8
RATES = (8.0, 40.0)
MADE: dict[str, Callable[[], policies.LengthPolicy | None]] = {
    "plain": lambda: None,
    "fixed": lambda: policies.FixedLength(3),
    "tiers": lambda: policies.TieredLength([(1, (1, 3, 7)), (64, (1, 2, 5))]),
    "cost_aware": lambda: policies.CostAwareLength(LLAMA_8B_H100),
    "margin_replay": lambda: policies.MarginLength(LLAMA_8B_H100),
    "oracle": lambda: policies.OracleLength(LLAMA_8B_H100),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    requests: int = option(1000, "requests of a play", least=100)


def made_up(outputs: int = 50, length: int = 256) -> Dense:
    """Return traces in which each token is accepted with probability 0.7."""
    rng, positions = np.random.default_rng(0), outputs * length
    kept = (rng.random((positions, DEPTH)) < 0.7).astype(np.float32)
    return Dense(
        lengths=np.full(outputs, length),
        probability=kept,
        proposed=np.full(positions, DEPTH),
        nodes=np.tile(np.arange(1, DEPTH + 1), (positions, 1)),
        rank=np.where(kept > 0, 0, 1),
        margin=rng.exponential(2.0, kept.shape).astype(np.float32),
    )


def main() -> None:
    """Play each policy once at each rate, and print one table."""
    options = read_options(Options, __doc__)
    one = [Planned(klass="all", pieces=((number, 300),), output_tokens=200) for number in range(options.requests)]
    asked, traces, rows = ask(one, Numbers(tokens=False), SamplingParams()), made_up(), []
    for name, make in MADE.items():
        given = {} if name == "plain" else {"traces": traces, "policy": make()}
        engine = VirtualEngine(
            costs=LLAMA_8B_H100, slots=64, max_length=1024, scheduler=TokenBudget(2048), mixed=True, **given
        )
        for rate in RATES:
            times = Poisson(rate=rate).times(np.random.default_rng(1), options.requests)
            begin = time.perf_counter()
            run = engine.play(asked, times, loop=OPEN)
            speed = run.requests.rounds.sum() / (time.perf_counter() - begin)
            many = rate == max(RATES)
            verdict = f">= {GOAL:,} {'reached' if speed >= GOAL else 'MISSED'}" if many else ""
            figures = {"rows": f"{run.turns.rows.mean():.1f}", "request-rounds/s": f"{speed:,.0f}"}
            rows.append({"policy": name, **figures, "goal": missed(verdict, wrong="MISSED" in verdict)})
    show(where(), rows)
