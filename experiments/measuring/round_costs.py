"""How long rounds take on this machine: by the depth of their drafts, or by the number of nodes that they verify."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from drafters.adaptive import AdaptiveDrafter
from specdec.drafting.costs import RoundCosts, smallest
from specdec.drafting.policies import FirstNodes, FixedLength
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.machine import dtype_name
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


def _begun(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, speculate: bool) -> tuple:
    """Submits prompts and plays until every request has had a round; returns their ids, and the tokens emitted."""
    ids = [engine.submit(list(prompt), sampling, speculate=speculate) for prompt in prompts]
    missing, emitted = set(ids), 0
    while missing and engine.unfinished:
        steps = engine.step()
        _check(steps)
        missing -= {step.request for step in steps}
        emitted += sum(step.accepted + 1 for step in steps)
    return ids, emitted


def _timed(engine: Engine) -> dict[str, float]:
    """Plays one round of the running requests; see ``TimedRound``."""
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
            ids, emitted = _begun(engine, given, own, speculate=speculate)
            context = (sum(map(len, given)) + emitted) / rows - 1  # the root is not in the cache yet
        for kind in range(len(kinds))[:: 1 if turn % 2 else -1]:
            for repeated in range(in_a_row):
                if engine.unfinished < rows:
                    break
                kinds[kind]()
                timed = _timed(engine)
                if turn >= WARM and repeated == in_a_row - 1 and engine.unfinished == rows:
                    found[kind].append({**timed, "context": context})
                context += timed["emitted"] / rows
    for each in ids:
        engine.abort(each)
    return found


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
    """Return how long rounds take on this machine, with drafts of every depth, or with some nodes of whole trees.

    Args:
        drafter: Drafts. Measured by nodes, it is a ``ScoredDrafter``, whose own policy stays as it is.
        prompts: Token ids to go on from; at least one, and they are used again where more rows are wanted.
        by_nodes: Whether rounds draft whole trees, and differ in how many of the nodes they verify.
        rows: Batch sizes to measure.
        rounds: How many rounds of each kind are timed.

    Raises:
        ValueError: There is no prompt, or an argument does not fit.
    """
    if not prompts:
        raise ValueError("costs of rounds are measured on prompts, and there are none: give at least one")
    scored: Any = drafter
    sizes = node_sizes(drafter.max_nodes) if by_nodes else tuple(range(drafter.max_depth + 1))
    limited = scored.pruned_by(FirstNodes()) if by_nodes else AdaptiveDrafter(drafter, FixedLength(0))
    most = [min(size, drafter.max_depth) + 1 for size in sizes]  # tokens that a round emits
    table = []
    for count in sorted(set(rows)):
        longest = max(len(prompts[row % len(prompts)]) for row in range(count))
        room = longest + sum(most) + max(most)
        with Engine(target, limited, verifier, max_batch_size=count, **{"max_length": room, **options}) as engine:
            engine.warm_up()  # rounds of a run are captured, so these are to be, too
            session: Any = engine.session
            kinds = [partial(setattr, session.policy, "nodes" if by_nodes else "depth", size) for size in sizes]
            timed = time_rounds(engine, prompts, SamplingParams(), rounds, kinds=kinds, anew=True)
            if not all(timed):
                raise ValueError(
                    f"max_length={engine.max_length} leaves no room to time rounds behind prompts of {longest} tokens: "
                    f"give at least {room}, or shorter prompts"
                )
        table.append(tuple(smallest([each["seconds"] for each in kind]) for kind in timed))
    return RoundCosts(
        rows=tuple(sorted(set(rows))),
        table=tuple(table),
        nodes=sizes if by_nodes else None,
        device=str(target.device),
        dtype=dtype_name(target.dtype),
        drafter=type(drafter).__name__,
    )
