"""Costs of steps on this machine: timed, to say whether speculation pays (``pays``), or fitted (``calibrate``)."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.config.sections import build, listed, plain
from experiments.measuring import calibrating
from experiments.measuring.conditions import conditions_of
from experiments.measuring.forwards import Forward, measure_forwards
from experiments.measuring.meters import LoadMeter
from experiments.reporting import costs as reports
from experiments.reporting.formats import publish
from experiments.reporting.progress import steps_shown
from experiments.reporting.run_tables import load_notes
from experiments.session.engines import settle
from experiments.session.methods import check_components
from specdec.interfaces import Drafter
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.rounds import TimedRounds
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

_TEXT = "def area(self):\n    return self.width * self.height\n\n\nclass Square(Shape):\n    def __init__(self):\n"


def pays(config: DictConfig) -> TimedRounds:
    """Time the target's forwards; print and write from which acceptance on speculation pays."""
    settle(config)
    formats = check_components(config, {"": "drafter"} if config.drafter.get("_target_") else {}, ("target",))
    batches = sorted({*(listed(config, "batch") if config.batch is not None else (1, 8))})
    nodes, costs = sorted({1, *listed(config, "nodes")}), listed(config, "draft_costs")
    context, seconds = config.context or 256, 20 if config.seconds is None else config.seconds
    target: Target = build(config, "target")
    if context + nodes[-1] > target.max_length:
        room = f"{target.name} has {target.max_length} positions, give at most so many together"
        raise ValueError(f"context={context} and nodes of up to {nodes[-1]}: {room}")
    torch.manual_seed(config.seed)
    sizes = {"max_batch_size": batches[-1], "max_length": context + 1, "max_nodes": nodes[-1] - 1}
    runner = ModelRunner(target.model, **sizes, **_engine(config))
    points = [Forward(batch=batch, queries=count, context=context) for batch in batches for count in nodes]
    meter = LoadMeter()
    with steps_shown("forwards") as say:
        timed = measure_forwards(runner, points, seconds=seconds, seed=config.seed, progress=say)
    found = {(each.forward.batch, each.forward.queries): each.seconds for each in timed}
    rounds = TimedRounds(nodes=nodes, seconds={batch: [found[batch, count] for count in nodes] for batch in batches})
    where = conditions_of(target, runner, None)
    threads = f"{where.threads} thread{'s' * (where.threads > 1)}"
    about = f"{where.model} in {where.dtype} on {where.device}, {threads}, context {context}"
    said = [*formats.values(), *load_notes(meter.stop(), timed)]
    publish(
        Path(config.out),
        "pays",
        tables=[reports.lengths_table(rounds, batch, costs, about) for batch in batches],
        figures=reports.timed_figures(rounds, costs) | {"conditions": where, "context": context},
        said=[*said, *reports.verdict(rounds, costs, passes=timed[0].passes)],
    )
    return rounds


def calibrate(config: DictConfig) -> CalibratedRounds:
    """Calibrate by a checked configuration, print what was found, and write it."""
    settle(config)
    drafts = config.drafter.get("_target_") is not None
    check_components(config, {"": "drafter"} if drafts else {}, ("target", "verifier", "sampling"))
    target: Target = build(config, "target")
    drafter: Drafter | None = build(config, "drafter") if drafts else None
    seconds = 50 if config.seconds is None else config.seconds
    options = {"seconds": seconds, "rounds": config.rounds, "seed": config.seed}
    plan = calibrating.Plan.within(target, drafter, plain(config, "grid"), plain(config, "held_out"), **options)
    prompt = [1] if target.tokenizer is None else target.tokenizer.encode(_TEXT)
    verifier, options = build(config, "verifier") if drafts else None, _engine(config)
    meter = LoadMeter()
    with steps_shown("calibrating") as say:
        found = calibrating.calibrate(
            target, drafter, verifier, prompt, plan, sampling=build(config, "sampling"), progress=say, **options
        )
    path = Path(config.out) / "costs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    tables = [reports.constants_table(found), reports.errors_table(found)]
    said = [*load_notes(meter.stop()), *reports.doubts(found)]
    publish(path.parent, "calibration", tables=tables, said=said, drawn=lambda: [path])
    return found


def _engine(config: DictConfig) -> dict[str, Any]:
    """The engine's settings that change what a forward costs."""
    engine = plain(config, "engine")
    return {name: engine[name] for name in ("attention", "optimize", "kv_cache", "invariant") if name in engine}
