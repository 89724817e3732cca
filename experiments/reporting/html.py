"""Templates of web pages, which escape every text: a table as a page of its own, and pieces of the report's page."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.reporting.table import Table

_FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """A page by the template of this name in this folder or below it."""
    pages = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["lines"] = lambda text: Markup("<br>").join(escape(text).split("\n"))
    return pages.get_template(template).render(values)


def page(made: Table) -> str:
    """A table as one web page that needs nothing else: no script, no network, light and dark."""
    return render("table.html", made=made, style=(_FOLDER / "table.css").read_text(encoding="utf-8").strip())
