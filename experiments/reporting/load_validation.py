"""How far virtual time is from the real engine's, for the same requests at the same moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.load.dense import Dense
from experiments.load.figures import figures_of
from experiments.load.run import LoadRun
from experiments.reporting import style, terminal
from experiments.reporting.columns import NOTHING
from experiments.reporting.formats import document, write_texts
from experiments.reporting.load import LOOPS, RATES, LoadReport
from experiments.reporting.table import Column, Table, left
from experiments.results.frame import Figures

TOLERANCES = {"throughput": 0.05, "tpot": 0.10, "ttft": 0.15}
"""Errors up to which virtual time is valid below the knee: of tokens per second, of median TPOT, of TTFT's p99."""
BACKLOG = 0.5
"""A load is beyond the knee where the median request waits longer than this share of its time in a slot: then a small
error of the seconds of a turn becomes a large one of the queue."""


@dataclass(frozen=True)
class Pair:
    """A load for real and in virtual time."""

    real: Figures
    virtual: Figures

    def error(self, name: str, level: str = "") -> float | None:
        """Return how much more a figure is in virtual time, relative to the real one."""
        figures = [each[name] for each in (self.real, self.virtual)]
        values = [each if not level or each is None else each[level] for each in figures]
        return None if None in values or not values[0] else values[1] / values[0] - 1

    @property
    def errors(self) -> dict[str, float | None]:
        """The errors that ``TOLERANCES`` judge."""
        return {
            "throughput": self.error("output_tokens_per_second"),
            "tpot": self.error("tpot", "p50"),
            "ttft": self.error("ttft", "p99"),
        }

    @property
    def beyond_knee(self) -> bool:
        """Whether requests queue."""
        queue, stay = self.real.queue, self.real.e2e
        return bool(queue and stay and queue.p50 > BACKLOG * (stay.p50 - queue.p50))

    @property
    def valid(self) -> bool:
        """Whether all errors are within the tolerances."""
        return all(abs(error or 0.0) <= TOLERANCES[name] for name, error in self.errors.items())

    @property
    def verdict(self) -> str:
        """Both in words."""
        return ("beyond the knee: " if self.beyond_knee else "") + ("valid" if self.valid else "OFF")


def traces_table(traces: Mapping[str, Dense]) -> Table:
    """A row per method: what was recorded of its drafter."""

    def tokens(found: Dense) -> str:
        accepted = found.accepted(np.random.default_rng(0))[0]
        places = zip(found.begins.tolist(), found.lengths.tolist(), strict=True)
        rounds = sum(_rounds(accepted[begin : begin + count]) for begin, count in places)
        return f"{found.lengths.sum() / rounds:.2f}"

    columns = [
        (left("method", min_width=10), lambda each: each[0]),
        (left("drafter"), lambda each: str(each[1].facts.get("drafter", NOTHING))),
        ("outputs", lambda each: str(len(each[1].lengths))),
        ("positions", lambda each: f"{each[1].lengths.sum():,}"),
        ("depth", lambda each: str(each[1].depth)),
        ("accepted at\ndepth 1", lambda each: f"{each[1].probability[:, 0].mean():.1%}"),
        ("tokens per\nround", lambda each: tokens(each[1])),
        ("left their\noutput", lambda each: str(each[1].facts.get("left_their_output", 0))),
    ]
    notes = [
        "tokens per round: replayed at full depth, one request at a time",
        "left their output: requests whose trace ends early, because rounding changed a token",
    ]
    return Table.of(list(traces.items()), columns, title="Dense traces of acceptance", notes=notes)


def _rounds(accepted: np.ndarray) -> int:
    at = rounds = 0
    while at < len(accepted):
        at, rounds = at + int(accepted[at]) + 1, rounds + 1
    return rounds


def report_validation(real: Sequence[LoadRun], virtual: Sequence[LoadRun], report: LoadReport) -> list[Path]:
    """Print the errors of virtual time, and write them with a picture; returns the files."""
    made = [
        {(run.method, run.rate): figures_of(run, report.terms, report.bootstrap) for run in runs}
        for runs in (real, virtual)
    ]
    pairs = [Pair(made[0][key], made[1][key]) for key in made[0] if key in made[1]]
    slower = [run.facts.get("slower", 1.0) for run in virtual]
    machine = (
        f"the machine took {min(slower):.2f} to {max(slower):.2f} times as long as when costs were calibrated (one row "
        f"of plain decoding, before and after every run), and so does virtual time"
    )
    table, said = validation_table(pairs, report), [*_sentences(pairs), machine]
    console = terminal.console()
    terminal.show(console, table)
    terminal.say(console, *said)
    rows = [
        {"method": p.real.method, "rate": p.real.rate, "beyond_knee": p.beyond_knee, "valid": p.valid, **p.errors}
        for p in pairs
    ]
    texts = {"validation.md": document(table, said), "validation.json": {"title": report.title, "pairs": rows}}
    about = f"{report.title}; {LOOPS[real[0].loop]}"
    return [*write_texts(report.folder, texts), _picture(pairs, report.folder / "validation.png", about)]


def validation_table(pairs: Sequence[Pair], report: LoadReport) -> Table:
    """A row per rate and method: what was measured, and the errors of virtual time."""

    def both(name: str, level: str = "", scale: float = 1.0) -> Column:
        def text(pair: Pair) -> str:
            error = pair.error(name, level)
            value = pair.real[name] if not level else (pair.real[name] or {}).get(level)
            return NOTHING if error is None or value is None else f"{value * scale:.3g}; {100 * error:+.1f} %"

        return text  # pyright: ignore[reportReturnType]

    columns = [
        (RATES[pairs[0].real.loop].replace(" ", "\n"), lambda pair: f"{pair.real.rate:.3g}"),
        (left("method", fold=True, min_width=10), lambda pair: pair.real.method),
        ("tokens/s\nreal; error", both("output_tokens_per_second")),
        ("TPOT p50, ms\nreal; error", both("tpot", "p50", 1000)),
        ("TPOT p99, ms\nreal; error", both("tpot", "p99", 1000)),
        ("TTFT p50, ms\nreal; error", both("ttft", "p50", 1000)),
        ("TTFT p99, ms\nreal; error", both("ttft", "p99", 1000)),
        ("tokens per\nround", both("mean_acceptance_length")),
        ("verdict", lambda pair: pair.verdict),
    ]
    limits = ", ".join(f"{name} {100 * most:.0f} %" for name, most in TOLERANCES.items())
    notes = [
        LOOPS[pairs[0].real.loop],
        "the same requests at the same moments; error: virtual over real, minus 1",
        f"valid: errors within {limits} (tokens per second, median TPOT, 99th percentile of TTFT)",
        f"beyond the knee: the median request waits for more than {BACKLOG:.0%} of its time in a slot",
    ]
    return Table.of(
        pairs, columns, title=f"Virtual time against the engine: {report.title}", notes=notes,
        section=lambda pair: pair.real.rate,
    )  # fmt: skip


def _sentences(pairs: Sequence[Pair]) -> list[str]:
    below = [pair for pair in pairs if not pair.beyond_knee]
    if not below:
        return ["no load was below the knee, where virtual time is to be judged: give lower rates"]
    worst = {name: max(abs(pair.errors[name] or 0.0) for pair in below) for name in TOLERANCES}
    words = ", ".join(f"{name} {100 * error:.1f} %" for name, error in worst.items())
    good = all(pair.valid for pair in below)
    return [
        f"below the knee virtual time is {'valid' if good else 'NOT valid'}: the largest errors of {len(below)} loads "
        f"are {words}"
    ]


@style.styled()
def _picture(pairs: Sequence[Pair], path: Path, subtitle: str) -> Path:
    """Draw virtual over real, a panel per figure: on the line they agree."""
    shown = (
        ("output_tokens_per_second", "", 1.0, "tokens per second", "throughput"),
        ("tpot", "p50", 1000.0, "median TPOT (ms)", "tpot"),
        ("ttft", "p99", 1000.0, "TTFT, p99 (ms)", "ttft"),
    )
    figure = style.new_figure(style.PAGE, 2.8)
    panels = figure.subplots(1, len(shown))
    methods = list(dict.fromkeys(pair.real.method for pair in pairs))
    for axes, (name, level, scale, text, kind) in zip(panels, shown, strict=True):
        ends = []
        for index, method in enumerate(methods):
            known = [pair for pair in pairs if pair.real.method == method and pair.error(name, level) is not None]
            points = [
                [scale * (each[name][level] if level else each[name]) for each in (pair.real, pair.virtual)]
                for pair in known
            ]
            ends += [value for point in points for value in point]
            looks = {**style.looks(index), "linestyle": "none"}
            axes.plot([x for x, _ in points], [y for _, y in points], label=method, **looks)
        if ends:
            line = [0.8 * min(ends), 1.25 * max(ends)]
            axes.plot(line, line, color="grey", linewidth=0.8)
            axes.fill_between(
                line, *([end * (1 + sign * TOLERANCES[kind]) for end in line] for sign in (-1, 1)),
                color="grey", alpha=0.2, linewidth=0,
            )  # fmt: skip
            style.plain_log(axes.xaxis)
            style.plain_log(axes.yaxis)
            axes.set(xlim=line, ylim=line)
        axes.set(xlabel=f"real {text}", ylabel="in virtual time")
    style.legend_of(figure, panels[0], ncols=len(methods))
    return style.finish(figure, path, "Virtual time over real time; grey: within the tolerance", subtitle)
