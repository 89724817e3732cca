"""A row per engine, from a run whose labels are "engine: way of drafting"; see ``conf/experiment/engines.yaml``."""

from experiments.reporting.cells import EMPTY, between, number, times
from experiments.reporting.formats import document
from experiments.reporting.run_plots import FAMILY
from experiments.reporting.run_tables import commanded
from experiments.reporting.table import Cell, Table, left
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.summary import MethodSummary

Found = dict[tuple[float, str, str], MethodSummary]
"""Methods by temperature, engine and way of drafting."""


def engines_document(run: Run) -> str:
    """Speeds by engine and way of drafting in Markdown, and the sentences that say what made them."""
    manifest, labels = run.manifest, run.manifest["config"]["labels"]
    found: Found = {}
    ours, _, plain = labels[PLAIN].partition(FAMILY)
    versions = {ours: f"specdec {manifest['versions']['specdec']}"}
    starts: dict[str, float] = {}
    for method in run.summary.methods:
        engine, _, way = labels[method.method].partition(FAMILY)
        found[method.temperature, engine, way] = method
        versions.setdefault(engine, manifest["contenders"].get(method.method) or engine)
        if (seconds := manifest["start_seconds"].get(method.method)) is not None:
            starts[engine] = max(seconds, starts.get(engine, 0.0))
    temperatures, engines, ways = (list(dict.fromkeys(each)) for each in zip(*found, strict=True))
    table = Table.of(
        [(temperature, engine) for temperature in sorted(temperatures) for engine in engines],
        [
            ("T", lambda at: f"{at[0]:g}"),
            (left("engine"), lambda at: versions[at[1]]),
            *((way, lambda at, way=way: _figures(found.get((*at, way)), plain=way == plain)) for way in ways),
        ],
    )
    cores = {engine: _cores(run, [found[at] for at in found if at[1] == engine]) for engine in engines}
    notes = [
        "In a cell: tokens/s; how many times specdec's plain decoding that is; tokens per round",
        f"cores used: {_listed({engine: number(value) for engine, value in cores.items()})}",
        f"the longest start, not counted: {_listed({engine: f'{value:.0f} s' for engine, value in starts.items()})}",
        *(f"{labels[each.method]} failed on {each.failed} prompts" for each in found.values() if each.failed),
        *(["NOISY TIMINGS: other programs ran meanwhile"] if run.summary.noise.noisy else []),
    ]
    return document(commanded(run), table, f"{'; '.join(notes)}.")


def _figures(method: MethodSummary | None, *, plain: bool) -> Cell:
    if method is None or not method.finished:
        return EMPTY
    speed = number(method.tokens_per_second, 0)
    if method.method == PLAIN:
        return Cell(speed)
    ratio = " ".join([times(method.speedup), *between(method.speedup_interval)])
    return Cell(speed, [ratio, *([] if plain else [number(method.mean_acceptance_length)])], joint="; ")


def _listed(values: dict[str, str]) -> str:
    return " / ".join(f"{name} {value}" for name, value in values.items())


def _cores(run: Run, methods: list[MethodSummary]) -> float | None:
    """The cores that an engine used while it was timed, as the system counts; None where it does not tell."""
    frames = [frame for each in methods if (frame := run.of(each)) is not None]
    timed = [
        (load["own"], seconds) for each in frames for load, seconds in zip(each.load, each.seconds, strict=True) if load
    ]
    return sum(own * seconds for own, seconds in timed) / sum(seconds for _, seconds in timed) if timed else None
