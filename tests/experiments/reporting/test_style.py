"""Pictures can be read in a paper's column; the table of a run of several methods."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from experiments.reporting import style, terminal
from experiments.reporting.run_plots import RUN_PLOTS, acceptance_plot, category_plot
from experiments.reporting.run_tables import methods_table
from experiments.results.runs import Run
from tests.experiments.made_runs import run_of
from tests.experiments.results.test_summary import PAIRS, record


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that a test would save."""
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self))
    return seen


@pytest.fixture(scope="module")
def lossy() -> Run:
    """Two categories, two temperatures, and a rule that is lossy."""
    made = [replace(r, exactness=r.exactness and "lossy") for r in PAIRS]
    return run_of([replace(r, temperature=t, category=c) for r in made for t in (0.0, 1.0) for c in "xy"], series=4)


def test_no_letter_is_too_small_no_figure_too_wide_and_a_lossy_rule_says_so(
    figures: list[Figure], lossy: Run, tmp_path: Path
) -> None:
    for name, plot in {**RUN_PLOTS, "categories.png": category_plot}.items():
        before = len(figures)
        plot(lossy, tmp_path / name, "conditions")
        for figure in figures[before:]:
            assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert min(float(text.get_fontsize()) for text in texts) >= style.SMALLEST
            assert any("lossy" in text.get_text() for text in texts), name
    assert len(figures) >= 2 * len(RUN_PLOTS), "PNG and SVG"


def test_svg_and_png_are_written_and_do_not_depend_on_the_time(lossy: Run, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        assert acceptance_plot(lossy, tmp_path / name, "conditions") == tmp_path / name
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second and "position in the draft" in first  # text, not outlines
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


LABELS = {"fast": "model: chain of 3", "wide": "model: tree of 6"}
TIMES = {"draft": 0.25, "verify": 0.5}


def ran(**more: Any) -> Run:
    records = []
    for number, prompt in enumerate("abcd"):
        records.append(record(prompt, "plain", number, 2.0, 10))
        records.append(record(prompt, "fast", number, 1.0, 10, stage_seconds=TIMES))
        wide = record(prompt, "wide", number, 0.5, 10, stage_seconds={"draft": 0.125, "verify": 0.25})
        records.append(replace(wide, accepted=(3, 1), expected_accepted=(2.5, 1.0), proposed_nodes=(9, 9)))
    run = run_of(records, planned=4, series=3, **more)
    run.manifest["config"]["labels"] = LABELS
    return run


def test_the_table_says_what_was_measured() -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(terminal.render(methods_table(ran(), "a title")))
    shown = console.export_text()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│ 0 " in line]
    assert cells[0] == ["0", "plain decoding", "1.00", "-", "-", "-", "5.0"]
    assert cells[1] == ["0", "model: chain of 3", "2.00 [2.00, 2.00]", "6.0", "25%", "2.00x [2.00, 2.00]", "10.0"]
    assert cells[2] == ["0", "model: tree of 6", "3.00 [3.00, 3.00]", "9.0", "25%", "4.00x [4.00, 4.00]", "20.0"]
    assert "INCOMPLETE" not in shown
    table = methods_table(ran(compared_with="fast"), "")
    assert "| 0 | model: tree of 6 | **3.00 [3.00, 3.00]** | +0.75 [+0.75, +0.75] | 9.0 | 25% |" in table.markdown()
    assert table.notes[-1] == "difference: from model: chain of 3 on the same prompts, given the drafts"
