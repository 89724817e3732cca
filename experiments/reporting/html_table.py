"""A table as one web page that needs nothing else: no script, no network, light and dark."""

from html import escape

from experiments.reporting.table import Cell, Column, Emphasis, Table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; padding: 0 1rem; width: fit-content; max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .7rem; }
th, td { padding: .3rem .7rem; text-align: right; vertical-align: top; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; }
.left { text-align: left; }
.fold { white-space: normal; }
thead { border-block: 2px solid; }
tbody { border-bottom: 1px solid; }
tbody:last-of-type { border-bottom-width: 2px; }
.more { opacity: .75; font-size: .85em; }
.best, .missed { font-weight: 700; }
.best .more, .missed .more { font-weight: 400; }
.lossy { font-style: italic; }
.missed { color: light-dark(#b00020, #ff8a80); }
ul { padding-left: 1.2rem; max-width: 60rem; }
""".strip()


def render(table: Table) -> str:
    """The page: the title as the table's caption, the notes as a list below it, a rule between sections."""
    head = "".join(_heading(column) for column in table.columns)
    bodies: list[list[str]] = [[]]
    for number, row in enumerate(table.rows):
        cells = "".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True))
        bodies[-1].append(f"<tr>{cells}</tr>")
        if number in table.sections and number + 1 < len(table.rows):
            bodies.append([])
    title = escape(table.title)
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style></head>",
        '<body><div class="wide"><table>',
        f"<caption>{title}</caption>",
        f"<thead><tr>{head}</tr></thead>",
        *("<tbody>\n" + "\n".join(body) + "\n</tbody>" for body in bodies),
        "</table></div>",
    ]
    if table.notes:
        lines.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in table.notes) + "</ul>")
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _heading(column: Column) -> str:
    return f'<th scope="col" class="{column.align}">{_lines(column.heading)}</th>'


def _cell(cell: Cell, column: Column) -> str:
    classes = [column.align, *(["fold"] if column.fold else [])]
    classes += [] if cell.emphasis is Emphasis.NONE else [cell.emphasis.value]
    more = "".join(f'{_lines(cell.joint)}<span class="more">{_lines(part)}</span>' for part in cell.more)
    return f'<td class="{" ".join(classes)}">{_lines(cell.text)}{more}</td>'


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
