"""The four kinds of requests: their figures by hand, what is said and drawn of them, and what is refused."""

import json
from pathlib import Path

import pytest

from experiments.reporting.quadrants import quadrants, report_quadrants, table
from experiments.reporting.table import Emphasis
from experiments.results.frame import Figures
from experiments.results.records import Record
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap
from tests.experiments.made_runs import loaded
from tests.experiments.results.outputs import moments, output

QUICK = Bootstrap(resamples=100)
TARGET = {"name": "bundled/target", "kv_bytes_per_position": 1e6}
INPUTS, OUTPUTS = (10, 100), (4, 40)
# Drafting waits longer for the first token, and takes half the time for every further one.
FIRST = {"plain": 1.0, "fast": 1.25}
FURTHER = {"plain": 0.1, "fast": 0.05}


def records(tokens: int, written: int) -> list[Record]:
    """Two batches of two requests, of which the second one starts where its slot is free."""
    found = []
    for number in range(4):
        for method in ("plain", "fast"):
            first = FIRST[method] * tokens / 10
            seen = [(first + FURTHER[method] * place, 1) for place in range(written)]
            fields = {"batch": number // 2, "prompt_tokens": tokens, "seconds": seen[-1][0], "accepted": (0,) * written}
            fields |= {"proposed_depth": (1,) * written, "equals_plain": None if method == "plain" else True}
            found.append(output(f"p{number}", method, **fields | moments(*seen, prefilled=first / 2)))
    return found


def run_of(folder: Path, tokens: int, most: int) -> Run:
    config = {"dataset": {"tokens": tokens}, "sampling": {"max_new_tokens": most}}
    return loaded(folder, records=records(tokens, most), config=config, target=TARGET)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("sweep")
    pairs = [(tokens, most) for most in OUTPUTS for tokens in reversed(INPUTS)]  # in any order
    return [run_of(folder / str(number), *pair) for number, pair in enumerate(pairs)]


@pytest.fixture(scope="module")
def found(runs: list[Run]) -> dict[str, Figures]:
    return {each.quadrant: each for each in quadrants(runs, QUICK)}


def test_every_quadrant_has_its_own_metric_by_hand(found: dict[str, Figures]) -> None:
    assert list(found) == ["SS", "SL", "LS", "LL"]
    own = {name: quadrant.methods[0].own for name, quadrant in found.items()}
    # SS: 4 requests in two batches of 1.3 s. LL: a request holds its slot for 10 s and 39 more tokens.
    assert own == pytest.approx({"SS": 60 * 4 / 2.6, "SL": 100.0, "LS": 10_000.0, "LL": 13.9})
    gains = {name: quadrant.methods[1].gain for name, quadrant in found.items()}
    assert gains == pytest.approx({"SS": 1.3 / 1.4, "SL": 2.0, "LS": 0.8, "LL": 13.9 / 14.45})
    assert all(quadrant.methods[1].gain_interval is not None for quadrant in found.values())


def test_what_is_written_and_said(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_quadrants(runs, tmp_path, ["NO RESULT of job 7"])
    said = " ".join(capsys.readouterr().out.split())
    assert "what counts is the time per output token after the first, 100 ms when decoding plainly" in said
    assert "best: fast, 2.00x" in said
    assert (
        "what counts is the time to first token, 10000 ms when decoding plainly; worse than plain decoding: fast"
        in said
    )
    assert "LL 100 to 140 MB (7 per GB)" in said and "NO RESULT of job 7" in said and "INCOMPLETE: 4 of 4 runs" in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "quadrants.md", "quadrants.json", "quadrants.png", "quadrants.svg"
    }  # fmt: skip
    figures = json.loads((tmp_path / "quadrants.json").read_text())["quadrants"]
    assert [each["quadrant"] for each in figures] == ["SS", "SL", "LS", "LL"]
    assert "long input (100 tokens), short output (4)" in (tmp_path / "quadrants.svg").read_text()


@pytest.mark.parametrize(
    ("interval", "marked"), [((1.2, 3.0), Emphasis.BEST), ((0.9, 3.0), Emphasis.NONE)], ids=["certain", "holds 1"]
)
def test_only_a_certain_gain_is_marked(
    found: dict[str, Figures], interval: tuple[float, float], marked: Emphasis
) -> None:
    plain, fast = found["SL"].methods
    quadrant = found["SL"] | {"methods": [plain, fast | {"gain": 2.0, "gain_interval": interval}]}
    assert table([quadrant], {}).rows[1][-1].emphasis is marked


def test_three_quadrants_are_shown_and_other_runs_refused(runs: list[Run], tmp_path: Path) -> None:
    names = [each.quadrant for each in quadrants([run for run in runs if run is not runs[0]], QUICK)]
    assert len(names) == 3
    with pytest.raises(ValueError, match=r"quadrants need runs at two input lengths.*dataset.tokens=10 and"):
        quadrants([run for run in runs if run.manifest["config"]["dataset"]["tokens"] == 10], QUICK)
    with pytest.raises(ValueError, match="each pair once"):
        quadrants([*runs, runs[0]], QUICK)
    with pytest.raises(ValueError, match=r"has no dataset.tokens: .*give dataset=joined or dataset=context"):
        quadrants([loaded(tmp_path / "run")], QUICK)
