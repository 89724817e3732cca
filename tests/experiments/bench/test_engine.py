"""The engine's benchmark: one small run from end to end, what follows from its times, and what it needs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.engine import rounds
from experiments.bench.engine import run as command
from experiments.bench.engine.settings import SECTIONS
from experiments.bench.models import SHAPES
from experiments.measuring.peaks import measure_peaks
from tests.shapes import shapes_unchecked

SMALL = "model=tiny dtype=float32 device=cpu nodes=[1,5] batch=[1,2] context=[32,16] tokens=6 repeats=1 seconds=1000"
SMALL += " threads=1 schemes=[int8] recordings=[rounds]"


def run(out: Path, sections: tuple[str, ...]) -> dict[str, Any]:
    """The files and results of a small run."""
    with pytest.MonkeyPatch.context() as patch, shapes_unchecked():
        patch.setattr(sys, "argv", ["bench", *SMALL.split(), f"only=[{','.join(sections)}]", f"out={out}"])
        patch.setattr(rounds, "PAIRS", PAIRS)
        patch.setattr(rounds, "WARM_UP", 2)
        # A roof from little memory: what is measured is not true, and takes no time.
        patch.setattr(
            command, "measure_peaks", lambda *given, seconds: measure_peaks(*given, seconds=0.02, largest=1 << 20)
        )
        command.main()
    found = json.loads((out / "results.json").read_text())
    return {**found, "files": sorted(path.name for path in out.iterdir())}


QUICK = ("steps", "rounds", "memory")
PAIRS = [rounds.PAIRS[0], rounds.PAIRS[1], ("chain", "block"), ("tree", "traversal")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("engine"), QUICK)


@pytest.mark.full
def test_a_run_writes_figures_and_pictures(results: dict[str, Any]) -> None:
    assert results["schema"] == 1
    assert set(results["seconds"]) == set(QUICK)
    assert {"results.json", "roofline.png", "verify_cost.png"} <= set(results["files"])
    assert results["versions"]["torch"] and results["device"]["name"]
    assert results["device"]["copy"] > 1e8 and results["device"]["read"] > 1e8 and results["device"]["flops"] > 1e8

    steps = results["steps"]
    assert {(s["batch"], s["nodes"], s["context"]) for s in steps} >= {(1, 1, 32), (1, 5, 32), (2, 5, 32), (1, 5, 16)}
    assert {s["executor"] for s in steps} == {"ReplayExecutor", "EagerExecutor", "InvariantExecutor"}
    assert len({s["backend"] for s in steps}) >= 2
    assert {(s["batch"], s["nodes"]) for s in steps if s["invariant"]} == {(1, 1), (1, 5), (2, 1), (2, 5)}
    copy, flops = results["device"]["copy"], results["device"]["flops"]
    for step in steps:
        assert step["bandwidth_utilization"] == pytest.approx(step["bytes"] / step["seconds"] / copy)
        assert step["flop_utilization"] == pytest.approx(step["flops"] / step["seconds"] / flops)
        assert step["of_least"] == pytest.approx(step["seconds"] / step["least_seconds"])
        assert 0 < step["best"] <= step["seconds"] and step["launches"] > 10


@pytest.mark.full
def test_rounds_have_stages_and_counts_and_are_played_in_every_way(results: dict[str, Any]) -> None:
    played = {(r["drafter"], r["rule"]): r for r in results["rounds"]}
    assert set(played) == set(PAIRS)
    for each in played.values():
        assert 0 < sum(each["stages"].values()) <= 1.2 * each["seconds"]
        assert 0 < each["launches_outside"] < each["launches"] and 0 < each["outside"] < 1
    assert played["none", "none"]["tokens_per_round"] == 1
    inside = {pair: each["launches"] - each["launches_outside"] for pair, each in played.items()}
    assert inside["chain", "block"] > 2 * inside["none", "none"], "the forwards of what drafts are no part of the rest"
    assert {r["recording"] for r in results["rounds"]} == {"auto"}, "the figures are those of the usual way"
    found = {(r["drafter"], r["rule"], r["recording"], r["invariant"]): r for r in results["ways"]}
    assert set(found) == {(*pair, *way) for pair in PAIRS[:3] for way in [("rounds", False), ("auto", True)]}
    assert all(each["seconds"] > 0 and each["rounds"] > 0 for each in found.values())

    named = {each["what"]: each for each in results["goals"]}
    assert results["memory"]["weights"] > 4 * SHAPES["tiny"]["vocab_size"] * SHAPES["tiny"]["hidden_size"]
    assert named["whole token / llama.cpp's, f32 (110M)"]["met"] is None, "another shape was measured"
    launches = next(each for what, each in named.items() if "traversal, kseq" in what)
    assert launches["measured"] == played["tree", "traversal"]["launches_outside"]


@pytest.mark.full
def test_predictions_and_quantized_weights(tmp_path: Path) -> None:
    results = run(tmp_path, tuple(section for section in SECTIONS if section not in QUICK))
    for each in results["synthetic"]:
        assert each["measured"] / each["predicted_from_tokens"] == pytest.approx(each["ratio"])
        assert each["tokens_per_round_given"] == pytest.approx((1 - 0.8**5) / (1 - 0.8))
        assert each["equal_to_plain"] == each["outputs"] == each["batch"], "float32"
    schemes = {(r["scheme"], r["nodes"]) for r in results["weights"]}
    assert {("int8", 1), ("int8", 9)} == {(scheme, nodes) for scheme, nodes in schemes if "float" not in scheme}
    assert all(r["ratio"] == pytest.approx(r["unquantized"] / r["seconds"]) for r in results["weights"])
    assert any("llama" in each["what"] for each in results["left_out"]) or results["llama_cpp"]


@pytest.mark.parametrize("word", ["model=lama", "device=gpu0", "context=[100000]"])
def test_bad_options_are_one_sentence(word: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["experiments.bench.engine", "model=tiny", "threads=1", word])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert capsys.readouterr().err.startswith(f"error: {word.partition('=')[0]}=")
