"""A model that fills mask tokens as a scorer: one forward for all depths (PARD, P-EAGLE).

The masks stand behind the newest entry that is complete. With L committed tokens that is the root's, at position L, or
for a head that reads pairs the pair (state at L-1, root), at position L-1. It predicts depth 1, and mask i depth i + 1.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import forward_of
from specdec.drafting.window import WindowScorer, given, take
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology


class ParallelScorer(WindowScorer):
    """Scores all depths at once: the logits of a depth do not depend on the tokens drafted above.

    A round's forward holds the window, the root if entries are tokens alone, and a mask for every depth but the first.

    Args:
        mask_token: The token of masks, as the model counts tokens.
        mask_feature: Returns the feature of masks; None if entries are tokens alone.
        fill: Returns the tokens of so many masks of every row, where they are not all ``mask_token``.
        adapter: The number of the adapter that masks go through, and nothing else does.
        **window: See ``WindowScorer``.
    """

    per_depth = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        mask_token: int,
        mask_feature: Callable[[], Tensor] | None = None,
        fill: Callable[[Batch, int], Tensor] | None = None,
        adapter: int = 0,
        **window: Any,
    ):
        super().__init__(runner, **window)
        self._mask_token, self._mask_feature = mask_token, mask_feature
        self._rooted = mask_feature is None
        self._fill, self._adapter = fill, adapter
        self._made_at: Hashable = None
        with torch.inference_mode(False):
            self._feature = torch.zeros_like(self._features[0, 0])

    def prepare(self, batch: Batch) -> Hashable:
        """Also make the masks' feature, if what makes it has changed."""
        version = self._fuse_version()
        if self._mask_feature is not None and version != self._made_at:
            self._feature.copy_(self._mask_feature())
            self._made_at = version
        return super().prepare(batch)

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        slots, window, every = batch.slots, self._window, self._every
        masks = self._tokens.new_full((len(batch), depth - 1), self._mask_token)
        if self._fill is not None:
            masks = self._fill(batch, depth - 1)
        behind = [self._to_model(batch.roots)[:, None], masks] if self._rooted else [masks]
        tokens = torch.cat([self._to_model(self._tokens[slots]), *behind], dim=1)
        nodes = tokens.shape[1]
        features = torch.cat([self._features[slots], self._feature.expand(len(batch), nodes - window, -1)], dim=1)
        adapters = None
        if self._adapter:
            adapters = torch.zeros_like(tokens)
            adapters[:, nodes - depth + 1 :].fill_(self._adapter)  # a number assigned would become a tensor first
        lengths, bound = batch.lengths, batch.key_bound
        have = lengths.clamp(max=window)
        if not every:  # shorter rows begin at position 0, with what there is, and end in what is never read
            index = window - have[:, None] + torch.arange(nodes, device=batch.device)
            index = index.clamp_(max=nodes - 1)
            tokens, features = tokens.gather(1, index), take(features, index)
            adapters = None if adapters is None else adapters.gather(1, index)
            bound = None if bound is None else bound + nodes
        logits = self.runner.run(
            forward_of(
                batch,
                tokens,
                Topology.chain(nodes, batch.device),
                (lengths - window).clamp_(min=0),
                features=given(features),
                adapters=adapters,
                key_bound=bound,
                wants=Wants(logits=depth if every else None),
            )
        ).scores
        if every:
            return logits
        first = have if self._rooted else (have - 1).clamp_(min=0)
        return take(logits, first[:, None] + torch.arange(depth, device=batch.device))
