"""docs/what-is-covered.md: every basic has its line, and everything that a line names is there."""

import ast
import re
from functools import cache
from pathlib import Path

from markdown.extensions.toc import slugify

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parent
BASICS = 102

TEXT = (DOCS / "what-is-covered.md").read_text()
LINE = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = {int(number): (what, where) for number, what, where in LINE.findall(TEXT)}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return frozenset(slugify(title.replace("`", ""), "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@cache
def functions(file: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))


def wrong(where: str) -> list[str]:
    """Returns what a line names and the repository does not have."""
    found = []
    for page, _, anchor in re.findall(r"\]\(([\w./-]+)(#([\w-]+))?\)", where):
        path = DOCS / page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            found.append(f"{page}#{anchor}")
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml)(?:::\w+)?)`", where):
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file() or (function and function not in functions(ROOT / file)):
            found.append(name)
    return found


def test_every_basic_has_a_line_that_says_where_it_is() -> None:
    assert list(ROWS) == list(range(1, BASICS + 1))
    assert len({what for what, _ in ROWS.values()}) == BASICS
    assert {number: wrong(where) for number, (_, where) in ROWS.items() if wrong(where)} == {}
    assert [number for number, (_, where) in ROWS.items() if not re.search(r"\]\(|`", where)] == []


def test_what_is_not_there_is_noticed() -> None:
    assert wrong("[a](costs.md#memory), [b](costs.md#no-such), [c](no-such.md)") == ["costs.md#no-such", "no-such.md#"]
    assert wrong("`tests/test_covered.py::wrong`, `tests/no_such.py`") == ["tests/no_such.py"]
    assert wrong("`tests/test_covered.py::no_such`") == ["tests/test_covered.py::no_such"]
