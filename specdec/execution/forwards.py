"""Runs a model's forwards as programs, without the model's Python: lists that C runs on a CPU, Triton kernels on a GPU.

What a forward does is noted (``program``), groups of its operations become one each (``patterns``), and the rest is
written down as a flat function. Attention and the write to the cache stay single steps, which read the cache and the
masks of the forward that runs. So a program depends on the numbers of rows and nodes, and not on any length.

On a CPU a program must return the very numbers of the model's own code on packed weights. On a GPU the forward of every
shape is noted once, by its shapes and without a device's work; its results differ by rounding alone.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from specdec.attention.call import AttentionBackend, AttentionCall, View
from specdec.attention.facts import Facts
from specdec.attention.native import NativeView, Seen
from specdec.cache.storage import Cache
from specdec.execution.executor import Executor, autocast_of, inputs_of, output_of
from specdec.execution.native_program import Workspace, compile_runs
from specdec.execution.norms import Forward, lent, norm_of
from specdec.execution.packing import PackedLinears, plain_weights
from specdec.execution.patterns import Joint, Layers, join_products, rewrite, without_repetition
from specdec.execution.program import Program, Step, noted, write_program
from specdec.execution.recorder import Recorder, Recording, Recordings, Stage, recording_now
from specdec.forward import ForwardBatch, ForwardOutput
from specdec.memory import ran_out
from specdec.opaque import noting, opaque

logger = logging.getLogger(__name__)

CAPTURE_AFTER = 24  # forwards of one shape on a CPU: capturing costs about what this many replays save
PROMPTS_AFTER = 3  # on a GPU, of one shape without logits: chunks of prompts have many lengths
MOST_CAPTURED = 1024
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest distance of a GPU program's outputs from the model's, as a share of their norm: kernels add in another
order, which layers pass on; a wrong one makes other outputs altogether."""


class ProgramExecutor(Executor):
    """Runs forwards whose programs there are, and the model's own code for others.

    Models with code or hooks from elsewhere have no programs, because such code may keep a state whose changes a
    program would not see; neither have those with recurrent layers, whose levels depend on the trees.
    """

    def __init__(
        self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, current: "CurrentForward", made: Recorder
    ):
        super().__init__(model, facts, backend)
        self.captures = not facts.mixers
        self._current = current
        self.recordings = Recordings(made, after=1, most=MOST_CAPTURED, what=f"forwards of {facts.model_type}")

    def read_again(self, facts: Facts) -> None:
        super().read_again(facts)
        self.recordings.clear()

    @property
    def _as_it_is(self) -> bool:
        return not self.captures or self.backend.passes_cache or not self.frozen.known

    def _take(
        self, batch: ForwardBatch, view: View, inputs: Sequence[Tensor], *, after: int, weights: Callable[[], Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        """Return the program of a forward, if there is one when it has come ``after`` times, and its outputs."""

        def stage(*given: Tensor) -> list[Tensor]:
            with weights():
                return self.call_model(batch.wants, given, view, self._current.answer, self._current.store)

        self.recordings.after = after
        key = batch.nodes, batch.wants, autocast_of(self.facts.device.type), type(view)
        return self.recordings.take("forward", key, stage, inputs)


class ReplayExecutor(ProgramExecutor):
    """For the CPU: runs a model on packed weights (``packing``), and makes programs of forwards that come often.

    A program is used if it returns the eager forward's numbers on inputs other than those it was captured with.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend):
        self._packed, current = PackedLinears(model), CurrentForward(backend)
        super().__init__(model, facts, backend, current, _ForwardRecorder(self._packed, current, facts.vocab_size))
        self._at_first_sight = False

    @property
    def replays_at_once(self) -> bool:
        return self.captures and self.frozen.known and self.backend.replays

    def read_again(self, facts: Facts) -> None:
        super().read_again(facts)
        self._packed.refresh()

    @contextmanager
    def at_first_sight(self) -> Iterator[None]:
        self._at_first_sight = True
        try:
            yield
        finally:
            self._at_first_sight = False

    def copies(self) -> dict[int, int]:
        return self._packed.bytes_by_weight()

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        self.check_recordable()
        view = self._current.view = self.prepare(batch, cache)
        # The C reads them by the strides that they had when the forward was captured.
        inputs, wants = [tensor.contiguous() for tensor in inputs_of(batch, cache)], batch.wants
        # A recording has a captured forward as one step, if its C is told where the forward's tensors are.
        notes = noting.get() if isinstance(view, NativeView) and recording_now() else None
        # Prompts are not captured: they have too many lengths.
        if not self._as_it_is and (notes is not None or not (recording_now() or wants.logits == 0)):
            after = 1 if notes is not None or self._at_first_sight else CAPTURE_AFTER
            with nullcontext() if notes is None else notes.apart():
                program, outputs = self._take(batch, view, inputs, after=after, weights=self._packed.in_use)
            if notes is None:
                return output_of(wants, outputs)
            if program is not None and not program.aimed and isinstance(view, NativeView):
                replay = partial(self._current.replay, program, replace(view, seen=()))
                notes.add(replay, (view.seen, *inputs), outputs)
                return output_of(wants, outputs)
        with self._packed.in_use():  # in a recording, its operations are noted one by one
            return output_of(wants, self.call_model(wants, inputs, view))


class FusedExecutor(ProgramExecutor):
    """For a GPU: ``kernels`` compute the patterns, in rounds that are played as they are and in captured ones.

    A program is used if its outputs on the inputs it was noted for are those of the model's own code, up to rounding.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, kernels: Any):
        current = CurrentForward(backend, kernels)
        super().__init__(model, facts, backend, current, _Rewriter(model, kernels, current))

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        self.check_recordable()
        view = self._current.view = self.prepare(batch, cache)
        inputs, wants = inputs_of(batch, cache), batch.wants
        with plain_weights():
            if self._as_it_is:
                return output_of(wants, self.call_model(wants, inputs, view))
            # To note a forward the host must wait, which it cannot while a graph is captured.
            after = sys.maxsize if recording_now() else PROMPTS_AFTER if wants.logits == 0 else 1
            return output_of(wants, self._take(batch, view, inputs, after=after, weights=nullcontext)[1])


class CurrentForward:
    """The forward that runs: what a captured forward's layers call (``patterns.Layers``), and what they read.

    Apart from the executor, which keeps programs that refer to this: in a ring they would keep the cache alive.
    """

    def __init__(self, backend: AttentionBackend, kernels: Any = None):
        self._backend, self._kernels = backend, kernels
        self.view: View | None = None

    def answer(self, call: AttentionCall) -> Tensor:
        """Return a layer's attention, as a single operation."""
        batch, heads, nodes = call.query.shape[:3]
        like = partial(call.query.new_empty, batch, nodes, heads, call.value.shape[3])
        return opaque(self.attend, *call, like=like)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values, as a single operation."""
        opaque(self.write, layer, keys, values, like=lambda: None)

    def attend(self, *call: Any) -> Tensor:
        return self._backend.attend(AttentionCall(*call), self.view)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert self.view is not None
        self.view.cache.write(layer, keys, values)

    def turn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Turn queries and keys, and store keys and values; on a CPU only the C runs this step."""
        assert self.view is not None and self._kernels is not None
        cache = self.view.cache
        destination = cache.destination(layer)
        if destination is not None and (destination.keys.dtype, destination.values.dtype) != (key.dtype, value.dtype):
            destination = None
        query, key = self._kernels.rotate(query, key, value, *options, destination)
        if destination is None:
            cache.write(layer, key, value)
        return query, key

    def replay(self, program: Recording, view: NativeView, seen: Seen, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the outputs of a captured forward that sees what stands in ``seen``, and otherwise as in ``view``."""
        self.view = NativeView(view.cache, view.masks, view.reaches, seen, view.cells)  # quicker than to replace it
        return program(*inputs)

    def native_view(self) -> NativeView:
        assert isinstance(self.view, NativeView), "as a program's key says"
        return self.view


class _ForwardRecorder(Recorder):
    """Captures a model's forward; several of its packed weights are joined."""

    def __init__(self, packed: PackedLinears, current: CurrentForward, vocab_size: int):
        self._packed, self._current, self._vocab_size = packed, current, vocab_size
        self._workspace = Workspace()

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        """See ``Recorder.record``. The forward's inputs decide about nothing: others of the same shapes are traced."""
        outputs, current = stage(*inputs), self._current
        given, positions, *features = inputs
        other = given.flip(-1) if given.is_floating_point() else (given + 1) % self._vocab_size
        shifted = torch.where(positions > 0, positions - 1, positions + 1)
        others = [other, shifted, *(feature.flip(-1) for feature in features)]
        with torch.inference_mode(), noted() as work:
            traced = stage(*others)
        if work.refusal is None:
            steps = fuse(work.steps, others, traced, self._packed.joint)
            # Otherwise a rewriting could move a read behind a write, or attention is not the C's.
            if isinstance(current.view, NativeView) and not any(step.writes for step in steps):
                steps = compile_runs(steps, others, traced, current, self._workspace, current.native_view)
            program: Any = write_program(steps, others, traced)
            program.aimed = any(step.function == current.write for step in steps)
            if all(torch.equal(a, b) for a, b in zip(program(*inputs), outputs, strict=True)):
                return program, outputs
        return work.refusal or "it returns other numbers", stage(*inputs)  # the cache holds what others have left


def fuse(steps: list[Step], inputs: Sequence[Tensor], outputs: Sequence[Tensor], joint: Joint) -> list[Step]:
    """Return steps of a CPU that make the very tensors of others, without repetition and with joint products."""
    if not any(step.writes for step in steps):
        steps = without_repetition(steps, outputs, inputs)
    return join_products(steps, joint)


class _Rewriter(Recorder):
    """Notes a model's forward by its shapes, and rewrites it."""

    def __init__(self, model: nn.Module, kernels: Any, layers: Layers):
        self._model, self._kernels, self._layers = model, kernels, layers
        self._forwards: list[tuple[nn.Module, Forward]] | None = None
        self._told = False

    def clear(self) -> None:
        self._forwards = None

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        expected = stage(*inputs)
        try:
            program = self.program(stage, inputs)
            outputs = program(*inputs)
            apart = max(map(distance, outputs, expected), default=0.0)  # a forward that only fills the cache has none
            if apart <= TOLERANCE[self._model.dtype]:  # type: ignore[index]
                return program, outputs
            reason = f"its outputs are {apart:.2g} of their size from those of the model's own code"
        except Exception as error:
            if ran_out(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if self._told else logging.WARNING
        logger.log(level, "a forward of a %s is not rewritten in fewer kernels: %s", type(self._model).__name__, reason)
        self._told = True
        return reason, stage(*inputs)  # the cache holds what others have left

    def program(self, stage: Stage, inputs: Sequence[Tensor]) -> Program:
        """Return a forward as a rewritten program."""
        modules = list(self._model.modules())
        if self._forwards is None:
            self._forwards = list(self._single_steps(modules))
        # Where all tensors are without numbers already, in a dry run, they stay as they are.
        mode = None if isinstance(inputs[0], FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
        given = list(inputs) if mode is None else [mode.from_tensor(input_) for input_ in inputs]
        with _restored(modules), lent(self._forwards), mode or nullcontext(), noted(shapes=True) as work:
            outputs = stage(*given)
        if work.refusal is not None:
            raise ValueError(work.refusal)
        return write_program(rewrite(work.steps, outputs, self._kernels, self._layers), given, outputs)

    def _single_steps(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Forward]]:
        """Yield modules that are one step each, and how: norms, and products with quantized weights, if not torch's."""
        for module in modules:
            norm = norm_of(module, self._kernels.norm)
            if norm is not None:
                yield module, norm
            elif hasattr(type(module), "rounds_to"):
                yield module, partial(_product, module.forward, module.out_features)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors as a share of the second one's norm."""
    if isinstance(one, FakeTensor):  # a dry run has no numbers
        return 0.0
    size = torch.linalg.vector_norm(other, dtype=torch.float32)
    return float(torch.linalg.vector_norm(one - other, dtype=torch.float32) / size.clamp_min(1e-30))


@contextmanager
def _restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what modules had as attributes and buffers before the ``with`` block, which may leave none there."""
    tables = [table for module in modules for table in (vars(module), module._buffers)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            for name in [*table]:
                if name not in kept:
                    del table[name]
            table.update(kept)


def _product(forward: Callable[[Tensor], Tensor], width: Any, inputs: Tensor) -> Tensor:
    return opaque(forward, inputs, like=lambda: inputs.new_empty(*inputs.shape[:-1], width))
