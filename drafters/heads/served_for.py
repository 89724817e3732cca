"""What a folder in speculators' layout says about the target, and about drafting for it."""

from dataclasses import dataclass
from typing import Any

VERSION = "0.9.0"
"""The version of speculators whose layout is written."""


@dataclass(frozen=True, kw_only=True)
class ServedFor:
    """The target that a drafter is served with.

    Attributes:
        target: Its name on the hub, or its folder. vLLM loads it by this name.
        architectures: What its ``config.json`` calls its class; empty if that is not known.
        tokens: How many tokens a server is to draft per round, unless it is told otherwise; None for what the head
            was made for.
    """

    target: str
    architectures: tuple[str, ...] = ()
    tokens: int | None = None


def speculators_section(algorithm: str, given: ServedFor, *, tokens: int) -> dict[str, Any]:
    """Returns ``speculators_config``.

    Args:
        algorithm: ``speculators_model_type`` of the folder.
        given: What it is served for.
        tokens: Drafted tokens per round if ``given`` does not say.

    Raises:
        ValueError: The target has no name, and vLLM refuses a folder that does not name it.
    """
    if not given.target:
        raise ValueError("speculators' layout names the target that is served: give its name")
    return {
        "algorithm": algorithm,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": given.tokens or tokens,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": given.target, "architectures": list(given.architectures)},
    }
