"""Acceptance, time and caches by length of the context: figures by hand, what is said and drawn, what is refused."""

from pathlib import Path

import pytest

from experiments.reporting.studies.context import CONTEXT, report
from experiments.results.records import Record
from experiments.results.rows import positions, rows_of
from experiments.results.runs import Run
from tests.experiments.made_runs import loaded
from tests.experiments.results.outputs import output

TARGET = {"name": "bundled/target", "kv_bytes_per_position": 1e6}
ACCEPTED = {128: (2, 2, 1), 4096: (1, 0, 0)}


def records(tokens: int) -> list[Record]:
    """Two batches of two prompts, which share their rounds."""
    found = []
    for number in range(4):
        fields = {"batch": number // 2, "prompt_tokens": tokens, "tokens": 8}
        found.append(output(f"p{number}", "plain", accepted=(0,) * 8, seconds=2.0, **fields))
        stages = {"prefill": 1.0, "draft": 0.003 * (tokens / 128) ** 0.5, "verify": 0.03, "accept": 0.001}
        drafted = {"accepted": ACCEPTED[tokens], "proposed_depth": (2, 2, 2), "stage_seconds": stages}
        found.append(output(f"p{number}", "fast", equals_plain=True, **drafted, **fields))
    return found


def run_of(folder: Path, tokens: int) -> Run:
    facts = {"drafter_cache": {"fast": {"bytes_per_position": 1e5, "window": 512}}, "target": TARGET}
    return loaded(folder, prompts=4, records=records(tokens), config={"dataset": {"tokens": tokens}}, **facts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("sweep")
    return [run_of(folder / str(tokens), tokens) for tokens in reversed(ACCEPTED)]  # in any order


def test_figures_by_hand(runs: list[Run]) -> None:
    short, long = rows_of(report.frame(runs))
    assert (short[CONTEXT], long[CONTEXT]) == (128, 4096)
    assert short["mean_acceptance_length"] == pytest.approx(1 + 5 / 3) and short["change"] is None
    assert [long[name] for name in ("change", "change_low", "change_high")] == pytest.approx([-4 / 3] * 3)
    assert positions(short) == [1, 2 / 3] and positions(long) == [1 / 3, 0]
    # Two batches of three rounds: each spends its seconds once.
    assert short["draft"] == pytest.approx(0.001) and short["verify"] == pytest.approx(0.01)
    assert long["draft"] == pytest.approx(0.001 * 32**0.5)
    assert (short["drafter_bytes"], short["target_bytes"]) == (136e5, 136e6)


def test_what_is_written_and_said(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(runs, tmp_path, ["NO RESULT of job 7"])
    said = " ".join(capsys.readouterr().out.split())
    assert "fast, T=0: 2.67 tokens per round at 128 tokens of context, 1.33 at 4,096: less (paired -1.33" in said
    assert "its drafts take 1.00 ms per round, then 5.66; it sees 512 positions, and its cache holds them all" in said
    assert "NO RESULT of job 7" in said
    line = "| fast | 0 | 4,096 | 1.33 [1.33, 1.33] | -1.33 [-1.33, -1.33] | 0.33 0.00 | 5.66; 10.0 | 410; 4104 |"
    assert line in (tmp_path / "context.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {f"context.{end}" for end in ("md", "json", "png", "svg")}
