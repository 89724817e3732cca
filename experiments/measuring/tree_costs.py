"""How long rounds with trees of several sizes take here."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from experiments.results.manifest import device_name
from specdec.drafting.best_shapes import PlannedShape
from specdec.drafting.tree_costs import TreeCosts
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.shape import TreeShape
from specdec.types import Step

_WARM = 3
"""Rounds before any is timed."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What rounds are measured with.

    Attributes:
        prompts: Token ids to go on from, at least one; they are used again where the batch has more rows.
        sampling: The requests' parameters.
        rounds: How many rounds of each tree are timed.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    rounds: int = 12


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
    setting: Setting,
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> TreeCosts:
    """Returns how long rounds take, with each of some trees and in plain decoding.

    Args:
        make: Makes an engine whose drafter drafts a tree of this shape. One engine lives at a time.
        shapes: The trees, at least one.
        setting: Prompts and the number of rounds.
        progress: Is told what is being measured.

    Raises:
        ValueError: An engine refuses the shape or the prompts.
    """
    trees: list[tuple[int, int]] = []
    seconds: list[float] = []
    plain: list[float] = []
    facts: dict[str, str | int] = {}
    for number, shape in enumerate(shapes):
        progress(f"costs of rounds: tree {number + 1} of {len(shapes)}")
        with make(shape) as engine:
            engine.warm_up([shape.num_nodes])
            trees.append((shape.num_nodes, shape.max_depth))
            seconds.append(_round_seconds(engine, setting, shape.max_depth + 1))
            if number in (0, len(shapes) - 1):
                plain.append(_round_seconds(engine, setting, 1, speculate=False))
            target = engine.target
            facts = {
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "target": f"{target.name}, {target.num_parameters / 1e6:,.1f}M parameters",
                "drafter": type(engine.drafter).__name__,
                "rows": engine.max_batch_size,
                "threads": torch.get_num_threads(),
            }
    return TreeCosts(trees=tuple(trees), seconds=tuple(seconds), plain=min(plain), **facts)  # type: ignore[arg-type]


def _round_seconds(engine: Engine, setting: Setting, most: int, *, speculate: bool = True) -> float:
    """The seconds of a round.

    Args:
        engine: Plays it.
        setting: What is decoded.
        most: The most tokens that a round may emit.
        speculate: Whether anything is drafted.
    """
    given = [list(setting.prompts[row % len(setting.prompts)]) for row in range(engine.max_batch_size)]
    wanted = (setting.rounds + _WARM + 1) * most
    room = engine.max_length - max(map(len, given))
    sampling = SamplingParams(
        temperature=setting.sampling.temperature,
        top_k=setting.sampling.top_k,
        top_p=setting.sampling.top_p,
        min_p=setting.sampling.min_p,
        max_new_tokens=max(1, min(wanted, room)),
        ignore_eos=True,
        seed=0,
    )
    ids = [engine.submit(prompt, sampling, speculate=speculate) for prompt in given]
    while not any(step.round for step in _stepped(engine)):
        pass  # the prompts are in the cache after this
    times: list[float] = []
    while len(times) < setting.rounds + _WARM and engine.unfinished == len(given):
        begin = time.perf_counter()
        _stepped(engine)
        _synchronize(engine.target.device)
        times.append(time.perf_counter() - begin)
    for each in ids:
        engine.abort(each)
    if not times:
        raise ValueError(
            f"engine.max_length={engine.max_length} leaves no room to time rounds behind prompts of "
            f"{max(map(len, given))} tokens: give a larger one, or shorter prompts"
        )
    # What else the machine does can only make a round slower.
    return min(times[min(_WARM, len(times) - 1) :])


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
