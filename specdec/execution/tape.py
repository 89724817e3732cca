"""Recordings for the CPU: a stage's operations as a flat program."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.execution.capture import UncapturableError, recorded_steps
from specdec.execution.program import write_program
from specdec.execution.recording import Recorder, Recording, Stage, while_recording
from specdec.host import without_looking


class TapeRecorder(Recorder):
    """Notes the operations of a stage while it runs, and writes them down as a program (``capture``).

    Its tensors' values may not decide about anything, and no tensor may be made from numbers that the host has: they
    would be the same in every replay.
    """

    def record(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording, tuple[Tensor, ...]]:
        """See ``Recorder.record``."""
        with torch.inference_mode(), without_looking(), while_recording(), recorded_steps() as steps:
            outputs = stage(*inputs)
        for step in steps:
            if step.function is torch.ops.aten.lift_fresh.default:
                raise UncapturableError("a tensor is made from numbers that the host has")
        return write_program(steps, inputs, outputs), outputs
