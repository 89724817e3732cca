"""Scheduling policies, one file each."""

from specdec.engine.scheduler.base import Scheduler, View, Work
from specdec.engine.scheduler.deadline import Deadline
from specdec.engine.scheduler.fair import Fair
from specdec.engine.scheduler.first_come import FirstCome
from specdec.engine.scheduler.prefill_first import PrefillFirst
from specdec.engine.scheduler.priority import Priority
from specdec.engine.scheduler.shortest import ShortestRemaining
from specdec.engine.scheduler.tiers import Tiers
from specdec.engine.scheduler.token_budget import TokenBudget

__all__ = [
    "Deadline",
    "Fair",
    "FirstCome",
    "PrefillFirst",
    "Priority",
    "Scheduler",
    "ShortestRemaining",
    "Tiers",
    "TokenBudget",
    "View",
    "Work",
]
