"""One table, all media: nothing is lost, nothing is read as markup, and no text of a run can break out of a cell."""

import csv
import io
import shutil
import subprocess
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


def test_terminal_markdown_and_csv() -> None:
    for frame in terminal.Frame:
        console = Console(width=60, record=True, file=io.StringIO())
        console.print(terminal.render(small(), frame))
        text = console.export_text()
        for expected in ("A [bold]title", "first note; [second] note", "shape=[a]", "[1.00, 3.00]", "a|b", "per s"):
            assert expected in text
    assert small().markdown() == (
        "| method | tokens per s |\n|---|---:|\n| model, shape=[a] | 2.00 [1.00, 3.00] |\n| *a\\|b* | **3** |\n"
    )
    rows = list(csv.reader(io.StringIO(small().csv())))
    assert rows == [["method", "tokens per s"], ["model, shape=[a]", "2.00 [1.00, 3.00]"], ["a|b", "3"]]


def test_a_full_table_that_is_too_wide_is_a_narrow_one() -> None:
    shown = []
    for width in (60, 30):
        console = Console(width=width, record=True, file=io.StringIO())
        terminal.show(console, small(), frame=terminal.Frame.FULL)
        shown.append(console.export_text())
    assert "│ 2.00 [1.00, 3.00] │" in shown[0] and "│" not in shown[1]
    assert "[1.00, 3.00]" in shown[1], "nothing is cut"


def has_latex() -> bool:
    if shutil.which("pdflatex") is None or shutil.which("kpsewhich") is None:
        return False
    return bool(subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True, text=True).stdout.strip())


@pytest.mark.skipif(not has_latex(), reason="needs pdflatex and booktabs.sty")
def test_latex_takes_the_table(tmp_path: Path) -> None:
    text = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs}\begin{document}"
    (tmp_path / "a.tex").write_text(f"{text}\n{latex.render(example(), 'tab:x')}\n\\end{{document}}\n")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    assert (tmp_path / "a.pdf").stat().st_size > 1000


def test_latex_stacks_what_is_long_and_escapes_what_it_would_read() -> None:
    tex = latex.render(example(), "tab:x")
    rows = [line.strip() for line in tex.splitlines() if "&" in line]
    assert rows[0].startswith(r"T & method and settings & \begin{tabular}[b]{@{}r@{}}mean \\ length\end{tabular}")
    stacked = r"\begin{tabular}[t]{@{}l@{}}model \\ \scriptsize shape=4 \\ \scriptsize a\_b=[1]\end{tabular}"
    assert rows[1] == rf"0 & {stacked} & 2.11 {{\scriptsize [2.00, 2.33]}} \\", "a column that says nothing is left out"
    assert rows[2] == r"0 & \emph{{}[typical]} & \textbf{1.82$\times$} {\scriptsize [1.67, 2.00]} \\"
    assert rows[4] == r"1 & rate=1e-5 & $-$1.5 {\scriptsize [$-$2.0, +1.0]} \\"
    assert tex.count(r"\midrule") == 3, "below the heading and between the sections, none at the end"
    assert r"\caption{org/Model\_1. Intervals at 95\%. Rule: \textless{}exact\textgreater{}.}" in tex


def test_a_web_page_has_sections_and_escapes_every_text() -> None:
    page = html.page(example())
    assert [body.count("<tr>") for body in page.split("<tbody>")[1:]] == [2, 1, 1]
    assert '<td class="left fold lossy">[typical]</td><td class="right best">1.82x <small>[1.67, 2.00]</small>' in page
    assert "<li>rule: &lt;exact&gt;</li>" in page
    table = Table((Column("<script>alert(1)</script>"),), '"><img src=x onerror=alert(1)>', ["<b onclick=x>"])
    table.add("<script src='http://x'></script>")
    assert not any(tag in html.page(table) for tag in ("<script", "<img", "<b ", "http-equiv"))
