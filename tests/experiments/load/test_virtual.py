"""Virtual time: queues of the textbook, pages, preemption, and figures like those of a real run."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.commands.load import load
from experiments.commands.run import run
from experiments.load.arrivals import Gaps
from experiments.load.run import DONE, OPEN
from experiments.load.virtual import Accepted, VirtualEngine, _Play
from experiments.load.workloads import Asked, Planned, ask
from experiments.tracing.trace import read_trace
from specdec import Engine, Paging, SamplingParams, Target
from specdec.drafting.policies import AdditiveLength
from specdec.engine.scheduler import FirstCome, Priority, Scheduler, TokenBudget
from specdec.physics.calibrated import Box, CalibratedRounds, Conditions
from specdec.physics.costs import StepCost
from specdec.physics.rounds import AffineRounds
from tests.experiments.runs import local
from tests.models import tiny_model

COSTS = AffineRounds(target=StepCost.affine(fixed=5e-3, per_token=2e-5, per_position=4e-8), outside=1e-3)


def requests(prompts: list[int], outputs: list[int]) -> list[Asked]:
    sizes = enumerate(zip(prompts, outputs, strict=True))
    planned = [Planned(klass="any", pieces=((number, one),), output_tokens=tokens) for number, (one, tokens) in sizes]
    return ask(planned, None, SamplingParams())


def test_latencies_are_sums_of_the_costs() -> None:
    """One request of 11 prompt tokens and 3 output tokens: three rounds, of which the first reads the prompt, too."""
    engine = VirtualEngine(costs=COSTS, slots=1, max_length=64)
    row = engine.play(requests([11], [3]), np.array([0.5]), loop=OPEN).requests.iloc[0]
    prefill = 10 * 2e-5
    rounds = [5e-3 + 2e-5 + 4e-8 * context + 1e-3 for context in (10, 11, 12)]
    assert row.first_token - row.arrived == pytest.approx(prefill + rounds[0])
    assert row.finished - row.arrived == pytest.approx(prefill + sum(rounds))


def test_passes_over_the_weights_are_those_that_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in seconds, as each takes one and nothing else takes any; pieces of several lengths are among them."""
    prompts, outputs, sizes = [9, 9, 21, 6, 6], [3, 5, 2, 4, 4], {"max_length": 64, "prefill_chunk": 8}
    engine, passes = Engine(Target(tiny_model()), max_batch_size=2, **sizes), []
    for name in ("run", "run_together"):
        own = getattr(engine.runner, name)
        monkeypatch.setattr(engine.runner, name, lambda given, own=own: (passes.append(given), own(given))[1])
    sampled = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in outputs]
    engine.generate([[number + 1] * length for number, length in enumerate(prompts)], sampled)

    def counted(executor: str) -> float:
        about = Conditions(device="", dtype="", model="", fingerprint="", executor=executor)
        box, one = Box(batch=(1, 2), context=(1, 64), drafted=(0, 0)), {"fixed": 1, "per_token": 0, "per_position": 0}
        costs = CalibratedRounds(conditions=about, box=box, target=StepCost.affine(**one))
        played = VirtualEngine(costs=costs, slots=2, **sizes).play(requests(prompts, outputs), np.zeros(5), loop=OPEN)
        return float(played.turns.seconds.sum())

    assert counted(type(engine.runner.executor).__name__) == len(passes) < counted("as on a GPU")


@pytest.mark.parametrize(
    ("reserve", "scheduler"), [(1.0, FirstCome()), (0.0, FirstCome()), (0.0, TokenBudget(64)), (0.0, Priority(64))]
)
def test_pages_are_conserved_and_everybody_ends(reserve: float, scheduler: Scheduler, monkeypatch: Any) -> None:
    left: list[int | None] = []
    monkeypatch.setattr(_Play, "close", lambda play: left.append(play.free_pages))
    rng = np.random.default_rng(2)
    asked = requests(rng.integers(2, 90, 60).tolist(), rng.integers(1, 90, 60).tolist())
    kept = np.random.default_rng(0).random((8, 20, 4)) < 0.7
    accepted = np.logical_and.accumulate(kept, -1).sum(-1).tolist()
    traces = Accepted.of([[(count, [1] * 4) for count in output] for output in accepted])  # chains of four
    drafts = {"scheduler": scheduler, "accepted": traces, "policy": AdditiveLength()}
    paging = Paging(page_size=8, pages=26, reserve=reserve)
    engine = VirtualEngine(costs=COSTS, slots=6, max_length=200, paging=paging, **drafts)
    run = engine.play(asked, Gaps(rate=30).times(rng, 60), loop=OPEN)
    table = run.requests
    assert (table.outcome == DONE).all() and left == [26]
    assert table.output_tokens.tolist() == [each.planned.output_tokens for each in asked]
    assert (table.preemptions.sum() > 0) == (table.recomputed_tokens.sum() > 0) == (reserve < 1)
    assert (table.accepted + table.rounds >= table.output_tokens).all()
    ends = np.append(0.0, run.turns.begin + run.turns.seconds)
    entered = np.maximum(table.arrived, ends[np.searchsorted(run.turns.begin, table.arrived)])
    stays = float((table.finished - entered).sum())  # Little's law
    assert float(((run.turns.running + run.turns.waiting) * run.turns.seconds).sum()) == pytest.approx(stays, rel=0.05)


def test_a_shorter_draft_is_what_was_left_of_the_recorded_one() -> None:
    """Behind a draft that was accepted whole, the next token is right as often as the deepest ones were."""
    found = Accepted.of([[(2, [1, 1, 1]), (0, [2, 1, 1]), (3, [1, 1, 1]), (1, [1, 1])]])
    assert found.lengths.tolist() == [3 + 1 + 4 + 2]
    assert found.able[:5].tolist() == [2, 1, 0, 0, 3] and found.able[8:].tolist() == [1, 0]
    assert found.able[5:8].tolist() in ([2, 1, 0], [3, 3, 2]), "it ends, or goes on as the next round"
    assert found.proposed.tolist() == [3] * 8 + [2] * 2 and found.nodes[3].tolist() == [2, 3, 4]
    ends = {tuple(Accepted.of([[(2, [1, 1]), (1, [1, 1])]] * 40, seed).able[1:3].tolist()) for seed in range(9)}
    assert ends == {(1, 0), (2, 2)}, "the mutant that never goes on has one"


@pytest.mark.usefixtures("no_pictures")
def test_a_trace_is_played_as_the_engine_has_played_it(configure, saved: Path, tiny: list[str], tmp_path: Path) -> None:
    """Greedy rounds of the trace's depth are the engine's own."""
    words = [*tiny, *local(saved, "model"), "target.dtype=float32", "title=false", "drafter.shape=6"]
    words.append("engine.max_length=128")
    run_words = ["dataset.count=6", "dataset.too_long=cut", "sampling.max_new_tokens=16", "sampling.ignore_eos=true"]
    run_words += ["warmup_prompts=0", "trace=true"]
    run(configure("run", *words, *run_words, f"out={tmp_path / 'trace'}"))
    found = Accepted.read(tmp_path / "trace", "model")
    assert len(found.lengths) == 6 and found.nodes.shape[1] == 6 and (found.lengths >= 16).all()
    clock = ["clock=virtual", "clock.costs=llama_8b_h100", f"clock.traces={tmp_path / 'trace'}"]
    more = ["workload.classes.chat={input: 12, output: 16, spread: 0}", "requests=6", "rates=[5,50]"]
    policies = ["+policy@policies.best=oracle", "+policy@policies.fixed=fixed", "policies.fixed.depth=null"]
    runs = load(configure("load", *words, *clock, *more, *policies, f"out={tmp_path / 'virtual'}"))
    assert [(run.method, run.rate) for run in runs] == [(m, r) for r in (5.0, 50.0) for m in ("plain", "best", "fixed")]
    assert all((run.requests.outcome == DONE).all() for run in runs)
    rounds = Counter(traced.key.prompt for shard in read_trace(tmp_path / "trace", tables=False) for traced in shard)
    assert runs[2].requests.rounds[:6].tolist() == list(rounds.values())
    text = (tmp_path / "virtual" / "load.md").read_text()
    assert "VIRTUAL TIME, llama_8b_h100" in text and "Does it pay" in text and "regret" in text


def test_what_virtual_time_has_not() -> None:
    with pytest.raises(ValueError, match=r"swap=100, shared=False: .* preempted by recomputation alone"):
        VirtualEngine(costs=COSTS, slots=1, max_length=64, paging=Paging(swap=100))
    with pytest.raises(ValueError, match="has no round with a draft"):
        Accepted.of([[(0, [])]])
