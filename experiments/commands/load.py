"""Methods under load: the same requests at the same moments for each, and what is shown of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.commands.load_plan import Load, asked_for, plan_loads, reported
from experiments.commands.load_virtual import beside, check_beside, play_virtual
from experiments.config import job
from experiments.config.pairs import check_files
from experiments.config.sections import bootstrap_of, build, plain, plain_whole, typed
from experiments.datasets.prompt import choose, fingerprint
from experiments.load.agreement import agreement
from experiments.load.clock import REAL, RECORD, VIRTUAL, Clock
from experiments.load.driver import Driver, Overload
from experiments.load.run import LoadRun, load_runs
from experiments.load.texts import Asked, Texts, ask
from experiments.load.workloads import Lengths, Planned
from experiments.measuring.conditions import recordings_of
from experiments.measuring.measure import Contender
from experiments.reporting.load import LoadReport
from experiments.reporting.progress import Progress
from experiments.results.limits import Terms
from experiments.results.manifest import check_facts, device_name, note_resumed, write_manifest
from experiments.results.origin import MANIFEST
from experiments.results.records import PLAIN
from experiments.session.engines import assemble, settle
from experiments.session.methods import check_components
from experiments.session.resume import begun
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker
from specdec.engine.engine import Engine
from specdec.target.target import Target

REFERENCE_TOKENS = 24
"""Tokens of the request that is timed before and after a run."""
_PARTS = ("target", "verifier", "sampling", "dataset", "tracker", "arrival", "workload", "overload", "clock")


def load(config: DictConfig) -> list[LoadRun]:
    """Measure plain decoding and the configuration's methods under the same load.

    An interrupted study goes on run by run (``resume=true``): a run is a method at a rate, and one that has not ended
    begins again.
    """
    folder = Path(config.out)
    before = begun(config, kind="load study", begins=MANIFEST)
    given = plain_whole(config)
    settle(config)
    methods = {str(name): f"methods.{name}" for name in config.methods}
    methods = methods or dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")
    check_components(config, methods, _PARTS)
    clock: Clock = build(config, "clock")
    if clock.mode == VIRTUAL:
        return play_virtual(config, clock, methods)
    bootstrap, terms = bootstrap_of(config), Terms.of(plain_whole(config))
    lengths = typed(Lengths, plain(config, "lengths"), "lengths")
    overload: Overload = build(config, "overload")
    loads, planned = plan_loads(config, config.seed)
    chosen, _ = choose(build(config, "dataset"))
    check_files(config)
    target, contenders = assemble(config, methods, samples=[prompt.turns[0] for prompt in chosen[:8]])
    room = min(each.engine.max_length for each in contenders)
    fitted, counts = lengths.fit(planned, room)
    tokenizer: Any = target.tokenizer
    texts = Texts(chosen, tokenizer, np.random.default_rng(config.seed), template=plain(config, "chat_template"))
    asked = ask(fitted, texts, build(config, "sampling"))
    warmup = ask(_others(fitted, config.warmup_prompts), texts, build(config, "sampling"))
    _check_limits(terms, contenders, warmup)
    drafting: dict[str, Any] = {each.method: each.engine for each in contenders if each.speculate}
    if clock.mode != REAL:
        check_beside(config, clock, methods, drafting, sampled=any(not each.sampling.greedy for each in asked))
    tracker = build(config, "tracker") or NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    title = _title(config, target, contenders, fitted)
    facts = {
        "title": title,
        "overrides": job.overrides(),
        "exactness": {each.method: each.exactness for each in contenders},
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": {"name": target.name},
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
    contenders: Sequence[Contender],
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
    load: Load, asked: Sequence[Asked], warmup: Sequence[Asked], contender: Contender, overload: Overload
) -> tuple[LoadRun, KeyboardInterrupt | None]:
    """Return a run, and what has interrupted it."""
    engine: Any = contender.engine
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
    )
    interrupted = None
    try:
        driver.run()
    except KeyboardInterrupt as error:
        interrupted = error
    facts: dict[str, Any] = {"virtual": False, "slots": engine.max_batch_size, "pages": engine.paging.pages}
    facts |= {"recordings": recordings_of(engine)}
    if interrupted is None and speeds[0] is not None:
        speeds.append(_reference(engine, warmup))
        middle = len(warmup[0].prompt_ids) + REFERENCE_TOKENS // 2
        facts |= {"reference_seconds": speeds, "reference_positions": middle}
    return driver.result(method=contender.method, rate=load.rate, **facts), interrupted


def _compared(
    run: LoadRun, before: Sequence[LoadRun], asked: Sequence[Asked], contenders: Sequence[Contender]
) -> LoadRun:
    """Return a run with how many of its outputs are those of plain decoding at the same rate, where that is here."""
    plain = next((each for each in before if each.method == PLAIN and each.rate == run.rate), None)
    engine = contenders[0].engine
    if plain is None or not isinstance(engine, Engine):
        return run
    return replace(run, facts={**run.facts, "outputs": agreement(run, plain, asked, engine.target)})


def _warm_up(engine: Engine, warmup: Sequence[Asked], *, speculate: bool) -> float | None:
    """Decode some requests together and forget them; returns the seconds of the shortest turn, if there were any."""
    prompts, sampling = [list(each.prompt_ids) for each in warmup], [each.sampling for each in warmup]
    moments: dict[int, list[float]] = {}
    for step in engine.stream(prompts, sampling, speculate=speculate) if prompts else ():
        moments.setdefault(step.request, []).append(step.visible)
    engine.forget()
    return min((float(gap) for own in moments.values() for gap in np.diff(own)), default=None)


def _reference(engine: Engine, warmup: Sequence[Asked]) -> float | None:
    """Return the seconds of a turn with one row, plainly: how fast the machine is at the moment. None where unknown."""
    if not warmup:
        return None
    own = replace(warmup[0].sampling, max_new_tokens=REFERENCE_TOKENS)
    prompt = list(warmup[0].prompt_ids)[: engine.max_length - REFERENCE_TOKENS]
    moments = [step.visible for step in engine.stream([prompt], own, speculate=False)]
    engine.forget()
    return float(np.median(np.diff(moments))) if len(moments) > 1 else None


def _check_limits(terms: Terms, contenders: Sequence[Contender], warmup: Sequence[Asked]) -> None:
    """Refuse limits that no request can keep with any method."""
    least: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
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


def _title(config: DictConfig, target: Target, contenders: Sequence[Contender], planned: Sequence[Planned]) -> str:
    """Return model, device and conditions, for tables and pictures."""
    about = asked_for(config, planned, "arrival", "workload", "overload", "clock")
    rows = sorted({each.engine.max_batch_size for each in contenders})
    return f"{target.name} on {device_name(target.device)}; {about}; {' and '.join(map(str, rows))} slots"


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
