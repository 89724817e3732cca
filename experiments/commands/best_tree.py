"""The best tree shapes of a trace: rates, costs, shapes, and what they bring when they are run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.config.kinds import did_you_mean
from experiments.config.sections import bootstrap_of, build, listed, plain, sections
from experiments.datasets.prompt import choose
from experiments.measuring.rounds import measure_tree_costs, shapes_to_measure
from experiments.planning.drafting import drafter_class
from experiments.reporting import terminal
from experiments.reporting.best_tree import Optimized, report_found, report_measured
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table
from experiments.results.frame import frame_of, rounds_of
from experiments.results.manifest import device_name
from experiments.results.origin import read_manifest
from experiments.results.rows import Row, ends
from experiments.results.runs import find_folders, records_of
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.session.assembly import encode_warmup, measure_methods
from experiments.session.engines import new_engine, settle
from experiments.session.measurement import Report
from experiments.session.methods import check_components
from experiments.tracing.draft_sets import DraftSet, find_drafts
from experiments.tracing.rates import record
from specdec.drafting.best_shapes import best_shapes, fastest
from specdec.drafting.costs import RoundCosts
from specdec.engine.engine import Engine
from specdec.interfaces import Verifier
from specdec.physics.calibrated import CalibratedRounds, is_calibrated
from specdec.shape import TreeShape
from specdec.target.target import Target

MEASURE, NO_COSTS = "measure", "none"
NEW, OLD = "new", "old"
_CARRIED = (
    *("target", "verifier", "sampling", "dataset", "tracker", "engine", "contenders", "bootstrap", "seed", "threads"),
    *("warmup_prompts", "resume", "trace", "trace_dropped", "chat_template", "progress_every", "title"),
)
"""Settings of the traced run that a measurement of two trees has, too."""
_SECTIONS = ("target", "drafter", "verifier", "sampling", "dataset", "engine")
"""Sections that the command line may change."""


def best_tree(config: DictConfig) -> list[Optimized]:
    """Find the best tree at every temperature of the configuration's traces; print and write what was found."""
    bootstrap = bootstrap_of(config)
    given = None
    if config.costs not in (MEASURE, NO_COSTS):  # the file may be one of plan costs=fit
        given = (CalibratedRounds if is_calibrated(config.costs) else RoundCosts).load(config.costs)
    traced = read_traces(config)
    rows = int(changed_run(config, traced, 0.0).engine.max_batch_size)
    costs_given = given.trees(rows=rows) if isinstance(given, CalibratedRounds) else given
    old = old_shape(config.old, traced.config)
    if costs_given is not None and config.measure:
        check_costs(costs_given, config.costs, changed_run(config, traced, 0.0))
    settle(config)
    if config.measure or config.costs == MEASURE:
        parts = ("target", "verifier", "sampling", "dataset")
        check_components(changed_run(config, traced, 0.0), {"": "drafter"}, parts)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    console = terminal.console()
    status = Console(stderr=True)
    found: list[Optimized] = []
    for temperature in sorted(traced.sets):
        with status.status(f"T={temperature:g}: reading the rounds"):
            recorded = record(traced.sets[temperature], traced.rule)
        rates = recorded.rates()
        depth = rates.max_depth if config.max_depth is None else config.max_depth
        planned = best_shapes(rates, max_nodes=config.max_nodes, max_depth=depth)
        changed = changed_run(config, traced, temperature)
        costs = costs_given
        if config.costs == MEASURE:
            with status.status("costs of rounds") as shown:
                costs = _measured_costs(changed, shapes_to_measure(planned), config.rounds, shown.update)
            costs.save(out / f"tree_costs_T{temperature:g}.json")
        best = fastest(planned, costs) if costs is not None else max(planned, key=lambda each: each.tokens)
        optimized = Optimized(
            temperature=temperature, recorded=recorded, rates=rates, planned=planned, costs=costs, best=best, old=old
        )
        about = _about(traced, costs)
        report_found(console, optimized, out, bootstrap, about)
        if config.measure:
            optimized = replace(optimized, measured=_measured(changed, optimized, out, bootstrap))
            report_measured(console, optimized, out, bootstrap, about)
        found.append(optimized)
    return found


def _with_shape(drafter: DictConfig, shape: Any) -> dict[str, Any]:
    """A drafter's section with another tree."""
    made: dict[str, Any] = OmegaConf.to_container(drafter, resolve=True)  # type: ignore[assignment]
    return {**made, "shape": [list(path) for path in shape.paths] if isinstance(shape, TreeShape) else shape}


def _measured_costs(
    changed: DictConfig, shapes: Sequence[TreeShape], rounds: int, say: Callable[[str], None]
) -> RoundCosts:
    """The costs of rounds of what is going to run, measured here."""
    target: Target = build(changed, "target")
    sampling = build(changed, "sampling")

    def make(shape: TreeShape) -> Engine:
        section = OmegaConf.create({**changed, "drafter": _with_shape(changed.drafter, shape)})
        return new_engine(changed, target, build(section, "drafter"), build(changed, "verifier"))

    chosen, _ = choose(build(changed, "dataset"))
    length = changed.engine.max_length or target.max_length
    prompts = encode_warmup([prompt.turns[0] for prompt in chosen[:4]], target, sampling, length)
    return measure_tree_costs(make, shapes, prompts, sampling, rounds=rounds, progress=say)


def check_costs(costs: RoundCosts, path: str, changed: DictConfig) -> None:
    """Refuse costs that were measured on something else than what is going to run."""
    wanted = str(changed.target.get("device") or "auto")
    on_gpu = torch.cuda.is_available() and wanted != "cpu"
    device = torch.device(wanted if wanted != "auto" else "cuda") if on_gpu else torch.device("cpu")
    here = {
        "device": device_name(device),
        "drafter": drafter_class(changed.drafter),
        "rows": (changed.engine.max_batch_size,),
    }
    different = [name for name, value in here.items() if getattr(costs, name) != value]
    if different:
        said = ", ".join(f"{name} is {getattr(costs, name)} there and {here[name]} here" for name in different)
        raise ValueError(
            f"costs={path} were measured on something else ({said}): give costs=measure, or measure=false to plan for "
            f"where the file is from"
        )


def _measured(changed: DictConfig, optimized: Optimized, out: Path, bootstrap: Bootstrap) -> dict[str, Row]:
    """What the old and the new tree bring on the traced run's prompts, by name."""
    methods = {NEW: _with_shape(changed.drafter, optimized.best.shape)}
    if not optimized.same:
        methods = {OLD: _with_shape(changed.drafter, optimized.old), **methods}
    settings = {name: changed[name] for name in _CARRIED if name in changed}
    folder = out / f"measured_T{optimized.temperature:g}"
    config = OmegaConf.create({**settings, "methods": methods, "out": str(folder)})
    report = Report(tables=lambda made, title: [comparison_table(made, title)], plots=RUN_PLOTS)
    made = measure_methods(config, methods={name: f"methods.{name}" for name in methods}, report=report)
    found: dict[str, Row] = {}
    for row in (row for row in made.rows if row["method"] in methods):
        rounds = rounds_of(frame_of(record for record in records_of(folder) if record.method == row["method"]))
        whole = rounds[rounds.proposed_depth == rounds.proposed_depth.max()]  # the output's end has cut the others
        emitted = 1 + whole.expected_accepted
        bounds = bootstrap.over_prompts(ratio_of_sums, whole.prompt, [emitted, [1.0] * len(emitted)])
        found[row["method"]] = {
            "tokens_per_round": float(emitted.mean()),
            **ends("tokens_per_round", bounds),
            **{name: row[name] for name in ("speedup", "speedup_low", "speedup_high")},
            "prompts": whole.prompt.nunique(),
        }
    return found


def _about(traced: "Traced", costs: RoundCosts | None) -> str:
    """Target, drafter and device, for titles."""
    drafter = drafter_class(traced.config.drafter)
    rule = type(traced.rule).__name__
    where = "without costs"
    if costs is not None:
        where = f"costs on {costs.device}, {costs.rows[0]} row{'s' * (costs.rows[0] > 1)}"
    return f"{traced.manifest['target']['name']} with {drafter}, {rule}; {where}"


# ---------------------------------------------------------------- the traced runs


@dataclass(frozen=True)
class Traced:
    """The drafts of one method, and the run that made them.

    Attributes:
        sets: By temperature.
        config: That of the (first) run, with the method's drafter as its drafter.
    """

    sets: Mapping[float, Sequence[DraftSet]]
    config: DictConfig
    manifest: Mapping[str, Any]
    rule: Verifier


def read_traces(config: DictConfig) -> Traced:
    """Find the drafts that the configuration's traces have of its method.

    Raises:
        ValueError: There is no trace, or it has several methods, or runs of several drafters.
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
    drafters = [each["methods"].get(method) if each.get("methods") else each["drafter"] for each in configs]
    known = [drafter for drafter in drafters if drafter is not None]
    for each in known[1:]:
        different = sorted(key for key in {*known[0], *each} - {"shape"} if known[0].get(key) != each.get(key))
        if different:
            name = different[0]
            raise ValueError(
                f"the traces are of different drafters (drafter.{name} is {known[0].get(name)!r} and "
                f"{each.get(name)!r}): optimize each by itself"
            )
    rules = [each["verifier"] for each in configs]
    if any(rule != rules[0] for rule in rules[1:]):
        raise ValueError("the traces are of different acceptance rules, whose rates differ: optimize each by itself")
    first = OmegaConf.create({**configs[0], "drafter": known[0]})
    by_temperature: dict[float, list[DraftSet]] = {}
    for drafts in sets:
        if drafts.method == method:
            by_temperature.setdefault(drafts.temperature, []).append(drafts)
    rule = build(OmegaConf.create({"verifier": rules[0]}), "verifier")
    return Traced(by_temperature, first, manifests[0], rule)


def old_shape(given: Any, traced: DictConfig) -> Any:
    """The ``drafter.shape`` without this optimization: as given, or in the drafter's file, or as it was traced."""
    if "shape" not in traced.drafter:
        raise ValueError(
            f"{traced.drafter.get('_target_')} takes no shape of its own: optimize the shape of the drafter that it is "
            f"made of, in a run of that one"
        )
    if given is not None:
        made = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
        TreeShape.of(made)  # type: ignore[arg-type]
        return made
    for section in sections("drafter", None).values():
        if section.get("_target_") == traced.drafter.get("_target_"):
            return plain(OmegaConf.create({"shape": section.get("shape")}), "shape")
    return plain(traced, "drafter.shape")


def changed_run(config: DictConfig, traced: Traced, temperature: float) -> DictConfig:
    """The traced run's configuration with what the command line changes, at one temperature."""
    made = OmegaConf.create({name: traced.config[name] for name in traced.config})
    for name in _SECTIONS:
        made[name] = OmegaConf.merge(made.get(name) or {}, config[name])
    made.sampling.temperature = temperature
    made.threads, made.resume, made.trace = config.threads, False, False
    made.policy = None
    made.tracker, made.contenders = sections("tracker", "none")["none"], {}
    return made
