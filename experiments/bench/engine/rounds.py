"""Where a round's time goes, and what it asks of the device: by stage, for plain decoding and drafters with rules."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from drafters import ModelDrafter, NGramDrafter
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Setting, make_runner, measure_step
from experiments.bench.models import make_draft_model, repetitive
from experiments.bench.rules import make_rules
from experiments.bench.timing import Budget, forward_seconds, now
from experiments.measuring.forwards import captured_at_once
from specdec.engine.engine import Engine
from specdec.execution.counting import Work, counted
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

TREE = (2, 2, 1, 1)
"""The shape of drafted trees: 14 nodes, four deep."""
PAIRS = (
    ("none", "none"),
    ("ngram", "rejection"),
    ("chain", "rejection"),
    ("chain", "block"),
    ("tree", "rejection"),
    ("tree", "target_walk"),
    ("tree", "traversal"),
    ("tree", "kseq"),
    ("tree", "weighted_transport"),
)
"""Drafters and rules, by name."""


WAYS = (("none", "none"), ("ngram", "rejection"), ("chain", "rejection"))
"""Drafters and rules whose rounds are played in every way of recording, and in invariant mode."""


@dataclass(frozen=True)
class Way:
    """How an engine plays its rounds (``Engine``'s arguments of the same names)."""

    recording: str = "auto"
    invariant: bool = False


Cell = tuple[tuple[str, str], Way]
"""A drafter and a rule by name, and how the engine plays its rounds."""


@dataclass
class Rounds:
    """What a number of rounds took, those with a prefill left out.

    Attributes:
        walls: Seconds of every turn of the engine.
        stages: Seconds by stage, over all rounds.
        tokens: Tokens emitted.
        emitted: Tokens before any cut, over all rounds and rows.
        steps: Rounds times rows.
    """

    walls: list[float] = field(default_factory=list)
    stages: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    emitted: int = 0
    steps: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row's round brings, recovered or bonus token included."""
        return self.emitted / max(1, self.steps)

    @property
    def seconds(self) -> float:
        """Seconds per round."""
        return sum(self.walls) / max(1, len(self.walls))

    def stage(self, name: str) -> float:
        """Return the seconds of a stage per round."""
        return self.stages[name] / max(1, len(self.walls))


def cells(options: Options) -> tuple[list[Cell], list[Cell]]:
    """Return the rounds of every pair of ``PAIRS``; and of every pair of ``WAYS`` in all ways that were asked for."""
    ways = [Way(recording) for recording in options.recordings]
    if options.invariant:
        ways.append(Way(invariant=True))
    return [(pair, Way()) for pair in PAIRS], [(pair, way) for pair in WAYS for way in ways]


def measure_rounds(
    target: Target, context: int, options: Options, budget: Budget, cells: Sequence[Cell], *, batch: int = 1
) -> list[dict[str, Any]]:
    """Time rounds, sampled at temperature 1 where the drafter draws.

    Args:
        target: The target.
        context: Prompt tokens.
        options: How many rounds to play.
        budget: Seconds.
        cells: A drafter and a rule by name, and how the engine plays its rounds.
        batch: Rows.

    Returns:
        A record per cell: seconds per round and stage, the share of a round outside its forwards, operations and reads.
    """
    rules = make_rules(tuple(dict.fromkeys(rule for (_, rule), _ in cells if rule != "none")))
    draft_model = make_draft_model(target)
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "ngram": lambda: NGramDrafter(max_draft_tokens=8, branches=1),
        "chain": lambda: ModelDrafter(draft_model, 4, sampling="iid"),
        "tree": lambda: ModelDrafter(draft_model, TREE, sampling="iid"),
    }
    records = []
    for number, ((drafter, rule), way) in enumerate(cells):
        how = "" if way == Way() else f", recording={way.recording}, invariant={str(way.invariant).lower()}"
        what = f"rounds of {drafter} with {rule}{how}"
        if budget.spent(what):
            continue
        temperature = 0.0 if drafter in ("none", "ngram") else 1.0
        about = {"drafter": drafter, "rule": rule, "batch": batch, "temperature": temperature, **asdict(way)}
        limit = budget.left / (len(cells) - number)
        try:
            played = _rounds_of(
                target, makers[drafter](), rules.get(rule), context, temperature, batch, options.tokens, limit, way
            )
        except ValueError as error:
            budget.skip(what, str(error))
        except torch.OutOfMemoryError:
            budget.skip(what, "out of memory: lower context or batch")
        else:
            records.append(about | played)
    return records


WARM_UP = 8
"""Rounds before those that count: every width that comes often is captured in them."""


def _rounds_of(
    target: Target,
    drafter: Drafter | None,
    rule: Verifier | None,
    context: int,
    temperature: float,
    batch: int,
    count: int,
    limit: float,
    way: Way,
) -> dict[str, Any]:
    """Play some rounds of requests that go on all the time, and time and count those in the middle.

    Args:
        target: The target.
        drafter: None for plain decoding.
        rule: None for plain decoding.
        context: Prompt tokens.
        temperature: At which all rows sample.
        batch: Rows.
        count: Rounds that are timed, at most.
        limit: Seconds for timing, about.
        way: How the engine plays its rounds.
    """
    device = target.device
    deepest = 1 if drafter is None else drafter.max_depth + 1
    wanted = (WARM_UP + 2 * count + 2) * deepest
    max_length = min(target.max_length, context + wanted + 1)
    sampling = SamplingParams(max_new_tokens=max(1, max_length - context - 1), temperature=temperature, ignore_eos=True)
    prompts = [repetitive(context, target.vocab_size, row) for row in range(batch)]
    with Engine(
        target,
        drafter,
        rule,
        max_batch_size=batch,
        max_length=max_length,
        recording=way.recording,
        invariant=way.invariant,
        timing=True,
    ) as engine:
        own = getattr(drafter, "runner", None)
        runners = [engine.runner, *([own] if isinstance(own, ModelRunner) else [])]
        with captured_at_once(CAPTURED):
            begin(engine, prompts, sampling)
            advance(engine, device, Rounds(), most=WARM_UP, limit=limit / 4)
            timed = advance(engine, device, Rounds(), most=count, limit=limit / 2)
            with forward_seconds(device, *runners) as spent:
                inside = advance(engine, device, Rounds(), most=count, limit=limit / 4)
            with _forwards_counted(runners) as models, counted() as whole:
                engine.step()
        outside = None
        if spent[1] >= len(inside.walls):
            outside = 1 - spent[0] / sum(inside.walls)
        elif timed.walls:  # rounds that are replayed as a whole: the same forwards, one by one
            width = 1 if drafter is None else drafter.max_nodes + 1
            forwards = _single(runners[0], Setting(batch, width, context, invariant=way.invariant), target)
            levels = 0 if drafter is None else drafter.max_depth
            forwards += sum(levels * _single(each, Setting(batch, 1, context), target) for each in runners[1:])
            outside = max(0.0, 1 - forwards / timed.seconds)
    return {
        "rounds": len(timed.walls),
        "seconds": timed.seconds,
        "stages": {stage: timed.stage(stage) for stage in ("draft", "verify", "accept", "commit")},
        "tokens_per_round": timed.tokens_per_round,
        "outside": outside,
        "launches": whole.launches,
        "launches_outside": whole.launches - models.launches,
        "reads": whole.synchronizations - models.synchronizations,
    }


def begin(engine: Engine, prompts: list[list[int]], sampling: SamplingParams, *, speculate: bool = True) -> list[int]:
    """Submit prompts of one length and step until all have played their first round; returns the requests' ids."""
    ids = [engine.submit(prompt, streamed(sampling, row), speculate=speculate) for row, prompt in enumerate(prompts)]
    while len(engine.step()) < len(prompts):
        pass
    return ids


def advance(
    engine: Engine,
    device: torch.device,
    into: Rounds,
    *,
    rows: int = 1,
    most: int | None = None,
    limit: float = float("inf"),
) -> Rounds:
    """Play rounds of the requests that run, and add up what they take.

    As in ``generate``, nothing else runs meanwhile, so that each model is looked at once for changes and not in every
    round.

    Args:
        engine: Its requests have begun.
        device: What to wait for.
        into: Where to add up; returned.
        rows: Stop when fewer requests than this are left.
        most: Rounds to play; None for all that there are.
        limit: Seconds after which no other round is begun; one is played in any case.
    """
    deadline = time.perf_counter() + limit
    played = 0
    start = now(device)
    while engine.unfinished >= rows and (most is None or played < most) and not (played and start > deadline):
        steps = engine.step()
        end = now(device)
        into.walls.append(end - start)
        into.stages.update(steps[0].seconds)
        into.tokens += sum(len(step.token_ids) for step in steps)
        into.emitted += sum(step.accepted + 1 for step in steps)
        into.steps += len(steps)
        played += 1
        start = now(device)
    return into


def _single(runner: ModelRunner, setting: Setting, target: Target) -> float:
    """Return the seconds of one forward of a runner's model, over a cache of its own."""
    of = target if runner.model is target.model else Target(runner.model)
    return measure_step(make_runner(of, setting, setting.nodes), setting, repeats=3, limit=2.0)["seconds"]


@contextmanager
def _forwards_counted(runners: list[ModelRunner]) -> Iterator[Work]:
    """Add up the work of these runners' forwards."""
    total = Work()

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        def counting_run(*arguments: Any) -> Any:
            with counted() as work:
                output = run(*arguments)
            total.operations.update(work.operations)
            total.reads.update(work.reads)
            return output

        return counting_run

    for runner in runners:
        vars(runner)["run"] = wrapped(runner.run)
    try:
        yield total
    finally:
        for runner in runners:
            vars(runner).pop("run", None)


def streamed(sampling: SamplingParams, row: int) -> SamplingParams:
    """Return the parameters of one row: random numbers of its own, the same ones in every run."""
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, ignore_eos=True, stream=row
    )
