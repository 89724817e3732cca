"""Does the engine make of an acceptance what the costs of a round promise? Measured with synthetic drafts."""

from typing import Any

import torch

from drafters import SyntheticDrafter
from experiments.bench.engine.rounds import Rounds, advance, begin, streamed
from experiments.bench.engine.settings import Options
from experiments.bench.engine.steps import CAPTURED, Setting, make_runner, measure_step
from experiments.bench.models import repetitive
from experiments.bench.timing import Budget, now
from experiments.measuring.forwards import captured_at_once
from specdec.engine.engine import Engine
from specdec.physics.speculation import speedup, tokens_per_round
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers import RejectionVerifier

LEARNING = 4
"""Runs in which the drafter learns what a speculative run emits; in float32 one is enough."""


def measure_acceptance(
    target: Target, context: int, options: Options, budget: Budget, *, batch: int = 1
) -> dict[str, Any] | None:
    """Measure the speedup of synthetic drafts, beside the one that the costs of single stages predict.

    Returns:
        ``measured``, ``predicted`` from the given acceptance, ``predicted_from_tokens`` from the acceptance that came
        out, the costs, and how many outputs equal those of plain decoding.
    """
    what = f"synthetic acceptance at batch {batch}"
    if budget.spent(what):
        return None
    drafter = SyntheticDrafter(min(1.0, options.accept), options.depth)
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    prompts = [repetitive(context, target.vocab_size, row) for row in range(batch)]
    each = [streamed(sampling, row) for row in range(batch)]
    max_length = min(target.max_length, context + options.tokens + 1)
    try:
        engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=batch, max_length=max_length, timing=True)
    except (ValueError, torch.OutOfMemoryError) as error:
        budget.skip(what, str(error).split("\n", 1)[0])
        return None
    device = target.device
    with engine, captured_at_once(CAPTURED):
        began = now(device)
        plain_outputs = [output.token_ids for output in engine.generate(prompts, each, speculate=False)]
        once = now(device) - began
        if 6 * once > budget.left:  # learning, then each way twice
            budget.skip(what, f"plain decoding takes {once:.1f} s, which is too long")
            return None
        outputs = plain_outputs
        for _ in range(LEARNING):
            for prompt, output in zip(prompts, outputs, strict=True):
                drafter.learn(prompt, output)
            before, outputs = outputs, [output.token_ids for output in engine.generate(prompts, each)]
            if outputs == before:
                break
        plain, speculative = Rounds(), Rounds()
        costs = Rounds(), Rounds()
        for repeat in range(options.repeats):
            if repeat and budget.left <= 0:
                break
            # Stages are timed in passes of their own: the speed is that of an engine which times nothing.
            for timing, into in ((True, costs), (False, (plain, speculative))):
                engine.timer.enabled = timing
                for speculate in (False, True) if repeat % 2 else (True, False):
                    ids = begin(engine, prompts, sampling, speculate=speculate)
                    # Rounds with all rows only: when rows end one by one, the last ones cost as much and bring less.
                    advance(engine, device, into[speculate], rows=batch)
                    for request in ids:
                        engine.abort(request)
    middle = min(context + options.tokens // 2, max_length)
    nodes = options.depth + 1
    runner = make_runner(target, Setting(batch, nodes, middle), nodes)
    step, verify = (
        measure_step(runner, Setting(batch, size, middle), repeats=options.repeats, limit=3.0)["seconds"]
        for size in (1, nodes)
    )
    outside = [rounds.stage("accept") + rounds.stage("commit") for rounds in costs]
    draft = costs[1].stage("draft")
    given = tokens_per_round([drafter.accept[0]] * options.depth)
    predicted = {
        name: speedup(tokens, plain=step + outside[0], verify=verify, draft=draft, outside=outside[1])
        for name, tokens in (("predicted", given), ("predicted_from_tokens", speculative.tokens_per_round))
    }
    # Per token: the two do not decode the same number of them.
    measured = (sum(plain.walls) / plain.tokens) / (sum(speculative.walls) / speculative.tokens)
    return {
        "batch": batch,
        "accept": drafter.accept[0],
        "depth": options.depth,
        "tokens_per_round": speculative.tokens_per_round,
        "tokens_per_round_given": given,
        "plain_step": step,
        "verify_step": verify,
        "draft": draft,
        "plain_outside": outside[0],
        "outside": outside[1],
        "plain_round": plain.seconds,
        "round": speculative.seconds,
        "measured": measured,
        **predicted,
        "ratio": measured / predicted["predicted_from_tokens"],
        "outputs": batch,
        "equal_to_plain": sum(a == b for a, b in zip(outputs, plain_outputs, strict=True)),
    }
