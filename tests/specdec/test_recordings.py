"""Recordings by themselves: which are kept, what they leave out, and what happens where memory runs out."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from specdec.execution.recorder import CudaGraphRecorder, Recorder, Recordings, recording_now


def test_without_memory_for_recordings_rounds_go_on_without_them(caplog) -> None:
    recorder = Mock(spec=Recorder)
    recorder.record.side_effect = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    recordings = Recordings(recorder, after=1, most=2)
    for _ in range(3):
        assert recordings.run("stage", "key", lambda x: (x + 1,), [torch.ones(1)])[0].item() == 2
    assert len(caplog.records) == 1
    assert "Tried to allocate 2.00 GiB" in caplog.text


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


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """CUDA graphs without a GPU, which run once: the pool of every capture, and whether it succeeded."""
    handles, captures = itertools.count(), []

    @contextmanager
    def graph(_: object, pool: int, **options: object) -> Iterator[None]:
        captures.append((pool, "broken off"))
        yield
        captures[-1] = (pool, "captured")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return captures


def test_graphs_of_different_stages_share_no_memory(graphs: list[tuple[int, str]]) -> None:
    """They are replayed in another order than they were captured in, and read each other's outputs."""
    recordings = Recordings(CudaGraphRecorder(torch.device("cpu")), after=1, most=9)
    for key in range(2):
        for name in ("verify", "judge"):
            recordings.run(name, key, lambda x: (x + 1,), [torch.ones(1)])
    pools = [pool for pool, _ in graphs]
    assert pools[0] == pools[2] != pools[1] == pools[3]
    recordings.clear()  # torch takes no handle again whose graphs are gone
    recordings.run("verify", 0, lambda x: (x + 1,), [torch.ones(1)])
    assert graphs[-1][0] not in pools


def test_after_a_capture_that_failed_others_get_another_pool(graphs: list[tuple[int, str]]) -> None:
    def fails(x: Tensor) -> tuple[Tensor, ...]:
        if recording_now():
            raise RuntimeError("operation not permitted when stream is capturing")
        return (x + 1,)

    recordings = Recordings(CudaGraphRecorder(torch.device("cpu")), after=1, most=9)
    for stage in (fails, lambda x: (x + 1,)):
        recordings.run("verify", stage, stage, [torch.ones(1)])
    assert [what for _, what in graphs] == ["broken off", "captured"] and graphs[0][0] != graphs[1][0]
    assert len(recordings) == 1
