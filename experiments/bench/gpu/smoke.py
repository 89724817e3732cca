"""Part 1, two minutes: do recorded rounds give the tokens that the same rounds give as they are?

Plainly, with a drafter, and with it again and again on one engine; greedy and sampled requests in one batch; through
several numbers of positions that attention reads, forwards and back.
"""

import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from experiments.bench.gpu.drafters import DRAFTERS
from experiments.bench.gpu.outcome import Outcome, counts
from experiments.bench.models import make_target
from experiments.bench.timing import Budget
from specdec.engine import rounds
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from verifiers.rejection import RejectionVerifier

SECONDS = 120
RECORD_AFTER = 2
"""A stage is recorded when it comes for this time: what it keeps must be there before."""
CONTEXTS, REHEARSED = (230, 490, 1000, 40), (254, 30)
"""Tokens of prompts: outputs cross into other numbers of positions, and the last one goes back."""
GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True, seed=0)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9)


def run(outcome: Outcome) -> None:
    """Try every drafter that there is time for."""
    budget = Budget(SECONDS, outcome.left_out)
    contexts, tokens = (REHEARSED, 8) if outcome.rehearsal else (CONTEXTS, GREEDY.max_new_tokens)
    target = make_target("tiny", outcome.device, torch.float32, vocab_size=64)  # so few that drafts hit
    for name, make in DRAFTERS.items():
        if budget.spent(name):
            continue
        print(f"{name} …", flush=True)
        found: dict[str, Any] = {"equal": None, "refused": 0, "replayed": None, "error": None}
        with patch.object(rounds, "RECORD_AFTER", RECORD_AFTER):
            try:
                found |= compare(target, make(target), contexts, tokens)
            except Exception as error:  # the others are to be tried, too
                why = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
                found |= {"error": why, "traceback": [traceback.format_exc()]}
        outcome.add("drafters", drafter=name, **found)
        tried = outcome.records["drafters"]
        failed = sum(each["error"] is not None for each in tried)
        different = sum(each["equal"] is False for each in tried)
        outcome.figures = {"failed": failed, "different": different, "tried": len(tried), **counts(tried)}
    outcome.table("Recorded rounds beside the same rounds as they are", "drafters")


def compare(target: Target, drafter: Drafter, contexts: Sequence[int], tokens: int) -> dict[str, Any]:
    """Decode plainly and with a drafter as it is; then recorded: plainly, and with the drafter three times.

    Returns:
        ``equal``, whether all tokens agree, and ``different``, where they do not; and of the last pass, in which
        everything has come before, the share of rounds that were replayed.
    """
    lengths = [length for length in contexts for _ in range(2)]
    prompts = [
        [(7 * (place % 23) + 3 * row + place // 97) % target.vocab_size for place in range(length)]
        for row, length in enumerate(lengths)
    ]
    sampling = [
        replace(SAMPLED if row % 2 else GREEDY, max_new_tokens=tokens, stream=row) for row in range(len(lengths))
    ]
    expected: dict[bool, list[tuple[int, ...]]] = {}
    different: list[str] = []
    found: dict[str, Any] = {}
    for recording, passes in {"off": (False, True), "rounds": (False, True, True, True)}.items():
        options: dict[str, Any] = {"max_batch_size": 2, "max_length": 2048, "recording": recording}
        began = Budget(0.0)
        with Engine(target, drafter, RejectionVerifier(), **options) as engine:
            for number, speculate in enumerate(passes):
                before = engine.recording_counts
                done = engine.generate(prompts, sampling, speculate=speculate)
                made = [each.token_ids for each in done]
                wrong = [row for row, right in enumerate(expected.setdefault(speculate, made)) if made[row] != right]
                different += [f"pass {number}, request {row}" for row in wrong]
            after = engine.recording_counts
        found[f"{recording}_seconds"] = -began.left
    steps = [step for each in done for step in each.steps]
    return {
        "equal": not different,
        "tokens_per_round": sum(step.accepted + 1 for step in steps) / len(steps),
        "recorded": after.stages,
        "refused": sum(map(len, after.refused.values())),
        "replayed": (after.replayed - before.replayed) / (after.rounds - before.rounds),
        "replays": after.replays,
        **found,
        "different": different,
        "reasons": after.refused,
    }
