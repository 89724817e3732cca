"""Drafts of rounds in virtual time, and how many are accepted: by dense traces, as deep as a policy lets them."""

import copy

import numpy as np
from jaxtyping import Int

from experiments.load.dense import Dense
from specdec.drafting.policies.lengths import LengthPolicy
from specdec.shape import TreeShape

_MOST_COPIES = 32

Rows = Int[np.ndarray, " batch"]


class Acceptance:
    """The drafts of some requests, of which request i has trace i, or one of the traces again where there are fewer.

    Args:
        outputs: The tokens of every request's output.
        shape: The tree that is drafted; None for chains.
        policy: How deep drafts are; None for as deep as the traces go.
        rng: Draws what is accepted, where that is not certain.
    """

    def __init__(
        self,
        traces: Dense,
        outputs: Int[np.ndarray, " request"],
        shape: TreeShape | None,
        policy: LengthPolicy | None,
        rng: np.random.Generator,
    ):
        self._traces, self.policy = traces, copy.copy(policy)
        count, own = len(outputs), len(traces.lengths)
        if shape is None:
            accepted, self._nodes = traces.accepted(rng, min(-(-count // own), _MOST_COPIES)), traces.nodes
        else:
            depths = np.array(shape.depths[1:])
            wide = [(depths <= level + 1).sum() for level in range(traces.depth)]
            accepted, self._nodes = traces.accepted_in(shape), np.broadcast_to(wide, traces.nodes.shape)
        self.most_nodes = int(self._nodes.max(initial=0))
        place = np.arange(count) % own
        # Where an output is longer than its trace, it goes on from the front, and leaves out the end, where drafts
        # were cut because the output was about to end.
        lengths = traces.lengths[place]
        self._around = np.where(outputs > lengths, np.maximum(lengths - traces.depth, 1), np.maximum(lengths, 1))
        self._begin = traces.begins[place]
        self._copy = (np.arange(count) // own % len(accepted)) * len(traces.proposed)
        self._accepted = np.ascontiguousarray(accepted).ravel()

    def round(self, rows: Rows, slots: Rows, lengths: Rows, output: Rows, most: Rows) -> tuple[Rows, Rows, Rows]:
        """Return how deep the drafts of a round are, how many nodes they have, and how many tokens are accepted.

        Args:
            rows: The numbers of the requests.
            lengths: The tokens in their caches.
            output: The tokens of their outputs so far.
            most: How deep the drafts may be.
        """
        place = self._begin[rows] + output % self._around[rows]
        able = self._accepted[self._copy[rows] + place]
        if self.policy is not None:
            if self.policy.foresees == "accepted":
                self.policy.foresee(slots, np.minimum(able, most))
            elif self.policy.foresees == "margins":
                self.policy.foresee(slots, self._traces.margin[place])
            most = np.minimum(self.policy.depths(slots, lengths), most)
        proposed = np.minimum(most, self._traces.proposed[place])
        accepted = np.minimum(able, proposed)
        if self.policy is not None:
            self.policy.note(slots, proposed, accepted)
        return proposed, np.where(proposed > 0, self._nodes[place, proposed - 1], 0), accepted
