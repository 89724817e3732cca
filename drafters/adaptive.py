"""Another drafter's drafts, as deep as a length policy finds worthwhile."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from specdec.arguments import instance
from specdec.batch import Batch
from specdec.drafting.policies import LengthPolicy
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Committed


class AdaptiveDrafter(Drafter):
    """Asks a policy before every round how deep each row's drafts may be, and another drafter for the drafts.

    The drafter is told the depths as if the output had room for no more, so any drafter will do. A batch takes as long
    as its deepest draft.

    Args:
        drafter: What drafts.
        policy: How deep.

    Raises:
        ValueError: An argument is something else.
    """

    adapts = True

    def __init__(self, drafter: Drafter, policy: LengthPolicy):
        instance("drafter", drafter, Drafter, "a Drafter")
        instance("policy", policy, LengthPolicy, "a LengthPolicy, such as AdditiveLength()")
        self.drafter, self.policy = drafter, policy
        self.max_nodes, self.max_depth = drafter.max_nodes, drafter.max_depth
        self.laws, self.is_chain = drafter.laws, drafter.is_chain
        self.is_paths = drafter.is_paths  # a row's paths are cut at one depth
        self.hidden_layers, self.top_tokens = drafter.hidden_layers, drafter.top_tokens
        self.has_leaf_probs = drafter.has_leaf_probs

    def bind(self, target: Target, *, max_batch_size: int, max_length: int, **options: Any) -> None:
        """Bind the drafter, and begin the policy anew."""
        self.drafter.bind(target, max_batch_size=max_batch_size, max_length=max_length, **options)
        self.policy.bind(max_batch_size=max_batch_size, max_depth=self.max_depth)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin a request with both."""
        self.policy.admit(slot)
        self.drafter.admit(slot, prompt_ids, sampling)

    def observe(self, committed: Committed) -> None:
        """Tell the drafter, and the policy how a round went."""
        self.drafter.observe(committed)
        if committed.host_proposed is not None:
            self.policy.note(committed.host_slots, committed.host_proposed, committed.counts - 1)

    @torch.inference_mode()
    def propose(self, slots: Batch) -> DraftTree:
        """Draft no deeper than the policy says."""
        room = np.minimum(self.policy.depths(slots.host_index), slots.host_max_depth)
        room = np.where(slots.host_drafting, room, 0)
        limit = torch.from_numpy(room).to(slots.device, non_blocking=True)
        tree = self.drafter.propose(replace(slots, host_max_depth=room, max_depth=limit))
        return tree.limited(limit) if (room < tree.max_depth).any() else tree

    def release(self, slot: int) -> None:
        """Forget the request."""
        self.drafter.release(slot)
