"""Puts a length policy beside a drafter, and measures what rounds cost where the policy needs to know."""

from collections.abc import Sequence
from pathlib import Path

from drafters.adaptive import AdaptiveDrafter, measure_costs
from specdec.drafting.policies import CostAwareLength, LengthPolicy
from specdec.interfaces import Drafter, Verifier
from specdec.modeling.target import Target

COSTS = "round_costs.json"
MOST_PROMPT = 512
"""Tokens of a prompt that rounds are measured on."""


def paced(drafter: Drafter | None, policy: LengthPolicy | None) -> Drafter | None:
    """Returns the drafter with the policy; as it is where there is none of the two."""
    return drafter if drafter is None or policy is None else AdaptiveDrafter(drafter, policy)


def settle_costs(
    drafter: Drafter | None,
    verifier: Verifier,
    target: Target,
    samples: Sequence[str],
    *,
    max_batch_size: int,
    folder: Path,
    method: str = "",
) -> None:
    """Measure what rounds cost, if the drafter's policy needs that and was not given it; keep it beside the results.

    Args:
        drafter: Any drafter.
        verifier: The acceptance rule.
        target: The target.
        samples: Texts to decode from.
        max_batch_size: The rows that rounds will have.
        folder: Where the results go.
        method: The method's name, if there are several.
    """
    if not isinstance(drafter, AdaptiveDrafter) or not isinstance(drafter.policy, CostAwareLength):
        return
    policy = drafter.policy
    if policy.costs is None:
        assert target.tokenizer is not None, "refused before"
        prompts = [target.tokenizer.encode(text)[:MOST_PROMPT] for text in samples]
        rows = (1, max_batch_size)
        given = [prompt for prompt in prompts if prompt] or [[0]]
        policy.costs = measure_costs(target, drafter.drafter, verifier, given, rows=rows)
    folder.mkdir(parents=True, exist_ok=True)
    policy.costs.save(folder / (f"{method}_{COSTS}" if method else COSTS))
