"""Methods under load: the same requests at the same moments for each, and what is shown of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from experiments.config import job
from experiments.config.pairs import check_files
from experiments.config.sections import bootstrap_of, build, plain, plain_whole, typed
from experiments.datasets.prompt import choose, fingerprint
from experiments.load.arrivals import Arrivals, Times, arriving
from experiments.load.driver import Driver, Overload
from experiments.load.recorded import Trace
from experiments.load.run import LoadRun
from experiments.load.texts import Asked, Texts, ask
from experiments.load.workloads import Lengths, Planned, Workload
from experiments.measuring.measure import Contender
from experiments.reporting.load import LoadReport, report_load
from experiments.reporting.progress import Progress
from experiments.results.frame import Figures
from experiments.results.limits import Terms
from experiments.results.manifest import device_name, write_manifest
from experiments.results.origin import flatten
from experiments.session.charged import charge_memory
from experiments.session.engines import assemble, settle
from experiments.session.methods import check_components
from experiments.session.tracked import tracked_run
from experiments.tracking.base import NullTracker
from specdec.engine.engine import Engine
from specdec.target.target import Target

_PARTS = ("target", "verifier", "sampling", "dataset", "tracker", "arrival", "workload", "overload")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What arrives when, at one rate.

    Attributes:
        rate: Requests per second; in a closed loop, users.
        times: When requests arrive.
        loop: ``OPEN`` or ``CLOSED``.
    """

    rate: float
    times: Times
    loop: str


def load(config: DictConfig) -> list[LoadRun]:
    """Measure plain decoding and the configuration's methods under the same load.

    Raises:
        ValueError: A setting is wrong, or a limit cannot be kept by any request.
    """
    settle(config)
    methods = {str(name): f"methods.{name}" for name in config.methods}
    methods = methods or dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")
    check_components(config, methods, _PARTS)
    bootstrap, terms = bootstrap_of(config), Terms.of(plain_whole(config))
    lengths = typed(Lengths, plain(config, "lengths"), "lengths")
    overload: Overload = build(config, "overload")
    loads, planned = _plan(config)
    chosen, _ = choose(build(config, "dataset"))
    check_files(config)
    charge_memory(config, methods)
    target, contenders = assemble(config, methods, samples=[prompt.turns[0] for prompt in chosen[:8]])
    assert target.tokenizer is not None, "assemble refuses a target without one"
    room = min(each.engine.max_length for each in contenders)
    fitted, counts = lengths.fit(planned, room)
    texts = Texts(chosen, target.tokenizer, np.random.default_rng(config.seed), template=plain(config, "chat_template"))
    asked = ask(fitted, texts, build(config, "sampling"))
    warmup = ask(_others(fitted, config.warmup_prompts), texts, build(config, "sampling"))
    _check_limits(terms, contenders, warmup)
    folder, tracker = Path(config.out), build(config, "tracker") or NullTracker()
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "overrides": job.overrides(),
        "exactness": {each.method: each.exactness for each in contenders},
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(chosen),
        "prompts_hash": fingerprint(chosen),
        "lengths": counts,
        "passes_through_the_texts": round(texts.passes, 3),
        "loop": loads[0].loop,
    }
    tracker.start(tracked_run(folder, write_manifest(folder, plain_whole(config), **facts)))
    report = LoadReport(
        folder=folder,
        terms=terms,
        bootstrap=bootstrap,
        title=_title(config, target, contenders, fitted),
        notes=_notes(counts, len(fitted), room, texts.passes),
        spare=overload.spare,
    )
    runs: list[LoadRun] = []
    exit_code = 1
    try:
        for run in _played(loads, asked, warmup, contenders, overload):
            run.save(folder / f"{run.method}_{run.rate:g}")
            runs.append(run)
        exit_code = 0
    except KeyboardInterrupt:
        exit_code = 130
        raise
    finally:
        if runs:
            figures, written = report_load(runs, report)
            tracker.summary(_flat(figures))
            tracker.files("results", written)
        tracker.finish(exit_code)
    return runs


def _plan(config: DictConfig) -> tuple[list[Load], list[Planned]]:
    """Return the arrivals at every rate, and the requests, of which lower counts take the first.

    Raises:
        ValueError: A trace cannot be read, nothing arrives, or workload and arrivals do not fit.
    """
    arrival: Arrivals = build(config, "arrival")
    workload: Workload = build(config, "workload")
    recorded = arrival.recorded if isinstance(arrival, Trace) else None
    requests = config.requests
    if recorded is not None:
        requests = min(requests or len(recorded.times), len(recorded.times))
    rated = [arrival] if config.rates is None else [arrival.at_rate(float(rate)) for rate in config.rates]
    loads = [
        Load(
            rate=each.rate,
            times=arriving(each, np.random.default_rng(config.seed), requests=requests, seconds=config.seconds),
            loop=each.loop,
        )
        for each in rated
    ]
    most = max(len(each.times) for each in loads)
    return loads, workload.plan(np.random.default_rng([config.seed, 1]), most, recorded)


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
) -> Iterator[LoadRun]:
    """Yield the runs, rate by rate; the last one of an interrupted command has what was seen until then."""
    with Progress(len(loads) * len(contenders), "runs") as progress:
        for number, (each, contender) in enumerate((each, one) for each in loads for one in contenders):
            engine = contender.engine
            assert isinstance(engine, Engine), "no other engines are assembled"
            _warm_up(engine, warmup, speculate=contender.speculate)
            driver = Driver(
                engine,
                asked[: len(each.times)],
                each.times,
                loop=each.loop,
                users=int(min(each.rate, len(asked))),
                overload=overload,
                speculate=contender.speculate,
            )
            told = {"slots": engine.max_batch_size, "pages": engine.paging.pages, "virtual": False}
            try:
                driver.run()
            except KeyboardInterrupt:
                yield driver.result(method=contender.method, rate=each.rate, **told)
                raise
            yield driver.result(method=contender.method, rate=each.rate, **told)
            progress.update(number + 1)


def _warm_up(engine: Engine, warmup: Sequence[Asked], *, speculate: bool) -> float | None:
    """Decode some requests together and forget them; returns the seconds of the shortest turn, if there were any."""
    prompts, sampling = [list(each.prompt_ids) for each in warmup], [each.sampling for each in warmup]
    moments: dict[int, list[float]] = {}
    for step in engine.stream(prompts, sampling, speculate=speculate) if prompts else ():
        moments.setdefault(step.request, []).append(step.visible)
    engine.forget()
    return min((float(gap) for own in moments.values() for gap in np.diff(own)), default=None)


def _check_limits(terms: Terms, contenders: Sequence[Contender], warmup: Sequence[Asked]) -> None:
    """Refuse limits that no request can keep with any method.

    Raises:
        ValueError: A limit is below what the shortest turn of every engine takes.
    """
    least: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    for each in contenders if terms.limits is not None else ():
        engine = each.engine
        assert isinstance(engine, Engine), "no other engines are assembled"
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


def _flat(figures: Sequence[Figures]) -> dict[str, float]:
    """Return single figures by method, rate and name, for a tracker."""
    found = {
        f"{each.method}/{each.rate:g}/{name}": value
        for each in figures
        for name, value in flatten(each, joint="/").items()
    }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _title(config: DictConfig, target: Target, contenders: Sequence[Contender], planned: Sequence[Planned]) -> str:
    """Return model, device and conditions, for tables and pictures."""
    groups = ("arrival", "workload", "overload")
    words = [f"{name} {job.choice(name) or type(build(config, name)).__name__}" for name in groups]
    sizes = [np.mean([getattr(each, name) for each in planned]) for name in ("prompt_tokens", "output_tokens")]
    rows = sorted({each.engine.max_batch_size for each in contenders})
    return (
        f"{target.name} on {device_name(target.device)}; {', '.join(words)}; {len(planned)} requests of {sizes[0]:.0f} "
        f"tokens in and {sizes[1]:.0f} out on average; {' and '.join(map(str, rows))} slots"
    )


def _notes(counts: Mapping[str, int], planned: int, room: int, passes: float) -> list[str]:
    few = f"of {planned} requests were too long for the engine's {room} positions, and were"
    said = [f"{count} {few} {what}" for what, count in counts.items() if count]
    if passes > 1:
        said.append(f"the texts were used {passes:.1f} times: give a larger dataset.count")
    return said
