"""Drafters over texts that are known to their end: their figures, tables and picture."""

from collections.abc import Sequence
from pathlib import Path

import pandas

from experiments.reporting import style
from experiments.reporting.cells import NOTHING, between, signed
from experiments.reporting.formats import document, publish
from experiments.reporting.table import Cell, Column, Table, left
from experiments.results.frame import Figures, Frame
from experiments.results.statistics import Bootstrap, Interval, difference_of_means, ratio_of_sums

ALL = "all"
FORCED = (
    "Teacher-forced: the answers in the files are what is emitted, so these are the rounds of a greedy target that "
    "would answer exactly so."
)


def look_up(label: str, texts: Sequence[Figures], bootstrap: Bootstrap) -> Figures:
    """Return a drafter's figures.

    Returns:
        Tokens per round over all texts (``length``, the mean acceptance length), its ``interval`` over the choice of
        texts, ``nodes`` per round, and tokens per round by category, in the order of the texts (``categories``).
    """
    frame: Frame = pandas.DataFrame(list(texts))
    sums = frame.groupby("category", sort=False)[["tokens", "rounds"]].sum()
    return Figures(
        label=label,
        texts=list(texts),
        length=float(frame.tokens.sum() / frame["rounds"].sum()),
        interval=bootstrap.interval(ratio_of_sums, [frame.tokens, frame["rounds"]]),
        nodes=float(frame.nodes.sum() / frame["rounds"].sum()),
        categories=(sums.tokens / sums["rounds"]).to_dict(),
    )


def over(each: Figures, other: Figures, bootstrap: Bootstrap) -> Interval | None:
    """Return the interval of the difference of tokens per round, with both on the same texts."""
    columns = [[text[name] for text in one.texts] for one in (each, other) for name in ("tokens", "rounds")]
    return bootstrap.interval(difference_of_means, columns)


def report_texts(
    done: Sequence[Figures], out: Path, *, files: Sequence[str], tokenizer: str, bootstrap: Bootstrap
) -> None:
    """Print the tables, and write ``replay_text.md``, ``.csv``, ``.json`` and ``.png``."""
    tokens = sum(each.tokens for each in done[0].texts)
    names = ", ".join(Path(file).name for file in files)
    about = f"{names}: {len(done[0].texts):,} answers, {tokens:,} tokens of {tokenizer}"
    found = [each | {"over_the_first": over(each, done[0], bootstrap)} for each in done]
    tables = [drafter_table(found, about, bootstrap.confidence), category_table(found)]
    publish(
        out,
        "replay_text",
        tables=tables,
        document=document(f"{about}.", *tables, FORCED),
        figures={"files": list(files), "tokenizer": tokenizer, "drafters": found},
        said=[FORCED],
        more={"replay_text.csv": tables[0].csv()},
        drawn=lambda: [text_plot(found, out / "replay_text.png", about, bootstrap.confidence)],
    )


def drafter_table(done: Sequence[Figures], about: str, confidence: float) -> Table:
    """A row per drafter: its tokens over all texts, and how much it drafts for that."""
    first = done[0]
    return Table.of(
        done,
        [
            (left("drafter"), lambda each: each.label),
            ("tokens per round", lambda each: Cell(f"{each.length:.2f}", between(each.interval))),
            (
                f"over {first.label}",
                lambda each: NOTHING if each is first else signed(each.length - first.length, each.over_the_first, 2),
            ),
            ("nodes per round", lambda each: f"{each.nodes:.1f}"),
        ],
        title=about,
        notes=[f"intervals at {confidence:.0%} over texts, differences paired"],
    )


def category_table(done: Sequence[Figures]) -> Table:
    """A row per category and a column per drafter. None stands out: single categories have no intervals."""
    headings = (each.label.replace(", ", ",\n").replace(" + ", " +\n") for each in done)
    columns = [left("category"), Column("answers", min_width=7), *map(Column, headings)]
    table = Table(columns, "Tokens per round (mean acceptance length), by category")
    for name in done[0].categories:
        answers = sum(text.category == name for text in done[0].texts)
        table.add(name, f"{answers:,}", *(f"{each.categories[name]:.2f}" for each in done))
    return table


def text_plot(done: Sequence[Figures], path: Path, about: str, confidence: float) -> Path:
    """Tokens per round by category, a mark per drafter; all texts together at the top, with their intervals."""
    names = [ALL, *done[0].categories]
    series: dict[str, list[style.Point]] = {}
    for each in done:
        by_category = [(row, value, None) for row, value in enumerate(each.categories.values(), start=1)]
        series[each.label] = [(0, each.length, each.interval), *by_category]
    return style.rows_plot(
        path,
        names,
        {"tokens per round (mean acceptance length)": series},
        about="Look-ups on known answers",
        subtitle=f"{about}; lines: {confidence:.0%} intervals over texts",
        numbers=False,
    )
