"""Times of rounds and of their parts: by depth of the drafts, rows and context, or by the tree that is drafted."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from drafters.adaptive import AdaptiveDrafter
from experiments.results.manifest import device_name
from specdec.drafting.best_shapes import PlannedShape
from specdec.drafting.costs import smallest
from specdec.drafting.policies import FixedLength
from specdec.drafting.tree_costs import TreeCosts
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.target.target import Target
from specdec.types import Step

_WARM = 3
"""Turns before any round is timed."""
_IN_A_ROW = 2
"""Rounds of a depth in every turn. The last one is timed: after a round of another depth, a drafter has to catch up on
more or fewer tokens than in a run of one depth."""


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """A round.

    Attributes:
        batch: Rows.
        context: Positions in a row's cache, on average.
        nodes: Drafted nodes per row.
        depth: Depth of the drafts.
        seconds: Seconds of the whole round.
        draft: Seconds of drafting.
        verify: Seconds of the target's forward.
        judge: Seconds of the rule's decision and the commit.
    """

    batch: int
    context: float
    nodes: int
    depth: int
    seconds: float
    draft: float
    verify: float
    judge: float

    @property
    def host(self) -> float:
        """Seconds that no stage has."""
        return max(0.0, self.seconds - self.draft - self.verify - self.judge)


def time_rounds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    rounds: int,
    *,
    kinds: Sequence[Callable[[], object]] = (lambda: None,),
    in_a_row: int = 1,
    speculate: bool = True,
) -> list[list[TimedRound]]:
    """Returns timed rounds of full batches, by kind.

    Rounds of all kinds take turns, so that whatever else the machine does meets all of them alike.

    Args:
        engine: Plays them.
        prompts: Token ids to go on from, which are used again where the batch has more rows.
        sampling: The requests' parameters, but for their length.
        rounds: How many rounds of every kind are timed.
        kinds: For every kind, what is called before a round of it.
        in_a_row: Rounds of a kind in every turn, of which the last one is timed.
        speculate: Whether anything is drafted.

    Raises:
        ValueError: There is no room behind the prompts, or a request ends with an error.
    """
    rows, device = engine.max_batch_size, engine.target.device
    given = [list(prompts[row % len(prompts)]) for row in range(rows)]
    context = sum(map(len, given)) / rows - 1
    room = engine.max_length - max(map(len, given))
    wanted = replace(sampling, max_new_tokens=max(1, room), ignore_eos=True, stop=(), stop_token_ids=(), n=1, seed=0)
    ids = [engine.submit(prompt, wanted, speculate=speculate) for prompt in given]
    found: list[list[TimedRound]] = [[] for _ in kinds]
    while not (steps := [step for step in _stepped(engine) if step.round]):
        pass  # the prompts are in the cache after this
    emitted = sum(step.accepted + 1 for step in steps)
    for turn in range(rounds + _WARM):
        for kind, prepare in enumerate(kinds):
            for repeated in range(in_a_row):
                if engine.unfinished < rows:
                    break
                prepare()
                before, begin = context + emitted / rows, time.perf_counter()
                steps = _stepped(engine)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - begin
                emitted += sum(step.accepted + 1 for step in steps)
                if turn >= _WARM and repeated == in_a_row - 1 and engine.unfinished == rows:
                    found[kind].append(_round(steps, rows, before, seconds))
    for each in ids:
        engine.abort(each)
    return found


def _round(steps: Sequence[Step], rows: int, context: float, seconds: float) -> TimedRound:
    stages = steps[0].seconds
    return TimedRound(
        batch=rows,
        context=context,
        nodes=max(step.proposed_nodes for step in steps),
        depth=max(step.proposed_depth for step in steps),
        seconds=seconds,
        draft=stages.get("draft", 0.0),
        verify=stages.get("verify", 0.0),
        judge=stages.get("accept", 0.0) + stages.get("commit", 0.0),
    )


def _stepped(engine: Engine) -> list[Step]:
    """A step of the engine.

    Raises:
        ValueError: A request has ended with an error, or none is left.
    """
    steps = engine.step()
    errors = [step.error for step in steps if step.error is not None]
    if errors or not (steps or engine.unfinished):
        raise ValueError(f"rounds could not be timed: {errors[0] if errors else 'the output has ended'}")
    return steps


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
    """Returns how long the parts of rounds take, with drafts of up to six depths.

    Args:
        target: The target.
        drafter: Drafts; None measures plain decoding alone.
        verifier: The acceptance rule; needed with a drafter.
        prompt: Tokens, which are repeated to the length of a context.
        batches: Numbers of rows.
        contexts: Lengths of the prompts.
        rounds: How many rounds of every kind are timed.
        sampling: Parameters of the requests, but for their length.
        progress: Called with how far it is.
        options: For ``Engine``.
    """
    paced = None if drafter is None else AdaptiveDrafter(drafter, FixedLength(0))
    depths = [0] if drafter is None else sorted({round(drafter.max_depth * share / 5) for share in range(6)})
    found: list[TimedRound] = []
    for batch in batches:
        for context in contexts:
            progress(f"rounds: {batch} rows behind {context} tokens")
            emitted = (rounds + _WARM + 1) * _IN_A_ROW * sum(depth + 1 for depth in depths)
            length = min(context + emitted, target.max_length)
            if length < context + 2:
                continue
            made = {**options, "max_batch_size": batch, "max_length": length, "timing": True}
            given = [prompt[place % len(prompt)] for place in range(context + 1)]
            with Engine(target, paced, verifier if paced is not None else None, **made) as engine:
                engine.warm_up()
                own, kinds = sampling or SamplingParams(), [lambda: None]
                if paced is not None:
                    session: Any = engine.session
                    kinds = [partial(setattr, session.policy, "depth", depth) for depth in depths]
                for timed in time_rounds(engine, [given], own, rounds, kinds=kinds, in_a_row=_IN_A_ROW):
                    sizes = dict.fromkeys((each.nodes, each.depth) for each in timed)  # it may have drafted less
                    found += [_typical([t for t in timed if (t.nodes, t.depth) == size]) for size in sizes]
    return found


def _typical(rounds: Sequence[TimedRound]) -> TimedRound:
    first = rounds[0]
    parts = {name: smallest([getattr(each, name) for each in rounds]) for name in ("draft", "verify", "judge")}
    host = smallest([each.host for each in rounds])
    context = sum(each.context for each in rounds) / len(rounds)
    return replace(first, context=context, seconds=sum(parts.values()) + host, **parts)


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
) -> TreeCosts:
    """Returns how long rounds take, with each of some trees and in plain decoding.

    Args:
        make: Makes an engine whose drafter drafts a tree of this shape. One engine lives at a time.
        shapes: The trees, at least one.
        prompts: Token ids to go on from, at least one.
        sampling: The requests' parameters.
        rounds: How many rounds of each tree are timed.
        progress: Called with what is being measured.

    Raises:
        ValueError: An engine refuses the shape or the prompts, or leaves no room for rounds.
    """
    seconds: list[float] = []
    plain: list[float] = []
    facts: dict[str, str | int] = {}
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
                times.append(min(each.seconds for each in timed))
            target = engine.target
            facts = {
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "target": f"{target.name}, {target.num_parameters / 1e6:,.1f}M parameters",
                "drafter": type(engine.drafter).__name__,
                "rows": engine.max_batch_size,
                "threads": torch.get_num_threads(),
            }
    trees = tuple((shape.num_nodes, shape.max_depth) for shape in shapes)
    return TreeCosts(trees=trees, seconds=tuple(seconds), plain=min(plain), **facts)  # type: ignore[arg-type]
