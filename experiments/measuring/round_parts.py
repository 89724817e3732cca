"""How long the parts of rounds take besides the target's forward, by depth of the drafts, rows and context."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafters.adaptive import AdaptiveDrafter
from specdec.drafting.costs import smallest
from specdec.drafting.policies import FixedLength
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target

_WARM = 3
"""Turns before any round is timed."""
_IN_A_ROW = 2
"""Rounds of a depth in every turn. The last one is timed: after a round of another depth, a drafter has to catch up on
more or fewer tokens than in a run of one depth."""


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """A round with drafts of one depth.

    Attributes:
        batch: Rows.
        context: Positions in a row's cache, on average.
        nodes: Drafted nodes per row.
        depth: Depth of the drafts.
        draft: Seconds of drafting.
        verify: Seconds of the target's forward.
        judge: Seconds of the rule's decision and the commit.
        host: Seconds that no stage has.
    """

    batch: int
    context: float
    nodes: int
    depth: int
    draft: float
    verify: float
    judge: float
    host: float


def measure_rounds(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier | None,
    prompt: Sequence[int],
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int = 8,
    sampling: SamplingParams | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[TimedRound]:
    """Returns how long the parts of rounds take. Rounds of all depths take turns.

    Args:
        target: The target.
        drafter: Drafts; None measures plain decoding alone.
        verifier: The acceptance rule; needed with a drafter.
        prompt: Tokens, which are repeated to the length of a context.
        batches: Numbers of rows.
        contexts: Lengths of the prompts.
        rounds: How many rounds of every kind are timed.
        sampling: Parameters of the requests, but for their length.
        progress: Is told how far it is.
        options: For ``Engine``.
    """
    policy = FixedLength(0)
    paced = None if drafter is None else AdaptiveDrafter(drafter, policy)
    depths = [0] if drafter is None else _depths(drafter.max_depth)
    found: list[TimedRound] = []
    for batch in batches:
        for context in contexts:
            progress(f"rounds: {batch} rows behind {context} tokens")
            emitted = (rounds + _WARM + 1) * _IN_A_ROW * sum(depth + 1 for depth in depths)
            length = min(context + emitted, target.max_length)
            made = {**options, "max_batch_size": batch, "max_length": length, "timing": True}
            with Engine(target, paced, verifier if paced is not None else None, **made) as engine:
                found += _time(engine, policy, depths, prompt, context, rounds, sampling or SamplingParams())
    return found


def _time(
    engine: Engine,
    policy: FixedLength,
    depths: Sequence[int],
    prompt: Sequence[int],
    context: int,
    rounds: int,
    sampling: SamplingParams,
) -> list[TimedRound]:
    rows = engine.max_batch_size
    given = [prompt[place % len(prompt)] for place in range(context + 1)]
    room = engine.max_length - len(given)
    if room < 1:
        return []
    wanted = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_new_tokens=room,
        ignore_eos=True,
        seed=0,
    )
    engine.warm_up()
    for _ in range(rows):
        engine.submit(given, wanted)
    emitted = 0
    while not (steps := [step for step in engine.step() if step.error is None]):
        pass  # the prompts are in the cache after this
    emitted += sum(step.accepted + 1 for step in steps)
    seen: dict[int, list[TimedRound]] = {depth: [] for depth in depths}
    for turn in range(rounds + _WARM):
        for depth in depths:
            if engine.unfinished < rows:
                break
            policy.depth = depth
            for _ in range(_IN_A_ROW):
                before = context + emitted / rows
                begin = time.perf_counter()
                steps = engine.step()
                wall = time.perf_counter() - begin
                emitted += sum(step.accepted + 1 for step in steps)
                if engine.unfinished < rows:
                    break
            if turn < _WARM or not steps or any(step.error is not None for step in steps):
                continue
            stages = steps[0].seconds
            nodes, deepest = max(s.proposed_nodes for s in steps), max(s.proposed_depth for s in steps)
            judge = stages.get("accept", 0.0) + stages.get("commit", 0.0)
            draft, verify = stages.get("draft", 0.0), stages.get("verify", 0.0)
            seen[depth].append(
                TimedRound(
                    batch=rows,
                    context=before,
                    nodes=nodes,
                    depth=deepest,
                    draft=draft,
                    verify=verify,
                    judge=judge,
                    host=max(0.0, wall - draft - verify - judge),
                )
            )
    return [_typical(group) for listed in seen.values() for group in _by_size(listed)]


def _by_size(rounds: Sequence[TimedRound]) -> list[list[TimedRound]]:
    """Returns rounds of one size together; a drafter may have drafted less than it was allowed."""
    groups: dict[tuple[int, int], list[TimedRound]] = {}
    for each in rounds:
        groups.setdefault((each.nodes, each.depth), []).append(each)
    return list(groups.values())


def _typical(rounds: Sequence[TimedRound]) -> TimedRound:
    first = rounds[0]
    return TimedRound(
        batch=first.batch,
        context=sum(each.context for each in rounds) / len(rounds),
        nodes=first.nodes,
        depth=first.depth,
        draft=smallest([each.draft for each in rounds]),
        verify=smallest([each.verify for each in rounds]),
        judge=smallest([each.judge for each in rounds]),
        host=smallest([each.host for each in rounds]),
    )


def _depths(most: int) -> list[int]:
    """Returns the depths to measure: at most six of them."""
    return sorted({round(most * share / 5) for share in range(6)})
