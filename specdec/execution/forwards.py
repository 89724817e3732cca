"""Runs a model's forwards as programs, without the model's Python: lists that C runs on a CPU, Triton kernels on a GPU.

What a forward does is noted (``program``), groups of its operations become one each (``patterns``), and the rest is
written down as a flat function. Attention and the write to the cache stay single steps, which read the cache and the
masks of the forward that runs. So a program depends on the numbers of rows and nodes, and not on any length.
"""

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

from specdec.attention.call import AttentionBackend, View
from specdec.attention.facts import Facts
from specdec.attention.native import NativeView
from specdec.execution.executor import Executor, autocast_of, first_sight
from specdec.execution.invariant import InvariantExecutor
from specdec.execution.native_program import compile_runs
from specdec.execution.norms import Forward, lent, norm_of
from specdec.execution.packing import PackedLinears
from specdec.execution.patterns import CurrentForward, Joint, join_products, rewrite, without_repetition
from specdec.execution.program import Program, Step, noted, write_program
from specdec.execution.recorder import Recorder, Recording, Recordings, Stage, recording_now
from specdec.forward import Wants
from specdec.kernels import obstacle
from specdec.opaque import noting, opaque

CAPTURE_AFTER = 24  # forwards of one shape on a CPU: capturing costs about what this many replays save
PROMPTS_AFTER = 3  # on a GPU, of one shape without logits: chunks of prompts have many lengths
MOST_CAPTURED = 1024
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest distance of a GPU program's outputs from the model's, as a share of their norm: kernels add in another
order, which layers pass on; a wrong one makes other outputs altogether."""


class ProgramExecutor(Executor):
    """Runs forwards whose programs there are, and the model's own code for others.

    Models with code from elsewhere, which may keep a state, have none, nor have those with recurrent layers, whose
    levels depend on the trees.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, current: CurrentForward, recorder: Recorder, **given: Any):
        super().__init__(model, facts, current.backend, **given)
        self.captures = self.frozen.known and not (facts.mixers or current.backend.passes_cache)
        self._current = current
        self.recordings = Recordings(recorder, after=1, most=MOST_CAPTURED, what=f"forwards of {facts.model_type}")

    def _take(self, wants: Wants, inputs: Sequence[Tensor], view: View, after: int) -> tuple[Any, Sequence[Tensor]]:
        """Return the program of a forward, if there is one when it has come ``after`` times, and its outputs."""

        def stage(*given: Tensor) -> list[Tensor]:
            with self.weights():
                return self.call_model(wants, given, view, self._current.answer, self._current.store)

        self._current.view, self.recordings.after = view, after
        key = wants, autocast_of(self.facts.device.type), type(view)
        return self.recordings.take("forward", key, stage, inputs)


class ReplayExecutor(ProgramExecutor):
    """For the CPU: runs a model on packed weights (``packing``), and makes programs of forwards that come often.

    A program is used if it returns the eager forward's numbers on inputs other than those it was captured with.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend):
        packed, current = PackedLinears(model), CurrentForward(backend)
        recorder = _ForwardRecorder(packed, current, facts.vocab_size)
        super().__init__(model, facts, current, recorder, packed=packed)

    def _outputs(self, wants: Wants, inputs: Sequence[Tensor], view: View) -> Sequence[Tensor]:
        # The C reads them by the strides that they had when the forward was captured.
        inputs = [tensor.contiguous() for tensor in inputs]
        # A recording has a captured forward as one step, if its C is told where the forward's tensors are.
        notes = noting.get() if isinstance(view, NativeView) and recording_now() else None
        # Prompts are not captured: they have too many lengths.
        if self.captures and (notes is not None or not (recording_now() or wants.logits == 0)):
            after = 1 if notes is not None or first_sight.get() else CAPTURE_AFTER
            with nullcontext() if notes is None else notes.apart():
                program, outputs = self._take(wants, inputs, view, after)
            if notes is None:
                return outputs
            if program is not None and not program.aimed and isinstance(view, NativeView):
                replay = partial(self._current.replay, program, replace(view, seen=()))
                notes.add(replay, (view.seen, *inputs), outputs)
                return outputs
        return super()._outputs(wants, inputs, view)  # in a recording, its operations are noted one by one


class FusedExecutor(ProgramExecutor):
    """For a GPU: ``kernels`` compute the patterns, where the outputs are the model's own up to rounding."""

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, kernels: Any):
        current = CurrentForward(backend, kernels)
        super().__init__(model, facts, current, _Rewriter(model, kernels, current))

    def _outputs(self, wants: Wants, inputs: Sequence[Tensor], view: View) -> Sequence[Tensor]:
        if not self.captures:
            return super()._outputs(wants, inputs, view)
        # To note a forward the host must wait, which it cannot while a graph is captured.
        after = sys.maxsize if recording_now() else PROMPTS_AFTER if wants.logits == 0 else 1
        with self.weights():
            return self._take(wants, inputs, view, after)[1]


def executor_for(
    model: PreTrainedModel, facts: Facts, backend: AttentionBackend, *, optimize: bool, invariant: bool = False
) -> Executor:
    """Return the fastest executor for a model on its device; without ``optimize`` one that runs the model's code."""
    if invariant:
        return InvariantExecutor(model, facts, backend, optimize=optimize)
    if optimize and model.device.type == "cpu":
        return ReplayExecutor(model, facts, backend)
    if optimize and model.device.type == "cuda" and not facts.mixers and obstacle(model.device) is None:
        from specdec.kernels import layers  # imports Triton

        return FusedExecutor(model, facts, backend, layers)
    return Executor(model, facts, backend)


class _ForwardRecorder(Recorder):
    """Captures a model's forward; several of its packed weights are joined."""

    def __init__(self, packed: PackedLinears, current: CurrentForward, vocab_size: int):
        self._packed, self._current, self._vocab_size = packed, current, vocab_size

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        # The forward's inputs decide about nothing: others of the same shapes are traced.
        outputs, current = stage(*inputs), self._current
        given, positions, *features = inputs
        other = given.flip(-1) if given.is_floating_point() else (given + 1) % self._vocab_size
        shifted = torch.where(positions > 0, positions - 1, positions + 1)
        others = [other, shifted, *(feature.flip(-1) for feature in features)]
        with torch.inference_mode(), noted() as work:
            traced = stage(*others)
        if work.refusal is None:
            steps = fuse(work.steps, others, traced, self._packed.joint)
            if isinstance(current.view, NativeView) and not any(step.writes for step in steps):
                steps = compile_runs(steps, others, traced, current)
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

    for_gpu = True

    def __init__(self, model: nn.Module, kernels: Any, current: CurrentForward):
        self._model, self._kernels, self._current = model, kernels, current
        self._forwards: list[tuple[nn.Module, Forward]] | None = None

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        expected = stage(*inputs)
        program, most = self.program(stage, inputs), TOLERANCE[self._model.dtype]  # type: ignore[index]
        outputs = program(*inputs)
        if max(map(distance, outputs, expected), default=0.0) <= most:  # a forward that only fills the cache has none
            return program, outputs
        reason = f"its outputs are more than {most:g} of their size from those of the model's own code"
        return reason, stage(*inputs)  # the cache holds what others have left

    def program(self, stage: Stage, inputs: Sequence[Tensor]) -> Program:
        """Return a forward as a rewritten program."""
        modules = list(self._model.modules())
        if self._forwards is None:  # single steps: norms, and products with quantized weights, if not torch's
            norms = [(module, norm_of(module, self._kernels.norm)) for module in modules]
            quantized = [module for module in modules if hasattr(type(module), "rounds_to")]
            products = [(module, partial(_product, module.forward, module.out_features)) for module in quantized]
            self._forwards = [(module, norm) for module, norm in norms if norm is not None] + products
        # Where all tensors are without numbers already, in a dry run, they stay as they are.
        mode = None if isinstance(inputs[0], FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
        given = list(inputs) if mode is None else [mode.from_tensor(input_) for input_ in inputs]
        with _restored(modules), lent(self._forwards), mode or nullcontext(), noted(shapes=True) as work:
            outputs = stage(*given)
        if work.refusal is not None:
            raise ValueError(work.refusal)
        return write_program(rewrite(work.steps, outputs, self._kernels, self._current), given, outputs)


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
            table.clear()
            table.update(kept)


def _product(forward: Callable[[Tensor], Tensor], width: Any, inputs: Tensor) -> Tensor:
    return opaque(forward, inputs, like=lambda: inputs.new_empty(*inputs.shape[:-1], width))
