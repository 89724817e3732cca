"""Commands under torchrun: the first process speaks and writes, the others compute along."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.config import launch as cli
from experiments.config import ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of two, as torchrun does."""

    def become(rank: int) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")

    return become


def config(**settings: Any) -> DictConfig:
    return OmegaConf.create({"target": {"tensor_parallel": 2}, "seed": 0, "out": "runs/a", "resume": False} | settings)


def test_another_process_is_silent_and_works_on_a_copy(
    process: Callable[[int], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    process(1)
    (tmp_path / "records.jsonl").write_text("begun")
    own = config(out=str(tmp_path), resume=True)
    with ranks.taking_part(own):
        print("not heard")
        copy = Path(own.out)
        assert copy != tmp_path and (copy / "records.jsonl").read_text() == "begun"
        (copy / "records.jsonl").write_text("changed")
    assert not copy.exists()
    assert (tmp_path / "records.jsonl").read_text() == "begun"
    assert capsys.readouterr().out == ""
    assert "hydra.output_subdir=null" in ranks.arguments(["a=1"])


def test_an_error_tells_whose_it_is(process: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    process(1)
    cli.show(ValueError("no such device"))
    process(0)
    cli.show(ValueError("no such device"))
    assert capsys.readouterr().err.splitlines() == ["error: process 1: no such device", "error: no such device"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": {"tensor_parallel": 1}}, "give target.tensor_parallel=2"),
        ({"target": None}, "would all do the same"),
        ({"seed": None}, "seed=null: processes that share a target need the same seed"),
        ({"contenders": {"hf": {}}}, "contenders run whole models in one process"),
    ],
)
def test_what_cannot_run_in_several_processes(
    process: Callable[[int], None], settings: dict[str, Any], message: str
) -> None:
    process(0)
    with pytest.raises(ValueError, match=message), ranks.taking_part(config(**settings)):
        pytest.fail("it began")


@pytest.mark.full
def test_a_run_in_two_processes_is_the_run_of_one(saved: Path, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [f"target.name={saved}/target", f"drafter.name={saved}/drafter", "target.dtype=float32"]
    words += ["dataset.count=2", "sampling.max_new_tokens=12", "warmup_prompts=0", "dataset.prompt_tokens=40"]

    def outputs(folder: Path, start: list[str], more: list[str]) -> list[Any]:
        command = [sys.executable, *start, "-m", "experiments.run", *words, *more, f"out={folder}"]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("mean acceptance length") == 1
        return [json.loads(line)["token_ids"] for line in (folder / "records.jsonl").read_text().splitlines()]

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = outputs(tmp_path / "two", torchrun, ["target.tensor_parallel=2"])
    assert len(together) == 4
    assert together == outputs(tmp_path / "one", [], [])
