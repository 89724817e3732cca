"""Stages of a round as CUDA graphs, without a GPU: pools, captures that fail, and stages that cannot be captured."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec.execution.recorder import (
    CudaGraphRecorder,
    Recorder,
    Recordings,
    Stage,
    UnrecordableError,
    recording_now,
)


def test_what_moves_is_not_begun_again_where_memory_ran_out() -> None:
    """The commit of a path may have moved keys already, so its requests end, and the next ones are not recorded."""

    class Breaks(Recorder):
        def record(self, name, stage, inputs):
            stage(*inputs)
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    state = torch.zeros(1)
    recordings = Recordings(Breaks(), after=1, most=2)

    def moving(step: Tensor) -> tuple[()]:
        state.add_(step)
        return ()

    with pytest.raises(torch.OutOfMemoryError):
        recordings.run("stage", "key", moving, [torch.ones(1)], repeatable=False)
    assert state.item() == 1
    recordings.run("stage", "key", moving, [torch.ones(1)], repeatable=False)
    assert state.item() == 2


class Cuda:
    """CUDA graphs without a GPU, which run once."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.captures: list[tuple[int, str]] = []
        self.stream, self.underway, self.mode, self.waits = "main", list[int](), 0, False
        handles = itertools.count()
        fakes = {
            "device": lambda device: nullcontext(), "graph_pool_handle": lambda: next(handles),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": self.graph,
            "current_stream": lambda: self.stream, "set_stream": partial(setattr, self, "stream"),
            "current_device": lambda: 0, "get_sync_debug_mode": lambda: self.mode, "set_sync_debug_mode": self.debug,
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.ended, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)

    def debug(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type, assignment]

    def ended(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    @contextmanager
    def graph(self, _: object, pool: int, **options: object) -> Iterator[None]:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.captures.append((pool, "broken off"))
        self.stream, before = "side", self.stream
        self.underway.append(pool)
        yield
        self.captures[-1], self.stream = (pool, "captured"), before
        self.underway.remove(pool)

    def look(self) -> None:
        """Do what makes the host wait."""
        if recording_now():
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def graphs(after: int = 1) -> Recordings:
    return Recordings(CudaGraphRecorder(torch.device("cpu")), after=after, most=9)


def plus_one(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1,)


def run(recordings: Recordings, name: str, stage: Stage, key: object = 0) -> float:
    return recordings.run(name, key, stage, [torch.ones(1)])[0].item()


def test_graphs_of_different_stages_share_no_memory(cuda: Cuda) -> None:
    """They are replayed in another order than they were captured in, and read each other's outputs."""
    recordings = graphs()
    for key in range(2):
        for name in ("verify", "judge"):
            run(recordings, name, plus_one, key)
    pools = [pool for pool, _ in cuda.captures]
    assert pools[0] == pools[2] != pools[1] == pools[3]
    recordings.clear()  # torch takes no handle again whose graphs are gone
    run(recordings, "verify", plus_one)
    assert cuda.captures[-1][0] not in pools


def test_after_a_capture_that_failed_others_succeed(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    """They get another pool; the stream and the allocator are as before. The failure is said once, and counted."""

    def fails(x: Tensor) -> tuple[Tensor, ...]:
        cuda.look()
        return plus_one(x)

    recordings = graphs()
    for key in range(2):
        assert run(recordings, "judge", fails, key) == 2
        assert (cuda.stream, cuda.underway) == ("main", [])
    run(recordings, "verify", plus_one)
    assert [what for _, what in cuda.captures] == ["broken off"] * 2 + ["captured"]
    assert len({pool for pool, _ in cuda.captures}) == 3 and recordings.made == len(recordings) == 1
    ((refused, kinds),) = recordings.refused.items()
    assert (refused.stage, kinds, refused.by_design) == ("judge", 2, False)
    assert "not permitted when stream is capturing" in refused.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_stage_that_makes_the_host_wait_is_refused_before_it_is_captured(cuda: Cuda, caplog) -> None:
    """It is done to its end, once, and what the process was told before about waiting holds again."""
    cuda.mode, done = 2, []

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        done.append(cuda.mode)
        if cuda.mode < 2:
            cuda.look()
        return plus_one(x)

    recordings = graphs(after=3)
    assert [run(recordings, "commit", waits) for _ in range(5)] == [2] * 5
    assert done == [2, 1, 2, 2, 2] and not cuda.captures
    assert [(each.stage, each.by_design) for each in recordings.refused] == [("commit", False)]
    assert len(caplog.records) == 1 and f"{__name__.rpartition('.')[2]}.py" in caplog.text, "it says where"
    for _ in range(3):
        run(recordings, "verify", plus_one)
    assert len(recordings) == 1


def test_code_of_a_users_is_refused_by_design(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    def hooked(x: Tensor) -> tuple[Tensor, ...]:
        if recording_now():
            raise UnrecordableError("the model has hooks from elsewhere")
        return plus_one(x)

    recordings = graphs()
    for key in range(9):
        assert run(recordings, "verify", hooked, key) == 2
    assert recordings.refused == {("verify", "the model has hooks from elsewhere", True): 9}
    assert not caplog.records


def test_an_address_is_a_graphs_only_as_long_as_there_is_the_graph(cuda: Cuda) -> None:
    """Else a tensor of somebody else's that came to lie there would be written to."""
    recorder = CudaGraphRecorder(torch.device("cpu"))
    recording, (output,) = recorder.record("draft", plus_one, [torch.ones(1)])
    assert set(recorder._fixed) == {output.data_ptr()}
    del recording, output
    assert not recorder._fixed
