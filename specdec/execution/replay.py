"""Replays forwards that come often without the model's Python, on packed weights."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from specdec.attention.base import AttentionState
from specdec.cache.base import Cache
from specdec.execution.base import Executor
from specdec.execution.capture import NAME, CapturingCache, capture
from specdec.execution.eager import call_model, evaluating, inputs_of, output_of
from specdec.execution.freshness import Change
from specdec.execution.packing import packed_linears
from specdec.execution.program import Program
from specdec.execution.recording import recording_now
from specdec.forward import ForwardBatch, ForwardOutput, Wants
from specdec.memory import ran_out

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan

logger = logging.getLogger(__name__)

CAPTURE_AFTER = 24
"""Forwards of one shape before it is captured. Capturing costs about what this many replays save."""


class _Key(NamedTuple):
    """What identifies a captured forward of a model."""

    batch: int
    nodes: int
    wants: Wants
    embeds: bool
    features: bool
    autocast: torch.dtype | None


class ReplayExecutor(Executor):
    """Runs a model on packed weights (``packing``) and captures forwards that come often (``capture``). CPU only.

    A captured forward is checked before it is used: on inputs other than those it was captured with, it must return the
    very numbers of the eager forward. Models with code or hooks from elsewhere are not captured, because such code may
    keep a state whose changes a capture would not see.
    """

    captures = True

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._packed = packed_linears(model)
        self._packing = self._packed.refresh()
        self._programs: dict[_Key, Program | None] = {}
        self._forwards: Counter[_Key] = Counter()
        self._now = _Now()
        self._full = False  # no memory for more captures
        self._at_first_sight = False

    def look(self) -> Change:
        """See ``Executor.look``. Also packs changed weights again, and drops captured forwards."""
        if not self.freshness.expired():
            return Change.NONE
        change = super().look()
        packing = self._packed.refresh(modules_changed=change is not Change.NONE)
        if packing != self._packing:
            self._packing = packing
            change = max(change, Change.PARTS)
        if change is not Change.NONE:
            self._programs.clear()
        return change

    def weights_changed(self) -> None:
        """See ``Executor.weights_changed``."""
        self._packing = self._packed.refresh(all_values=True)
        self._programs.clear()

    @contextmanager
    def at_first_sight(self) -> Iterator[None]:
        """See ``Executor.at_first_sight``."""
        self._at_first_sight = True
        try:
            yield
        finally:
            self._at_first_sight = False

    def copies(self) -> dict[int, int]:
        """See ``Executor.copies``."""
        return self._packed.bytes_by_weight()

    def run(self, plan: "ModelPlan", batch: ForwardBatch, cache: Cache) -> ForwardOutput:
        """See ``Executor.run``."""
        self.check_recordable()
        cache.aim(batch)
        self._now.plan, self._now.cache = plan, cache
        self._now.state = plan.attention.prepare(batch, cache, plan)
        key = _Key(batch.batch, batch.nodes, batch.wants, batch.tokens is None, batch.features is not None, _autocast())
        return output_of(batch.wants, self._forward(key, plan, inputs_of(batch, cache)))

    def _forward(self, key: _Key, plan: "ModelPlan", inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns what the model computes, captured or not."""
        program = self._programs.get(key)
        if program is not None:
            return program(*inputs)
        assert self._now.cache is not None
        with self._packed.in_use(), evaluating(self.freshness.training):
            outputs = call_model(plan, self._now.state, self._now.cache, key.wants, inputs)
            self._consider(key, plan, inputs, outputs)
        return outputs

    def _consider(self, key: _Key, plan: "ModelPlan", inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Capture a forward that comes often; keep the capture if it returns what the model has just returned."""
        if recording_now() or self._full:
            return
        self._forwards[key] += 1
        often = (self._at_first_sight or self._forwards[key] >= CAPTURE_AFTER) and key not in self._programs
        # Prompts are not captured: they have too many lengths.
        if not often or key.wants.logits == 0 or not plan.attention.replayable or not self.freshness.known:
            return
        self._programs[key] = None
        now = self._now
        assert now.cache is not None
        cache = CapturingCache(len(now.cache.layers), now.state.masks)
        try:
            program = capture(
                lambda *given: call_model(plan, now.state, cache, key.wants, given, attention=NAME),
                _others(inputs, plan, now.cache),
                cache=cache,
                attend=now.attend,
                joint=self._packed.joint,
            )
            # The same inputs again, so that the cache is written with what it holds already.
            if all(torch.equal(a, b) for a, b in zip(program(*inputs), outputs, strict=True)):
                self._programs[key] = program
        except Exception as error:
            if not ran_out(error):  # the model does something that cannot be traced: it runs as it is
                logger.debug("%s is not captured: %s", plan.model_type, error)
                return
            self._full = True
            logger.warning(
                "no memory is left for capturing forwards of %s: from now on it runs as it is", plan.model_type
            )


class _Now:
    """The forward that runs: what a captured forward's attention reads.

    Apart from the executor, which keeps programs that refer to this: in a ring they would keep the cache alive.
    """

    plan: "ModelPlan | None" = None
    cache: Cache | None = None

    def __init__(self) -> None:
        self.state = AttentionState([])

    def attend(self, *call: Any) -> Tensor:
        """Returns a layer's attention over the cache and with the masks of this forward.

        Args:
            *call: What a captured attention call has: ``AttentionBackend.attend`` from ``query`` on.
        """
        assert self.plan is not None and self.cache is not None
        return self.plan.attention.attend(self.state, self.cache, *call)


def _others(inputs: Sequence[Tensor], plan: "ModelPlan", cache: Cache) -> list[Tensor]:
    """Returns inputs of the same shapes with other values."""
    given, positions, *features = inputs
    other = given.flip(-1) if given.is_floating_point() else (given + 1) % plan.vocab_size
    return [other, (positions + 1).clamp(max=cache.max_length - 1), *(each.flip(-1) for each in features)]


def _autocast() -> torch.dtype | None:
    """Returns the dtype of autocasting on the CPU; None if it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
