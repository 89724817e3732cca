"""Pictures can be read in a paper's column: no small letters, both formats, markers that belong to a method."""

import contextvars
from collections.abc import Iterator
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
def figures() -> Iterator[list[Figure]]:
    """Every figure that is saved while the test runs."""
    seen: list[Figure] = []
    save = Figure.savefig

    def spy(self: Figure, *args: object, **kwargs: object) -> None:
        seen.append(self)
        save(self, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", spy)
        yield seen


def two_temperatures() -> Summary:
    rows = [replace(r, temperature=t, category=c) for r in PAIRS for t in (0.0, 1.0) for c in "xy"]
    return summary_of(rows, series=4)


def test_no_letter_is_too_small_and_no_figure_too_wide(figures: list[Figure], tmp_path: Path) -> None:
    for name, plot in {**RUN_PLOTS, "categories.png": category_plot}.items():
        plot(two_temperatures(), tmp_path / name, "conditions")
    assert len(figures) >= 2 * len(RUN_PLOTS)
    for figure in figures:
        assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= style.SMALLEST


def test_svg_and_png_are_written_and_do_not_depend_on_the_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        assert acceptance_plot(two_temperatures(), tmp_path / name, "conditions") == tmp_path / name
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert "position in the draft" in first  # text, not outlines
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_title_the_alarm_stays(figures: list[Figure], tmp_path: Path) -> None:
    context = contextvars.copy_context()
    context.run(style.TITLES.set, False)
    made = style.new_figure(style.PAGE, 2)
    made.subplots()
    context.run(style.title, made, "a title", "conditions", alarm="NOT LOSSLESS: fast")
    texts = " ".join(text.get_text() for text in made.findobj(Text))  # type: ignore[union-attr]
    assert "NOT LOSSLESS: fast" in texts and "a title" not in texts and "conditions" not in texts
    context.run(acceptance_plot, two_temperatures(), tmp_path / "x.png", "conditions")
    assert not figures[0].get_suptitle()
    style.title(made, "a title", "conditions")
    assert made.get_suptitle() == "a title\nconditions", "only where it was asked for"
