"""Scheduling policies."""

from specdec.engine.scheduler.base import Scheduler, View, Work
from specdec.engine.scheduler.fair import Fair
from specdec.engine.scheduler.first_come import FirstCome, PrefillFirst
from specdec.engine.scheduler.ranked import Deadline, Priority, ShortestRemaining, TokenBudget
from specdec.engine.scheduler.tiers import Tiers

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
