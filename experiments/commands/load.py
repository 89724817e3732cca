"""Methods under load: the same requests at the same moments for each, and what is shown of them."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.commands.load_plan import Load, asked_for, plan_loads, reported
from experiments.commands.load_servers import check_servers, clients_of, is_server, server_alone
from experiments.commands.load_virtual import beside, check_beside, play_virtual
from experiments.config import job, ranks
from experiments.config.pairs import check_files
from experiments.config.sections import bootstrap_of, build, plain, plain_whole, typed
from experiments.datasets.prompt import choose, fingerprint
from experiments.load.agreement import agreement
from experiments.load.client import Client
from experiments.load.clock import REAL, RECORD, VIRTUAL, Clock
from experiments.load.driver import Driver, Overload
from experiments.load.peers import Lent, borrow, lend, meet
from experiments.load.replicas import Replicas, Sizes
from experiments.load.run import LoadRun, load_runs
from experiments.load.texts import Asked, Texts, ask
from experiments.load.workloads import Lengths, Planned
from experiments.measuring.conditions import recordings_of
from experiments.reporting.load import LoadReport
from experiments.reporting.progress import Progress
from experiments.results.limits import Terms
from experiments.results.lossless import DECLARED
from experiments.results.manifest import check_facts, device_name, note_resumed, write_manifest
from experiments.results.origin import MANIFEST
from experiments.results.records import PLAIN
from experiments.session.engines import assemble, settle
from experiments.session.methods import check_components
from experiments.session.resume import begun
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker
from specdec.engine.engine import Engine
from specdec.native import recommended_threads

REFERENCE_TOKENS = 24
"""Tokens of the request that is timed before and after a run."""
_PARTS = ("target", "verifier", "sampling", "dataset", "tracker", "arrival", "workload", "overload", "clock")


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A method under load, and what decodes for it."""

    method: str
    engine: Engine | Replicas | Client
    speculate: bool


def load(config: DictConfig) -> list[LoadRun]:
    """Measure plain decoding and the configuration's methods under the same load.

    An interrupted study goes on run by run (``resume=true``): a run is a method at a rate, and one that has not ended
    begins again.
    """
    ranks.check_replicas(config.replicas)
    folder = Path(config.out)
    before = begun(config, kind="load study", begins=MANIFEST)
    given = plain_whole(config)
    if config.replicas > 1:
        config.threads = config.threads or max(1, recommended_threads() // config.replicas)
    settle(config)
    methods = {str(name): f"methods.{name}" for name in config.methods}
    if not is_server(config):
        methods = methods or dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")
    check_components(config, methods, _PARTS)
    check_servers(config)
    clock: Clock = build(config, "clock")
    if clock.mode == VIRTUAL:
        return play_virtual(config, clock, methods)
    if clock.mode != REAL and (config.replicas > 1 or is_server(config)):
        what = f"replicas={config.replicas}" if config.replicas > 1 else "engine=openai"
        raise ValueError(f"clock={clock.mode} records the drafts of one engine in this process: leave out {what}")
    bootstrap, terms = bootstrap_of(config), Terms.of(plain_whole(config))
    lengths = typed(Lengths, plain(config, "lengths"), "lengths")
    overload: Overload = build(config, "overload")
    loads, planned = plan_loads(config, config.seed)
    chosen, _ = choose(build(config, "dataset"))
    check_files(config)
    found = _served(config, methods, [prompt.turns[0] for prompt in chosen[:8]])
    if found is None:
        return []
    served, contenders = found
    room = min(each.engine.max_length for each in contenders)
    fitted, counts = lengths.fit(planned, room)
    texts = Texts(chosen, served.tokenizer, np.random.default_rng(config.seed), template=plain(config, "chat_template"))
    asked = ask(fitted, texts, build(config, "sampling"))
    warmup = ask(_others(fitted, config.warmup_prompts), texts, build(config, "sampling"))
    _check_limits(terms, contenders, warmup)
    drafting = {each.method: each.engine for each in contenders if each.speculate and isinstance(each.engine, Engine)}
    if clock.mode != REAL:
        check_beside(config, clock, methods, drafting, sampled=any(not each.sampling.greedy for each in asked))
    tracker = build(config, "tracker") or NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    title = _title(config, served, contenders, fitted)
    facts = {
        "title": title,
        "overrides": job.overrides(),
        "exactness": {method: exactness for method, _, exactness, _ in served.methods}
        | {each.method: DECLARED for each in contenders if isinstance(each.engine, Client)},
        "device": served.device,
        "dtype": served.dtype,
        "target": {"name": served.name},
        "replicas": config.replicas,
        "prompts": len(chosen),
        "prompts_hash": fingerprint(chosen),
        "lengths": counts,
        "passes_through_the_texts": round(texts.passes, 3),
        "loop": loads[0].loop,
    }
    kept: dict[tuple[str, float], LoadRun] = {}
    if before is None:
        before = write_manifest(folder, given, **facts)
    else:
        check_facts(before, folder, **facts)
        note_resumed(folder, before)
        kept = {(run.method, run.rate): run for run in load_runs(folder) if run.facts["complete"]}
    tracker.start(tracked_run(folder, before))
    report = LoadReport(
        folder=folder,
        terms=terms,
        bootstrap=bootstrap,
        title=title,
        notes=[*_conditions(config), *_notes(counts, len(fitted), room, texts.passes, len(kept))],
        spare=overload.spare,
    )
    runs: list[LoadRun] = []
    virtual: list[LoadRun] = []
    with reported(runs, report, tracker, virtual):
        for run in _played(loads if clock.mode != RECORD else (), asked, warmup, contenders, overload, kept):
            if (run.method, run.rate) not in kept:
                run = _compared(run, runs, asked, contenders)
                run.save(folder / f"{run.method}_{run.rate:g}")
            runs.append(run)
        if clock.mode != REAL:
            virtual += beside(config, clock, methods, drafting, loads, asked, runs)
    return runs


def _served(
    config: DictConfig, methods: Mapping[str, str], samples: Sequence[str]
) -> tuple[Lent, list[Entrant]] | None:
    """Return what is known of the target, and the methods with what decodes for them.

    With replicas this process has the queue, and no model. None in a process that has served such a queue to its end.
    """
    connections = meet() if config.replicas > 1 else []
    engines: Sequence[Engine | Replicas]
    clients: dict[str, Client] = {}
    if connections and not ranks.follows():
        served, engines = borrow(connections, config.affinity_margin)
    else:
        alone = [server_alone(config)] if is_server(config) else []
        target, contenders = (alone[0].engine.target, alone) if alone else assemble(config, methods, samples=samples)
        clients = clients_of(contenders)
        engines = [engine for engine in dict.fromkeys(each.engine for each in contenders) if isinstance(engine, Engine)]
        numbers: dict[object, int] = {engine: number for number, engine in enumerate(engines)}
        served = Lent(
            name=target.name,
            tokenizer=target.tokenizer,
            device=str(target.device) if alone else device_name(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            engines=[Sizes.of(engine) for engine in engines],
            methods=[
                (each.method, each.speculate, each.exactness, numbers[each.engine])
                for each in contenders
                if each.method not in clients
            ],
        )
        if connections:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process with the queue reports first, and then hangs up
            lend(connections[0], served, engines)
            return None
    ours = [
        Entrant(method=method, engine=engines[number], speculate=speculate)
        for method, speculate, _, number in served.methods
    ]
    return served, ours + [Entrant(method=name, engine=each, speculate=True) for name, each in clients.items()]


def _others(planned: Sequence[Planned], count: int) -> list[Planned]:
    """Return requests to warm up with, as long as the first ones, of texts that nothing else has."""
    number = 1 + max(part for each in planned for part, _ in each.pieces)
    fitting = [each for each in planned if each.fits][:count]
    return [
        Planned(klass="warm-up", pieces=((number + place, each.prompt_tokens),), output_tokens=each.output_tokens)
        for place, each in enumerate(fitting)
    ]


def _played(
    loads: Sequence[Load],
    asked: Sequence[Asked],
    warmup: Sequence[Asked],
    contenders: Sequence[Entrant],
    overload: Overload,
    kept: Mapping[tuple[str, float], LoadRun],
) -> Iterator[LoadRun]:
    """Yield the runs, rate by rate; the last one of an interrupted command has what was seen until then.

    Those that are kept from an earlier attempt come as they are.
    """
    with Progress(len(loads) * len(contenders), "runs") as progress:
        for number, (each, contender) in enumerate((each, one) for each in loads for one in contenders):
            if (contender.method, each.rate) in kept:
                yield kept[contender.method, each.rate]
                progress.update(number + 1)
                continue
            run, interrupted = _play(each, asked, warmup, contender, overload)
            yield run
            if interrupted is not None:
                raise interrupted
            progress.update(number + 1)


def _play(
    load: Load, asked: Sequence[Asked], warmup: Sequence[Asked], contender: Entrant, overload: Overload
) -> tuple[LoadRun, KeyboardInterrupt | None]:
    """Return a run, and what has interrupted it."""
    engine = contender.engine
    client = engine if isinstance(engine, Client) else None
    with client or nullcontext():
        _warm_up(engine, warmup, speculate=contender.speculate)
        speeds = [_reference(engine, warmup)]
        driver = Driver(
            engine,
            asked[: len(load.times)],
            load.times,
            loop=load.loop,
            users=int(min(load.rate, len(asked))),
            overload=overload,
            speculate=contender.speculate,
            in_process=isinstance(engine, Engine),
            wait=None if client is None else client.wait,
        )
        interrupted = None
        try:
            driver.run()
        except KeyboardInterrupt as error:
            interrupted = error
        facts: dict[str, Any] = {"virtual": False}
        if not isinstance(engine, Client):
            facts |= {"slots": engine.max_batch_size, "pages": engine.paging.pages}
        if isinstance(engine, Engine):
            facts |= {"recordings": recordings_of(engine)}
        if interrupted is None and speeds[0] is not None:
            speeds.append(_reference(engine, warmup))
            middle = len(warmup[0].prompt_ids) + REFERENCE_TOKENS // 2
            facts |= {"reference_seconds": speeds, "reference_positions": middle}
        run = driver.result(method=contender.method, rate=load.rate, **facts)
        return run if client is None else client.told(run), interrupted


def _compared(
    run: LoadRun, before: Sequence[LoadRun], asked: Sequence[Asked], contenders: Sequence[Entrant]
) -> LoadRun:
    """Return a run with how many of its outputs are those of plain decoding at the same rate, where that is here."""
    plain = next((each for each in before if each.method == PLAIN and each.rate == run.rate), None)
    engine = contenders[0].engine
    if plain is None or not isinstance(engine, Engine):
        return run
    return replace(run, facts={**run.facts, "outputs": agreement(run, plain, asked, engine.target)})


def _warm_up(engine: Engine | Replicas | Client, warmup: Sequence[Asked], *, speculate: bool) -> float | None:
    """Decode some requests together and forget them; returns the seconds of the shortest turn, if there were any."""
    prompts, sampling = [list(each.prompt_ids) for each in warmup], [each.sampling for each in warmup]
    moments: dict[int, list[float]] = {}
    for step in engine.stream(prompts, sampling, speculate=speculate) if prompts else ():
        moments.setdefault(step.request, []).append(step.visible)
    engine.forget()
    return min((float(gap) for own in moments.values() for gap in np.diff(own)), default=None)


def _reference(engine: Engine | Replicas | Client, warmup: Sequence[Asked]) -> float | None:
    """Return the seconds of a turn with one row, plainly: how fast the machine is at the moment. None where unknown."""
    if not isinstance(engine, Engine) or not warmup:
        return None
    own = replace(warmup[0].sampling, max_new_tokens=REFERENCE_TOKENS)
    prompt = list(warmup[0].prompt_ids)[: engine.max_length - REFERENCE_TOKENS]
    moments = [step.visible for step in engine.stream([prompt], own, speculate=False)]
    engine.forget()
    return float(np.median(np.diff(moments))) if len(moments) > 1 else None


def _check_limits(terms: Terms, contenders: Sequence[Entrant], warmup: Sequence[Asked]) -> None:
    """Refuse limits that no request can keep with any method."""
    least: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    if any(isinstance(each.engine, Client) for each in contenders):
        return  # nobody knows how fast a server could be
    for each in contenders if terms.limits is not None else ():
        engine: Any = each.engine
        turn = _warm_up(engine, warmup, speculate=each.speculate)
        depth = engine.drafter.max_nodes if each.speculate and engine.drafter is not None else 0
        for name, own in least.items():
            own += [] if turn is None else [turn / (1 + depth) if name == "tpot" else turn]
    for name, own in least.items():
        limit = getattr(terms.limits, name, None)
        if limit is not None and own and limit < min(own):
            raise ValueError(
                f"sla.{name}={limit:g}: the fastest method takes at least {min(own):.2g} s here with nothing else to "
                f"do, so no request can keep that: give more"
            )


def _title(config: DictConfig, served: Lent, contenders: Sequence[Entrant], planned: Sequence[Planned]) -> str:
    """Return model, device and conditions, for tables and pictures."""
    about = asked_for(config, planned, "arrival", "workload", "overload", "clock")
    rows = sorted({each.engine.max_batch_size for each in contenders if not isinstance(each.engine, Client)})
    slots = f"; {' and '.join(map(str, rows))} slots" if rows else ""
    times = f"{config.replicas} times " if config.replicas > 1 else ""
    return f"{served.name} on {times}{served.device}; {about}{slots}"


def _conditions(config: DictConfig) -> list[str]:
    """Return what the title does not say: how the rate varies."""
    shown = {name: value for name, value in plain(config, "arrival").items() if name not in ("_target_", "rate")}
    return [f"arrivals: {', '.join(f'{name} {value}' for name, value in shown.items())}"] if shown else []


def _notes(counts: Mapping[str, int], planned: int, room: int, passes: float, kept: int) -> list[str]:
    few = f"of {planned} requests were too long for the engine's {room} positions, and were"
    said = [f"{count} {few} {what}" for what, count in counts.items() if count]
    if kept:
        said.append(f"{kept} of the runs are from an earlier attempt at this study")
    if passes > 1:
        said.append(f"the texts were used {passes:.1f} times: give a larger dataset.count")
    return said
