"""Tensor parallelism: two processes on the CPU, started by torchrun, decode what one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.quantization import quantize
from specdec.quantization.base import weights_read
from specdec.target import parallel
from specdec.target.loading import load
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has found, by rank."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model(seed=7, scale=4.0).save_pretrained(folder)
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.specdec.sharing", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.full
def test_two_processes_decode_what_one_does(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["together"] == second["together"]
    assert len(first["together"]) == 5
    for method, outputs in first["together"].items():
        assert outputs == first["alone"][method], method
    greedy = [outputs for method, outputs in first["together"].items() if method.endswith("at 0.0")]
    assert all(outputs == greedy[0] for outputs in greedy)


@pytest.mark.full
def test_a_process_keeps_only_its_own_heads(found: list[dict[str, Any]]) -> None:
    whole = tiny_model()
    assert [each["key heads"] for each in found] == [whole.config.num_key_value_heads // 2] * 2
    assert [each["executor"] for each in found] == ["EagerExecutor"] * 2
    assert not any(each["recorded"] for each in found)
    bytes_of_all = weights_read(whole).bytes
    assert all(each["bytes"] < 0.6 * bytes_of_all for each in found)


@pytest.mark.full
def test_a_cache_in_one_byte_is_shared_too(found: list[dict[str, Any]]) -> None:
    """Rounding to bytes may fall otherwise than in one process, so it is compared with plain decoding in both."""
    plain, drafted = found[0]["in int8"]
    assert plain == drafted
    assert found[1]["in int8"] == [plain, drafted]


@pytest.mark.full
def test_invariant_mode_is_not_for_shares(found: list[dict[str, Any]]) -> None:
    assert all("invariant=True: this llama model runs on several devices or" in each["invariant"] for each in found)


@pytest.mark.full
def test_what_the_first_process_decides_counts(found: list[dict[str, Any]]) -> None:
    """The second process has other drafts, and each of its own verdicts is wrong."""
    first, second = found
    assert first["despite other opinions"] == second["despite other opinions"]
    assert first["despite other opinions"].items() <= first["alone"].items()


@pytest.mark.full
def test_without_agreement_the_processes_part(found: list[dict[str, Any]]) -> None:
    """Even the first process is wrong then: its forwards mix its tokens with those of the other."""
    first, second = found
    alone = first["alone"]["plain at 0.0"]
    assert alone != first["without agreement"] != second["without agreement"] != alone


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_model().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started three processes."""
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (2, "tensor_parallel=2: this process was started alone; start the program with torchrun --nproc-per-node 2"),
        (True, "tensor_parallel=True: start the processes with torchrun"),
        (0, "tensor_parallel=0: give at least 1"),
        ("two", "tensor_parallel='two': give the number of processes, or True"),
    ],
)
def test_processes_that_are_not_there(given: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=message):
        parallel.check_processes(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel": 2},
            "torchrun has started 3 processes; start the program with torchrun --nproc-per-node 2",
        ),
        ({"device_map": "auto"}, "tensor_parallel and device_map both say"),
        ({"device": "cuda:1"}, "every process uses its own .* device; leave device out"),
        ({"quantization": "int8"}, "quantization='int8' needs whole weights"),
        ({"inflate": "110m"}, "inflate='110m' needs whole weights"),
        ({}, "tensor_parallel=3 does not divide the model's 4 attention heads"),
    ],
)
def test_what_cannot_be_shared(folder: str, started: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, **{"tensor_parallel": 3} | options)


def test_a_model_without_a_plan(started: None, tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transformers has no plan for splitting gpt2 models"):
        load(str(tmp_path), tensor_parallel=3)


def test_a_checkpoint_of_our_own_quantization(started: None, tmp_path: Path) -> None:
    quantize(tiny_model(), "int8").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized by this project, and tensor_parallel cannot split them"):
        load(str(tmp_path), tensor_parallel=3)
