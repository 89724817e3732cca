"""Recordings for a GPU: CUDA graphs, whose kernels are launched all together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.execution.recording import Recorder, Recording, Stage, while_recording
from specdec.host import without_looking


class CudaGraphRecorder(Recorder):
    """Captures stages as CUDA graphs, which share one pool of memory.

    A graph reads its inputs at fixed addresses. An input that comes from another graph stands at a fixed address
    anyway; any other is copied to one.

    Args:
        device: A CUDA device.
    """

    runs = False

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # a handle, whose type torch keeps to itself
        self._fixed: set[int] = set()  # addresses of outputs of graphs

    def record(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording, tuple[Tensor, ...]]:
        """See ``Recorder.record``. Nothing runs while a graph is captured, so a failure has changed nothing."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            places = tuple(each if each.data_ptr() in self._fixed else each.clone() for each in inputs)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device meanwhile.
            with (
                torch.inference_mode(),
                without_looking(),
                while_recording(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                outputs = stage(*places)
        self._fixed.update(each.data_ptr() for each in outputs)

        def replay(*given: Tensor) -> tuple[Tensor, ...]:
            for place, each in zip(places, given, strict=True):
                if place.data_ptr() != each.data_ptr():
                    place.copy_(each)
            graph.replay()
            return outputs

        return replay, replay(*inputs)
