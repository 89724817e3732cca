"""A head that reads pairs (the target's hidden state at t, token t+1) as a scorer: EAGLE's heads, MTP modules.

Where they stand: the pair of position t stands at position t of the head's own KV cache. With L committed tokens, the
newest complete pair is (state at L-1, root). It stands at L-1 and is node 0 of the tree that is grown. A drafted node's
pair is (its parent's output, its token). Nothing of a tree is committed: the pairs of accepted tokens are forwarded
again, with the target's hidden states in place of the head's own outputs.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.drafting.scorer import forward_of
from specdec.drafting.window import Fuse, WindowScorer, take
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology


class FeatureScorer(WindowScorer):
    """Scores level by level with a head that reads its own output where the target has not been run yet.

    Args:
        runner: The head. Its forward takes ``features`` and can return what is fed back.
        max_shown: The most nodes that are shown to it in one tree, the root not counted.
        fuse: Makes features of the target's hidden states.
        fed_back: Which of the head's hidden states is the feature of a node's children.
        **window: See ``WindowScorer``.
    """

    def __init__(self, runner: ModelRunner, *, max_shown: int, fuse: Fuse, fed_back: int, **window: Any):
        super().__init__(runner, fuse=fuse, **window)
        self._max_shown, self._fed_back = max_shown, fed_back
        self._chain = Topology.chain(self._window, runner.device)
        self._outputs = self._features[:0, :1]  # of the tree that is grown, by node

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        """Return logits after the newest pair, from a forward of the window's pairs."""
        tokens, features, starts, have = self._newest(batch.slots, batch.lengths, full=self._every)
        wants = Wants(logits=1 if have is None else None, hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_model(tokens), self._chain, starts, features=features, wants=wants)
        )
        feature, logits = output.hidden_states[self._fed_back], output.scores
        if have is None:
            feature = feature[:, -1:]
        else:
            last = (have - 1).clamp_(min=0)[:, None]
            feature, logits = take(feature, last), take(logits, last)
        self._outputs = feature.new_zeros(len(batch), 1 + self._max_shown, feature.shape[2])
        self._outputs[:, :1] = feature
        return logits

    def level_logits(
        self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int
    ) -> Float[Tensor, "batch node vocab"]:
        """Return logits after drafted nodes, each read together with its parent's output."""
        nodes = slice(topology.width - tokens.shape[1], topology.width)
        parents = topology.parents[:, nodes].expand(len(batch), -1)
        lengths, features = (batch.lengths - 1).clamp_(min=0), take(self._outputs, parents)
        wants = Wants(hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_model(tokens), topology, lengths, features=features, wants=wants)
        )
        self._outputs[:, nodes] = output.hidden_states[self._fed_back]
        return output.scores
