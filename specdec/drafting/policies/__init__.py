"""How much to draft: length policies decide before a round, node policies while a tree is drafted."""

from specdec.drafting.policies.additive import AdditiveLength
from specdec.drafting.policies.base import LengthPolicy
from specdec.drafting.policies.confidence import ConfidenceNodes
from specdec.drafting.policies.cost_aware import CostAwareLength
from specdec.drafting.policies.cost_aware_nodes import CostAwareNodes, FirstNodes
from specdec.drafting.policies.fixed import FixedLength
from specdec.drafting.policies.nodes import NodePolicy

__all__ = [
    "AdditiveLength",
    "ConfidenceNodes",
    "CostAwareLength",
    "CostAwareNodes",
    "FirstNodes",
    "FixedLength",
    "LengthPolicy",
    "NodePolicy",
]
