"""Length policies: how deep a row's next drafts may be."""

from specdec.drafting.policies.additive import AdditiveLength
from specdec.drafting.policies.base import LengthPolicy
from specdec.drafting.policies.cost_aware import CostAwareLength
from specdec.drafting.policies.fixed import FixedLength

__all__ = ["AdditiveLength", "CostAwareLength", "FixedLength", "LengthPolicy"]
