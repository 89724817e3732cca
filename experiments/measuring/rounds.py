"""Times of rounds: by depth of the drafts, rows and context, by verified nodes, or by the tree that is drafted."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from statistics import mean
from typing import Any

import torch

from drafters.combined import AdaptiveDrafter
from specdec.drafting.costs import RoundCosts, smallest
from specdec.drafting.policies import FirstNodes, FixedLength
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.machine import dtype_name
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.types import Step

WARM, LEAST, SECONDS = 3, 3, 20.0
"""Turns before any round counts; rounds of a kind that are timed in any case; the time after which they will do."""
STAGES = ("draft", "verify", "accept", "commit")


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """A round of ``rows`` rows.

    Attributes:
        nodes, depth: The most drafted nodes of a row, and the depth of the deepest draft.
        context: Positions in a row's cache, on average.
        stages: Seconds by stage.
        host: Seconds that no stage has.
    """

    rows: int
    nodes: int
    depth: int
    context: float
    stages: Mapping[str, float]
    host: float

    @property
    def seconds(self) -> float:
        return self.host + sum(self.stages.values())


def now(device: torch.device) -> float:
    """Return the time at which everything is done that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, rounds: int, *,
    kinds: Sequence[Callable[[], object]],
) -> list[list[TimedRound]]:  # fmt: skip
    """Return timed rounds of full batches, by kind.

    Rounds of all kinds take turns, forwards and backwards, so that whatever else the machine does meets all of them
    alike. Of two rounds in a row the second is timed: after one of another kind, a drafter has to catch up on more or
    fewer tokens. Requests begin behind the prompts again when there is no room left.

    Args:
        prompts: Token ids to go on from, which are used again where the batch has more rows.
        rounds: How many rounds of every kind are timed, at most: a slow machine's are steadier, and ``LEAST`` will do.
        kinds: For every kind, what is called before a round of it.

    Raises:
        ValueError: A request ends with an error, or there is no room for rounds of every kind.
    """
    rows = engine.max_batch_size
    given = [list(prompts[row % len(prompts)]) for row in range(rows)]
    room = max(1, engine.max_length - max(map(len, given)))
    endless = replace(sampling, max_new_tokens=room, ignore_eos=True, stop=(), stop_token_ids=(), n=1, seed=0)
    timed: list[list[TimedRound]] = [[] for _ in kinds]
    ids: list[int] = []
    emitted: dict[int, int] = {}
    begin = time.perf_counter()

    def play() -> list[Step]:
        steps = engine.step()
        for step in steps:
            if step.error is not None:
                raise ValueError(f"rounds could not be timed: {step.error}")
            emitted[step.request] = emitted.get(step.request, 0) + step.accepted + 1
        return steps

    for turn in range(rounds + WARM):
        if min(map(len, timed)) >= LEAST and time.perf_counter() - begin > SECONDS:
            break
        if engine.unfinished < rows:
            for number in ids:
                engine.abort(number)
            emitted.clear()
            ids = [engine.submit(prompt, endless) for prompt in given]
            while len(emitted) < rows and engine.unfinished:
                play()
        for kind in range(len(kinds))[:: 1 if turn % 2 else -1]:
            for first in (True, False):
                if engine.unfinished < rows:
                    break
                kinds[kind]()
                # The root is not in the cache yet.
                context = (sum(map(len, given)) + sum(emitted.values())) / rows - 1
                start = now(engine.target.device)
                steps = play()
                seconds = now(engine.target.device) - start
                if turn >= WARM and not first and engine.unfinished == rows:
                    stages = {stage: steps[0].seconds.get(stage, 0.0) for stage in STAGES}
                    most = {name: max(map(attrgetter(f"proposed_{name}"), steps)) for name in ("nodes", "depth")}
                    host = max(0.0, seconds - sum(stages.values()))
                    timed[kind].append(TimedRound(rows=rows, context=context, stages=stages, host=host, **most))
    for number in ids:
        engine.abort(number)
    if not all(timed):
        raise ValueError(
            f"engine.max_length={engine.max_length} leaves no room to time rounds behind prompts of "
            f"{max(map(len, prompts))} tokens: give a larger one, or shorter prompts"
        )
    return timed


def rounds_of_sizes(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier | None,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    rounds: int,
    *,
    by_nodes: bool = False,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> list[list[TimedRound]]:
    """Return timed rounds with drafts of some depths, or of whole trees of which so many nodes are verified."""
    limited: Any = drafter
    if drafter is not None:
        limited = limited.pruned_by(FirstNodes()) if by_nodes else AdaptiveDrafter(drafter, FixedLength(0))
    with Engine(target, limited, None if drafter is None else verifier, **options) as engine:
        engine.warm_up()  # rounds of a run are captured, so these are to be, too
        policy, name = getattr(engine.session, "policy", None), "nodes" if by_nodes else "depth"
        kinds = [(lambda: None) if policy is None else partial(setattr, policy, name, size) for size in sizes]
        return time_rounds(engine, prompts, sampling or SamplingParams(), rounds, kinds=kinds)


def room_of(emitted: Sequence[int]) -> int:
    """Return the tokens that a turn of rounds needs which emit so many each, with a first round and one to go."""
    return 2 * sum(emitted) + max(emitted) + 1


def measure_rounds(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier | None,
    prompt: Sequence[int],
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int = 8,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[TimedRound]:
    """Return typical rounds, plainly or with drafts of up to six depths, behind ``prompt``'s tokens repeated."""
    depths = [0] if drafter is None else sorted({round(drafter.max_depth * share / 5) for share in range(6)})
    turn = room_of([depth + 1 for depth in depths])
    typical: list[TimedRound] = []
    for batch, context in product(batches, [size for size in contexts if size + turn < target.max_length]):
        progress(f"rounds: {batch} rows behind {context} tokens")
        length = min(context + (rounds + WARM) * turn, target.max_length)
        made = {**options, "max_batch_size": batch, "max_length": length, "timing": True}
        repeated = [prompt[place % len(prompt)] for place in range(context + 1)]
        for timed in rounds_of_sizes(target, drafter, verifier, [repeated], depths, rounds, **made):
            sizes = dict.fromkeys((each.nodes, each.depth) for each in timed)  # it may have drafted less
            typical += [_typical([each for each in timed if (each.nodes, each.depth) == size]) for size in sizes]
    return typical


def _typical(rounds: Sequence[TimedRound]) -> TimedRound:
    return replace(
        rounds[0],
        stages={stage: smallest([round_.stages[stage] for round_ in rounds]) for stage in STAGES},
        host=smallest([round_.host for round_ in rounds]),
        context=mean(round_.context for round_ in rounds),
    )


def node_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of nodes that are measured: few, and close together where there are few."""
    steps = [0, 1, 2, 3] + [size for power in range(2, 12) for size in (2**power, 3 * 2 ** (power - 1))]
    return tuple(sorted({size for size in steps if size < most} | {most}))


def measure_costs(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    *,
    by_nodes: bool = False,
    rows: Sequence[int] = (1,),
    rounds: int = 12,
    **options: Any,
) -> RoundCosts:
    """Return how long rounds take, by the depth of drafts, or by nodes of a ``ScoredDrafter``'s whole trees."""
    sizes = node_sizes(drafter.max_nodes) if by_nodes else tuple(range(drafter.max_depth + 1))
    room = max(map(len, prompts)) + room_of([min(size, drafter.max_depth) + 1 for size in sizes])
    table = {}
    for count in sorted(set(rows)):
        made = {"max_length": room, **options, "max_batch_size": count}
        timed = rounds_of_sizes(target, drafter, verifier, prompts, sizes, rounds, by_nodes=by_nodes, **made)
        table[count] = tuple(smallest([each.seconds for each in kind]) for kind in timed)
    return RoundCosts(
        rows=tuple(table), table=tuple(table.values()), nodes=sizes if by_nodes else None, device=str(target.device),
        dtype=dtype_name(target.dtype), drafter=type(drafter).__name__,
    )  # fmt: skip
