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


@pytest.mark.full
def test_two_processes_decode_what_one_does(tmp_path: Path) -> None:
    whole = tiny_model(seed=7, scale=4.0)
    whole.save_pretrained(tmp_path)
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.specdec.sharing", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert len(first["together"]) == 5
    assert first["together"] == second["together"] == first["alone"]
    # Rounding to bytes may fall otherwise than in one process, so it is compared with plain decoding in both.
    plain, drafted = first["in int8"]
    assert plain == drafted and second["in int8"] == [plain, drafted]
    for each in (first, second):
        assert each["key heads"] == whole.config.num_key_value_heads // 2, "a process keeps only its own heads"
        assert each["bytes"] < 0.6 * weights_read(whole).bytes
        assert each["executor"] == "EagerExecutor" and not each["recorded"]
        assert "invariant=True" in each["invariant"]
    # The second process has other drafts, and each of its own verdicts is wrong: what the first one decides counts.
    assert first["despite other opinions"] == second["despite other opinions"]
    assert first["despite other opinions"].items() <= first["alone"].items()
    # Without agreement even the first one is wrong: its forwards mix its tokens with those of the other.
    alone = first["alone"]["plain at 0.0"]
    assert alone != first["without agreement"] != second["without agreement"] != alone


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started three processes."""
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("given", [2, True, 0, "two"])
def test_processes_that_are_not_there(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=f"tensor_parallel='?{given}"):
        parallel.check_processes(given)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (tiny_model, {"tensor_parallel": 2}, "torchrun .*3 processes"),
        (tiny_model, {"device_map": "auto"}, "tensor_parallel and device_map"),
        (tiny_model, {"device": "cuda:1"}, "device"),
        (tiny_model, {"quantization": "int8"}, "quantization='int8'"),
        (tiny_model, {"inflate": "110m"}, "inflate='110m'"),
        (tiny_model, {}, "tensor_parallel=3 .*4 attention heads"),
        (lambda: tiny_model("gpt2"), {}, "no plan for splitting gpt2"),
        (lambda: quantize(tiny_model(), "int8"), {}, "quantized by this project"),
    ],
)
def test_what_cannot_be_shared(make: Any, tmp_path: Path, started: None, options: dict[str, Any], message: str) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path), **{"tensor_parallel": 3} | options)
