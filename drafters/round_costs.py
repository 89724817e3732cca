"""How long rounds take on this machine: by the depth of their drafts, or by the number of nodes that they verify.

``time_rounds`` is the one timer of rounds: calibrations, costs of trees and the engine's benchmark use it, too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drafters.adaptive import AdaptiveDrafter
from specdec.drafting.costs import RoundCosts, smallest
from specdec.drafting.policies import FirstNodes, FixedLength
from specdec.drafting.scored import ScoredDrafter
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target

WARM = 3
"""Turns before any round counts."""
STAGES = ("draft", "verify", "accept", "commit")
"""The stages of a round."""

TimedRound = Mapping[str, float]
"""``rows``, drafted ``nodes`` and ``depth`` per row, ``seconds`` in all and of every stage, ``emitted`` tokens before
any cut, ``tokens`` after it. From ``time_rounds`` also ``context``: positions in a row's cache, on average."""


def now(device: torch.device) -> float:
    """Return the time at which everything is done that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def begin(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, speculate: bool = True
) -> tuple[list[int], int]:
    """Submit prompts and play until every request has had a round; return their ids, and the tokens emitted so far."""
    pairs = zip(prompts, sampling, strict=True)
    ids = [engine.submit(list(prompt), own, speculate=speculate) for prompt, own in pairs]
    missing, emitted = set(ids), 0
    while missing and engine.unfinished:
        steps = engine.step()
        _check(steps)
        missing -= {step.request for step in steps}
        emitted += sum(step.accepted + 1 for step in steps)
    return ids, emitted


def time_round(engine: Engine) -> dict[str, float]:
    """Play one round of the running requests and return what it took; see ``TimedRound``."""
    device = engine.target.device
    start = now(device)
    steps = engine.step()
    seconds = now(device) - start
    _check(steps)
    return {
        "rows": len(steps),
        "nodes": max(step.proposed_nodes for step in steps),
        "depth": max(step.proposed_depth for step in steps),
        "seconds": seconds,
        **{stage: steps[0].seconds.get(stage, 0.0) for stage in STAGES},
        "emitted": sum(step.accepted + 1 for step in steps),
        "tokens": sum(len(step.token_ids) for step in steps),
    }


def _check(steps: Sequence[Any]) -> None:
    errors = [step.error for step in steps if step.error is not None]
    if errors:
        raise ValueError(f"rounds could not be timed: {errors[0]}")


def time_rounds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    rounds: int,
    *,
    kinds: Sequence[Callable[[], object]] = (lambda: None,),
    in_a_row: int = 1,
    anew: bool = False,
    speculate: bool = True,
) -> list[list[TimedRound]]:
    """Return timed rounds of full batches, by kind.

    Rounds of all kinds take turns, forwards and backwards, so that whatever else the machine does meets all of them
    alike, and so does what a drafter has to catch up with after a round of another kind.

    Args:
        engine: Plays them.
        prompts: Token ids to go on from, which are used again where the batch has more rows.
        sampling: The requests' parameters, but for their length.
        rounds: How many rounds of every kind are timed, at most: fewer where there is little room behind the prompts.
        kinds: For every kind, what is called before a round of it.
        in_a_row: Rounds of a kind in every turn, of which the last one is timed.
        anew: Whether every turn begins behind the prompts again, and not behind what was emitted so far.
        speculate: Whether anything is drafted.

    Raises:
        ValueError: A request ends with an error.
    """
    rows = engine.max_batch_size
    given = [prompts[row % len(prompts)] for row in range(rows)]
    room = max(1, engine.max_length - max(map(len, given)))
    own = replace(sampling, max_new_tokens=room, ignore_eos=True, stop=(), stop_token_ids=(), n=1, seed=0)
    found: list[list[TimedRound]] = [[] for _ in kinds]
    ids: list[int] = []
    context = 0.0
    for turn in range(rounds + WARM):
        if anew or not ids:
            for each in ids:
                engine.abort(each)
            ids, emitted = begin(engine, given, [own] * rows, speculate=speculate)
            context = (sum(map(len, given)) + emitted) / rows - 1  # the root is not in the cache yet
        for kind in range(len(kinds))[:: 1 if turn % 2 else -1]:
            for repeated in range(in_a_row):
                if engine.unfinished < rows:
                    break
                kinds[kind]()
                timed = time_round(engine)
                if turn >= WARM and repeated == in_a_row - 1 and engine.unfinished == rows:
                    found[kind].append({**timed, "context": context})
                context += timed["emitted"] / rows
    for each in ids:
        engine.abort(each)
    return found


def measure_costs(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int] = (1,),
    rounds: int = 12,
    **options: Any,
) -> RoundCosts:
    """Return how long rounds take on this machine, with drafts of every depth.

    Args:
        prompts: Token ids to go on from; at least one, and they are used again where more rows are wanted.
        rows: Batch sizes to measure.
        rounds: How many rounds of each kind are timed.

    Raises:
        ValueError: There is no prompt, or an argument does not fit.
    """
    tokens = {depth: depth + 1 for depth in range(drafter.max_depth + 1)}
    limited = AdaptiveDrafter(drafter, FixedLength(0))
    costs = _measured(target, limited, verifier, prompts, tokens, "depth", rows=rows, rounds=rounds, **options)
    return replace(costs, drafter=type(drafter).__name__)


def measure_node_costs(
    target: Target, drafter: ScoredDrafter, verifier: Verifier, prompts: Sequence[Sequence[int]], **more: Any
) -> RoundCosts:
    """Return how long rounds take on this machine that draft whole trees and verify some of their nodes.

    Arguments and errors are those of ``measure_costs``. The drafter's own policy stays as it is.
    """
    tokens = {nodes: min(nodes, drafter.max_depth) + 1 for nodes in node_sizes(drafter.max_nodes)}
    limited = drafter.pruned_by(FirstNodes())
    return _measured(target, limited, verifier, prompts, tokens, "nodes", **more)


def node_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of nodes that are measured: few, and close together where there are few."""
    steps = [0, 1, 2, 3] + [size for power in range(2, 12) for size in (2**power, 3 * 2 ** (power - 1))]
    return tuple(sorted({size for size in steps if size < most} | {most}))


def _measured(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    tokens: Mapping[int, int],
    size_name: str,
    *,
    rows: Sequence[int] = (1,),
    rounds: int = 12,
    **options: Any,
) -> RoundCosts:
    """Return the costs of rounds by batch size and by size of their drafts.

    ``tokens`` has the most tokens that a round of each size emits; ``size_name`` is the attribute of the session's
    policy that sets the size.
    """
    if not prompts:
        raise ValueError("costs of rounds are measured on prompts, and there are none: give at least one")
    emitted = sum(tokens.values()) + max(tokens.values())
    table = []
    for count in sorted(set(rows)):
        longest = max(len(prompts[row % len(prompts)]) for row in range(count))
        own = {"max_length": longest + emitted, **options}
        with Engine(target, drafter, verifier, max_batch_size=count, **own) as engine:
            engine.warm_up()  # rounds of a run are captured, so these are to be, too
            session: Any = engine.session
            kinds = [partial(setattr, session.policy, size_name, size) for size in tokens]
            timed = time_rounds(engine, prompts, SamplingParams(), rounds, kinds=kinds, anew=True)
            if not all(timed):
                raise ValueError(
                    f"max_length={engine.max_length} leaves no room to time rounds behind prompts of {longest} tokens: "
                    f"give at least {longest + emitted}, or shorter prompts"
                )
        table.append(tuple(smallest([each["seconds"] for each in kind]) for kind in timed))
    return RoundCosts(
        rows=tuple(sorted(set(rows))),
        table=tuple(table),
        nodes=tuple(tokens) if size_name == "nodes" else None,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        drafter=type(drafter).__name__,
    )
