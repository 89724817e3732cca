"""Loads in virtual time: without a model by recorded traces, or beside a real run to see how far they are apart."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.commands.load_plan import Load, asked_for, plan_loads, reported
from experiments.config import job
from experiments.config.sections import bootstrap_of, build, plain, plain_whole, typed
from experiments.load.clock import RECORD, Clock
from experiments.load.dense import Dense
from experiments.load.dense_recording import record
from experiments.load.driver import Overload
from experiments.load.run import LoadRun, pooled
from experiments.load.texts import Asked, Numbers, ask
from experiments.load.virtual import VirtualEngine
from experiments.load.workloads import Lengths
from experiments.measuring.conditions import conditions_of
from experiments.reporting import terminal
from experiments.reporting.load import LoadReport
from experiments.reporting.load_validation import traces_table
from experiments.reporting.progress import Progress
from experiments.results.limits import Terms
from experiments.results.manifest import write_manifest
from experiments.results.records import PLAIN
from experiments.session.methods import Method, methods_of
from experiments.session.policies import check_replayed, unpaced
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker
from specdec.cache.pages import Paging
from specdec.drafting.builders.along import along_output
from specdec.drafting.costs import check_conditions
from specdec.engine.engine import DEFAULT_MAX_LENGTH, Engine
from specdec.physics.calibrated import CalibratedRounds

DENSE = "traces.safetensors"


def play_virtual(config: DictConfig, clock: Clock, methods: Mapping[str, str]) -> list[LoadRun]:
    """Play plain decoding and the configuration's methods under the same load in virtual time, and report it."""
    bootstrap, terms = bootstrap_of(config), Terms.of(plain_whole(config))
    engines = {
        each.name: virtual_engine(each, clock, None if each.drafter is None else clock.traces_of(each.name))
        for each in methods_of(config, methods)
    }
    overload: Overload = build(config, "overload")
    seeded = [_asked(config, config.seed + number, engines) for number in range(clock.seeds)]
    planned = [each.planned for each in seeded[0][1]]
    folder, tracker = Path(config.out), build(config, "tracker") or NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    title = _title(config, engines, planned, clock)
    facts = {
        "title": title,
        "overrides": job.overrides(),
        "exactness": {name: None if each.traces is None else "replayed" for name, each in engines.items()},
        "device": title.partition(";")[0],
        "traces": {name: dict(each.traces.facts) for name, each in engines.items() if each.traces is not None},
        "loop": seeded[0][0][0].loop,
        "virtual": True,
    }
    tracker.start(tracked_run(folder, write_manifest(folder, plain_whole(config), **facts)))
    said = (
        "virtual time: turns take what costs say, and rounds accept what dense traces say; the scheduler, the policy "
        "and the pages are those of an engine; pieces of prompts "
        f"{'share' if clock.mixed else 'do not share'} a forward with rounds"
    )
    notes = [said, *_wraps(engines, [each.output_tokens for each in planned])]
    report = LoadReport(folder=folder, terms=terms, bootstrap=bootstrap, title=title, notes=notes, spare=overload.spare)
    runs: list[LoadRun] = []
    with reported(runs, report, tracker):
        for run in virtual_runs(engines, seeded, overload, clock):
            run.save(folder / f"{run.method}_{run.rate:g}")
            runs.append(run)
    return runs


def _asked(config: DictConfig, seed: int, engines: Mapping[str, VirtualEngine]) -> tuple[list[Load], list[Asked]]:
    loads, planned = plan_loads(config, seed)
    lengths = typed(Lengths, plain(config, "lengths"), "lengths")
    fitted, _ = lengths.fit(planned, min(each.max_length for each in engines.values()))
    numbers = Numbers(tokens=any(each.paging.shared for each in engines.values()))
    return loads, ask(fitted, numbers, build(config, "sampling"))


def virtual_runs(
    engines: Mapping[str, VirtualEngine],
    seeded: Sequence[tuple[Sequence[Load], Sequence[Asked]]],
    overload: Overload,
    clock: Clock,
) -> Iterator[LoadRun]:
    """Yield a run for every rate and method, with all seeds in it."""
    cases: list[list[Callable[[], LoadRun]]] = [
        [_play(engines[name], loads[place], asked, overload, seed, name) for seed, (loads, asked) in enumerate(seeded)]
        for place in range(len(seeded[0][0]))
        for name in engines
    ]
    with Progress(len(cases), "virtual runs") as progress, ExitStack() as open_until:
        if clock.workers > 1:
            pool = open_until.enter_context(ProcessPoolExecutor(clock.workers))
            cases = [[pool.submit(each).result for each in own] for own in cases]
        for number, own in enumerate(cases):
            yield pooled([each() for each in own])
            progress.update(number + 1)


def _play(
    engine: VirtualEngine, load: Load, asked: Sequence[Asked], overload: Overload, seed: int, method: str
) -> Callable[[], LoadRun]:
    """Return one play, which another process may do."""
    users = int(min(load.rate, len(asked)))
    given = {"loop": load.loop, "users": users, "overload": overload, "seed": seed, "method": method, "rate": load.rate}
    return partial(engine.play, asked[: len(load.times)], load.times, **given)


def virtual_engine(method: Method, clock: Clock, traces: Dense | None, engine: Engine | None = None) -> VirtualEngine:
    """Return a method's engine in virtual time.

    Args:
        traces: What is accepted; None for plain decoding.
        engine: A real engine to be like; None for the configuration's settings alone.
    """
    config, costs = method.config, clock.costs_of(method.name)
    section = method.policy if traces is not None else None
    if section is not None:
        check_replayed(config, section)
    options = plain(config, "engine")
    if engine is not None and isinstance(costs, CalibratedRounds):
        here = conditions_of(engine.target, engine.runner, engine.drafter)
        check_conditions(costs.conditions, here, "clock's file", drafter=traces is not None)
    policy: Any = None if section is None else build(config, section)
    if policy is not None and getattr(policy, "costs", costs) is None:
        policy.costs = costs  # it decides by costs, and was not given any
    paging: Paging = build(config, "engine.cache") if options.get("cache") else Paging()
    return VirtualEngine(
        costs=costs,
        slots=options["max_batch_size"],
        max_length=engine.max_length if engine is not None else options["max_length"] or DEFAULT_MAX_LENGTH,
        prefill_chunk=options["prefill_chunk"],
        paging=paging,
        scheduler=build(config, "engine.scheduler") if options.get("scheduler") else None,
        traces=traces,
        shape=clock.tree if traces is not None else None,
        policy=policy,
        mixed=clock.mixed,
    )


def record_traces(engines: Mapping[str, Engine], asked: Sequence[Asked], folder: Path) -> dict[str, Dense]:
    """Record dense traces of all methods that draft, and write them; methods with one drafter are recorded once."""
    found: dict[str, Dense] = {}
    written: list[Path] = []
    for name, engine in engines.items():
        drafter = engine.drafter
        if drafter is None or engine.verifier is None:
            continue
        base = unpaced(drafter)
        wanted = ("name", "max_depth", "max_nodes", "sampling", "temperature")  # they tell one drafter from another
        settings = {"class": type(base).__name__, **{each: str(getattr(base, each, "")) for each in wanted}}
        same = next((other for other, each in found.items() if each.facts["settings"] == settings), None)
        if same is not None:
            found[name] = found[same]
            continue
        own = {
            "target": engine.target.name,
            "drafter": type(base).__name__,
            "settings": settings,
            "method": name,
            "temperature": asked[0].sampling.temperature,
        }
        found[name] = record(
            engine.target,
            base,
            [each for each in asked if each.planned.fits],
            noise=engine.verifier.noise,
            facts=own,
            max_batch_size=engine.max_batch_size,
            max_length=engine.max_length,
        )
        written.append(found[name].save(folder / (DENSE if len(engines) == 1 else f"{name}_{DENSE}")))
    console = terminal.console()
    terminal.show(console, traces_table(found))
    terminal.list_written(console, written)
    return found


def _title(config: DictConfig, engines: Mapping[str, VirtualEngine], planned: Sequence[Any], clock: Clock) -> str:
    """Return what is played, for tables and pictures."""
    costs: Any = engines[PLAIN].costs
    conditions = getattr(costs, "conditions", None)
    device = str(clock.costs) if conditions is None else f"{conditions.model} on {conditions.device}"
    times = f", {clock.seeds} times" if clock.seeds > 1 else ""
    about = asked_for(config, planned, "arrival", "workload", "overload", times=times)
    rows = sorted({each.slots for each in engines.values()})
    return f"VIRTUAL TIME, {device}; {about}; {' and '.join(map(str, rows))} slots"


def _wraps(engines: Mapping[str, VirtualEngine], outputs: Sequence[int]) -> list[str]:
    """Return what should be known of traces that are shorter or fewer than what is played."""
    said = []
    traced = {name: each.traces for name, each in engines.items() if each.traces is not None}
    for name, each in traced.items():
        count = len(each.lengths)
        longer = sum(wanted > each.lengths[place % count] for place, wanted in enumerate(outputs))
        if longer or count < len(outputs):
            said.append(
                f"{name} has the acceptance of {count} outputs for {len(outputs)} requests; {longer} are longer than "
                f"their trace, which then begins again"
            )
    return list(dict.fromkeys(said))


def check_beside(
    config: DictConfig, clock: Clock, methods: Mapping[str, str], engines: Mapping[str, Engine], *, sampled: bool
) -> None:
    """Refuse, before anything is played, what cannot be recorded or played in virtual time."""
    for each in methods_of(config, methods):
        drafter = engines[each.name].drafter if each.name in engines else None
        if drafter is not None:
            along_output(unpaced(drafter), sampled)
            if each.policy is not None:
                check_replayed(each.config, each.policy)
        if clock.mode != RECORD and (drafter is not None or each.name == PLAIN):
            costs = clock.costs_of(each.name)
            costs.check_depth(0 if drafter is None else drafter.max_depth)


def beside(
    config: DictConfig,
    clock: Clock,
    methods: Mapping[str, str],
    engines: Mapping[str, Engine],
    loads: Sequence[Load],
    asked: Sequence[Asked],
    runs: Sequence[LoadRun],
) -> list[LoadRun]:
    """Record the traces of a load's requests; returns what virtual time makes of it, with the same arrivals.

    With ``clock=record`` the traces are all, and nothing is returned.
    """
    traces = record_traces(engines, asked, Path(config.out))
    if clock.mode == RECORD:
        return []
    made = {
        each.name: virtual_engine(each, clock, traces.get(each.name), engines.get(each.name))
        for each in methods_of(config, methods)
        if each.name == PLAIN or each.name in traces
    }
    overload: Overload = build(config, "overload")
    found = []
    for run in (each for each in runs if each.method in made):
        engine = replace(made[run.method], slower=_slower(run, made[run.method]))
        load = next(each for each in loads if each.rate == run.rate)
        plays = [_play(engine, load, asked, overload, seed, run.method)() for seed in range(clock.seeds)]
        found.append(pooled(plays))
    return found


def _slower(run: LoadRun, engine: VirtualEngine) -> float:
    """Return how much slower the machine was around a run than when costs were calibrated, by one row's plain turns."""
    speeds = [each for each in run.facts.get("reference_seconds", ()) if each]
    if not speeds:
        return 1.0
    none = np.zeros(1, dtype=np.int64)
    expected = engine.costs.ragged(1, float(run.facts["reference_positions"]), drafted=none, deepest=none)[0]
    return float(np.mean(speeds) / expected)
