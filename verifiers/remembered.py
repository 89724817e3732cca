"""Lets ``next_law`` use what ``stop_law`` has just computed for the same tables.

The two functions of a rule are pure, and either may be called alone. But ``accept`` calls one after the other, and much
of the work is the same. What ``stop_law`` leaves here is used at most once, by the next call for the very same tree and
table, so a table that somebody writes to later is not taken for what it was.
"""

from typing import Any

from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree


def remember(rule: Verifier, tree: DraftTree, target_probs: Tensor, value: Any) -> None:
    """Keep a value for the rule's next call with this tree and this table."""
    vars(tree)["_remembered"] = (rule, target_probs, value)


def recall(rule: Verifier, tree: DraftTree, target_probs: Tensor) -> Any:
    """Returns what was kept for this rule, tree and table, and forgets it; None if there is nothing."""
    kept = vars(tree).pop("_remembered", None)
    if kept is not None and kept[0] is rule and kept[1] is target_probs:
        return kept[2]
    return None
