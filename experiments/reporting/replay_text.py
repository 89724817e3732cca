"""The report of drafters over texts: its tables, its picture, and the files that it leaves."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.reporting import style, terminal
from experiments.reporting.cells import NOTHING, between, signed
from experiments.reporting.formats import document, write_texts
from experiments.reporting.table import Cell, Column, Table, left
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
        tokenizer: Name of the tokenizer whose tokens were counted.
        bootstrap: Settings of the intervals.
    """
    tokens = sum(each.tokens for each in done[0].texts)
    names = ", ".join(Path(file).name for file in files)
    about = f"{names}: {len(done[0].texts):,} answers, {tokens:,} tokens of {tokenizer}"
    differences = [over(each, done[0], bootstrap) for each in done]
    tables = [drafter_table(done, differences, about, bootstrap.confidence), category_table(done)]
    console = terminal.console()
    for table in tables:
        console.print(terminal.render(table))
    terminal.say(console, FORCED)
    figures = [asdict(each) | {"over_the_first": bounds} for each, bounds in zip(done, differences, strict=True)]
    content = {"files": list(files), "tokenizer": tokenizer, "drafters": figures}
    texts = {
        "replay_text.md": document(f"{about}.", *tables, FORCED),
        "replay_text.csv": tables[0].csv(),
        "replay_text.json": json.dumps(content, indent=2, ensure_ascii=False) + "\n",
    }
    written = write_texts(out, texts)
    picture = text_plot(done, out / "replay_text.png", about, bootstrap.confidence)
    terminal.list_written(console, [*written, picture])


def drafter_table(
    done: Sequence[LookUp], differences: Sequence[Interval | None], about: str, confidence: float
) -> Table:
    """A row per drafter: its tokens over all texts, and how much it drafts for that."""
    first = done[0]
    columns = [left("drafter"), *map(Column, ("tokens per round", f"over {first.label}", "nodes per round"))]
    table = Table(columns, about, [f"intervals at {confidence:.0%} over texts, differences paired"])
    for each, bounds in zip(done, differences, strict=True):
        gain = NOTHING if each is first else signed(each.length - first.length, bounds, 2)
        table.add(each.label, Cell(f"{each.length:.2f}", between(each.interval)), gain, f"{each.nodes:.1f}")
    return table


def category_table(done: Sequence[LookUp]) -> Table:
    """A row per category and a column per drafter. None stands out: single categories have no intervals."""
    headings = (each.label.replace(", ", ",\n").replace(" + ", " +\n") for each in done)
    columns = [left("category"), Column("answers", min_width=7), *map(Column, headings)]
    table = Table(columns, "Tokens per round (mean acceptance length), by category")
    for name in done[0].categories:
        answers = sum(text.category == name for text in done[0].texts)
        table.add(name, f"{answers:,}", *(f"{each.categories[name]:.2f}" for each in done))
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
        axes.plot(values, places, linestyle="none", label=each.label, **style.looks(index))
        if each.interval is not None:
            axes.hlines(offset, *each.interval, color=style.color(index), linewidth=1)
    style.name_rows(axes, names, 30)
    axes.set_xlim(left=min(0.95, axes.get_xlim()[0]))
    axes.set_xlabel("tokens per round (mean acceptance length)")
    axes.grid(axis="x")
    style.baseline(axes, vertical=True)
    style.legend(figure, *axes.get_legend_handles_labels())
    style.title(figure, "Look-ups on known answers", f"{about}; lines: {confidence:.0%} intervals over texts")
    return style.save(figure, path)
