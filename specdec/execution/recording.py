"""What a recording is: a piece of work on tensors that was done once and can be done again without its Python.

A stage of a round is a function of tensors that returns tensors; besides, it may read and write tensors that stay where
they are (the slots' state, the caches). If it depends on nothing else, it can be recorded: as a CUDA graph on a GPU,
and as a flat program of operations on a CPU (``tape``). So a stage that is recorded and replayed on other lengths,
slots and trees on a CPU, bit for bit, is known to be ready for a graph.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from specdec.memory import ran_out
from specdec.scoped import scoped

logger = logging.getLogger(__name__)

Stage = Callable[..., tuple[Tensor, ...]]
"""A function of tensors. Whatever else it reads must be the same tensors, or the same values, every time."""

Recording = Callable[..., tuple[Tensor, ...]]
"""Does what its stage did, on other inputs of the same shapes."""


class UnrecordableError(RuntimeError):
    """A stage does something that a recording could not repeat."""


class Recorder(ABC):
    """One way of recording.

    Attributes:
        runs: Whether a stage does its work while it is recorded.
    """

    runs: bool = True

    @abstractmethod
    def record(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | None, tuple[Tensor, ...]]:
        """Do a stage's work and record it.

        Args:
            stage: It must have run before, so that what it keeps (constants, workspaces) is there.
            inputs: Its inputs.

        Returns:
            The recording, and the outputs for these inputs. The recording is None if the stage has run and cannot be
            repeated.

        Raises:
            Exception: The stage cannot be recorded. It has then changed nothing that matters, or has not run.
        """


def while_recording() -> AbstractContextManager[bool]:
    """Tell everybody, during the ``with`` block, that a stage is being recorded (``recording_now``)."""
    return scoped(_recording, True)


def recording_now() -> bool:
    """Returns whether a stage is being recorded in this thread: nothing that is not part of it may run."""
    return _recording.get()


_recording: ContextVar[bool] = ContextVar("recording", default=False)


class Recordings:
    """Recordings by what they were made for.

    Args:
        recorder: Makes them.
        after: A stage is recorded when it comes for this time.
        most: Recordings that are kept; beyond that, the one that was used the longest time ago is dropped.
    """

    def __init__(self, recorder: Recorder, *, after: int, most: int):
        self._recorder = recorder
        self._after, self._most = after, most
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._times: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()
        self._full = False
        self.replays = 0

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop all recordings, because something that they were made from has changed."""
        self._kept.clear()
        self._times.clear()
        self._refused.clear()

    def give_up(self, error: BaseException) -> None:
        """Drop all recordings and make none from now on, because memory has run out, as an error says."""
        if not self._full:
            logger.warning("no memory is left for recordings, so rounds run without them from now on: %s", error)
        self.clear()
        self._full = True

    def run(
        self, key: Hashable, stage: Stage, inputs: Sequence[Tensor], *, repeatable: bool = True
    ) -> tuple[Tensor, ...]:
        """Returns what a stage returns, replayed if it came often.

        Args:
            key: All that the stage depends on besides the inputs' values and the tensors that stay where they are.
            stage: The stage.
            inputs: Its inputs.
            repeatable: Whether it may be begun again after it was broken off: not if it moves what it reads.

        Raises:
            Exception: The stage was broken off while it was recorded, and is not repeatable.
        """
        key = (key, *[(each.shape, each.dtype) for each in inputs])
        recording = self._kept.get(key)
        if recording is not None:
            self._kept.move_to_end(key)
            self.replays += 1
            return recording(*inputs)
        self._times[key] += 1
        if self._times[key] < self._after or key in self._refused or self._full:
            return stage(*inputs)
        try:
            recording, outputs = self._recorder.record(stage, inputs)
        except Exception as error:
            if ran_out(error):  # without recordings there may be room for the work itself
                self.give_up(error)
                if not repeatable and self._recorder.runs:
                    raise
                return stage(*inputs)
            # It depends on values, or does something that cannot be repeated: it runs as it is.
            logger.debug("a stage is not recorded: %s: %s", type(error).__name__, error)
            self._refused.add(key)
            return stage(*inputs)
        if recording is None:  # it is not done again: it may have moved what it would then move once more
            self._refused.add(key)
            return outputs
        self._kept[key] = recording
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return outputs
