"""Tables in all media; pictures a paper's column can hold; progress."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from experiments.reporting import progress, style, terminal
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.table import Cell, Col, Emphasis, Table, three_digits, words
from tests.experiments.made_runs import run_of
from tests.experiments.results.test_summary import PAIRS


def test_letters_are_large_figures_narrow_and_a_lossy_rule_says_so(tmp_path: Path, monkeypatch) -> None:
    """Two categories, two temperatures, and a rule that is lossy."""
    made = [replace(r, exactness=r.exactness and "lossy") for r in PAIRS]
    lossy = run_of([replace(r, temperature=t, category=c) for r in made for t in (0.0, 1.0) for c in "xy"], series=4)
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    for name, plot in RUN_PLOTS.items():
        before = len(figures)
        plot(lossy, tmp_path / name, "conditions")
        for figure in figures[before:]:
            assert figure.get_figwidth() == style.PAGE
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert min(float(text.get_fontsize()) for text in texts) >= style.SMALLEST
            assert any("lossy" in text.get_text() for text in texts), name
    assert len(figures) >= 2 * len(RUN_PLOTS), "PNG and SVG"


NASTY = r"""a\b{c}$d&e#f%g_h^i~j<k>l|m"n`o"""


def example() -> Table:
    columns = (Col("T"), words("method and settings"), Col("mean\nlength"), Col("none"))
    table = Table(columns, "org/[bold]Model_1", ["intervals at 95%", "rule: <exact>"])
    table.add("0", Cell("model", ("shape=4", "a_b=[1]"), joint=", "), Cell("2.11", ("[2.00, 2.33]",)), "-")
    best = Cell("1.82x", ("[1.67, 2.00]",), emphasis=Emphasis.BEST)
    table.add("0", Cell("[typical]", emphasis=Emphasis.LOSSY), best, "-", end_section=True)
    table.add("1", NASTY, Cell("-", emphasis=Emphasis.MISSED), "-", end_section=True)
    return table


def test_terminal_and_markdown() -> None:
    for stacked in (False, True):
        console = Console(width=90, record=True, file=io.StringIO())
        console.print(terminal.render(example(), stacked=stacked))
        text = console.export_text()
        said = ("[bold]Model_1", "intervals at 95%; rule: <exact>", "a_b=[1]", "[2.00, 2.33]", "k>l|m", "length")
        assert [each for each in said if each not in text] == []
    head, rule, first, second, third = example().markdown().splitlines()
    assert (head, rule) == ("| T | method and settings | mean length | none |", "|---:|---|---:|---:|")
    assert first == "| 0 | model, shape=4, a_b=[1] | 2.11 [2.00, 2.33] | - |"
    assert second == "| 0 | *[typical]* | **1.82x [1.67, 2.00]** | - |" and r"k>l\|m" in third


def test_a_small_figure_does_not_read_as_nothing() -> None:
    texts = {0.0: "0.0", 0.24: "0.24", 0.0042: "0.0042", 9.83: "9.8", 159.2: "159.2"}
    assert {value: Col("tokens/s", "rate", ".1f").cell({"rate": value}).text for value in texts} == texts
    digits = {0.0: "0.00", 0.0042: "0.0042", 15.92: "15.9", 1592.0: "1,592"}
    assert {value: three_digits(value) for value in digits} == digits


def test_latex_escapes_what_it_would_read() -> None:
    tex = example().latex("tab:x")
    rows = [line.strip() for line in tex.splitlines() if "&" in line]
    assert rows[1] == r"0 & model, shape=4, a\_b=[1] & 2.11 [2.00, 2.33] & - \\"
    assert r"\bfseries" in rows[2] and r"\itshape" in rows[2] and "1.82x [1.67, 2.00]" in rows[2]
    assert r"a\textbackslash{}b\{c\}\$d\&e\#f\%g\_h" in rows[3]
    assert r"\caption{org/[bold]Model\_1. intervals at 95\%. rule: \textless{}exact\textgreater{}.}" in tex
    assert r"\toprule" in tex and "booktabs" in tex and r"\label{tab:x}" in tex


def test_the_time_left_is_by_what_was_measured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Neither what was warmed up before, nor what an earlier attempt has done."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress(10, passed=2) as shown:
        for done, seconds in ((0, 300.0), (2, 0.0), (3, 40.0)):
            now[0] += seconds
            shown.update(done)
    *_, said = capsys.readouterr().err.splitlines()
    assert said == f"3 of 10 prompts, 40 s elapsed, about {progress.duration(40 * 7)} left"
