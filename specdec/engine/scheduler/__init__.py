"""Scheduling policies, one file each."""

from specdec.engine.scheduler.base import Scheduler, View, Work
from specdec.engine.scheduler.first_come import FirstCome
from specdec.engine.scheduler.prefill_first import PrefillFirst
from specdec.engine.scheduler.token_budget import TokenBudget

__all__ = ["FirstCome", "PrefillFirst", "Scheduler", "TokenBudget", "View", "Work"]
