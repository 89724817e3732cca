"""Pictures can be read in a paper's column: no small letters, both formats, markers that belong to a method."""

import contextvars
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reporting import style
from experiments.reporting.run_plots import RUN_PLOTS, acceptance_plot, category_plot
from experiments.results.metrics import AcceptanceByPosition
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


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("suffix tree or small model", ["suffix tree or", "small model"]),
        ("drafter.shape=[3,2,1,1]", ["drafter.shape=", "[3,2,1,1]"]),
        ("averyveryverylongname", ["averyveryverylongname"]),
    ],
)
def test_a_label_is_broken_between_words(text: str, lines: list[str]) -> None:
    assert style.wrapped(text, 14).splitlines() == lines


def test_shares_of_few_rounds_say_so(figures: list[Figure], tmp_path: Path) -> None:
    found = two_temperatures()
    few = AcceptanceByPosition(rounds=(40, 8), unconditional=(0.5, 0.25), conditional=(0.5, 1.0))
    methods = [replace(m, acceptance_by_position=few) for m in found.methods if m.acceptance_by_position.rounds]
    acceptance_plot(replace(found, methods=tuple(methods[:1])), tmp_path / "x.png", "conditions")
    panel = figures[0].axes[0]
    assert [text.get_text() for text in panel.texts] == ["8"], "100 % of 8 rounds"
    assert [bar.get_alpha() for bar in panel.patches] == [1.0, 0.4]


def test_a_diamond_has_the_colour_of_its_bar(figures: list[Figure], tmp_path: Path) -> None:
    acceptance_plot(two_temperatures(), tmp_path / "x.png", "conditions")
    panel = figures[0].axes[0]
    bars = {round(bar.get_x() + bar.get_width() / 2, 6): bar.get_facecolor()[:3] for bar in panel.patches}  # type: ignore[attr-defined]
    diamonds = [line for line in panel.lines if line.get_marker() == "D"]
    assert diamonds
    for line in diamonds:
        (x,) = line.get_xdata()
        assert bars[round(x, 6)] == to_rgb(line.get_markeredgecolor())  # type: ignore[arg-type]


def luminance(color: str) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_colours_are_the_named_palette_and_markers_differ_before_colours_repeat() -> None:
    assert all(re.fullmatch(r"#[0-9a-f]{6}", color) for color in style.COLORS)
    assert len(set(style.COLORS)) == len(style.COLORS)
    assert len(set(style.MARKERS)) > len(style.COLORS)
    # Neighbours in the order of use differ in grey, too.
    assert all(abs(luminance(a) - luminance(b)) > 0.02 for a, b in zip(style.COLORS, style.COLORS[1:], strict=False))
