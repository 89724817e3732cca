"""Rounds: where their time goes and what they ask of the device, and the speedup that synthetic drafts bring."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from drafters import ModelDrafter, NGramDrafter
from drafters.round_costs import STAGES, TimedRound, begin, now, time_round
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Record, Setting, make_runner, measure_step
from experiments.bench.models import make_draft_model, repetitive
from experiments.bench.rules import make_rules
from experiments.bench.synthetic import SyntheticDrafter
from experiments.bench.timing import Budget, runs_wrapped
from experiments.measuring.forwards import captured_at_once
from specdec.counting import Work, counted
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.physics.speculation import speedup, tokens_per_round
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from verifiers import RejectionVerifier

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
"""Drafters and rules, by name; the first three are played in every way of recording and in invariant mode, too."""
WARM_UP = 8
"""Rounds before those that count: every width that comes often is captured in them."""
LEARNING = 4
"""Runs in which the synthetic drafter learns what a speculative run emits; in float32 one is enough."""


@dataclass(frozen=True)
class Way:
    """How an engine plays its rounds (``Engine``'s arguments of the same names)."""

    recording: str = "auto"
    invariant: bool = False


Cell = tuple[tuple[str, str], Way]
"""A drafter and a rule by name, and how the engine plays its rounds."""


def cells(options: Options) -> tuple[list[Cell], list[Cell]]:
    """Return the rounds of every pair as usual; and of the first three pairs in all ways that were asked for."""
    ways = [Way(recording) for recording in options.recordings] + [Way(invariant=True)] * options.invariant
    return [(pair, Way()) for pair in PAIRS], list(itertools.product(PAIRS[:3], ways))


def play(engine: Engine, *, rows: int = 1, most: int | None = None, limit: float = float("inf")) -> list[TimedRound]:
    """Play rounds of the requests that run, and nothing else, as ``generate`` does.

    Args:
        engine: Its requests have begun.
        rows: Stop when fewer requests than this are left.
        most: Rounds to play; None for all that there are.
        limit: Seconds after which no other round is begun; one is played in any case.
    """
    deadline, rounds = time.perf_counter() + limit, []
    while engine.unfinished >= rows and len(rounds) != most and not (rounds and time.perf_counter() > deadline):
        rounds.append(time_round(engine))
    return rounds


def mean(rounds: Sequence[TimedRound], *names: str, per: str | None = None) -> float:
    """Return the sum of some figures over rounds, per round or per another figure."""
    whole = sum(each[name] for each in rounds for name in names)
    return whole / max(1, len(rounds) if per is None else sum(each[per] for each in rounds))


def streams(sampling: SamplingParams, rows: int) -> list[SamplingParams]:
    """Return the parameters of all rows: each has random numbers of its own, the same ones in every run."""
    return [replace(sampling, stream=row) for row in range(rows)]


def measure_rounds(
    target: Target, context: int, options: Options, budget: Budget, cells: Sequence[Cell], *, batch: int = 1
) -> list[Record]:
    """Time rounds behind ``context`` prompt tokens, sampled at temperature 1 where the drafter draws.

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
        sampling = SamplingParams(temperature=temperature, ignore_eos=True)
        limit = budget.left / (len(cells) - number)
        try:
            played = _rounds_of(
                target, makers[drafter](), rules.get(rule), way, context, sampling, batch, options.tokens, limit
            )
        except ValueError as error:
            budget.skip(what, error)
        except torch.OutOfMemoryError:
            budget.skip(what, "out of memory: lower context or batch")
        else:
            about = {"drafter": drafter, "rule": rule, "batch": batch, "temperature": temperature}
            records.append({**about, **asdict(way), **played})
    return records


def _rounds_of(
    target: Target,
    drafter: Drafter | None,
    rule: Verifier | None,
    way: Way,
    context: int,
    sampling: SamplingParams,
    batch: int,
    count: int,
    limit: float,
) -> Record:
    """Play rounds of requests that go on all the time, and time and count up to ``count`` in the middle."""
    device = target.device
    deepest, width = (1, 1) if drafter is None else (drafter.max_depth + 1, drafter.max_nodes + 1)
    max_length = min(target.max_length, context + (WARM_UP + 2 * count + 2) * deepest + 1)
    sampling = replace(sampling, max_new_tokens=max(1, max_length - context - 1))
    prompts = [repetitive(context, target.vocab_size, row) for row in range(batch)]
    spent: list[float] = []
    models = Work()

    def clocked(run: Callable[..., Any]) -> Callable[..., Any]:
        # A forward that is replayed as a part of something larger is not seen.
        def forward(*arguments: Any) -> Any:
            start = now(device)
            outputs = run(*arguments)
            spent.append(now(device) - start)
            return outputs

        return forward

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any) -> Any:
            with counted() as work:
                outputs = run(*arguments)
            models.operations.update(work.operations)
            models.reads.update(work.reads)
            return outputs

        return forward

    def playing(recording: str) -> Engine:
        return Engine(
            target, drafter, rule, max_batch_size=batch, max_length=max_length, timing=True, recording=recording,
            invariant=way.invariant,
        )  # fmt: skip

    with playing(way.recording) as engine, captured_at_once(CAPTURED):
        recorded = engine.recording == "rounds"
        runners = _runners(engine)
        begin(engine, prompts, streams(sampling, batch))
        play(engine, most=WARM_UP, limit=limit / 4)
        timed = play(engine, most=count, limit=limit / 2)
        with runs_wrapped([runner.executor for runner in runners], clocked):
            inside = play(engine, most=count, limit=limit / 4)
        if not recorded:
            with runs_wrapped(runners, counting), counted() as whole:
                engine.step()
        outside = None
        if not recorded and len(spent) >= len(inside):
            outside = 1 - sum(spent) / sum(each["seconds"] for each in inside)
        elif timed:  # rounds that are replayed as a whole: the same forwards, one by one
            forwards = _single(runners[0], Setting(batch, width, context, invariant=way.invariant), target)
            forwards += sum((deepest - 1) * _single(each, Setting(batch, 1, context), target) for each in runners[1:])
            outside = max(0.0, 1 - forwards / mean(timed, "seconds"))
    if recorded:  # what a replay does is counted in a round that is not one
        with playing("decisions") as engine, captured_at_once(CAPTURED):
            begin(engine, prompts, streams(sampling, batch))
            play(engine, most=WARM_UP, limit=limit / 4)
            with runs_wrapped(_runners(engine), counting), counted() as whole:
                engine.step()
    return {
        "rounds": len(timed),
        "seconds": mean(timed, "seconds"),
        "stages": {stage: mean(timed, stage) for stage in STAGES},
        "tokens_per_round": mean(timed, "emitted", per="rows"),
        "outside": outside,
        "launches": whole.launches,
        "launches_outside": whole.launches - models.launches,
        "reads": whole.synchronizations - models.synchronizations,
    }


def _runners(engine: Engine) -> list[ModelRunner]:
    """Return the target's runner, and those of the models that draft."""
    own = () if engine.session is None else engine.session.models
    return [engine.runner, *(each for each in own if isinstance(each, ModelRunner))]


def _single(runner: ModelRunner, setting: Setting, target: Target) -> float:
    """Return the seconds of one forward of a runner's model, over a cache of its own."""
    of = target if runner.model is target.model else Target(runner.model)
    return measure_step(make_runner(of, setting, setting.nodes), setting, repeats=3, limit=2.0)["seconds"]


# ---------------------------------------------------------------- a given acceptance


def measure_acceptance(target: Target, context: int, options: Options, budget: Budget, batch: int) -> list[Record]:
    """Measure the speedup of synthetic drafts, beside the one that the costs of single stages predict.

    Returns:
        One record, or none where there was no time: ``measured``, ``predicted`` from the given acceptance,
        ``predicted_from_tokens`` from the acceptance that came out, the costs, and how many outputs equal those of
        plain decoding.
    """
    what = f"synthetic acceptance at batch {batch}"
    if budget.spent(what):
        return []
    drafter = SyntheticDrafter(min(1.0, options.accept), options.depth)
    prompts = [repetitive(context, target.vocab_size, row) for row in range(batch)]
    each = streams(SamplingParams(max_new_tokens=options.tokens, ignore_eos=True), batch)
    max_length = min(target.max_length, context + options.tokens + 1)
    try:
        engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=batch, max_length=max_length, timing=True)
    except (ValueError, torch.OutOfMemoryError) as error:
        budget.skip(what, error)
        return []
    with engine, captured_at_once(CAPTURED):
        began = now(target.device)
        plain_outputs = [output.token_ids for output in engine.generate(prompts, each, speculate=False)]
        once = now(target.device) - began
        if 6 * once > budget.left:  # learning, then each way twice
            budget.skip(what, f"plain decoding takes {once:.1f} s, which is too long")
            return []
        outputs = plain_outputs
        for _ in range(LEARNING):
            for prompt, output in zip(prompts, outputs, strict=True):
                drafter.learn(prompt, output)
            before, outputs = outputs, [output.token_ids for output in engine.generate(prompts, each)]
            if outputs == before:
                break
        # By whether anything is drafted, and whether stages are timed: in passes of their own, because the speed is
        # that of an engine which times nothing.
        played: dict[tuple[bool, bool], list[TimedRound]] = defaultdict(list)
        for repeat in range(options.repeats):
            if repeat and budget.left <= 0:
                break
            for timing, second in itertools.product((True, False), (False, True)):
                speculate, engine.timer.enabled = second ^ bool(repeat % 2), timing
                ids, _ = begin(engine, prompts, each, speculate=speculate)
                # Rounds with all rows only: when rows end one by one, the last ones cost as much and bring less.
                played[speculate, timing] += play(engine, rows=batch)
                for request in ids:
                    engine.abort(request)
    middle = min(context + options.tokens // 2, max_length)
    nodes = options.depth + 1
    runner = make_runner(target, Setting(batch, nodes, middle), nodes)
    step, verify = (
        measure_step(runner, Setting(batch, size, middle), repeats=options.repeats, limit=3.0)["seconds"]
        for size in (1, nodes)
    )
    plain, speculative = played[False, False], played[True, False]
    plain_outside, outside = (mean(played[which, True], "accept", "commit") for which in (False, True))
    draft, tokens = mean(played[True, True], "draft"), mean(speculative, "emitted", per="rows")
    given = tokens_per_round([drafter.accept[0]] * options.depth)
    predicted, from_tokens = (
        speedup(count, plain=step + plain_outside, verify=verify, draft=draft, outside=outside)
        for count in (given, tokens)
    )
    # Per token: the two do not decode the same number of them.
    measured = mean(plain, "seconds", per="tokens") / mean(speculative, "seconds", per="tokens")
    return [
        {
            "batch": batch,
            "accept": drafter.accept[0],
            "depth": options.depth,
            "tokens_per_round": tokens,
            "tokens_per_round_given": given,
            "plain_step": step,
            "verify_step": verify,
            "draft": draft,
            "plain_outside": plain_outside,
            "outside": outside,
            "plain_round": mean(plain, "seconds"),
            "round": mean(speculative, "seconds"),
            "measured": measured,
            "predicted": predicted,
            "predicted_from_tokens": from_tokens,
            "ratio": measured / from_tokens,
            "outputs": batch,
            "equal_to_plain": sum(a == b for a, b in zip(outputs, plain_outputs, strict=True)),
        }
    ]
