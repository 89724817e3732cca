"""How long rounds take on this machine: by the depth of their drafts, or by the number of nodes that they verify."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drafters.adaptive import AdaptiveDrafter
from specdec.drafting.costs import RoundCosts, smallest
from specdec.drafting.policies import FirstNodes, FixedLength
from specdec.drafting.scored import ScoredDrafter
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter, Verifier
from specdec.requests import SamplingParams
from specdec.target.target import Target

_WARM = 3
"""Rounds of each kind before any is timed."""


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
    """Returns how long rounds take on this machine, with drafts of every depth.

    Rounds of all depths take turns, so that what else the machine does falls on all of them.

    Args:
        target: The target.
        drafter: Drafts.
        verifier: The acceptance rule.
        prompts: Token ids to go on from; at least one, and they are used again where more rows are wanted.
        rows: Batch sizes to measure.
        rounds: How many rounds of each kind are timed.
        options: For ``Engine``.

    Raises:
        ValueError: There is no prompt, or an argument does not fit.
    """
    depths = range(drafter.max_depth + 1)

    def play(engine: Engine, depth: int) -> None:
        session: Any = engine.session
        session.policy.depth = depth

    tokens = {depth: depth + 1 for depth in depths}
    limited = AdaptiveDrafter(drafter, FixedLength(0))
    table = _timed(target, limited, verifier, prompts, rows, rounds, tokens, play, options)
    return _costs(target, drafter, rows, table)


def measure_node_costs(
    target: Target,
    drafter: ScoredDrafter,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int] = (1,),
    rounds: int = 12,
    **options: Any,
) -> RoundCosts:
    """Returns how long rounds take on this machine that draft whole trees and verify some of their nodes.

    Arguments and errors are those of ``measure_costs``. The drafter's own policy stays as it is.
    """
    sizes = node_sizes(drafter.max_nodes)

    def play(engine: Engine, nodes: int) -> None:
        session: Any = engine.session
        session.policy.nodes = nodes

    tokens = {nodes: min(nodes, drafter.max_depth) + 1 for nodes in sizes}
    table = _timed(target, drafter.pruned_by(FirstNodes()), verifier, prompts, rows, rounds, tokens, play, options)
    return _costs(target, drafter, rows, table, nodes=sizes)


def node_sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of nodes that are measured: few, and close together where there are few."""
    steps = [0, 1, 2, 3] + [size for power in range(2, 12) for size in (2**power, 3 * 2 ** (power - 1))]
    return tuple(sorted({size for size in steps if size < most} | {most}))


def _timed(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    rounds: int,
    tokens: Mapping[int, int],
    play: Callable[[Engine, int], None],
    options: Mapping[str, Any],
) -> tuple[tuple[float, ...], ...]:
    """Returns the seconds of rounds, by batch size and by size of their drafts.

    Args:
        target: The target.
        drafter: Drafts.
        verifier: The acceptance rule.
        prompts: Token ids to go on from.
        rows: Batch sizes.
        rounds: How many rounds of each kind are timed.
        tokens: The sizes to measure, and the most tokens that a round of each may emit.
        play: Sets the size of the next round's drafts.
        options: For ``Engine``.
    """
    if not prompts:
        raise ValueError("costs of rounds are measured on prompts, and there are none: give at least one")
    emitted = sum(tokens.values()) + max(tokens.values())
    table = []
    for count in sorted(set(rows)):
        given = [list(prompts[row % len(prompts)]) for row in range(count)]
        longest = max(map(len, given))
        with Engine(
            target, drafter, verifier, max_batch_size=count, **{"max_length": longest + emitted, **options}
        ) as engine:
            engine.warm_up()  # rounds of a run are captured, so these are to be, too
            sampling = SamplingParams(max_new_tokens=min(emitted, engine.max_length - longest), ignore_eos=True)
            times: dict[int, list[float]] = {size: [] for size in tokens}
            for turn in range(rounds + _WARM):
                # Anew every time: behind what was emitted so far, rounds would take longer and longer.
                ids = [engine.submit(prompt, sampling) for prompt in given]
                while not any(step.round for step in engine.step()):
                    pass  # the prompts are in the cache after this
                # Forwards and backwards in turn: what a drafter has to catch up with depends on the round before.
                for size in list(tokens)[:: 1 if turn % 2 else -1]:
                    if engine.unfinished < count:
                        break  # there is no room for more
                    play(engine, size)
                    begin = time.perf_counter()
                    engine.step()
                    if turn >= _WARM:
                        times[size].append(time.perf_counter() - begin)
                for each in ids:
                    engine.abort(each)
        if not all(times.values()):
            raise ValueError(
                f"max_length={engine.max_length} leaves no room to time rounds behind prompts of {longest} tokens: "
                f"give at least {longest + emitted}, or shorter prompts"
            )
        table.append(tuple(smallest(each) for each in times.values()))
    return tuple(table)


def _costs(
    target: Target,
    drafter: Drafter,
    rows: Sequence[int],
    table: tuple[tuple[float, ...], ...],
    nodes: tuple[int, ...] | None = None,
) -> RoundCosts:
    return RoundCosts(
        rows=tuple(sorted(set(rows))),
        table=table,
        nodes=nodes,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        drafter=type(drafter).__name__,
    )
