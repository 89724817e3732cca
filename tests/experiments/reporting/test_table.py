"""One table, all media: nothing is lost, nothing is read as markup, and no text of a run can break out of a cell."""

import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from experiments.reporting import html, latex, terminal
from experiments.reporting.table import Cell, Column, Emphasis, Table

NASTY = r"""a\b{c}$d&e#f%g_h^i~j<k>l|m"n`o"""


def example() -> Table:
    columns = (Column("T"), Column("method and settings", "left", fold=True), Column("mean\nlength"), Column("none"))
    table = Table(columns, "org/Model_1", ["intervals at 95%", "rule: <exact>"])
    table.add("0", Cell("model", ("shape=4", "a_b=[1]"), joint=", "), Cell("2.11", ("[2.00, 2.33]",)), "-")
    best = Cell("1.82x", ("[1.67, 2.00]",), emphasis=Emphasis.BEST)
    table.add("0", Cell("[typical]", emphasis=Emphasis.LOSSY), best, "-", end_section=True)
    table.add("1", NASTY, Cell("-", emphasis=Emphasis.MISSED), "-", end_section=True)
    table.add("1", "rate=1e-5", Cell("-1.5", ("[-2.0, +1.0]",)), "-", end_section=True)
    return table


def small() -> Table:
    columns = [Column("method", "left", fold=True), Column("tokens\nper s")]
    table = Table(columns, "A [bold]title", ["first note", "[second] note"])
    table.add(Cell("model", ("shape=[a]",), joint=", "), Cell("2.00", ("[1.00, 3.00]",)), end_section=True)
    table.add(Cell("a|b", emphasis=Emphasis.LOSSY), Cell("3", emphasis=Emphasis.BEST))
    return table


def shown(frame: terminal.Frame) -> str:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(terminal.render(small(), frame))
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
    assert small().markdown() == (
        "| method | tokens per s |\n|---|---:|\n| model, shape=[a] | 2.00 [1.00, 3.00] |\n| *a\\|b* | **3** |\n"
    )


def test_csv() -> None:
    rows = list(csv.reader(io.StringIO(small().csv())))
    assert rows == [["method", "tokens per s"], ["model, shape=[a]", "2.00 [1.00, 3.00]"], ["a|b", "3"]]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2 columns"):
        small().add("alone")


def test_a_table_of_items_has_a_line_between_their_sections() -> None:
    table = Table.of([1, 2, 12], [("n", str), ("twice", lambda n: f"{2 * n}")], section=lambda n: n // 10)
    assert [[cell.text for cell in row] for row in table.rows] == [["1", "2"], ["2", "4"], ["12", "24"]]
    assert table.sections == {1, 2}
    upright = Table.upright([1, 2], ["one", "two"], [("twice", lambda n: f"{2 * n}")])
    assert [column.heading for column in upright.columns] == ["", "one", "two"]
    assert [[cell.text for cell in row] for row in upright.rows] == [["twice", "2", "4"]]


# ---------------------------------------------------------------- LaTeX


def parsed(tex: str) -> list[list[str]]:
    """Cells of all rows of the outer tabular; fails where braces or environments do not match."""
    tex = re.sub(r"(?m)^%.*\n", "", tex)
    stack: list[str] = []
    depth = 0
    rows: list[list[str]] = [[""]]
    for token in re.findall(r"\\begin\{\w+\}(?:\[\w\])?|\\end\{\w+\}|\\\\|\\[a-zA-Z]+|\\.|.", tex, re.DOTALL):
        inside = stack == ["table", "tabular"] and depth == 0
        if token.startswith(r"\begin"):
            stack.append(re.findall(r"\w+", token)[1])
        elif token.startswith(r"\end"):
            assert stack.pop() == re.findall(r"\w+", token)[1]
        elif inside and token in ("&", r"\\"):
            rows[-1].append("") if token == "&" else rows.append([""])
            continue
        elif token in "{}":
            depth += 1 if token == "{" else -1
            assert depth >= 0
        if stack[:2] == ["table", "tabular"]:
            rows[-1][-1] += token
    assert depth == 0
    assert not stack
    return [[cell.strip() for cell in row] for row in rows[:-1]]


def test_the_structure_of_the_latex_table() -> None:
    tex = latex.render(example(), "tab:x")
    rows = parsed(tex)
    assert [len(row) for row in rows] == [3, 3, 3, 3, 3], "a column that says nothing is left out"
    assert rows[0][2] == r"\begin{tabular}[b]{@{}r@{}}mean \\ length\end{tabular}"
    assert rows[1][1:] == [
        r"\begin{tabular}[t]{@{}l@{}}model \\ \scriptsize shape=4 \\ \scriptsize a\_b=[1]\end{tabular}",
        r"2.11 {\scriptsize [2.00, 2.33]}",
    ]
    assert rows[2][1:] == [r"\emph{{}[typical]}", r"\textbf{1.82$\times$} {\scriptsize [1.67, 2.00]}"]
    assert rows[3][2] == r"\textbf{--}"
    assert rows[4][1:] == ["rate=1e-5", r"$-$1.5 {\scriptsize [$-$2.0, +1.0]}"]
    assert tex.count(r"\midrule") == 3, "below the heading and between the sections, none at the end"
    assert r"\caption{org/Model\_1. Intervals at 95\%. Rule: \textless{}exact\textgreater{}.}" in tex
    assert r"\label{tab:x}" in tex


def test_texts_are_escaped_for_latex() -> None:
    assert latex.escape(NASTY) == (
        r"a\textbackslash{}b\{c\}\$d\&e\#f\%g\_h\textasciicircum{}i\textasciitilde{}j\textless{}k\textgreater{}l"
        r"\textbar{}m\textquotedbl{}n\textasciigrave{}o"
    )


def test_the_parser_finds_what_is_broken() -> None:
    """The check above on tables that LaTeX would refuse."""
    good = latex.render(example(), "x")
    for bad in (good.replace(r"\end{tabular}", "", 1), good.replace(r"\_1", r"\_1}"), good.replace("2.11", "2.11 &")):
        with pytest.raises((AssertionError, IndexError)):
            assert [len(row) for row in parsed(bad)] == [3, 3, 3, 3, 3]


def has_latex() -> bool:
    if shutil.which("pdflatex") is None or shutil.which("kpsewhich") is None:
        return False
    return bool(subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, text=True).stdout.strip())


@pytest.mark.skipif(not has_latex(), reason="needs pdflatex and booktabs.sty")
def test_latex_takes_the_table(tmp_path: Path) -> None:
    text = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{text}\n{latex.render(example(), 'tab:x')}\n\\end{{document}}\n")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.pdf").stat().st_size > 1000


# ---------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Tags, their classes and texts of a page; fails where tags do not match."""

    VOID = ("meta", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.bodies: list[list[list[tuple[str | None, str]]]] = []
        self.texts: dict[str, list[str]] = {}
        self.used: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.used.add(tag)
        if tag in self.VOID:
            return
        self.open.append(tag)
        if tag == "tbody":
            self.bodies.append([])
        elif tag == "tr" and "tbody" in self.open:
            self.bodies[-1].append([])
        elif tag == "td":
            self.bodies[-1][-1].append((dict(attrs).get("class"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            kind, text = self.bodies[-1][-1][-1]
            self.bodies[-1][-1][-1] = (kind, text + data)
        elif self.open:
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def test_the_structure_of_the_web_page() -> None:
    page = Page(html.page(example()))
    assert [[len(row) for row in body] for body in page.bodies] == [[4, 4], [4], [4]]
    assert page.bodies[0][0][1] == ("left fold", "model, shape=4, a_b=[1]")
    assert page.bodies[0][1][1:3] == [("left fold lossy", "[typical]"), ("right best", "1.82x [1.67, 2.00]")]
    assert page.bodies[1][0][1] == ("left fold", NASTY)
    assert page.texts["title"] == page.texts["caption"] == ["org/Model_1"]
    assert page.texts["li"] == ["intervals at 95%", "rule: <exact>"]


def test_the_page_needs_nothing_else_and_runs_nothing() -> None:
    table = Table((Column("<script>alert(1)</script>"),), '"><img src=x onerror=alert(1)>', ["<b onclick=x>"])
    table.add("<script src='http://x'></script>")
    page = Page(html.page(table))
    assert not page.used & {"script", "img", "link", "b", "iframe"}
    assert page.bodies == [[[("right", "<script src='http://x'></script>")]]]
