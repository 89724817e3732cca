"""Methods under load, on the engine or in virtual time: the same requests at the same moments for each."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from experiments.config.sections import bootstrap_of, build, choice, job_overrides, plain, plain_whole
from experiments.datasets.joined import Texts
from experiments.datasets.prompt import choose, fingerprint
from experiments.load.arrivals import Arrivals, Times, Trace
from experiments.load.driver import Driver, RealEngine
from experiments.load.figures import ALL
from experiments.load.run import LoadRun, load_runs
from experiments.load.virtual import Accepted, Virtual, VirtualEngine
from experiments.load.workloads import Asked, Planned, Workload, ask, fitted
from experiments.measuring.conditions import recordings_of
from experiments.measuring.measure import Contender
from experiments.reporting.load import LoadReport, report_load
from experiments.reporting.progress import Progress
from experiments.results.limits import Terms
from experiments.results.manifest import check_facts, device_name, note_resumed, write_manifest
from experiments.results.origin import MANIFEST
from experiments.session.engines import assemble, settle
from experiments.session.methods import Method, check_components, drafters_of, methods_of
from experiments.session.policies import check_replayed
from experiments.session.resume import begun
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker, Tracker
from specdec.cache.pages import Paging
from specdec.engine.engine import DEFAULT_MAX_LENGTH, Engine
from specdec.engine.scheduler import FirstCome

_PARTS = ("target", "verifier", "sampling", "dataset", "tracker", "arrival", "workload", "overload", "clock")


class Load(NamedTuple):
    """The arrivals at one rate (per second, or users in a closed loop), and the other options of the ``Driver``."""

    rate: float
    times: Times
    options: dict[str, Any]


class Plays(NamedTuple):
    """What plays a load, by method, and what a table has to say of it."""

    title: str
    facts: Mapping[str, Any]
    notes: Sequence[str]
    methods: Mapping[str, Callable[[Load], LoadRun]]


def load(config: DictConfig) -> list[LoadRun]:
    """Measure plain decoding and the configuration's methods under the same load.

    An interrupted study goes on run by run (``resume=true``): a method at a rate that has not ended begins again.
    """
    folder = Path(config.out)
    before = begun(config, kind="load study", begins=MANIFEST)
    settle(config)
    drafters = drafters_of(config)
    check_components(config, drafters, _PARTS)
    given = plain_whole(config)
    clock: Virtual | None = build(config, "clock")
    bootstrap, terms = bootstrap_of(config), Terms.of(given)
    loads, planned = _plan(config)
    played = _real(config, drafters, planned) if clock is None else _virtual(config, clock, drafters, planned)
    tracker = build(config, "tracker") or NullTracker()
    options = loads[0].options
    facts = {**played.facts, "title": played.title, "overrides": job_overrides(), "loop": options["loop"]}
    kept: dict[tuple[str, float], LoadRun] = {}
    if before is None:
        before = write_manifest(folder, given, **facts)
    else:
        check_facts(before, folder, **facts)
        note_resumed(folder, before)
        kept = {(run.method, run.rate): run for run in load_runs(folder) if run.facts["complete"]}
    tracker.start(tracked_run(folder, before))
    notes = [*played.notes, *([f"{len(kept)} of the runs are from an earlier attempt at this study"] if kept else [])]
    about = {"terms": terms, "bootstrap": bootstrap, "title": played.title, "spare": options["overload"].spare}
    report = LoadReport(folder=folder, notes=notes, **about)
    cases, runs = [(load, method) for load in loads for method in played.methods], []
    exit_code = 1
    try:
        with Progress(len(cases), "runs") as progress:
            for number, (load, method) in enumerate(cases, start=1):
                runs.append(kept.get((method, load.rate)) or played.methods[method](load))
                if (method, load.rate) not in kept:
                    runs[-1].save(folder / f"{method}_{load.rate:g}")
                if not runs[-1].facts["complete"]:
                    raise KeyboardInterrupt
                progress.update(number)
        exit_code = 0
    except KeyboardInterrupt:
        exit_code = 130
        raise
    finally:
        if runs:
            _report(runs, report, tracker)
        tracker.finish(exit_code)
    return runs


def _report(runs: Sequence[LoadRun], report: LoadReport, tracker: Tracker) -> None:
    frame, written = report_load(runs, report)
    tracker.summary(
        {
            f"{row['method']}/{row['rate']:g}/{name}": value
            for row in frame[frame.group == ALL].to_dict("records")
            for name, value in row.items()
            if isinstance(value, int | float) and value == value
        }
    )
    tracker.files("results", [path for path in written if path.parent == report.folder])


def _plan(config: DictConfig) -> tuple[list[Load], list[Planned]]:
    """Return the arrivals at every rate, and the requests."""
    arrival: Arrivals = build(config, "arrival")
    workload: Workload = build(config, "workload")
    recorded = arrival.recorded if isinstance(arrival, Trace) else None
    requests: int | None = config.requests
    if recorded is not None:
        requests = min(requests or len(recorded), len(recorded))
    if requests is None:
        raise ValueError("requests=null: give a number of requests, or arrival=trace")
    rates = [arrival.rate] if config.rates is None else list(map(float, config.rates))
    if len(set(rates)) < len(rates):
        raise ValueError(f"rates={plain(config, 'rates')}: give each rate once")
    overload, loads = build(config, "overload"), []
    for rate in rates:
        process = arrival if config.rates is None else arrival.at_rate(rate)
        times = process.times(np.random.default_rng(config.seed), requests)
        loads.append(Load(rate, times, {"loop": process.loop, "users": int(rate), "overload": overload}))
    return loads, workload.plan(np.random.default_rng([config.seed, 1]), requests, recorded)


def _about(config: DictConfig, planned: Sequence[Planned], slots: set[int]) -> str:
    """Return what was chosen of arrivals, workload and overload, and the sizes of the requests."""
    groups = ("arrival", "workload", "overload")
    words = [f"{name} {choice(name) or type(build(config, name)).__name__}" for name in groups]
    prompt, output = (np.mean([getattr(one, name) for one in planned]) for name in ("prompt_tokens", "output_tokens"))
    return (
        f"{', '.join(words)}; {len(planned)} requests of {prompt:.0f} tokens in and {output:.0f} out on average; "
        f"{' and '.join(map(str, sorted(slots)))} slots"
    )


def _real(config: DictConfig, drafters: Mapping[str, str], planned: Sequence[Planned]) -> Plays:
    chosen, _ = choose(build(config, "dataset"))
    target, contenders = assemble(config, drafters, samples=[prompt.turns[0] for prompt in chosen[:8]])
    room = min(contender.engine.max_length for contender in contenders)
    planned, cut = fitted(planned, room, config.lengths.scale)
    tokenizer: Any = target.tokenizer
    texts = Texts(chosen, tokenizer, np.random.default_rng(config.seed), template=plain(config, "chat_template"))
    sampling = build(config, "sampling")
    asked = ask(planned, texts, sampling)
    unused = 1 + max(part for one in planned for part, _ in one.pieces)  # texts that nothing else has
    first = enumerate(planned[: config.warmup_prompts])
    warm = ask([replace(one, pieces=((unused + at, one.prompt_tokens),)) for at, one in first], texts, sampling)
    notes = []
    if cut:
        notes.append(f"{cut} of {len(planned)} requests were too long for the engine's {room} positions, and were cut")
    if texts.passes:
        notes.append(f"the texts were used {texts.passes + 1} times: give a larger dataset.count")
    device, slots = device_name(target.device), {contender.engine.max_batch_size for contender in contenders}
    facts = {"device": device, "dtype": str(target.dtype).removeprefix("torch."), "target": {"name": target.name}}
    facts["exactness"] = {contender.method: contender.exactness for contender in contenders}
    return Plays(
        title=f"{target.name} on {device}; {_about(config, planned, slots)}",
        facts={**facts, "prompts": len(chosen), "prompts_hash": fingerprint(chosen)},
        notes=notes,
        methods={contender.method: partial(_play, contender, asked, warm) for contender in contenders},
    )


def _play(contender: Contender, asked: Sequence[Asked], warmup: Sequence[Asked], load: Load) -> LoadRun:
    """Return a run on the engine; one that was interrupted is not complete."""
    engine, speculate = contender.engine, contender.speculate
    assert isinstance(engine, Engine), "no contenders are asked for"
    if warmup:
        prompts = [list(one.prompt_ids) for one in warmup]
        engine.generate(prompts, [one.sampling for one in warmup], speculate=speculate)
        engine.forget()
    driver = Driver(RealEngine(engine, speculate=speculate), asked, load.times, **load.options)
    with suppress(KeyboardInterrupt):
        driver.run()
    facts = {"slots": engine.max_batch_size, "pages": engine.paging.pages, "recordings": recordings_of(engine)}
    return driver.result(method=contender.method, rate=load.rate, virtual=False, **facts)


def _virtual(config: DictConfig, clock: Virtual, drafters: Mapping[str, str], planned: Sequence[Planned]) -> Plays:
    engines = {method.name: _engine(method, clock) for method in methods_of(config, drafters)}
    planned, _ = fitted(planned, min(engine.max_length for engine in engines.values()), config.lengths.scale)
    asked = ask(planned, None, build(config, "sampling"))

    def play(method: str, load: Load) -> LoadRun:
        return engines[method].play(asked, load.times, method=method, rate=load.rate, **load.options)

    measured = getattr(next(iter(engines.values())).costs, "conditions", None)
    costs = clock.costs if measured is None else f"{measured.model} on {measured.device}"
    device, slots = f"VIRTUAL TIME, {costs}", {engine.slots for engine in engines.values()}
    exactness = {name: None if engine.accepted is None else "replayed" for name, engine in engines.items()}
    return Plays(
        title=f"{device}; {_about(config, planned, slots)}",
        facts={"exactness": exactness, "device": device, "virtual": True},
        notes=["virtual time by costs and traces; scheduler, policy and pages are an engine's"],
        methods={name: partial(play, name) for name in engines},
    )


def _engine(method: Method, clock: Virtual) -> VirtualEngine:
    """Return a method's engine in virtual time."""
    config, costs = method.config, clock.read_costs()
    section = method.policy if method.drafter is not None else None
    if section is not None:
        check_replayed(config, section)
    options = plain(config, "engine")
    policy: Any = None if section is None else build(config, section)
    if policy is not None and getattr(policy, "costs", costs) is None:
        policy.costs = costs  # it decides by costs, and was not given any
    paging: Paging = build(config, "engine.cache") if options.get("cache") else Paging()
    return VirtualEngine(
        costs=costs,
        slots=options["max_batch_size"],
        max_length=options["max_length"] or DEFAULT_MAX_LENGTH,
        prefill_chunk=options["prefill_chunk"],
        paging=paging,
        scheduler=build(config, "engine.scheduler") if options.get("scheduler") else FirstCome(),
        accepted=None if method.drafter is None else Accepted.read(Path(str(clock.traces)), method.name),
        policy=policy,
    )
