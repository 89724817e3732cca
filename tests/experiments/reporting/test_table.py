"""One table, all media: nothing is lost, nothing is read as markup, and no text of a run can break out of a cell."""

import io

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.table import Cell, Col, Emphasis, Table, words

NASTY = r"""a\b{c}$d&e#f%g_h^i~j<k>l|m"n`o"""


def example() -> Table:
    columns = (Col("T"), words("method and settings"), Col("mean\nlength"), Col("none"))
    table = Table(columns, "org/Model_1", ["intervals at 95%", "rule: <exact>"])
    table.add("0", Cell("model", ("shape=4", "a_b=[1]"), joint=", "), Cell("2.11", ("[2.00, 2.33]",)), "-")
    best = Cell("1.82x", ("[1.67, 2.00]",), emphasis=Emphasis.BEST)
    table.add("0", Cell("[typical]", emphasis=Emphasis.LOSSY), best, "-", end_section=True)
    table.add("1", NASTY, Cell("-", emphasis=Emphasis.MISSED), "-", end_section=True)
    table.add("1", "rate=1e-5", Cell("-1.5", ("[-2.0, +1.0]",)), "-", end_section=True)
    return table


def small() -> Table:
    columns = [words("method"), Col("tokens\nper s")]
    table = Table(columns, "A [bold]title", ["first note", "[second] note"])
    table.add(Cell("model", ("shape=[a]",), joint=", "), Cell("2.00", ("[1.00, 3.00]",)), end_section=True)
    table.add(Cell("a|b", emphasis=Emphasis.LOSSY), Cell("3", emphasis=Emphasis.BEST))
    return table


def test_terminal_and_markdown() -> None:
    for frame in terminal.Frame:
        console = Console(width=60, record=True, file=io.StringIO())
        console.print(terminal.render(small(), frame))
        text = console.export_text()
        for expected in ("A [bold]title", "first note; [second] note", "shape=[a]", "[1.00, 3.00]", "a|b", "per s"):
            assert expected in text
    assert small().markdown() == (
        "| method | tokens per s |\n|---|---:|\n| model, shape=[a] | 2.00 [1.00, 3.00] |\n| *a\\|b* | **3** |\n"
    )


def test_latex_escapes_what_it_would_read() -> None:
    tex = example().latex("tab:x")
    rows = [line.strip() for line in tex.splitlines() if "&" in line]
    assert rows[0] == r"T & method and settings & mean length & none \\"
    assert rows[1] == r"0 & model, shape=4, a\_b=[1] & 2.11 [2.00, 2.33] & - \\"
    assert r"\bfseries" in rows[2] and r"\itshape" in rows[2] and "1.82x [1.67, 2.00]" in rows[2]
    assert r"a\textbackslash{}b\{c\}\$d\&e\#f\%g\_h" in rows[3]
    assert r"\caption{org/Model\_1. intervals at 95\%. rule: \textless{}exact\textgreater{}.}" in tex
    assert r"\toprule" in tex and "booktabs" in tex and r"\label{tab:x}" in tex
