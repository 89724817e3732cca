"""The command in virtual time: what it records, plays again, compares with the engine, and refuses."""

import json
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from experiments.load.__main__ import load
from experiments.load.dense import Dense
from experiments.load.run import DONE
from experiments.reporting.load_validation import Pair
from experiments.results.frame import Figures
from tests.experiments.runs import Configure

QUICK = ["drafter=ngram", "method=ngram", "requests=5", "arrival.rate=500", "title=false", "target.dtype=float32"]
SMALL = ["workload.classes.chat={input: 12, output: 9, spread: 0.5, users: 2}", "engine.max_length=64"]
COSTS = "clock.costs=llama_8b_h100"


def test_traces_are_recorded_and_played_without_a_model(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy rounds in virtual time are the engine's, whatever the policy of the study; the oracle has no regret."""
    assert load(configure("load", *tiny, *QUICK, *SMALL, "clock=record")) == []
    shown = capsys.readouterr().out
    assert "Dense traces of acceptance" in shown and "NGramDrafter" in shown
    file = tmp_path / "out" / "traces.safetensors"
    traces = Dense.load(file)
    assert len(traces.lengths) == 5 and traces.facts["temperature"] == 0
    real = load(configure("load", *tiny, *QUICK, *SMALL, f"out={tmp_path}/real"))
    given = ["clock=virtual", COSTS, f"clock.traces={file}", "clock.seeds=2", "rates=[100,500]", "target.name=nowhere"]
    policies = ["+policy@policies.best=oracle", "+policy@policies.fixed=fixed"]
    runs = load(configure("load", *tiny, *QUICK, *SMALL, *given, *policies, f"out={tmp_path}/virtual"))
    assert [(run.method, run.rate) for run in runs] == [
        (name, rate) for rate in (100.0, 500.0) for name in ("plain", "best", "fixed")
    ]
    assert all((run.requests.outcome == DONE).all() and run.facts["seeds"] == 2 for run in runs)
    assert runs[2].requests.rounds[:5].tolist() == real[1].requests.rounds.tolist()
    found = json.loads((tmp_path / "virtual" / "load.json").read_text())
    assert {row["method"] for row in found["pays"]} == {"best", "fixed"} and found["pays"][0]["regret"] == 0
    shown = capsys.readouterr().out
    assert "VIRTUAL TIME, llama_8b_h100" in shown and "Does it pay" in shown and "regret" in shown
    assert (tmp_path / "virtual" / "pays.png").is_file()


def test_real_and_virtual_time_stand_side_by_side(
    configure: Configure, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The costs are another machine's; how much slower this one is, is said, and so is every verdict."""
    runs = load(configure("load", *tiny, *QUICK, *SMALL, "clock=both", COSTS))
    assert [run.method for run in runs] == ["plain", "ngram"] and not any(run.facts["virtual"] for run in runs)
    found = json.loads((tmp_path / "out" / "validation.json").read_text())["pairs"]
    assert [pair["method"] for pair in found] == ["plain", "ngram"]
    assert all({"throughput", "tpot", "ttft", "beyond_knee", "valid"} < pair.keys() for pair in found)
    assert (tmp_path / "out" / "validation.png").is_file() and (tmp_path / "out" / "traces.safetensors").is_file()
    shown = " ".join(capsys.readouterr().out.split())
    assert "Virtual time against the engine" in shown
    assert "times as long as when costs were calibrated" in shown
    assert runs[0].facts["reference_seconds"][0] > 0
    assert all(run.facts["recordings"]["replays"] > 0 and not run.facts["recordings"]["refused"] for run in runs)


def figures(throughput: float, tpot: float, ttft: float, queue: float = 0.0) -> Figures:
    return Figures(
        output_tokens_per_second=throughput,
        tpot=Figures(p50=tpot, p99=tpot),
        ttft=Figures(p50=ttft, p99=ttft),
        queue=Figures(p50=queue),
        e2e=Figures(p50=1.0 + queue),
    )


def test_errors_are_judged_below_the_knee() -> None:
    real = figures(100, 0.02, 0.3)
    assert Pair(real, figures(104, 0.0185, 0.34)).verdict == "valid"
    for off in (figures(106, 0.02, 0.3), figures(100, 0.0225, 0.3), figures(100, 0.02, 0.2)):
        assert Pair(real, off).verdict == "OFF"
    assert Pair(figures(100, 0.02, 3.0, queue=0.6), figures(100, 0.02, 4.0)).verdict == "beyond the knee: OFF"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clock=both"], "clock=both needs to know how long rounds take: give clock.costs=FILE"),
        (["clock=virtual", COSTS], "clock=virtual needs to know what is accepted: give clock.traces=FILE"),
        (["clock=virtual", COSTS, "clock.traces=no.safetensors"], "no.safetensors holds no dense traces"),
        (["clock=virtual", "clock.costs=no.json", "clock.traces=x"], "no.json holds no calibrated costs"),
        (["clock=virtual", "clock.costs={other: x}", "clock.traces=x"], "clock.costs has other, and not plain"),
        (["clock=both", COSTS, "clock.seeds=0"], "clock.seeds=0: give at least 1"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    words: list[str], said: str, configure: Configure, tiny: list[str]
) -> None:
    with pytest.raises((ValueError, InstantiationException), match=said):
        load(configure("load", *tiny, *QUICK, *SMALL, *words, "target.name=nowhere"))


def test_a_policy_of_nodes_is_refused_before_the_load_is_played(
    configure: Configure, tiny: list[str], tmp_path: Path
) -> None:
    drafter = f"drafter.name={Path(tiny[0].partition('=')[2]).parent / 'drafter'}"
    words = [*QUICK[1:], *SMALL, "drafter=model", drafter, "policy=confidence", "clock=both", COSTS]
    with pytest.raises(ValueError, match=r"chooses among drafted nodes|drafts by more than the request itself"):
        load(configure("load", *tiny, *words))
    assert not (tmp_path / "out").exists()
