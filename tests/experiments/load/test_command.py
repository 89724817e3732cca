"""The whole command on tiny models: what it plays, leaves, and keeps when somebody interrupts it."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.load.__main__ import load, main
from experiments.load.run import DONE, UNFINISHED, load_runs
from specdec.engine.engine import Engine
from tests.experiments.runs import Configure, launched

QUICK = ["drafter=ngram", "method=ngram", "requests=6", "arrival.rate=500", "title=false"]
SMALL = ["workload.classes.chat={input: 12, output: 6, spread: 0.5, users: 2}"]


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.reporting.load.PICTURES", {})


def test_plain_decoding_and_a_method_get_the_same_requests_at_the_same_moments(
    configure: Configure, tiny: list[str], tmp_path: Path
) -> None:
    runs = load(configure("load", *tiny, *QUICK, *SMALL, "rates=[200,500]", "sla.ttft=100"))
    assert [(run.method, run.rate) for run in runs] == [
        (name, rate) for rate in (200.0, 500.0) for name in ("plain", "ngram")
    ]
    asked = ["request", "klass", "user", "arrived", "prompt_tokens", "output_tokens", "outcome"]
    for plain, other in zip(runs[::2], runs[1::2], strict=True):
        assert plain.requests[asked].equals(other.requests[asked]) and (plain.requests.outcome == DONE).all()
        assert len(plain.requests) == 6 and plain.turns.nodes.sum() == 0 < other.turns.nodes.sum(), "no warm-up counts"
        assert plain.requests.tokens.map(tuple).equals(other.requests.tokens.map(tuple)), "greedy outputs are the same"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {"config", "git", "versions", "prompts_hash", "device", "dtype", "loop"} <= manifest.keys()
    assert manifest["config"]["seed"] == 0 and manifest["config"]["arrival"]["rate"] == 500
    assert (tmp_path / "out" / "knee.png").is_file()
    again = {(run.method, run.rate): run for run in load_runs(tmp_path / "out")}
    assert all(again[run.method, run.rate].requests.arrived.equals(run.requests.arrived) for run in runs)


@pytest.mark.usefixtures("no_pictures")
def test_chats_find_their_beginnings_in_the_cache(configure: Configure, tiny: list[str], tmp_path: Path) -> None:
    chats = "workload.systems=1 workload.system=32 workload.turns=2 workload.said=4 workload.output=4"
    words = [*tiny, *QUICK, "workload=shared", *chats.split(), "engine=paged", "engine.max_batch_size=2"]
    runs = load(configure("load", *words))
    rows = json.loads((tmp_path / "out" / "load.json").read_text())["runs"]
    found = [row for row in rows if row["group"] == "all"]
    for run, figures in zip(runs, found, strict=True):
        assert figures["hit_rate"] > 0.3 and figures["saved_tokens"] == run.requests.reused_tokens.sum() >= 32 * 4
    both = [run.requests.tokens.map(tuple) for run in runs]
    assert both[0].equals(both[1])


@pytest.mark.usefixtures("no_pictures")
def test_an_interruption_keeps_all_that_was_seen(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    step, drafted = Engine.step, []

    def interrupted(engine: Engine) -> Any:
        steps = step(engine)
        drafted.append(any(each.proposed_nodes for each in steps))
        if sum(drafted) == 3:
            raise KeyboardInterrupt
        return steps

    monkeypatch.setattr(Engine, "step", interrupted)
    words = [f"hydra.run.dir={tmp_path / 'hydra'}", *tiny, *QUICK, *SMALL]
    assert launched(*words, monkeypatch=monkeypatch, main=main) == 130
    runs = {run.method: run for run in load_runs(tmp_path / "out")}
    assert (runs["plain"].requests.outcome == DONE).all() and UNFINISHED in set(runs["ngram"].requests.outcome)
    assert "BROKEN OFF" in (tmp_path / "out" / "load.md").read_text() and "interrupted" in capsys.readouterr().err
