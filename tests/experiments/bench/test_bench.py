"""The benchmark: every part has its figures, and a ratio that is there is found."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.bench import gpu, measure
from experiments.bench.play import Case, Checkout, folder_of, play
from experiments.commands.bench import bench
from experiments.results.manifest import ROOT
from tests.experiments.runs import Configure


def test_forwards_and_rounds_have_their_figures(configure: Configure, tmp_path: Path) -> None:
    words = ["inflate=null", "rounds=4", "nodes=[1,3]", "drafts=[chain]", "temperatures=[0]", "threads=1", "device=cpu"]
    words += ["dtypes=[float32]", "quantizations=[null,int8]", f"out={tmp_path}"]
    tables = bench(configure("bench", *words))
    steps, rounds = tables["steps"], tables["rounds"]
    assert list(steps.nodes) == [1, 3, 1, 3] and (steps.ms > 0).all()
    assert (steps.over_one_node[steps.nodes == 1] == 1).all()
    assert list(rounds.drafts) == ["plain", "chain"] and rounds.speedup[0] == 1 and rounds.tokens[0] == 1
    assert rounds.outside.between(0, 1).all() and rounds.tokens[1] > 1
    stages = rounds[["draft_ms", "verify_ms", "accept_ms", "commit_ms"]].sum(axis=1)
    assert (stages < 1.2 * rounds.round_ms).all()
    assert len(pd.read_csv(tmp_path / "rounds.csv")) == 2 and (tmp_path / "manifest.json").is_file()


class Noisy(Checkout):
    """Plays in the time that its folder says; processes differ by a tenth, plays of one hardly."""

    random = np.random.default_rng(0)

    def __init__(self, path: Path):
        self.path, self.pace = path, self.random.lognormal(sigma=0.1)

    def __exit__(self, *_: object) -> None: ...

    def play(self, case: Case) -> dict[str, float]:
        taken = 1.5 if self.path != ROOT and case.drafts == "chain" else 1.0
        taken *= self.pace * self.random.lognormal(sigma=0.01)
        return {"round": taken, "verify": taken, "tokens": 2.0}


def test_a_difference_is_told_from_that_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "Checkout", Noisy)
    (tmp_path / "specdec").mkdir()
    cases = [Case("plain"), Case("chain")]
    table = measure.against(str(tmp_path), {"steps": cases, "rounds": cases}, repeats=3, processes=8)
    for part in ("steps", "rounds"):
        same, slower = table[table.part == part].itertuples()
        assert slower.sure and slower.low < 1.5 < slower.high and slower.ratio > 1.2
        assert not same.sure and same.low < 1 < same.high


@pytest.mark.full
def test_another_commit_plays_in_a_worktree_of_its_own() -> None:
    with folder_of("HEAD", ROOT) as folder:
        assert (folder / "specdec").is_dir() and folder != ROOT
        with Checkout(folder) as checkout:
            case = Case("chain", rounds=3, threads=1)
            assert checkout.play(case).keys() == play(case).keys()
            with pytest.raises(ValueError, match="cannot play"):
                checkout.play(Case("plain", dtype="no such dtype"))
    assert not folder.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout
    assert str(folder) not in listed


def test_the_table_of_a_gpu_is_rehearsed_on_a_processor(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fails = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"))
    monkeypatch.setattr(gpu, "_attention", fails)
    monkeypatch.setattr(gpu, "gc", SimpleNamespace(collect=lambda: None))  # seconds, with all that tests have loaded
    monkeypatch.setattr(gpu, "measure_peaks", partial(gpu.measure_peaks, largest=1 << 22))
    monkeypatch.setitem(gpu.SHAPES, "tiny", gpu.SHAPES["tiny"] | {"max_position_embeddings": 1100})
    table = gpu.measure(torch.device("cpu"), torch.float32, shape="tiny", context=64, seconds=0.02)
    left_out = {what for what in gpu.BOUNDS if what.startswith(("attention", "fp8"))}
    assert set(table.what) == gpu.BOUNDS.keys() - left_out
    assert table.met.isna().all() and "left out: OutOfMemoryError: CUDA out of memory." in capsys.readouterr().out
