"""The pictures of a replay: what can be told apart in them, and what is left out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reporting import style
from experiments.reporting.replay import gain_plot, reach_plot
from experiments.tracing.draft_sets import DraftSet
from experiments.tracing.figures import DraftSetFigures, RuleFigures
from specdec.types import DraftSampling


def rule(name: str, exactness: str, reach: tuple[float, ...], gain: float | None = None) -> RuleFigures:
    return RuleFigures(
        rule=name, exactness=exactness, accepted=sum(reach), accepted_interval=None, gain=gain,
        gain_interval=None if gain is None else (gain - 0.001, gain + 0.001), reach=reach,
        distance_tv=None, distance_kl=None, rounds=9, prompts=3,
    )  # fmt: skip


def drawn_on(kind: str, temperature: float) -> DraftSetFigures:
    drafts = DraftSet(
        settings=(kind,), folder=Path("run"), method="model", exactness="exact", temperature=temperature,
        laws=frozenset({DraftSampling.IID}), is_chain=True, max_nodes=4, max_depth=4,
    )  # fmt: skip
    rows = (
        rule("rejection", "exact", (0.6, 0.3)),
        rule("kseq", "exact", (0.6, 0.302), 0.002),
        rule("block", "exact", (0.65, 0.4), 0.15),
        rule("typical", "lossy", (0.9, 0.9), 0.9),
    )
    return DraftSetFigures(
        drafts=drafts, rows=rows, refused=(), bound=0.64, bound_interval=(0.6, 0.68), levels=(), error=None
    )


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.fixture
def figures() -> Iterator[list[Figure]]:
    """Every figure that is written while the test runs."""
    seen: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", lambda figure, path: seen.append(figure) or path)
        yield seen


def test_gains_are_a_matrix_with_lossy_rules_apart(figures: list[Figure], tmp_path: Path) -> None:
    done = [drawn_on(kind, t) for t in (0.6, 1.0) for kind in ("drafter.shape=4", "drafter.shape=[2,2]")]
    gain_plot(done, tmp_path / "x.png", "where", baseline="rejection")
    texts = texts_of(figures[0])
    assert texts.count("1.05*") == 4  # block, in every kind of drafts
    assert texts.count("0.90*") == 0  # kseq's gain is beyond chance, and too small to be seen
    assert "typical (lossy)" in texts
    assert {"4\niid", "[2,2]\niid", "T = 0.6", "T = 1"} <= set(texts)
    assert "gain over rejection" in " ".join(texts)


def test_rules_that_accept_alike_share_a_line_and_lossy_ones_are_left_out(
    figures: list[Figure], tmp_path: Path
) -> None:
    reach_plot(drawn_on("drafter.shape=4", 1.0), tmp_path / "x.png", "where")
    (axes,) = figures[0].axes
    assert len(axes.lines) == 2
    texts = " ".join(texts_of(figures[0]))
    assert "rejection = kseq" in texts
    assert "typical" not in texts
    assert "bound of any lossless rule, position 1, with its interval" in texts
