"""Runs a model on packed weights, and replays forwards that come often without the model's Python. CPU only.

A captured forward is to the CPU what a captured graph is to a GPU, with one difference: attention stays one opaque
step, which reads the cache and the masks of the forward that runs. So it depends on the numbers of rows and nodes, and
not on any length. What was noted is rewritten in fewer operations (``fusion``) and becomes a function (``program``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.attention.call import AttentionBackend, AttentionCall, View
from specdec.attention.facts import Facts
from specdec.attention.native import NativeView, Seen
from specdec.cache.base import Cache
from specdec.execution.executor import Executor, autocast_of, inputs_of, output_of
from specdec.execution.frozen import epoch
from specdec.execution.fusion import Rewriting, fuse
from specdec.execution.native_program import Workspace, in_lists
from specdec.execution.packing import PackedLinears, packed_linears
from specdec.execution.program import noted, write_program
from specdec.execution.recorder import Recorder, Recording, Recordings, Stage, recording_now
from specdec.execution.rewriting import Layers
from specdec.forward import ForwardBatch, ForwardOutput, Wants
from specdec.opaque import noting, opaque

CAPTURE_AFTER = 24
"""Forwards of one shape before it is captured. Capturing costs about what this many replays save."""
MOST_CAPTURED = 1024


class ForwardKey(NamedTuple):
    """What identifies a captured forward of a model, besides the shapes of its inputs."""

    nodes: int
    wants: Wants
    autocast: torch.dtype | None
    view: type[View]


class ReplayExecutor(Executor):
    """Runs a model on packed weights (``packing``) and captures forwards that come often.

    A captured forward is checked before it is used: on inputs other than those it was captured with, it must return the
    very numbers of the eager forward. Models with code or hooks from elsewhere are not captured, because such code may
    keep a state whose changes a capture would not see; neither are those with recurrent layers, whose levels depend on
    the trees.
    """

    def __init__(self, model: PreTrainedModel, facts: Facts, backend: AttentionBackend):
        super().__init__(model, facts, backend)
        self.captures = not facts.mixers
        self._packed = packed_linears(model)
        self._now = Now(backend)
        recorder = _ForwardRecorder(self._packed, self._now, facts.vocab_size)
        self.recordings = Recordings(
            recorder, after=CAPTURE_AFTER, most=MOST_CAPTURED, what=f"forwards of {facts.model_type}"
        )
        self._at_first_sight = False

    @property
    def replays_at_once(self) -> bool:
        return self.captures and self.frozen.known and self.backend.replays

    def read_again(self, facts: Facts) -> None:
        super().read_again(facts)
        self._packed.refresh(epoch())
        self.recordings.clear()

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
        view = self._now.view = self.prepare(batch, cache)
        # The C reads them by the strides that they had when the forward was captured.
        inputs, wants = [each.contiguous() for each in inputs_of(batch, cache)], batch.wants
        as_it_is = not self.captures or self.backend.passes_cache or not self.frozen.known
        # A recording has a captured forward as one step, if its C is told where the forward's tensors are.
        notes = noting.get() if isinstance(view, NativeView) and recording_now() else None
        # Prompts are not captured: they have too many lengths.
        if as_it_is or (notes is None and (recording_now() or wants.logits == 0)):
            with self._packed.in_use():
                return output_of(wants, self.call_model(wants, inputs, view))

        def stage(*given: Tensor) -> list[Tensor]:
            with self._packed.in_use():
                return self.call_model(wants, given, view, self._now.answer, self._now.store)

        key = ForwardKey(batch.nodes, wants, autocast_of("cpu"), type(view))
        if notes is None:
            self.recordings.after = 1 if self._at_first_sight else CAPTURE_AFTER
            return output_of(wants, self.recordings.take("forward", key, stage, inputs)[1])
        assert isinstance(view, NativeView)
        self.recordings.after = 1
        program: Any
        with notes.apart():
            program, outputs = self.recordings.take("forward", key, stage, inputs)
        if program is None or program.aimed:  # its operations are noted one by one
            with self._packed.in_use():
                return output_of(wants, self.call_model(wants, inputs, view))
        notes.add(partial(self._now.replay, program, replace(view, seen=())), (view.seen, *inputs), outputs)
        return output_of(wants, outputs)


class Now:
    """The forward that runs: what a captured forward's attention reads.

    Apart from the executor, which keeps programs that refer to this: in a ring they would keep the cache alive.
    """

    def __init__(self, backend: AttentionBackend):
        self._backend = backend
        self.view: View | None = None

    def answer(self, call: AttentionCall) -> Tensor:
        """Return a layer's attention; a single operation while a forward is captured."""
        batch, heads, nodes = call.query.shape[:3]
        like = partial(call.query.new_empty, batch, nodes, heads, call.value.shape[3])
        return opaque(self.attend, *call, like=like)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values; a single operation while a forward is captured."""
        opaque(self.write, layer, keys, values, like=lambda: None)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys and values in this forward's cache."""
        assert self.view is not None
        self.view.cache.write(layer, keys, values)

    def turn(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Turn queries and keys, and store keys and values: a step that only C runs."""
        raise NotImplementedError

    def attend(self, *call: Any) -> Tensor:
        """Return a layer's attention over the cache and with the masks of this forward."""
        return self._backend.attend(AttentionCall(*call), self.view)

    def replay(self, program: Recording, view: NativeView, seen: Seen, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the outputs of a captured forward that sees what stands in ``seen``, and otherwise as in ``view``."""
        self.view = replace(view, seen=seen)
        return program(*inputs)


class _ForwardRecorder(Recorder):
    """Captures a model's forward; several of its packed weights are joined."""

    def __init__(self, packed: PackedLinears, now: "Now", vocab_size: int):
        self._packed, self._now, self._vocab_size = packed, now, vocab_size
        self._workspace = Workspace()

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        """See ``Recorder.record``. The forward's inputs decide about nothing: others of the same shapes are traced."""
        outputs = stage(*inputs)
        traced_inputs = self._others(*inputs)
        with torch.inference_mode(), noted() as work:
            traced = stage(*traced_inputs)
        if work.refusal is None:
            steps = fuse(work.steps, traced_inputs, traced, self._packed.joint, self._listed(traced_inputs, traced))
            program: Any = write_program(steps, traced_inputs, traced)
            program.aimed = any(step.function == self._now.write for step in steps)
            if all(torch.equal(a, b) for a, b in zip(program(*inputs), outputs, strict=True)):
                return program, outputs
        return work.refusal or "it returns other numbers", stage(*inputs)  # the cache holds what others have left

    def _listed(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Rewriting | None:
        """Return what puts steps into lists; None if attention is not the C's."""
        now = self._now
        if not isinstance(now.view, NativeView):
            return None
        layers = Layers(now.attend, now.write, now.turn)

        def of_now() -> NativeView:
            assert isinstance(now.view, NativeView), "as its key says"
            return now.view

        return lambda steps: in_lists(steps, inputs, outputs, layers, self._workspace, of_now)

    def _others(self, given: Tensor, positions: Tensor, *features: Tensor) -> list[Tensor]:
        """Return inputs of the same shapes with other values."""
        other = given.flip(-1) if given.is_floating_point() else (given + 1) % self._vocab_size
        return [other, torch.where(positions > 0, positions - 1, positions + 1), *(each.flip(-1) for each in features)]
