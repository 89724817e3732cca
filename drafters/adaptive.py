"""Another drafter's drafts, as deep as a length policy finds worthwhile."""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from drafters.combined import CombinedDrafter, CombinedSession
from specdec.arguments import instance
from specdec.batch import Batch
from specdec.drafting.policies import LengthPolicy
from specdec.interfaces import Description, Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome


class AdaptiveDrafter(CombinedDrafter):
    """Asks a policy before every round how deep each row's drafts may be, and another drafter for the drafts.

    The drafter is shown a batch as if the output had room for no deeper drafts, so any drafter will do.
    """

    adapts = True

    def __init__(self, drafter: Drafter, policy: LengthPolicy):
        super().__init__(drafter=drafter)
        instance("policy", policy, LengthPolicy, "a LengthPolicy, such as AdditiveLength()")
        if policy.foresees is not None:
            raise ValueError(
                f"{type(policy).__name__} decides by what is known after the round ({policy.foresees}): give another "
                f"policy, or play it in virtual time"
            )
        self.drafter, self.policy = drafter, policy
        self.max_nodes, self.is_chain = drafter.max_nodes, drafter.is_chain
        self.is_paths = drafter.is_paths  # a row's paths are cut at one depth
        self.has_leaf_probs = drafter.has_leaf_probs

    def describe(self, target: Target | None = None) -> Description:
        return self.drafter.describe(target)

    def bind(self, target: Target, sizes: Sizes) -> "AdaptiveSession":
        return AdaptiveSession(self, self.drafter.bind(target, sizes), sizes)


class AdaptiveSession(CombinedSession):
    """A session whose drafts a policy limits."""

    def __init__(self, drafter: AdaptiveDrafter, session: Session, sizes: Sizes):
        super().__init__(drafter, session)
        self.policy = copy.copy(drafter.policy)
        self.policy.bind(max_batch_size=sizes.max_batch_size, max_depth=drafter.max_depth)

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.policy.admit(slot)
        super().admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        self.parts[0].observe(outcome)
        host = outcome.host
        if host is not None and host.proposed_depth is not None:
            rows = host.counts > 0
            self.policy.note(host.slots[rows], host.proposed_depth[rows], host.counts[rows] - 1)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        host = batch.on_host
        wanted = self.policy.depths(host.slots, host.lengths)
        room = np.where(host.drafting, np.minimum(wanted, host.max_depth), 0)
        shown = batch.limited(room)
        tree = self.ask(0, shown)
        return tree.limited(shown.max_depth) if (room < tree.max_depth).any() else tree
