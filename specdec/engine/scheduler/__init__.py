"""Scheduling policies."""

from specdec.engine.scheduler.base import FirstCome, PrefillFirst, Scheduler, View, Work
from specdec.engine.scheduler.ranked import Deadline, Priority, ShortestRemaining, Tiers, TokenBudget

__all__ = [
    "Deadline",
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
