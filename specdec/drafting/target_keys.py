"""A drafter's own queries over the target's keys and values, which are in the target's cache."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from specdec.attention import BACKENDS
from specdec.attention.call import AttentionCall, answered_by
from specdec.attention.facts import Reach
from specdec.batch import Batch
from specdec.forward import ForwardBatch
from specdec.target.runner import ModelRunner
from specdec.topology import Topology


class TargetKeys:
    """Answers a drafting model's attention calls with what some layers of the target have stored.

    All nodes of a draft stand at one place, behind the committed positions, and see these alone. So a level's nodes are
    one query with more heads, and the cache is read once for all of them.

    Args:
        runner: Runs the target. Nothing is written to its cache.
        layers: The layer that is read, by a name that the model has for it.
        reaches: How far back is seen, by the same names.

    Attributes:
        stand_ins: What the model is given as keys and values, by name: the call is recognized by them.
    """

    def __init__(self, runner: ModelRunner, layers: Mapping[str, int], reaches: Mapping[str, Reach]):
        self._runner, self._facts = runner, replace(runner.facts, reaches=dict(reaches))
        self._backend = BACKENDS["grouped"] if runner.backend.passes_cache else runner.backend
        self._chain = Topology.chain(1, runner.device)
        self.stand_ins: dict[str, tuple[Tensor, Tensor]] = {}
        self._known: dict[int, tuple[int, int]] = {}
        for name, layer in layers.items():
            shape = runner.facts.layers[layer]
            with torch.inference_mode(False):
                key, value = torch.zeros(2, 1, shape.key_heads, 1, 1, device=runner.device)
            self.stand_ins[name] = key, value
            self._known[id(key)] = layer, self._facts.distinct_reaches.index(reaches[name])

    @property
    def version(self) -> int:
        return self._runner.version

    def aim(self, batch: Batch) -> None:
        """Prepare for the drafts of a round: the rows' last committed positions, and what these see."""
        last = (batch.lengths - 1).clamp_(min=0)
        forward = ForwardBatch(
            tokens=batch.roots[:, None],
            slots=batch.slots,
            lengths=last,
            topology=self._chain,
            key_bound=batch.key_bound,
        )
        self._runner.cache.aim(forward)
        self._view = self._backend.prepare(forward, self._runner.cache, self._facts)

    def answering(self) -> AbstractContextManager[object]:
        """During the ``with`` block, answer attention calls whose keys are stand-ins."""
        return answered_by(self._answer)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: object) -> Tensor:
        layer, reach = self._known[id(key)]
        rows, heads, nodes, width = query.shape
        folded = query.reshape(rows, heads * nodes, 1, width)
        call = AttentionCall(folded, key, value, layer, reach, *options)  # type: ignore[arg-type]
        output = self._backend.attend(call, self._view)
        return output.reshape(rows, heads, nodes, -1).transpose(1, 2)
