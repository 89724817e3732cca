"""Another drafter's drafts, as deep as a length policy finds worthwhile."""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from specdec.arguments import instance
from specdec.batch import Batch
from specdec.drafting.policies import LengthPolicy
from specdec.interfaces import Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import Outcome


class AdaptiveDrafter(Drafter):
    """Asks a policy before every round how deep each row's drafts may be, and another drafter for the drafts.

    The drafter is shown a batch as if the output had room for no deeper drafts, so any drafter will do. A batch takes
    as long as its deepest draft.

    Args:
        drafter: The other drafter.
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
        self.has_leaf_probs = drafter.has_leaf_probs

    def bind(self, target: Target, sizes: Sizes) -> "AdaptiveSession":
        """Begin a session of the drafter, and the policy anew."""
        policy = copy.copy(self.policy)
        policy.bind(max_batch_size=sizes.max_batch_size, max_depth=self.max_depth)
        return AdaptiveSession(self.drafter.bind(target, sizes), policy)


class AdaptiveSession(Session):
    """A session whose drafts a policy limits.

    Args:
        session: Drafts.
        policy: How deep; bound.
    """

    reads_host = True

    def __init__(self, session: Session, policy: LengthPolicy):
        self.session, self.policy = session, policy
        self.hidden_layers, self.top_tokens = session.hidden_layers, session.top_tokens
        self.models, self.caches, self.lookback = session.models, session.caches, session.lookback

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Begin a request with both."""
        self.policy.admit(slot)
        self.session.admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        """Show the session what became final, and the policy how a round went."""
        self.session.observe(outcome)
        host = outcome.host
        if host is not None and host.proposed_depth is not None:
            rows = host.counts > 0
            self.policy.note(host.slots[rows], host.proposed_depth[rows], host.counts[rows] - 1)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        """Draft no deeper than the policy says."""
        host = batch.on_host
        room = np.where(host.drafting, np.minimum(self.policy.depths(host.slots), host.max_depth), 0)
        shown = batch.limited(room)
        self.session.prepare(shown)
        tree = self.session.propose(shown)
        return tree.limited(shown.max_depth) if (room < tree.max_depth).any() else tree

    def held(self, slot: int, length: int) -> int:
        """See ``Session.held``."""
        return self.session.held(slot, length)

    def release(self, slot: int) -> None:
        """Forget the request."""
        self.session.release(slot)
