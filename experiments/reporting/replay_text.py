"""The report of drafters over texts: its tables, its picture, and the files that it leaves."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.reporting import csv, markdown, style, terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table
from experiments.results.statistics import Bootstrap, Interval
from experiments.results.texts import LookUp, over

ALL = "all"
FORCED = (
    "Teacher-forced: the answers in the files are what is emitted, so these are the rounds of a greedy target that "
    "would answer exactly so."
)


def report_texts(
    done: Sequence[LookUp], out: Path, *, files: Sequence[str], tokenizer: str, bootstrap: Bootstrap
) -> None:
    """Print the tables, and write ``replay_text.md``, ``.csv``, ``.json`` and ``.png``.

    Args:
        done: The drafters' figures, on the same texts.
        out: The folder to write to.
        files: Where the texts are from.
        tokenizer: Whose tokens were counted.
        bootstrap: Settings of the intervals.
    """
    tokens = sum(each.tokens for each in done[0].texts)
    names = ", ".join(Path(file).name for file in files)
    about = f"{names}: {len(done[0].texts):,} answers, {tokens:,} tokens of {tokenizer}"
    differences = [over(each, done[0], bootstrap) for each in done]
    tables = [drafter_table(done, differences, about, bootstrap.confidence), category_table(done)]
    out.mkdir(parents=True, exist_ok=True)
    console = terminal.console()
    for table in tables:
        console.print(terminal.render(table))
    terminal.say(console, FORCED)
    content = {
        "files": list(files),
        "tokenizer": tokenizer,
        "drafters": [
            asdict(each) | {"over_the_first": interval} for each, interval in zip(done, differences, strict=True)
        ],
    }
    contents = {
        "replay_text.md": f"{about}.\n\n" + "\n".join([*map(markdown.render, tables), f"{FORCED}\n"]),
        "replay_text.csv": csv.render(tables[0]),
        "replay_text.json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in contents.items():
        (out / name).write_text(text, encoding="utf-8")
    picture = text_plot(done, out / "replay_text.png", about, bootstrap.confidence)
    terminal.list_written(console, [*(out / name for name in contents), picture])


def drafter_table(
    done: Sequence[LookUp], differences: Sequence[Interval | None], about: str, confidence: float
) -> Table:
    """A row per drafter: what it does over all texts, and how much it drafts for that."""
    first = done[0]
    columns = [
        Column("drafter", "left"),
        Column("tokens per round"),
        Column(f"over {first.label}"),
        Column("nodes per round"),
    ]
    notes = [f"intervals at {confidence:.0%} over texts, differences paired"]
    table = Table(columns, about, notes)
    for each, interval in zip(done, differences, strict=True):
        gain = Cell("-") if each is first else Cell(f"{each.length - first.length:+.2f}", _between(interval, "+.2f"))
        table.add(each.label, Cell(f"{each.length:.2f}", _between(each.interval, ".2f")), gain, f"{each.nodes:.1f}")
    return table


def category_table(done: Sequence[LookUp]) -> Table:
    """A row per category and a column per drafter; the best of a row stands out."""
    headings = (each.label.replace(", ", ",\n").replace(" + ", " +\n") for each in done)
    columns = [Column("category", "left"), Column("answers", min_width=7), *map(Column, headings)]
    table = Table(columns, "Tokens per round (mean acceptance length), by category")
    for name in done[0].categories:
        figures = [each.categories[name] for each in done]
        best = f"{max(figures):.2f}"
        marked = [
            Cell(text, emphasis=Emphasis.BEST if text == best else Emphasis.NONE)
            for text in (f"{value:.2f}" for value in figures)
        ]
        table.add(name, f"{sum(text.category == name for text in done[0].texts):,}", *marked)
    return table


@style.styled()
def text_plot(done: Sequence[LookUp], path: Path, about: str, confidence: float) -> Path:
    """Tokens per round by category, a mark per drafter; all texts together at the top, with their intervals."""
    names = [ALL, *done[0].categories]
    figure = style.new_figure(style.PAGE, 1.3 + 0.28 * len(names))
    axes = figure.subplots()
    for index, each in enumerate(done):
        offset = (index - (len(done) - 1) / 2) * 0.8 / len(done)
        values = [each.length, *each.categories.values()]
        places = [place + offset for place in range(len(names))]
        color = style.color(index)
        axes.plot(values, places, linestyle="none", color=color, marker=style.marker(index), label=each.label)
        if each.interval is not None:
            axes.hlines(offset, *each.interval, color=color, linewidth=1)
    for place in range(len(names) - 1):
        axes.axhline(place + 0.5, color="#dddddd", linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=min(0.95, axes.get_xlim()[0]))
    axes.set_xlabel("tokens per round (mean acceptance length)")
    axes.grid(axis="x")
    handles, labels = axes.get_legend_handles_labels()
    line = style.baseline(axes, vertical=True)
    style.legend(figure, [*handles, line], [*labels, "plain decoding"])
    style.title(figure, "Look-ups on known answers", f"{about}; lines: {confidence:.0%} intervals over texts")
    return style.save(figure, path)


def _between(interval: Interval | None, form: str) -> tuple[str, ...]:
    return () if interval is None else (f"[{interval[0]:{form}}, {interval[1]:{form}}]",)
