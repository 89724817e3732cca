"""Pictures can be read in a paper's column: no small letters, both formats, alarms that stay."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reporting import style
from experiments.reporting.run_plots import RUN_PLOTS, acceptance_plot, category_plot
from experiments.results.summary import Summary
from tests.experiments.results.test_summary import PAIRS, summary_of


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that a test would save."""
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self))
    return seen


@pytest.fixture(scope="module")
def lossy() -> Summary:
    """Two categories, two temperatures, and a rule that is lossy."""
    made = [replace(r, exactness=r.exactness and "lossy") for r in PAIRS]
    return summary_of([replace(r, temperature=t, category=c) for r in made for t in (0.0, 1.0) for c in "xy"], series=4)


def test_no_letter_is_too_small_no_figure_too_wide_and_a_lossy_rule_says_so(
    figures: list[Figure], lossy: Summary, tmp_path: Path
) -> None:
    for name, plot in {**RUN_PLOTS, "categories.png": category_plot}.items():
        before = len(figures)
        plot(lossy, tmp_path / name, "conditions")
        for figure in figures[before:]:
            assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert min(text.get_fontsize() for text in texts) >= style.SMALLEST
            assert any("lossy" in text.get_text() for text in texts), name  # type: ignore[union-attr]
    assert len(figures) >= 2 * len(RUN_PLOTS), "PNG and SVG"


def test_svg_and_png_are_written_and_do_not_depend_on_the_time(lossy: Summary, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        assert acceptance_plot(lossy, tmp_path / name, "conditions") == tmp_path / name
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second and "position in the draft" in first  # text, not outlines
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
