"""What a drafter does to outputs: greedy ones must be plain decoding's, and every request must come to its end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from specdec.drafter_checks.findings import Finding, failed, not_applicable, passed
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.engine.engine import Engine
from specdec.exactness.reference import top_two_margin
from specdec.requests import SamplingParams
from specdec.types import Noise

GREEDY = "greedy outputs"
ENDS = "ends of outputs and of the cache"

ROUNDING = 1e-3
"""Nats. In float32, two ways of computing a logit differ by less: a smaller margin between two tokens is a tie."""


def mixed(prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, tokens: int) -> list[Job]:
    """Returns requests of many kinds for one batch: greedy ones beside sampled ones at several temperatures."""
    greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    kinds = [
        greedy,
        sampling,
        replace(greedy, repetition_penalty=1.3, max_new_tokens=tokens + 1),
        replace(sampling, temperature=0.7, max_new_tokens=tokens + 2),
        replace(greedy, max_new_tokens=max(tokens - 3, 1)),
        replace(sampling, temperature=1.5, top_p=0.9, max_new_tokens=tokens),
    ]
    return [
        Job(prompt, replace(kinds[number % len(kinds)], stream=number, seed=sampling.seed))
        for number, prompt in enumerate([*prompts, prompts[0][:1], *prompts[:2]])
    ]


def plainly(stage: Stage, jobs: Sequence[Job]) -> list[Run]:
    """Returns plain decoding's outputs, from an engine that has no drafter."""
    engine = Engine(
        stage.target,
        verifier=stage.verifier,
        max_batch_size=3,
        max_length=stage.max_length,
        prefill_chunk=7,
        **stage.options,
    )
    return run(engine, [replace(job, speculate=False) for job in jobs])


def greedy_outputs(stage: Stage, jobs: Sequence[Job], runs: Sequence[Run], plain: Sequence[Run]) -> Finding:
    """Compares outputs with plain decoding's, token for token."""
    shared = stage.verifier.noise is Noise.SHARED
    compared = [(job, a, b) for job, a, b in zip(jobs, runs, plain, strict=True) if shared or job.sampling.greedy]
    where = f"{len(compared)} outputs in a ragged batch of 3 slots, refilled, with prompts in pieces of 7"
    ties = 0
    for job, drafted, alone in compared:
        if drafted.tokens == alone.tokens:
            continue
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted.tokens, alone.tokens, strict=False))
        )
        sequence = [*job.prompt, *alone.tokens[:same]]
        margin = top_two_margin(stage.target.model, sequence, job.sampling.repetition_penalty)
        if (stage.target.dtype in (torch.float32, torch.float64) and margin > ROUNDING) or shared:
            return failed(
                GREEDY,
                f"an output differs from plain decoding's from token {same} on, where the target's two best tokens are "
                f"{margin:.2g} nats apart ({where})",
            )
        ties += 1
    if ties and stage.target.dtype not in (torch.float32, torch.float64):
        return not_applicable(
            GREEDY, f"{ties} of {where} differ, and a target in {_name(stage.target.dtype)} rounds: give it float32"
        )
    return passed(GREEDY, f"equal to plain decoding: {where}" + (f"; {ties} ties" if ties else ""))


def ends(stage: Stage, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> Finding:
    """Asks for a few tokens only, for a prompt of one token, and for all that the cache has room for."""
    jobs = []
    for number, length in enumerate((1, 2, 3, 4, 1, 2)):
        base = sampling if number % 2 else SamplingParams(ignore_eos=True)
        prompt = prompts[number % len(prompts)] if number < 4 else prompts[0][:1]
        jobs.append(Job(prompt, replace(base, max_new_tokens=length, stream=number, seed=sampling.seed)))
    long = max(prompts, key=len)
    filled = (long * (stage.max_length // len(long) + 1))[: stage.max_length - 12]
    jobs.append(Job(filled, SamplingParams(ignore_eos=True, max_new_tokens=12, stream=9)))
    runs = run(stage.engine(slots=2), jobs)
    for job, done in zip(jobs, runs, strict=True):
        if len(done.tokens) != job.sampling.max_new_tokens:
            return failed(ENDS, f"{len(done.tokens)} tokens came where {job.sampling.max_new_tokens} were wanted")
    return passed(
        ENDS, f"{len(jobs)} requests: 1 to 4 tokens, prompts of one token, the last of {stage.max_length} positions"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
