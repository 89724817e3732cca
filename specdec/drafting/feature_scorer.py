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
from specdec.drafting.scorer import Logits, forward_of
from specdec.drafting.window import Fuse, WindowScorer, take
from specdec.forward import Wants
from specdec.target.runner import ModelRunner
from specdec.topology import Topology


class FeatureScorer(WindowScorer):
    """Scores level by level with a head that reads its own output where the target has not been run yet.

    Args:
        runner: The head. Its forward takes ``features`` and can return what is fed back.
        fuse: Makes features of the target's hidden states.
        fed_back: Which of the head's hidden states is the feature of a node's children.
        **window: See ``WindowScorer``.
    """

    def __init__(self, runner: ModelRunner, *, fuse: Fuse, fed_back: int, **window: Any):
        super().__init__(runner, fuse=fuse, **window)
        self._fed_back = fed_back
        self._chain = Topology.chain(self._window, runner.device)
        # What the head has returned for the nodes of the last forward, from which node on.
        self._outputs, self._first = self._features[:0, :1], 0

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
        self._outputs, self._first = feature, 0
        return logits

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        """Return logits after drafted nodes, each read together with its parent's output."""
        first = topology.width - tokens.shape[1]
        features, lengths = self._outputs, (batch.lengths - 1).clamp(min=0)
        if not topology.in_line:  # all parents were in the last forward
            features = take(features, topology.parents[:, first:].expand(len(batch), -1) - self._first)
        wants = Wants(hidden_layers=(self._fed_back,))
        output = self.runner.run(
            forward_of(batch, self._to_model(tokens), topology, lengths, features=features, wants=wants)
        )
        self._outputs, self._first = output.hidden_states[self._fed_back], first
        return output.scores
