"""Recordings: a piece of work on tensors that was done once and can be done again without its Python.

A stage is a function of tensors that returns tensors, and may read and write tensors that stay where they are (the
slots' state, the caches): as a CUDA graph on a GPU, and as a flat program on a CPU.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specdec.execution.patterns import without_repetition
from specdec.execution.program import needed, noted, write_program
from specdec.host import scoped, without_looking
from specdec.memory import ran_out
from specdec.origin import first_sentence
from specdec.tree_parts import builder, taken_apart

logger = logging.getLogger(__name__)

Stage = Callable[..., Sequence[Tensor]]
"""A function of tensors. Whatever else it reads must be the same tensors, or the same values, every time."""
Recording = Callable[..., Sequence[Tensor]]
"""Does what its stage did, on other inputs of the same shapes."""


class UnrecordableError(RuntimeError):
    """Raised by code that opts out of recording."""


class Refused(NamedTuple):
    """A stage that is not recorded: ``by_design`` (it runs a user's hook, for one), or because of a failure."""

    stage: str
    reason: str
    by_design: bool = False


_recording: ContextVar[bool] = ContextVar("recording", default=False)
recording_now = _recording.get
"""Returns whether a stage is being recorded in this thread: nothing that is not part of it may run."""


class Recorder(ABC):
    """One way of recording. Where one ``for_gpu`` fails, the stage may be done again, and a warning says so."""

    for_gpu: bool = False

    @abstractmethod
    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        """Do a stage's work, record it, and return the recording, or why it cannot be repeated, and the outputs.

        Stages of one ``name`` never need each other's outputs. A stage has run before, so that what it keeps is there.
        If this raises, the stage has changed nothing that matters.
        """

    def rehearse(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[str | None, Sequence[Tensor]]:
        """Do a stage's work for the last time before it is recorded; return why it cannot be, if known, and outputs."""
        return None, stage(*inputs)

    def clear(self) -> None:  # noqa: B027 (most keep nothing)
        """Give back what is kept for recordings, all of which have been dropped."""


class TapeRecorder(Recorder):
    """For the CPU: notes the operations of a stage while it runs, and writes them down as a program."""

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        with torch.inference_mode(), without_looking(), scoped(_recording, True), noted() as work:
            outputs = stage(*inputs)
        if any(step.function is torch.ops.aten.lift_fresh.default for step in work.steps):
            work.refuse("a tensor is made from numbers that the host has")
        if work.refusal is not None:
            return work.refusal, outputs
        try:
            steps = without_repetition(work.steps, outputs, inputs)
            return write_program(needed(steps, outputs), inputs, outputs), outputs
        except Exception as error:  # the work is done, and may not be done again
            return f"{type(error).__name__}: {first_sentence(error)}", outputs


_WAITS = "called a synchronizing CUDA operation"  # torch's words


class CudaGraphRecorder(Recorder):
    """For a GPU: captures stages as CUDA graphs, whose kernels are launched all together.

    A graph reads its inputs at fixed addresses, where outputs of other graphs stand anyway. Graphs of one kind of stage
    share a pool of memory; those of different kinds read each other's outputs, in another order than they were made in.
    """

    for_gpu = True

    def __init__(self, device: torch.device):
        self._device = device
        self._pools: dict[str, Any] = {}  # handles, whose type torch keeps to itself
        self._fixed: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # outputs of graphs by address

    def rehearse(self, stage: Stage, inputs: Sequence[Tensor]) -> tuple[str | None, Sequence[Tensor]]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outputs = stage(*inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [f"{each.filename}:{each.lineno}" for each in caught if _WAITS in str(each.message)]
        return f"it makes the host wait for the device at {waits[0]}" if waits else None, outputs

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        with torch.cuda.device(self._device):
            if name not in self._pools:
                self._pools[name] = torch.cuda.graph_pool_handle()
            places = tuple(tensor if tensor.data_ptr() in self._fixed else tensor.clone() for tensor in inputs)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            # Other threads may go on using the device meanwhile.
            graphed = torch.cuda.graph(graph, pool=self._pools[name], capture_error_mode="thread_local")
            try:
                with torch.inference_mode(), without_looking(), scoped(_recording, True), graphed:
                    # Whoever reads an output copies into places of its shape, which must not overlap themselves.
                    outputs = tuple(each.contiguous() for each in stage(*places))
            except BaseException:
                torch.cuda.set_stream(stream)
                pool, device = self._pools.pop(name), torch.cuda.current_device()
                with suppress(RuntimeError):  # torch has ended the allocator's part of the capture
                    torch._C._cuda_endAllocateToPool(device, pool)
                    torch._C._cuda_releasePool(device, pool)
                raise
        self._fixed.update((output.data_ptr(), output) for output in outputs)

        def replay(*given: Tensor) -> Sequence[Tensor]:
            for place, each in zip(places, given, strict=True):
                if place.data_ptr() != each.data_ptr():
                    place.copy_(each)
            graph.replay()
            return outputs

        return replay, replay(*inputs)

    def clear(self) -> None:
        self._pools.clear()  # torch takes no handle again after the last graph of its pool is gone
        self._fixed.clear()


class Recordings:
    """Recordings by what they were made for, the ``most`` that were used last.

    Attributes:
        after: A stage is recorded when it comes for this time.
        made: How many there were so far, those included that were dropped.
        replays: How many stages were replayed.
        refused: The stages that are not recorded, each with the number of its kinds (keys, shapes) so far.
    """

    def __init__(self, recorder: Recorder, *, after: int, most: int, what: str = "rounds"):
        self._recorder = recorder
        self.after, self._most, self._what = after, most, what
        self.kept: OrderedDict[Any, Recording] = OrderedDict()  # by name, key, and shapes and dtypes of the inputs
        self._times: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()
        self._stopped = False
        self.made = self.replays = 0
        self.refused: Counter[Refused] = Counter()

    def clear(self) -> None:
        """Drop all recordings, because something that they were made from has changed."""
        self.kept.clear()
        self._times.clear()
        self._refused.clear()
        self._recorder.clear()

    def give_up(self, error: BaseException) -> None:
        """Drop all recordings and make none from now on, because memory has run out, as an error says."""
        reason = f"no memory is left for recordings, so {self._what} run without them from now on: {error}"
        if not self._stopped:
            logger.warning(reason)
            self.refused[Refused("all", reason)] += 1
        self.clear()
        self._stopped = True

    def run(
        self, name: str, key: Hashable, stage: Callable[..., Any], inputs: Sequence[Any], *, repeatable: bool = True
    ) -> Any:
        """Return the result of a stage, replayed if it came often; raise if it was broken off and is not repeatable.

        Args:
            key: All that the stage depends on besides the inputs and the tensors that stay where they are.
            stage: A function of values made of tensors (``tree_parts.taken_apart``) that returns one.
            repeatable: Whether it may be begun again after it was broken off: not if it moves what it reads.
        """
        tensors: list[Tensor] = []
        kind = taken_apart(tuple(inputs), tensors)
        build: Callable[..., Any] | None = None

        def flat(*given: Tensor) -> list[Tensor]:
            nonlocal build
            result: list[Tensor] = []
            build = builder(taken_apart(stage(*builder(kind)(iter(given))), result))
            return result

        recording, outputs = self.take(name, (key, kind), flat, tensors, repeatable=repeatable)
        if build is None:  # it was replayed
            return recording.build(iter(outputs))
        if recording is not None:
            recording.build = build
        return build(iter(outputs))

    def take(
        self, name: str, key: Hashable, stage: Stage, inputs: Sequence[Tensor], *, repeatable: bool = True
    ) -> tuple[Any, Sequence[Tensor]]:
        """Return the outputs of a stage of tensors like ``run``, and the recording; None if there is none yet."""
        full = (name, key, *[(tensor.shape, tensor.dtype) for tensor in inputs])
        recording = self.kept.get(full)
        if recording is not None:
            self.kept.move_to_end(full)
            self.replays += 1
            return recording, recording(*inputs)
        self._times[full] += 1
        rehearsal = 1 < self._times[full] == self.after - 1  # the first time, what is needed once is made
        if (self._times[full] < self.after and not rehearsal) or full in self._refused or self._stopped:
            return None, stage(*inputs)
        if rehearsal:
            reason, outputs = self._recorder.rehearse(stage, inputs)
            if reason is not None:
                self._refuse(full, Refused(name, reason))
            return None, outputs
        try:
            recorded, outputs = self._recorder.record(name, stage, inputs)
        except Exception as error:
            if ran_out(error):  # without recordings there may be room for the work itself
                self.give_up(error)
                if not (repeatable or self._recorder.for_gpu):
                    raise
            else:  # it depends on values, or does something that cannot be repeated: it runs as it is
                by_design = isinstance(error, UnrecordableError)
                reason = str(error) if by_design else f"{type(error).__name__}: {first_sentence(error)}"
                self._refuse(full, Refused(name, reason, by_design))
            return None, stage(*inputs)
        if isinstance(recorded, str):  # it is not done again: it may have moved what it would then move once more
            self._refuse(full, Refused(name, recorded))
            return None, outputs
        self.kept[full] = recorded
        self.made += 1
        if len(self.kept) > self._most:
            self.kept.popitem(last=False)
        return recorded, outputs

    def _refuse(self, key: Hashable, refused: Refused) -> None:
        """Run this stage as it is from now on; say so once where it is a failure that costs much."""
        says = self._recorder.for_gpu and not refused.by_design and refused not in self.refused
        level = logging.WARNING if says else logging.DEBUG
        logger.log(level, "some %s are not recorded (%s): %s", self._what, refused.stage, refused.reason)
        self._refused.add(key)
        self.refused[refused] += 1
