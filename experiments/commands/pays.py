"""Does speculation pay on this machine: forwards are timed by a configuration, and what follows is published."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from experiments.config.sections import build, component_of, listed, plain
from experiments.measuring.conditions import conditions_of
from experiments.measuring.forwards import Forward, measure_forwards
from experiments.reporting.formats import publish
from experiments.reporting.pays import figures_of, lengths_table, verdict
from experiments.reporting.progress import steps_shown
from experiments.session.engines import settle
from specdec.physics.rounds import TimedRounds
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

_ENGINE = ("attention", "optimize", "kv_cache", "invariant")


def pays(config: DictConfig) -> TimedRounds:
    """Time the target's forwards; print and write from which acceptance on speculation pays."""
    settle(config)
    component_of(config, "target")
    batches = sorted({*(listed(config, "batch") if config.batch is not None else (1, 8))})
    nodes, context = sorted({1, *listed(config, "nodes")}), config.context or 256
    seconds = 20 if config.seconds is None else config.seconds
    target: Target = build(config, "target")
    if context + nodes[-1] > target.max_length:
        raise ValueError(
            f"context={context} and nodes of up to {nodes[-1]}: {target.name} has {target.max_length} "
            f"positions, give at most so many together"
        )
    torch.manual_seed(config.seed)
    options = {name: value for name, value in plain(config, "engine").items() if name in _ENGINE}
    sizes = {"max_batch_size": batches[-1], "max_length": context + 1, "max_nodes": nodes[-1] - 1}
    runner = ModelRunner(target.model, **sizes, **options)
    points = [Forward(batch=batch, queries=count, context=context) for batch in batches for count in nodes]
    with steps_shown("forwards") as say:
        timed = measure_forwards(runner, points, seconds=seconds, seed=config.seed, progress=say)
    found = {(each.forward.batch, each.forward.queries): each.seconds for each in timed}
    rounds = TimedRounds(nodes=nodes, seconds={batch: [found[batch, count] for count in nodes] for batch in batches})
    where = conditions_of(target, runner, None)
    threads = f"{where.threads} thread{'s' * (where.threads > 1)}"
    about = f"{where.model} in {where.dtype} on {where.device}, {threads}, context {context}"
    costs = listed(config, "draft_costs")
    publish(
        Path(config.out),
        "pays",
        tables=[lengths_table(rounds, batch, costs, about) for batch in batches],
        figures=figures_of(rounds, costs) | {"conditions": where, "context": context},
        said=verdict(rounds, costs, passes=min(each.passes for each in timed)),
    )
    return rounds
