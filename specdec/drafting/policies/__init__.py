"""How much to draft: length policies decide before a round, node policies while a tree is drafted."""

from specdec.drafting.policies.lengths import (
    AdditiveLength,
    CostAwareLength,
    FixedLength,
    LengthPolicy,
    OracleLength,
    TableLength,
)  # fmt: skip
from specdec.drafting.policies.nodes import ConfidenceNodes, CostAwareNodes, FirstNodes, LoopedNodes, NodePolicy

__all__ = [
    "AdditiveLength", "ConfidenceNodes", "CostAwareLength", "CostAwareNodes", "FirstNodes", "FixedLength",
    "LengthPolicy", "LoopedNodes", "NodePolicy", "OracleLength", "TableLength",
]  # fmt: skip
