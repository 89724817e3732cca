"""Times of rounds: by depth of the drafts, rows and context, or by the tree that is drafted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from drafters.adaptive import AdaptiveDrafter
from experiments.measuring.round_costs import STAGES, WARM, TimedRound, time_rounds
from experiments.results.manifest import device_name
from specdec.drafting.best_shapes import PlannedShape
from specdec.drafting.costs import RoundCosts, smallest
from specdec.drafting.policies import FixedLength
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.target.target import Target

_IN_A_ROW = 2
"""Rounds of a depth in every turn. The last one is timed: after a round of another depth, a drafter has to catch up on
more or fewer tokens than in a run of one depth."""


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
    """Return typical rounds with drafts of up to six depths; ``host`` has the seconds that no stage has.

    Args:
        drafter: Drafts; None measures plain decoding alone.
        verifier: The acceptance rule; needed with a drafter.
        prompt: Tokens, which are repeated to the length of a context.
        rounds: How many rounds of every kind are timed.
    """
    paced = None if drafter is None else AdaptiveDrafter(drafter, FixedLength(0))
    depths = [0] if drafter is None else sorted({round(drafter.max_depth * share / 5) for share in range(6)})
    emitted = (rounds + WARM + 1) * _IN_A_ROW * sum(depth + 1 for depth in depths)
    found: list[TimedRound] = []
    for batch in batches:
        for context in contexts:
            progress(f"rounds: {batch} rows behind {context} tokens")
            length = min(context + emitted, target.max_length)
            if length < context + 2:
                continue
            made = {**options, "max_batch_size": batch, "max_length": length, "timing": True}
            given = [prompt[place % len(prompt)] for place in range(context + 1)]
            with Engine(target, paced, verifier if paced is not None else None, **made) as engine:
                engine.warm_up()
                session: Any = engine.session
                own, kinds = sampling or SamplingParams(), [lambda: None]
                if paced is not None:
                    kinds = [partial(setattr, session.policy, "depth", depth) for depth in depths]
                for timed in time_rounds(engine, [given], own, rounds, kinds=kinds, in_a_row=_IN_A_ROW):
                    sizes = dict.fromkeys((each["nodes"], each["depth"]) for each in timed)  # it may have drafted less
                    found += [_typical([t for t in timed if (t["nodes"], t["depth"]) == size]) for size in sizes]
    return found


def measure_follows(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    chunks: Sequence[int],
    rounds: int = 8,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> float:
    """Return what the drafter adds to a forward over a prompt, relative to it: the median over sizes of prompts.

    Args:
        drafter: Follows the prompt with its own model.
        prompt: Tokens, which are repeated.
        rounds: How often each is timed, with and without the drafter in turn.
    """
    longest = max(chunks)
    made = {**options, "max_length": min(longest + 2, target.max_length), "prefill_chunk": longest, "timing": True}
    own = replace(sampling or SamplingParams(), max_new_tokens=1)
    added = []
    with Engine(target, drafter, verifier, **made) as engine:
        for chunk in [size for size in chunks if size + 2 <= engine.max_length]:
            given = [prompt[place % len(prompt)] for place in range(chunk + 1)]
            took: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * (rounds + 1)):
                (done,) = engine.generate([given], own, speculate=turn % 2 == 0)
                if turn > 1:
                    took[turn % 2 == 0].append(done.steps[0].seconds["prefill"])
            added.append(smallest(took[True]) / smallest(took[False]) - 1)
    return max(0.0, median(added)) if added else 0.0


def _typical(rounds: Sequence[TimedRound]) -> TimedRound:
    parts = {stage: smallest([each[stage] for each in rounds]) for stage in STAGES}
    host = smallest([max(0.0, each["seconds"] - sum(each[stage] for stage in STAGES)) for each in rounds])
    context = mean(each["context"] for each in rounds)
    return {**rounds[0], **parts, "host": host, "context": context, "seconds": host + sum(parts.values())}


def shapes_to_measure(planned: Sequence[PlannedShape]) -> list[TreeShape]:
    """About a dozen of the planned trees, from which the costs of the others follow.

    The sizes are doubled from one to the next, at a middle depth; the shallowest and the deepest trees are measured
    small and large.
    """
    depths = sorted({each.depth for each in planned})
    found: dict[TreeShape, None] = {}
    for depth in depths:
        same = {each.nodes: each.shape for each in planned if each.depth == depth}
        least, most = min(same), max(same)
        steps = math.ceil(math.log2(most / least)) if depth == depths[len(depths) // 2] else 1
        for step in range(steps + 1):
            wanted = least * (most / least) ** (step / max(steps, 1))
            found[same[min(same, key=lambda nodes, wanted=wanted: abs(nodes - wanted))]] = None
    return list(found)


def measure_tree_costs(
    make: Callable[[TreeShape], Engine],
    shapes: Sequence[TreeShape],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    rounds: int = 12,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundCosts:
    """Return how long rounds take, with each of some trees and in plain decoding.

    Args:
        make: Makes an engine whose drafter drafts a tree of this shape. One engine lives at a time.
        prompts: Token ids to go on from, at least one.
        rounds: How many rounds of each tree are timed.

    Raises:
        ValueError: An engine refuses the shape or the prompts, or leaves no room for rounds.
    """
    seconds: list[float] = []
    plain: list[float] = []
    facts: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        progress(f"costs of rounds: tree {number + 1} of {len(shapes)}")
        with make(shape) as engine:
            engine.warm_up([shape.num_nodes])
            for speculate, times in ((True, seconds), (False, plain)):
                if not speculate and number not in (0, len(shapes) - 1):
                    continue
                (timed,) = time_rounds(engine, prompts, sampling, rounds, speculate=speculate)
                if not timed:
                    raise ValueError(
                        f"engine.max_length={engine.max_length} leaves no room to time rounds behind prompts of "
                        f"{max(map(len, prompts))} tokens: give a larger one, or shorter prompts"
                    )
                # What else the machine does can only make a round slower.
                times.append(min(each["seconds"] for each in timed))
            target = engine.target
            facts = {
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "target": f"{target.name}, {target.num_parameters / 1e6:,.1f}M parameters",
                "drafter": type(engine.drafter).__name__,
                "rows": (engine.max_batch_size,),
                "threads": torch.get_num_threads(),
            }
    trees = ((0, 0), *((shape.num_nodes, shape.max_depth) for shape in shapes))
    return RoundCosts(trees=trees, table=((min(plain), *seconds),), **facts)
