"""A request's drafts depend on the request alone: the same ones come in any batch, in any slot, after any history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from specdec.drafter_checks.findings import Finding, failed, not_applicable, passed
from specdec.drafter_checks.playing import DRAWN, LONG_CHUNK, Draft, Job, Run, Stage, run
from specdec.requests import SamplingParams

SEED = "same seed, same drafts"
COMPANY = "independent of batch mates"
PIECES = "independent of the prompt's pieces"
REUSE = "a slot is used again"
DRIFT = "no drift"
ALL = (SEED, COMPANY, PIECES, REUSE, DRIFT)

ROUNDING = 1e-4
"""Entries of q that differ by less are equal up to rounding."""

CHECKPOINTS = 12
"""Rounds of a long output that are compared with a new drafter."""


@dataclass(frozen=True)
class _Trial:
    """The start of all comparisons: two requests, greedy and sampled, and their drafts when each is alone."""

    stage: Stage
    prompts: Sequence[tuple[int, ...]]
    jobs: Sequence[Job]
    alone: Sequence[Run]

    def compare(self, check: str, runs: Sequence[Run], detail: str, so: str) -> Finding:
        """Returns whether the drafts are those of the requests alone, up to the first round that differs."""
        for job, mine, wanted in zip(self.jobs, runs, self.alone, strict=True):
            kind = "greedy" if job.sampling.greedy else "sampled"
            for number, (draft, other) in enumerate(zip(mine.drafts, wanted.drafts, strict=False)):
                difference = draft.difference(other, ROUNDING)
                if difference is not None:
                    return failed(check, f"in round {number} of a {kind} request, {so}: {difference}")
        return passed(check, detail)


def repeats(
    stage: Stage,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    tokens: int,
    rounds: int,
    attempt: Callable[[str, Callable[[], Finding]], Finding],
) -> list[Finding]:
    """Returns a finding for every check in ``ALL``.

    Args:
        stage: Where the drafter is tried.
        prompts: The prompts.
        sampling: Parameters of sampled requests.
        tokens: Length of the outputs.
        rounds: Length of a long output, in rounds.
        attempt: Turns an exception of a check into its finding.
    """
    if stage.target.dtype not in (torch.float32, torch.float64):
        dtype = str(stage.target.dtype).removeprefix("torch.")
        why = f"in {dtype}, results differ with the size of a batch: try it with the target in float32"
        return [not_applicable(check, why) for check in ALL]
    greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True, stream=0, seed=sampling.seed)
    jobs = [Job(prompts[0], greedy), Job(prompts[-1], replace(sampling, max_new_tokens=tokens, stream=1))]

    def alone(chunk: int = LONG_CHUNK) -> list[Run]:
        return [run(stage.engine(chunk=chunk), [job])[0] for job in jobs]

    trials: list[_Trial] = []

    def same_seed() -> Finding:
        trials.append(_Trial(stage, prompts, jobs, alone()))
        return trials[0].compare(
            SEED,
            alone(),
            f"a second run of {tokens} tokens, greedy and sampled, drafts the same",
            "a second run with the same seed drafts otherwise (take random numbers from specdec.random)",
        )

    def pieces() -> Finding:
        return trials[0].compare(
            PIECES,
            alone(chunk=3),
            "prompts in pieces of 3 tokens lead to the same drafts as in one",
            "a prompt that came in pieces of 3 tokens leads to other drafts",
        )

    found = [attempt(SEED, same_seed)]
    if stage.log.adapts and not found[0].failed:
        why = "the drafter says adapts=True: its drafts may depend on other requests and on earlier rounds"
        return [*found, *(not_applicable(check, why) for check in ALL[1:])]
    others = {
        COMPANY: lambda: _company(trials[0]),
        PIECES: pieces,
        REUSE: lambda: _reuse(trials[0]),
        DRIFT: lambda: _drift(stage, jobs, rounds),
    }
    for check, tried in others.items():
        if found[-1].failed:
            break
        found.append(attempt(check, tried))
    return found


def _company(trial: _Trial) -> Finding:
    """Decode both requests in one batch with others, one of which does not speculate."""
    mates = [
        Job(
            prompt,
            replace(trial.jobs[number % 2].sampling, max_new_tokens=7 + 3 * number, stream=50 + number),
            speculate=number != 1,
        )
        for number, prompt in enumerate(trial.prompts)
    ]
    jobs = [mates[0], trial.jobs[0], *mates[1:], trial.jobs[1]]
    runs = run(trial.stage.engine(slots=len(jobs)), jobs)
    return trial.compare(
        COMPANY,
        [runs[1], runs[-1]],
        f"in a batch of {len(jobs)} requests, each drafts as it does alone",
        f"in a batch of {len(jobs)} requests, it drafts otherwise than alone",
    )


def _reuse(trial: _Trial) -> Finding:
    """Decode both requests in a slot that others have left: one at its end, one in the middle."""
    engine = trial.stage.engine()
    others = [replace(job, prompt=prompt) for job, prompt in zip(trial.jobs, trial.prompts[1:], strict=False)]
    run(engine, others)
    run(engine, others[:1], stop_after=2)
    runs = [run(engine, [job])[0] for job in trial.jobs]
    return trial.compare(
        REUSE,
        runs,
        "after requests that ended, and one that was dropped, it drafts as a new drafter does",
        "in a slot that others have used, it drafts otherwise (what do admit and release leave behind?)",
    )


def _drift(stage: Stage, jobs: Sequence[Job], rounds: int) -> Finding:
    """Compare drafts late in a long output with those of a new drafter that is given the same sequence."""
    seen = 0
    for job in jobs:
        length = min(rounds * (stage.log.depth + 1), stage.max_length - len(job.prompt))
        long = replace(job, sampling=replace(job.sampling, max_new_tokens=length))
        done = run(stage.engine(), [long], stop_after=rounds, rows_of_q=1)[0]
        if len(done.drafts) < 2:
            continue
        last = len(done.drafts) - 1
        seen = max(seen, last + 1)
        fresh = stage.engine()
        for number in sorted({last - last * k // CHECKPOINTS for k in range(CHECKPOINTS)}):
            before = done.before[number]
            prompt = (*job.prompt, *done.tokens[:before])
            again = Job(prompt, replace(long.sampling, max_new_tokens=length - before))
            turns = -(-len(prompt) // LONG_CHUNK)  # to the end of its first round
            anew = run(fresh, [again], stop_after=turns, rows_of_q=1)[0].drafts
            difference = _apart(done.drafts[number], anew[0]) if anew else "nothing was proposed"
            if difference is not None:
                kind = "greedy" if job.sampling.greedy else "sampled"
                return failed(
                    DRIFT,
                    f"in round {number} of a {kind} request, {before} tokens into its output, it drafts otherwise than "
                    f"a new drafter that is given the same sequence: {difference}",
                )
    return passed(DRIFT, f"over {seen} rounds, it drafts as a new drafter that is given the same sequence")


def _apart(late: Draft, new: Draft) -> str | None:
    """Returns how two drafts after the same sequence differ, where the number of the round makes no difference."""
    if set(DRAWN).isdisjoint((*late.laws, *new.laws)):
        return late.difference(new, ROUNDING)
    if late.draft_probs is None or new.draft_probs is None:
        return None
    # Other rounds have other random numbers, so only what the first tokens are drawn from can be compared.
    apart = float((late.draft_probs[0] - new.draft_probs[0]).abs().max())
    return f"q after the root differs by up to {apart:.2g}" if apart > ROUNDING else None
