"""Tries the likeliest alternatives to the way a drafter was loaded, and says whether one explains bad figures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.inspecting.acceptance import Acceptance, Gain, gain, play
from experiments.inspecting.kinds import Alternative, alternatives, check_one_model
from specdec.interfaces import Description, Drafter
from specdec.target.target import Target

ABOVE_UNIGRAM = 0.05
"""Minimum acceptance at depth 1 above the unigram baseline for a head to count as trained."""


@dataclass(frozen=True, eq=False)
class Tried:
    """An alternative, and what it brings."""

    alternative: Alternative
    acceptance: Acceptance
    gain: Gain


@dataclass(frozen=True, eq=False)
class Inspection:
    """The result of inspecting a drafter.

    Attributes:
        loaded: What is accepted of it.
        tried: The alternatives, best first.
        refused: Those that the drafter or the target refused, and why.
    """

    drafter: Description
    loaded: Acceptance
    tried: Sequence[Tried]
    refused: Mapping[str, str]

    @property
    def mistake(self) -> Tried | None:
        """The alternative that explains bad figures; None if there is none."""
        least = self.loaded.unigram + ABOVE_UNIGRAM
        return next((each for each in self.tried if each.gain.counts and each.acceptance.acceptance[0] > least), None)

    @property
    def knows_nothing(self) -> bool:
        """It predicts no more than token frequencies do, whatever is tried."""
        return self.mistake is None and self.loaded.acceptance[0] <= self.loaded.unigram + ABOVE_UNIGRAM


def inspect(
    make: Callable[[Mapping[str, Any]], Drafter],
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    seed: int = 0,
    given: Collection[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Inspection:
    """Play rounds with a drafter, and with it loaded in other ways.

    Args:
        make: Loads the drafter anew, with some settings changed. It drafts chains.

    Raises:
        ValueError: The drafter is no trained model, or does not fit the target, or drafts trees.
    """
    drafter = make({})
    described = drafter.describe(target)
    check_one_model(described)
    progress("as loaded")
    loaded = play(target, drafter, prompts, tokens=tokens, seed=seed)
    tried: list[Tried] = []
    refused: dict[str, str] = {}
    for each in alternatives(described, target, given):
        progress(each.name)
        try:
            other = make(each.settings)
            if each.edit is not None:
                each.edit(other.describe(target).doubts)
            acceptance = play(target, other, prompts, tokens=tokens, seed=seed)
        except ValueError as error:
            refused[each.name] = str(error)
            continue
        tried.append(Tried(each, acceptance, gain(acceptance, loaded)))
    return Inspection(described, loaded, sorted(tried, key=lambda each: -each.gain.tokens), refused)
