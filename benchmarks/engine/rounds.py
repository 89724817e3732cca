"""Where a round's time goes, and what it asks of the device: by stage, for plain decoding and drafters with rules."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.clock import Budget, forward_seconds, now
from benchmarks.engine.models import make_draft_model
from benchmarks.engine.settings import Options
from benchmarks.engine.steps import captured_at_once
from benchmarks.rules import make_rules
from drafters import ModelDrafter, NGramDrafter
from specdec.engine.engine import Engine
from specdec.execution.counting import Work, counted
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.runner import ModelRunner
from specdec.modeling.target import Target
from specdec.requests import SamplingParams
from specdec.types import Step

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

    walls: list[float]
    stages: Counter[str]
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
        """Returns the seconds of a stage per round."""
        return self.stages[name] / max(1, len(self.walls))


def measure_rounds(
    target: Target, context: int, options: Options, budget: Budget, *, batch: int = 1
) -> list[dict[str, Any]]:
    """Time rounds of every pair of ``PAIRS``, sampled at temperature 1 where the drafter draws.

    Returns:
        A record per pair: seconds per round and stage, the share of a round outside its forwards, operations and reads.
    """
    rules = make_rules(tuple(dict.fromkeys(rule for _, rule in PAIRS if rule != "none")))
    draft_model = make_draft_model(target)
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "ngram": lambda: NGramDrafter(max_draft_tokens=8, branches=1),
        "chain": lambda: ModelDrafter(draft_model, 4, sampling="iid"),
        "tree": lambda: ModelDrafter(draft_model, TREE, sampling="iid"),
    }
    records = []
    for drafter, rule in PAIRS:
        what = f"rounds of {drafter} with {rule}"
        if budget.left <= 0:
            budget.skip(what, "no time left")
            continue
        try:
            temperature = 0.0 if drafter in ("none", "ngram") else 1.0
            records.append(
                {
                    "drafter": drafter,
                    "rule": rule,
                    "batch": batch,
                    "temperature": temperature,
                    **_rounds_of(target, makers[drafter](), rules.get(rule), context, options, temperature, batch),
                }
            )
        except ValueError as error:
            budget.skip(what, str(error))
        except torch.OutOfMemoryError:
            budget.skip(what, "out of memory: lower context or batch")
    return records


def _rounds_of(
    target: Target,
    drafter: Drafter | None,
    rule: Verifier | None,
    context: int,
    options: Options,
    temperature: float,
    batch: int,
) -> dict[str, Any]:
    device = target.device
    sampling = SamplingParams(max_new_tokens=options.tokens, temperature=temperature, ignore_eos=True)
    prompts = [repetitive(context, target.vocab_size, row) for row in range(batch)]
    max_length = min(target.max_length, context + options.tokens + 1)
    with Engine(target, drafter, rule, max_batch_size=batch, max_length=max_length, timing=True) as engine:
        own = getattr(drafter, "runner", None)
        runners = [engine.runner, *([own] if isinstance(own, ModelRunner) else [])]
        with captured_at_once():
            play(engine, prompts, sampling, device)
            rounds = play(engine, prompts, sampling, device)
            with forward_seconds(device, *runners) as spent:
                inside = Rounds([], Counter())
                begun: list[float] = []
                play(engine, prompts, sampling, device, into=inside, at_start=lambda: begun.append(spent[0]))
                forwards = spent[0] - begun[0]
        whole, models = count_one_round(engine, runners, prompts, sampling)
    return {
        "rounds": len(rounds.walls),
        "seconds": rounds.seconds,
        "stages": {stage: rounds.stage(stage) for stage in ("draft", "verify", "accept", "commit")},
        "tokens_per_round": rounds.tokens_per_round,
        # None where the forwards cannot be told from the rest, as in a round that is replayed as a whole.
        "outside": 1 - forwards / sum(inside.walls) if forwards > 0 else None,
        "launches": whole.launches,
        "launches_outside": whole.launches - models.launches,
        "reads": whole.synchronizations - models.synchronizations,
    }


def play(
    engine: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    device: torch.device,
    *,
    speculate: bool = True,
    into: Rounds | None = None,
    at_start: Callable[[], object] = lambda: None,
) -> Rounds:
    """Decode prompts turn by turn, and time the turns that consist of a round for all of them.

    Args:
        engine: With a slot for every prompt, and ``timing=True`` if stages are wanted.
        prompts: Of one length, so that all begin together.
        sampling: For all.
        device: What to wait for.
        speculate: Whether to draft.
        into: Where to add up; None for new figures.
        at_start: Called when all prompts are in the cache, before the first turn that counts.
    """
    found = Rounds([], Counter()) if into is None else into
    for row, prompt in enumerate(prompts):
        engine.submit(prompt, streamed(sampling, row), speculate=speculate)
    running = False
    start = now(device)
    while engine.unfinished:
        steps = engine.step()
        end = now(device)
        if running and steps:
            found.walls.append(end - start)
            found.stages.update(steps[0].seconds)
            found.tokens += sum(len(step.token_ids) for step in steps)
            found.emitted += sum(step.accepted + 1 for step in steps)
            found.steps += len(steps)
        elif len(steps) == len(prompts):
            running = True  # the turn with the end of the prefill was the last that does not count
            at_start()
        start = now(device)
    return found


def count_one_round(
    engine: Engine, runners: list[ModelRunner], prompts: list[list[int]], sampling: SamplingParams
) -> tuple[Work, Work]:
    """Returns the work of one round, and the part of it that is forwards of models."""
    ids = [engine.submit(prompt, streamed(sampling, row)) for row, prompt in enumerate(prompts)]
    steps: list[Step] = []
    for _ in range(10_000):
        steps = engine.step()
        if len(steps) == len(prompts):
            break
    with _forwards_counted(runners) as forwards, counted() as whole:
        engine.step()
    for each in ids:
        engine.abort(each)
    return whole, forwards


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


def repetitive(count: int, vocab: int, row: int = 0) -> list[int]:
    """Returns a prompt that repeats itself, so that prompt lookup has something to find."""
    return [(7 * (place % 23) + 3 * row + 1) % vocab for place in range(count)]


def streamed(sampling: SamplingParams, row: int) -> SamplingParams:
    """Returns the parameters of one row: random numbers of its own, the same ones in every run."""
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, ignore_eos=True, stream=row
    )
