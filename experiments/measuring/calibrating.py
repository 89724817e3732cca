"""Calibrates costs of rounds: measures, fits, checks, and says how well the fit predicts what it has not seen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import psutil
import torch

from experiments.measuring.conditions import conditions_of, least_work
from experiments.measuring.forwards import Grid, Timed, measure_forwards
from experiments.measuring.peaks import Peaks, measure_peaks
from experiments.measuring.rounds import TimedRound, measure_rounds
from experiments.results.manifest import versions
from specdec.drafting.costs import smallest
from specdec.interfaces import Drafter, Verifier
from specdec.physics.calibrated import Box, CalibratedRounds
from specdec.physics.costs import Errors, StepCost, StepSize, check_possible, fit_part, fit_step
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

CPU_RANGES = (1, 16)
"""On a CPU, one token is bound by the memory; up to sixteen, and more, are so less and less."""
GPU_RANGES = (64,)
"""On a GPU, matrix products work on tiles of 64 rows or more, which fewer tokens do not fill."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The points of a calibration, those that constants are tried at (``held_out``), and the time for them.

    Attributes:
        seconds: For the target's forwards.
        rounds: How many rounds of every kind are timed for the other parts; 0 leaves them out.
    """

    grid: Grid
    held_out: Grid
    seconds: float = 60.0
    rounds: int = 8
    seed: int = 0

    @classmethod
    def within(
        cls,
        target: Target,
        drafter: Drafter | None,
        grid: Mapping[str, Any],
        held_out: Mapping[str, Any],
        **options: Any,
    ) -> "Plan":
        """The plan for grids as far as the model has room for them, the drafter's largest tree included."""
        drafted = {*grid["drafted"]} | ({drafter.max_nodes} if drafter is not None else set())
        room, made = target.max_length - max(*drafted, *held_out["drafted"]) - 1, {}
        for name, given in {"grid": {**grid, "drafted": drafted}, "held_out": held_out}.items():
            sizes = given | {"context": [length for length in given["context"] if length <= room]}
            if not sizes["context"]:
                raise ValueError(
                    f"{name}.context={given['context']}: {target.name} has {target.max_length} positions, which leaves "
                    f"{room} behind drafts: give contexts of at most that"
                )
            made[name] = Grid(**{key: tuple(sorted(set(values))) for key, values in sizes.items()})
        return cls(**made, **options)

    @property
    def box(self) -> Box:
        """The sizes between which the fit holds: those that it was fitted to."""
        grid = self.grid
        return Box(
            batch=(min(grid.batch), max(grid.batch)),
            context=(min(grid.context), max(grid.context)),
            drafted=(min(grid.drafted), max(grid.drafted)),
            chunk=(min(grid.chunk), max(grid.chunk)) if grid.chunk else (1, 1),
        )


def calibrate(
    target: Target,
    drafter: Drafter | None,
    verifier: Verifier | None,
    prompt: Sequence[int],
    plan: Plan,
    *,
    sampling: SamplingParams | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> CalibratedRounds:
    """Return the fitted costs of rounds of a target, and of a drafter and its rule, on this machine.

    Prompts are made of ``prompt``'s tokens; ``options`` are those of ``Engine`` and its runner.

    Raises:
        ValueError: The grid does not fit into the model, or the fit is faster than physics.
    """
    torch.manual_seed(plan.seed)
    longest = max(*plan.grid.context, *plan.held_out.context)
    runner = ModelRunner(
        target.model,
        max_batch_size=max(*plan.grid.batch, *plan.held_out.batch),
        max_length=min(target.max_length, longest + max((*plan.grid.chunk, *plan.held_out.chunk), default=0)),
        max_nodes=max(*plan.grid.drafted, *plan.held_out.drafted),
        **{name: options[name] for name in ("attention", "optimize", "kv_cache", "invariant") if name in options},
    )
    progress("what the device can do at best")
    peaks = measure_peaks(target.device, target.dtype, seconds=0.5)
    points = plan.grid.forwards() + plan.held_out.forwards(held_out=True)
    points = [each for each in points if each.context + each.queries <= runner.cache.max_length or not each.prompt]
    timed = measure_forwards(runner, points, seconds=plan.seconds, seed=plan.seed, progress=progress)
    peaks = Peaks(*map(max, astuple(peaks), astuple(measure_peaks(target.device, target.dtype, seconds=0.5))))
    ends = CPU_RANGES if target.device.type == "cpu" else GPU_RANGES
    rounds = [each for each in timed if not each.forward.prompt]
    pieces = [each for each in timed if each.forward.prompt]
    cost, found = _fitted(rounds, ends)
    errors = {"target": found}
    prefill: StepCost | None = None
    if any(not each.forward.held_out for each in pieces):
        prefill, errors["prefill"] = _fitted(pieces, ())
    least = least_work(target, runner)
    if least is not None:
        sizes = [each.forward.size for each in rounds]
        check_possible(cost, sizes, least, peaks.roof, cache_bytes=peaks.cache_bytes)
    conditions = conditions_of(target, runner, drafter)
    del runner
    parts: dict[str, Any] = {}
    if plan.rounds:
        batches, contexts = sorted(plan.grid.batch), sorted(plan.grid.context)
        more = {"rounds": plan.rounds, "sampling": sampling, "progress": progress, **options}
        more["batches"] = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
        more["contexts"] = sorted({contexts[0], contexts[len(contexts) // 2]})
        parts, found = _parts(measure_rounds(target, drafter, verifier, prompt, **more), cost, ends)
        errors |= found
    measured, passes = [], min(each.passes for each in timed)
    for each in timed:
        point, fitted = each.forward, prefill or cost if each.forward.prompt else cost
        sizes, flags = (point.batch, point.context, point.queries - 1), (int(point.held_out), int(point.prompt))
        measured.append((*sizes, each.seconds, fitted.seconds(point.size), *flags))
    on_gpu = target.device.type == "cuda"
    memory: Any = torch.cuda.get_device_properties(target.device) if on_gpu else psutil.virtual_memory()
    return CalibratedRounds(
        conditions=conditions,
        box=plan.box,
        target=cost,
        prefill=prefill,
        errors=errors,
        peaks={**asdict(peaks), "memory": memory.total_memory if on_gpu else memory.total},
        work={} if least is None else asdict(least),
        versions=versions(),
        measured=tuple(measured),
        note=f"every forward was timed {passes} times only: give more seconds" if passes < 5 else "",
        **parts,
    )


def _parts(
    timed: Sequence[TimedRound], cost: StepCost, ends: Sequence[int]
) -> tuple[dict[str, Any], dict[str, dict[str, Errors]]]:
    """Return the parts of rounds besides the forward, and their errors and those of the forward's prediction there."""
    drafts = [each for each in timed if each.depth]
    parts: dict[str, Any] = {"host": smallest([each.host for each in timed])}
    errors: dict[str, dict[str, Errors]] = {}
    for name, rounds, stages, own in (
        ("judging", timed, ("accept", "commit"), ()),
        ("drafting", drafts, ("draft",), ends),
    ):
        seconds = [sum(each.stages[stage] for stage in stages) for each in rounds]
        if name == "judging" or any(seconds):
            sizes = [
                {"levels": each.depth, "tokens": each.rows * each.nodes, "positions": each.rows * each.context}
                for each in rounds
            ]
            parts[name] = fit_part(sizes, seconds, ends=own)
            errors[name] = {"fit": Errors.of([parts[name].seconds(**size) for size in sizes], seconds)}
    predicted = [
        cost.seconds(StepSize.of(rows=each.rows, queries=each.nodes + 1, context=each.context)) for each in timed
    ]
    errors["target in rounds"] = {"held_out": Errors.of(predicted, [each.stages["verify"] for each in timed])}
    depths = sorted({(each.nodes, each.depth) for each in drafts})
    if any(nodes != depth for nodes, depth in depths):
        parts["depths"] = tuple(depths)
    parts["deepest"] = max((depth for _, depth in depths), default=0)
    return parts, errors


def _fitted(timed: Sequence[Timed], ends: Sequence[int]) -> tuple[StepCost, dict[str, Errors]]:
    """Return the cost that fits the points which are not held out, and its errors at both kinds."""
    fitted, held_out = ([each for each in timed if each.forward.held_out is held] for held in (False, True))
    cost = fit_step([each.forward.size for each in fitted], [each.seconds for each in fitted], ends=ends)
    return cost, {
        kind: Errors.of([cost.seconds(each.forward.size) for each in points], [each.seconds for each in points])
        for kind, points in (("fit", fitted), ("held_out", held_out))
        if points
    }
