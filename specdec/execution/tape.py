"""Recordings for the CPU: a stage's operations as a flat program."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.execution.capture import recorded_steps
from specdec.execution.program import Step, write_program
from specdec.execution.recording import Recorder, Recording, Stage, while_recording
from specdec.host import without_looking

logger = logging.getLogger(__name__)


class TapeRecorder(Recorder):
    """Notes the operations of a stage while it runs, and writes them down as a program (``capture``).

    Its tensors' values may not decide about anything, and no tensor may be made from numbers that the host has: they
    would be the same in every replay.
    """

    def record(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | None, tuple[Tensor, ...]]:
        """See ``Recorder.record``. A stage that cannot be repeated is done to its end all the same."""
        with torch.inference_mode(), without_looking(), while_recording(), recorded_steps() as noted:
            outputs = stage(*inputs)
        if any(step.function is torch.ops.aten.lift_fresh.default for step in noted.steps):
            noted.refuse("a tensor is made from numbers that the host has")
        if noted.refusal is not None:
            logger.debug("a stage is not recorded: %s", noted.refusal)
            return None, outputs
        return write_program(needed(noted.steps, outputs), inputs, outputs), outputs


def needed(steps: Sequence[Step], outputs: Sequence[Tensor]) -> list[Step]:
    """Returns the steps without those that change nothing and whose results nobody reads.

    Code that runs in stages makes what most rounds need, such as the law of every node; a single round may not read it.
    """
    read = {id(tensor) for tensor in outputs}
    kept: list[Step] = []
    for step in reversed(steps):
        pure = isinstance(step.function, OpOverload) and not step.function._schema.is_mutable
        if not pure or any(id(tensor) in read for tensor in step.makes):
            kept.append(step)
            read.update(id(tensor) for tensor in step.reads)
    return kept[::-1]
