"""The pictures of a replay: what can be told apart in them, and what is left out."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments.reporting import style
from experiments.reporting.replay import gain_plot, reach_plot
from experiments.results.frame import Figures
from experiments.tracing.draft_sets import DraftSet
from specdec.types import DraftSampling


def rule(name: str, exactness: str, reach: tuple[float, ...], gain: float | None = None) -> Figures:
    return Figures(
        rule=name, exactness=exactness, accepted=sum(reach), accepted_interval=None, gain=gain,
        gain_interval=None if gain is None else (gain - 0.001, gain + 0.001), reach=reach,
        distance_tv=None, distance_kl=None, rounds=9, prompts=3,
    )  # fmt: skip


ROWS = (
    rule("rejection", "exact", (0.6, 0.3)),
    rule("kseq", "exact", (0.6, 0.302), 0.002),
    rule("block", "exact", (0.65, 0.4), 0.15),
    rule("typical", "lossy", (0.9, 0.9), 0.9),
)


def drawn_on(kind: str, temperature: float) -> Figures:
    drafts = DraftSet(
        settings=(kind,), folder=Path("run"), method="model", exactness="exact", temperature=temperature,
        laws=frozenset({DraftSampling.IID}), is_chain=True, max_nodes=4, max_depth=4,
    )  # fmt: skip
    return Figures(
        drafts=drafts.label, temperature=temperature, bound_at_1=0.64, bound_at_1_interval=(0.6, 0.68), rules=ROWS
    )


def test_gains_are_a_matrix_and_rules_that_accept_alike_share_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure) or path)
    done = [drawn_on(kind, t) for t in (0.6, 1.0) for kind in ("drafter.shape=4", "drafter.shape=[2,2]")]
    gain_plot(done, tmp_path / "x.png", "where", baseline="rejection")
    reach_plot(done[0], tmp_path / "x.png", "where")
    gains, reach = ([text.get_text() for text in each.findobj(Text) if text.get_text()] for each in figures)  # type: ignore[union-attr]
    assert gains.count("1.05*") == 4  # block, in every kind of drafts
    assert gains.count("0.90*") == 0  # kseq's gain is beyond chance, and too small to be seen
    assert {"typical (lossy)", "4\niid", "[2,2]\niid", "T = 0.6", "T = 1"} <= set(gains)
    assert "gain over rejection" in " ".join(gains)
    (axes,) = figures[1].axes
    assert len(axes.lines) == 2 and "rejection = kseq" in " ".join(reach)
    assert "typical" not in " ".join(reach), "lossy rules are left out"
    assert "bound of any lossless rule, position 1, with its interval" in reach
