"""What an attention backend is: it owns masks, and how the cache is read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from transformers import Cache as TransformersCache

from specdec.cache.base import Cache
from specdec.forward import ForwardBatch

if TYPE_CHECKING:
    from specdec.target.plan import ModelPlan


class Reach(NamedTuple):
    """How far back the queries of a layer see: a window, or a chunk of the row; everything if both are None."""

    window: int | None = None
    chunk: int | None = None


@dataclass(eq=False)
class AttentionState:
    """What a backend has prepared for one forward.

    Attributes:
        masks: One for each reach that the model's layers have, in the order of ``ModelPlan.distinct_reaches``.
    """

    masks: list[Tensor]

    def argument(self, plan: "ModelPlan") -> Tensor | Mapping[str, Tensor]:
        """Returns what a transformers model takes as ``attention_mask``: a dict where layers differ."""
        if len(plan.reaches) == 1:
            return self.masks[0]
        by_reach = dict(zip(plan.distinct_reaches, self.masks, strict=True))
        return {layer_type: by_reach[reach] for layer_type, reach in plan.reaches.items()}


class AttentionBackend(ABC):
    """One way of computing attention over the cache.

    Before a model runs, ``prepare`` makes what all layers need. The layers then call the attention function that
    transformers knows by ``name``. A backend that is ``replayable`` also has ``attend``, which a replayed forward calls
    instead of that function.

    Attributes:
        name: The name of the attention function in transformers, to which the model is switched during our forwards.
        replayable: Whether the backend has ``attend``.
    """

    name: str
    replayable: bool = False

    @abstractmethod
    def prepare(self, batch: ForwardBatch, cache: Cache, plan: "ModelPlan") -> AttentionState:
        """Returns what all layers of a forward share. ``cache.aim(batch)`` has been called before."""

    def attend(
        self,
        state: AttentionState,
        cache: Cache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        mask: int,
        scaling: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Store a layer's new keys and values and return its attention's output.

        Args:
            state: What ``prepare`` returned.
            cache: Where keys and values go.
            query: ``[batch, head, node, head_dim]``.
            key: ``[batch, kv_head, node, head_dim]``, the new ones.
            value: ``[batch, kv_head, node, value_dim]``, the new ones.
            sinks: Attention sinks, one logit per head, or None.
            layer: Index of the layer.
            mask: Index into ``state.masks``.
            scaling: Factor of the scores; None for ``head_dim ** -0.5``.
            softcap: Cap of the scores, or None.

        Returns:
            ``[batch, node, head, value_dim]``.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be replayed")

    def forward(self, state: AttentionState, cache: Cache) -> AbstractContextManager[TransformersCache]:
        """Returns a context in which a model runs, with what the model is given as its cache."""
        return nullcontext(cache)

    def automatic(self, model: Any) -> bool:
        """Returns whether ``attention="auto"`` tries this backend on a model."""
        return True

    def check(self, model: Any) -> str | None:
        """Returns why a model cannot use this backend, or None. A trial shows later whether its numbers are right."""
        return None


def refuses_attention_functions(model: Any) -> str | None:
    """Returns why a model takes no attention function, or None if it takes one. Models say so themselves."""
    if getattr(model, "_supports_attention_backend", False):
        return None
    return f"{model.config.model_type} does not take an attention function"
