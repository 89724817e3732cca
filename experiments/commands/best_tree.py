"""The best tree shapes of a trace: acceptance rates, costs of rounds, and the shape that is fastest by both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.config.kinds import did_you_mean
from experiments.config.sections import bootstrap_of, build, listed
from experiments.planning.drafting import drafter_class
from experiments.reporting import terminal
from experiments.reporting.best_tree import Optimized, report_found
from experiments.results.origin import read_manifest
from experiments.results.runs import find_folders
from experiments.session.engines import settle
from experiments.tracing.rates import record
from experiments.tracing.scoring import DraftSet, find_drafts
from specdec.drafting.best_shapes import best_shapes, fastest
from specdec.drafting.costs import RoundCosts
from specdec.interfaces import Verifier
from specdec.physics.calibrated import CalibratedRounds, is_calibrated


def best_tree(config: DictConfig) -> list[Optimized]:
    """Find the best tree at every temperature of the configuration's traces; print and write what was found."""
    bootstrap = bootstrap_of(config)
    costs: Any = None
    if config.costs is not None:  # the file may be one of plan costs=fit
        costs = (CalibratedRounds if is_calibrated(config.costs) else RoundCosts).load(config.costs)
    traced = read_traces(config)
    if isinstance(costs, CalibratedRounds):
        costs = costs.trees(rows=int(traced.config.engine.max_batch_size))
    settle(config)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    results: list[Optimized] = []
    for temperature in sorted(traced.sets):
        recorded = record(traced.sets[temperature], traced.rule)
        rates = recorded.rates()
        depth = rates.max_depth if config.max_depth is None else config.max_depth
        planned = best_shapes(rates, max_nodes=config.max_nodes, max_depth=depth)
        best = fastest(planned, costs) if costs is not None else max(planned, key=lambda shape: shape.tokens)
        results.append(
            Optimized(temperature=temperature, recorded=recorded, rates=rates, planned=planned, costs=costs, best=best)
        )
        about = f"{traced.manifest['target']['name']} with {drafter_class(traced.config.drafter)}"
        where = (
            "without costs"
            if costs is None
            else f"costs on {costs.device}, {costs.rows[0]} row{'s' * (costs.rows[0] > 1)}"
        )
        report_found(terminal.console(), results[-1], out, bootstrap, f"{about}, {type(traced.rule).__name__}; {where}")
    return results


@dataclass(frozen=True)
class Traced:
    """The drafts of one method by temperature, and the configuration of the (first) run, with the method's drafter."""

    sets: Mapping[float, Sequence[DraftSet]]
    config: DictConfig
    manifest: Mapping[str, Any]
    rule: Verifier


def read_traces(config: DictConfig) -> Traced:
    """Find the drafts that the configuration's traces have of its method.

    Raises:
        ValueError: There is no trace, it has several methods, or its runs differ in drafter or rule.
    """
    folders = find_folders(listed(config, "trace"))
    manifests = [read_manifest(folder) for folder in folders]
    sets = [drafts for folder in folders for drafts in find_drafts(folder)]
    methods = list(dict.fromkeys(drafts.method for drafts in sets))
    method = config.method if config.method is not None else methods[0]
    if config.method is None and len(methods) > 1:
        raise ValueError(f"the trace has drafts of {', '.join(methods)}: give method=NAME")
    if method not in methods:
        raise ValueError(f"method={method!r}: the trace has no such method{did_you_mean(str(method), methods)}")
    configs = [manifest["config"] for manifest in manifests]
    drafters = [given["methods"].get(method) if given.get("methods") else given["drafter"] for given in configs]
    known = [drafter for drafter in drafters if drafter is not None]
    rules = [given["verifier"] for given in configs]
    for part, parts in (("drafter", known), ("verifier", rules)):
        for other in parts[1:]:
            if different := sorted(key for key in {*parts[0], *other} if parts[0].get(key) != other.get(key)):
                key = different[0]
                raise ValueError(
                    f"the traces are of different runs ({part}.{key} is {parts[0].get(key)!r} and "
                    f"{other.get(key)!r}): optimize each by itself"
                )
    if "shape" not in known[0]:
        raise ValueError(
            f"{known[0].get('_target_')} takes no shape of its own: optimize the shape of the drafter that it is made "
            f"of, in a run of that one"
        )
    run = OmegaConf.create({**configs[0], "drafter": known[0], "threads": config.threads})
    by_temperature: dict[float, list[DraftSet]] = {}
    for drafts in sets:
        if drafts.method == method:
            by_temperature.setdefault(drafts.temperature, []).append(drafts)
    return Traced(by_temperature, run, manifests[0], build(OmegaConf.create({"verifier": rules[0]}), "verifier"))
