"""Pieces of the page that are the same whoever looks: tables and facts, with every text escaped."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from experiments.reporting.table import Cell, Emphasis, Table

_CLASSES = {Emphasis.NONE: "", Emphasis.BEST: "best", Emphasis.LOSSY: "lossy", Emphasis.MISSED: "missed"}


def element(tag: str, *content: str, **attributes: str | None) -> str:
    """An element whose content is HTML already, and whose attributes are not.

    Args:
        tag: Its name.
        *content: What it holds, escaped by the caller.
        **attributes: Texts; those that are None are left out. ``class_`` is ``class``, and ``data_x`` is ``data-x``.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{given}>{''.join(content)}</{tag}>"


def table(made: Table, *, categories: Sequence[str] = (), sortable: bool = True) -> str:
    """A table.

    Args:
        made: The table.
        categories: The category of every row, for the page's filter.
        sortable: Give its headings buttons that sort the rows.
    """
    headings = [
        element("th", _heading(column.title, sortable=sortable), scope="col", class_=column.align)
        for column in made.columns
    ]
    rows = []
    for number, row in enumerate(made.rows):
        cells = [_cell(cell, column.align) for cell, column in zip(row, made.columns, strict=True)]
        rows.append(element("tr", *cells, data_category=categories[number] if categories else None))
    parts = [element("caption", escape(made.title))] if made.title else []
    parts += [element("thead", element("tr", *headings)), element("tbody", *rows)]
    notes = "".join(element("p", escape(note), class_="note") for note in made.notes)
    return element("div", element("table", *parts), class_="scroll") + notes


def facts(pairs: Mapping[str, str]) -> str:
    """Names and values."""
    items = (element("dt", escape(name)) + element("dd", escape(value)) for name, value in pairs.items())
    return element("dl", *items, class_="facts")


def sentences(texts: Iterable[str], class_: str) -> str:
    """Sentences, a paragraph each."""
    return "".join(element("p", escape(text), class_=class_) for text in texts)


def _heading(title: str, *, sortable: bool) -> str:
    return element("button", escape(title), type="button") if sortable and title else escape(title)


def _cell(cell: Cell, align: str) -> str:
    text = escape(cell.text)
    more = "".join(" " + element("small", escape(part)) for part in cell.more)
    return element("td", text + more, class_=" ".join(filter(None, [align, _CLASSES[cell.emphasis]])))
