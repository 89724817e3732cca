"""Runs a model's forwards as programs in which a few kernels compute what stands between the products. GPUs only.

Transformers' models launch some forty small kernels per layer besides the products. The forward of every shape is noted
once, by its shapes and without a device's work, and rewritten (``rewriting``). From then on the program runs, in rounds
that are played as they are and in those that are captured as a graph: the same kernels, so the same bits.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from specdec.attention.call import AttentionBackend
from specdec.attention.facts import Facts
from specdec.cache.base import Cache
from specdec.execution.executor import Executor, autocast_of, inputs_of, output_of
from specdec.execution.packing import plain_weights
from specdec.execution.program import Program, noted, write_program
from specdec.execution.recorder import Recorder, Recording, Recordings, Stage, recording_now
from specdec.execution.replay import MOST_CAPTURED, ForwardKey, Now
from specdec.execution.rewriting import Kernels, Layers, rewrite
from specdec.forward import ForwardBatch, ForwardOutput
from specdec.memory import ran_out
from specdec.opaque import opaque

logger = logging.getLogger(__name__)

PROMPTS_AFTER = 3
"""Forwards without logits of one shape before one is noted: chunks of prompts have many lengths. Drafters do such
forwards too, and are noted before their rounds are captured."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest distance of a program's outputs from the model's, as a share of their norm. Kernels differ by the order
of sums, which layers pass on; a wrong one makes other outputs altogether."""


class FusedExecutor(Executor):
    """Runs every forward whose shape was noted as a program; the model's own code runs the others.

    A program is used if its outputs were those of the model's own code, up to rounding, on the inputs that it was noted
    for. Models with code or hooks from elsewhere are not noted.

    Args:
        kernels: Compute the patterns. All other arguments: see ``Executor``.
    """

    captures = True

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend, kernels: Kernels):
        super().__init__(model, facts, backend)
        self._now = _Now(backend, kernels)
        rewriter = _Rewriter(model, kernels, self._now.layers)
        self.recordings = Recordings(rewriter, after=1, most=MOST_CAPTURED, what=f"forwards of {facts.model_type}")

    def read_again(self, facts: Facts) -> None:
        super().read_again(facts)
        self.recordings.clear()

    def run(self, batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        self.check_recordable()
        view = self._now.view = self.prepare(batch, cache)
        inputs, wants = inputs_of(batch, cache), batch.wants
        with plain_weights():
            if self.backend.passes_cache or not self.frozen.known:
                return output_of(wants, self.call_model(wants, inputs, view))

            def stage(*given: Tensor) -> list[Tensor]:
                return self.call_model(wants, given, view, self._now.answer, self._now.store)

            seldom = PROMPTS_AFTER if wants.logits == 0 else 1
            # To note a forward the host must wait, which it cannot while a graph is captured.
            self.recordings.after = sys.maxsize if recording_now() else seldom
            key = ForwardKey(batch.nodes, wants, autocast_of(self.facts.device.type), type(view))
            return output_of(wants, self.recordings.take("forward", key, stage, inputs)[1])


class _Now(Now):
    """The forward that runs, whose layers may turn and write at once."""

    def __init__(self, backend: AttentionBackend, kernels: Kernels):
        super().__init__(backend)
        self._rotate = kernels.rotate

    @property
    def layers(self) -> Layers:
        """The functions by which a forward reaches its cache."""
        return Layers(self.attend, self.write, self.turn)

    def turn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        assert self.view is not None
        cache = self.view.cache
        destination = cache.destination(layer)
        if destination is not None and (destination.keys.dtype, destination.values.dtype) != (key.dtype, value.dtype):
            destination = None
        query, key = self._rotate(query, key, value, *options, destination)
        if destination is None:
            cache.write(layer, key, value)
        return query, key


class _Rewriter(Recorder):
    """Notes a model's forward by its shapes, and rewrites it."""

    def __init__(self, model: nn.Module, kernels: Kernels, layers: Layers):
        self._model, self._kernels, self._layers = model, kernels, layers
        self._told = False

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
        # Where all tensors are without numbers already, in a dry run, they stay as they are.
        mode = None if isinstance(inputs[0], FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
        given = list(inputs) if mode is None else [mode.from_tensor(each) for each in inputs]
        modules = list(self._model.modules())
        with _restored(modules), opaque_products(modules), mode or nullcontext(), noted(shapes=True) as work:
            outputs = stage(*given)
        if work.refusal is not None:
            raise ValueError(work.refusal)
        return write_program(rewrite(work.steps, outputs, self._kernels, self._layers), given, outputs)


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


@contextmanager
def opaque_products(modules: Sequence[nn.Module]) -> Iterator[None]:
    """During the ``with`` block, let layers with quantized weights be one operation each: it may be no torch's."""
    own = [module for module in modules if hasattr(type(module), "rounds_to")]
    for module in own:
        vars(module)["forward"] = partial(_product, module.forward, module.out_features)
    try:
        yield
    finally:
        for module in own:
            del vars(module)["forward"]


def _product(forward: Callable[[Tensor], Tensor], width: Any, inputs: Tensor) -> Tensor:
    return opaque(forward, inputs, like=lambda: inputs.new_empty(*inputs.shape[:-1], width))


def triton_kernels() -> Kernels:
    """Return Triton's kernels, where they run (``specdec.kernels.obstacle``)."""
    from specdec.kernels.layers import add_norm, gated, norm, rotate

    return Kernels(norm, add_norm, gated, rotate)
