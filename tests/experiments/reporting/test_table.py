"""One table, three media: nothing is lost, and nothing is read as markup."""

import csv as standard_csv
import io

import pytest
from rich.console import Console

from experiments.reporting import csv, markdown, terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table


def example() -> Table:
    table = Table(
        [Column("method", "left", fold=True), Column("tokens\nper s")], "A [bold]title", ["first note", "[second] note"]
    )
    table.add(Cell("model", ("shape=[a]",), joint=", "), Cell("2.00", ("[1.00, 3.00]",)), end_section=True)
    table.add(Cell("a|b", emphasis=Emphasis.LOSSY), Cell("3", emphasis=Emphasis.BEST))
    return table


def shown(frame: terminal.Frame) -> str:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(terminal.render(example(), frame))
    return console.export_text()


@pytest.mark.parametrize("frame", list(terminal.Frame))
def test_a_terminal_shows_everything_as_it_is(frame: terminal.Frame) -> None:
    text = shown(frame)
    for expected in ("A [bold]title", "first note; [second] note", "shape=[a]", "[1.00, 3.00]", "a|b", "per s"):
        assert expected in text


def test_parts_of_a_cell_are_below_each_other_where_it_is_narrow() -> None:
    narrow = [line.split() for line in shown(terminal.Frame.NARROW).splitlines()]
    assert ["model", "2.00"] in narrow
    assert ["shape=[a]", "[1.00,", "3.00]"] in narrow
    assert "model, shape=[a]" in shown(terminal.Frame.FULL)
    assert "2.00 [1.00, 3.00]" in shown(terminal.Frame.FULL)


def test_markdown() -> None:
    assert markdown.render(example()) == (
        "| method | tokens per s |\n|---|---:|\n| model, shape=[a] | 2.00 [1.00, 3.00] |\n| *a\\|b* | **3** |\n"
    )


def test_csv() -> None:
    rows = list(standard_csv.reader(io.StringIO(csv.render(example()))))
    assert rows == [["method", "tokens per s"], ["model, shape=[a]", "2.00 [1.00, 3.00]"], ["a|b", "3"]]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2 columns"):
        example().add("alone")
