"""The effect of a drafter on outputs: greedy ones must be plain decoding's, and every request must come to its end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest

from specdec.drafter_checks.findings import Finding, failed, passed
from specdec.drafter_checks.playing import Job, Run, Stage, run
from specdec.engine.engine import Engine
from specdec.exactness.ties import examine
from specdec.requests import SamplingParams
from specdec.types import Noise, Step

GREEDY = "greedy outputs"
RECORDED = "recorded rounds"
ENDS = "ends of outputs and of the cache"

ROUNDING = 1e-3
"""Expectations that differ by less are equal up to rounding."""


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
        far = "" if shared else _unexplained(stage, job, drafted.tokens, alone.tokens, same)
        if shared or far:
            return failed(GREEDY, f"an output differs from plain decoding's from token {same} on{far} ({where})")
        ties += 1
    return passed(GREEDY, f"equal to plain decoding: {where}" + (f"; {ties} ties" if ties else ""))


def recorded_rounds(stage: Stage, jobs: Sequence[Job]) -> Finding:
    """Plays rounds as an engine records them, with the drafter itself, and compares them with rounds that are not.

    On a GPU, whole rounds are recorded, and replayed without the drafter's Python.
    """
    rounds: list[list[list[Step]]] = []
    for recording in ("off", "rounds"):
        options = {**stage.options, "optimize": True, "recording": recording}
        with Engine(
            stage.target, stage.make(), stage.verifier, max_batch_size=3, max_length=stage.max_length, **options
        ) as engine:
            ids = [engine.submit(job.prompt, job.sampling) for job in jobs]
            steps: dict[int, list[Step]] = {number: [] for number in ids}
            while engine.unfinished:
                for step in engine.step():
                    steps[step.request].append(step)
            rounds.append(list(steps.values()))
    for job, wanted, found in zip(jobs, *rounds, strict=True):
        errors = [step.error for step in found if step.error]
        if errors:
            return failed(RECORDED, f"a request failed: {errors[0]}")
        if stage.log.adapts:
            continue  # its drafts may depend on the order in which rounds of several requests are played
        for number, (one, other) in enumerate(zip_longest(wanted, found)):
            if one is not None and other is not None and _alike(one, other):
                continue
            kind = "greedy" if job.sampling.greedy else "sampled"
            said = [f"{each.token_ids} with {each.expected_accepted:.3g} accepted" for each in (one, other) if each]
            return failed(
                RECORDED,
                f"in round {number} of a {kind} request, a recorded round gives {said[-1]}, and another one {said[0]} "
                f"(is all of its state in the same tensors throughout?)",
            )
    return passed(RECORDED, f"{len(jobs)} requests go as in rounds that are not recorded")


def _alike(one: Step, other: Step) -> bool:
    return one.token_ids == other.token_ids and abs(one.expected_accepted - other.expected_accepted) < ROUNDING


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


def _unexplained(stage: Stage, job: Job, drafted: Sequence[int], alone: Sequence[int], same: int) -> str:
    """Returns why the dtype does not explain that two outputs part after so many tokens; empty if it does."""
    if same >= min(len(drafted), len(alone)):
        return ", where one of the two ends"
    sequence = [*job.prompt, *alone[:same]]
    pair = (drafted[same], alone[same])
    kv_cache = stage.options.get("kv_cache")
    tie = examine(stage.target.model, sequence, pair, job.sampling, prompt_length=len(job.prompt), kv_cache=kv_cache)
    if tie.margin is None or tie.bound is None:
        return ", with a token that is impossible there"
    if tie.margin <= tie.bound:
        return ""
    return f", where its token is {tie.margin:.2g} nats below the best, and the dtype explains {tie.bound:.2g}"
