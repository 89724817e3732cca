"""Tables and facts as HTML, every text escaped: pieces of the report's page, or a page of their own."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from experiments.reporting.table import Cell, Column, Emphasis, Table

_STYLE = Path(__file__).with_name("table.css")


def element(tag: str, *content: str, **attributes: str | None) -> str:
    """An element whose content is HTML already, and whose attributes are not.

    Args:
        *content: What it holds, escaped by the caller.
        **attributes: Texts; those that are None are left out. ``class_`` is ``class``, and ``data_x`` is ``data-x``.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{''.join(content)}</{tag}>"


def table(made: Table, *, categories: Sequence[str] = (), sortable: bool = False) -> str:
    """A table: its title as the caption, a body for each section, the notes as a list below."""
    headings = [_heading(column, sortable=sortable) for column in made.columns]
    bodies: list[list[str]] = [[]]
    for number, row in enumerate(made.rows):
        cells = [_cell(cell, column) for cell, column in zip(row, made.columns, strict=True)]
        bodies[-1].append(element("tr", *cells, data_category=categories[number] if categories else None))
        if number in made.sections and number + 1 < len(made.rows):
            bodies.append([])
    parts = [element("caption", escape(made.title))] if made.title else []
    parts += [element("thead", element("tr", *headings)), *(element("tbody", *body) for body in bodies)]
    notes = element("ul", *(element("li", escape(note)) for note in made.notes), class_="note") if made.notes else ""
    return element("div", element("table", *parts), class_="scroll") + notes


def page(made: Table) -> str:
    """A table as one web page that needs nothing else: no script, no network, light and dark."""
    head = [
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        element("title", escape(made.title)),
        element("style", _STYLE.read_text(encoding="utf-8").strip()),
    ]
    return f'<!doctype html>\n<html lang="en">{element("head", *head)}\n{element("body", table(made))}</html>\n'


def facts(pairs: Mapping[str, str]) -> str:
    """Names and values."""
    items = (element("dt", escape(name)) + element("dd", escape(value)) for name, value in pairs.items())
    return element("dl", *items, class_="facts")


def sentences(texts: Iterable[str], class_: str) -> str:
    """Sentences, a paragraph each."""
    return "".join(element("p", escape(text), class_=class_) for text in texts)


def _heading(column: Column, *, sortable: bool) -> str:
    text = _lines(column.heading)
    return element(
        "th", element("button", text, type="button") if sortable and text else text, scope="col", class_=column.align
    )


def _cell(cell: Cell, column: Column) -> str:
    classes = [column.align, *(["fold"] if column.fold else [])]
    classes += [] if cell.emphasis is Emphasis.NONE else [cell.emphasis.value]
    more = "".join(_lines(cell.joint) + element("small", _lines(part)) for part in cell.more)
    return element("td", _lines(cell.text) + more, class_=" ".join(classes))


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
