"""From the template to the page."""

import re
import textwrap
from pathlib import Path

from experiments.bench.chapter.figures import Figures
from experiments.bench.chapter.formats import FILTERS
from experiments.bench.chapter.tables import Tables

ROOT = Path(__file__).parents[3]
TEMPLATE = ROOT / "docs/templates/why-decoding-is-slow.md.jinja"
PAGE = ROOT / "docs/why-decoding-is-slow.md"
WIDTH = 120
"""Characters per line."""
NOTE = (
    "<!-- Made by `python -m experiments.bench chapter`: edit docs/templates/why-decoding-is-slow.md.jinja instead. -->"
    "\n\n"
)


def rendered(template: str) -> str:
    """Returns the page: the template with every value that it names.

    Args:
        template: Its text. Values are attributes of ``Figures`` (``{{ f.load | s }}``) and tables of ``Tables``.

    Raises:
        jinja2.UndefinedError: It names something that does not exist.
    """
    from jinja2 import Environment, StrictUndefined  # a dependency of the documentation only

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.filters.update(FILTERS)
    figures = Figures()
    made = environment.from_string(template).render(f=figures, g=figures.g, tables=Tables(figures))
    return NOTE + reflowed(made)


def reflowed(text: str) -> str:
    """Returns Markdown whose paragraphs and list items are broken into lines of ``WIDTH`` again.

    Values are longer or shorter than their names. Blocks of code, tables and headings stay as they are.
    """
    lines: list[str] = []
    collected: list[str] = []
    fenced = False

    def flush() -> None:
        if collected:
            first = collected[0]
            indent = re.match(r"(?:\s*\* )?\s*", first)
            assert indent is not None
            words = " ".join(line.strip() for line in collected)
            before, after = indent[0], " " * len(indent[0])
            words = words.removeprefix(before.strip()).strip()
            lines.extend(
                textwrap.wrap(
                    words, WIDTH, initial_indent=before, subsequent_indent=after, break_long_words=False,
                    break_on_hyphens=False,
                )
            )  # fmt: skip
            collected.clear()

    for line in text.split("\n"):
        fence = line.startswith("```")
        if fenced or fence or not line.strip() or line.startswith(("|", "#", "!", "<")):
            flush()
            lines.append(line)
            fenced = fenced != fence
            continue
        if line.lstrip().startswith("* ") and not line.lstrip().startswith("**"):
            flush()
        collected.append(line)
    flush()
    return "\n".join(lines)


def chapter() -> str:
    """Returns the chapter as it follows from today's code."""
    return rendered(TEMPLATE.read_text(encoding="utf-8"))
