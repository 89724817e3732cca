"""Tries all alternatives of a head on the same text, and says which explain bad figures."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from experiments.inspecting.measured import Gain, Measured, gain, ignorance, measure
from experiments.inspecting.text import Text
from experiments.inspecting.wiring import Family, Mistake, Variation, Wiring

_ROUNDS = 3
"""So many mistakes are looked for, one on top of the other."""
_ABOVE = 0.05
"""So much better than token frequencies alone must the acceptance at depth 1 be, to say that a head knows anything."""
_FAR, _TIMES = 0.15, 1.5
"""So much better, in acceptance at depth 1 and in drafted length, must a head predict another token than the next."""


@dataclass(frozen=True, eq=False)
class Tried:
    """An alternative, and what it brings."""

    variation: Variation
    measured: Measured
    gain: Gain


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found out about a head.

    Attributes:
        loaded: What it predicts as it was loaded.
        ignorance: The α at depth 1 that token frequencies alone bring.
        tried: All alternatives to the way it was loaded, best first.
        mistakes: Those that explain bad figures, one on top of the other; each is compared with what was before.
        knows_nothing: Whether it predicts no more than token frequencies do, whatever is tried.
    """

    loaded: Measured
    ignorance: float
    tried: list[Tried] = field(default_factory=list)
    mistakes: list[Tried] = field(default_factory=list)
    knows_nothing: bool = False

    @property
    def names(self) -> list[Mistake]:
        """The mistakes' names; that it was made for another target, if nothing else explains that it knows nothing."""
        return [Mistake.TARGET] if self.knows_nothing else [each.variation.mistake for each in self.mistakes]

    @property
    def best(self) -> Measured:
        """What it predicts with all mistakes mended."""
        return self.mistakes[-1].measured if self.mistakes else self.loaded


def inspect(family: Family, text: Text, progress: Callable[[str], object] = lambda what: None) -> Inspection:
    """Run a head as it was loaded and in all other ways, and look for what raises its acceptance.

    The best of the alternatives that help is taken for a mistake, and then all are tried again on top of it.

    Args:
        family: The head.
        text: What it is tried on.
        progress: Is told what is tried next.
    """

    def measured(wiring: Wiring) -> Measured:
        return measure(text, family.logits(wiring, text), wiring.columns, wiring.labels)

    floor = ignorance(text)
    wiring = family.wiring
    progress("as it was loaded")
    now = measured(wiring)
    found = Inspection(now, floor)
    for step in range(_ROUNDS):
        tried = []
        for variation in family.variations(wiring):
            if not text.states.keys() >= set(variation.wiring.layers):
                continue
            progress(variation.name)
            new = measured(variation.wiring)
            tried.append(Tried(variation, new, gain(new, now)))
        tried.sort(key=lambda each: -each.gain.tokens)
        if step == 0:
            found.tried.extend(tried)
        helping = _helping(tried, now, floor)
        if not helping:
            break
        found.mistakes.append(helping[0])
        wiring, now = helping[0].variation.wiring, helping[0].measured
        if helping[0].variation.mistake is Mistake.TARGET:
            break
    return replace(found, knows_nothing=now.acceptance[0] <= floor + _ABOVE)


def _helping(tried: list[Tried], now: Measured, floor: float) -> list[Tried]:
    """Returns the alternatives that explain bad figures, best first."""
    found = [each for each in tried if _explains(each, now, floor)]
    if any(each.variation.mistake is Mistake.VOCABULARY for each in found):
        # The target's rows for the tokens of a wrong map make up for the map.
        found = [each for each in found if each.variation.mistake is not Mistake.OUTPUT]
    return found


def _explains(tried: Tried, now: Measured, floor: float) -> bool:
    """Returns whether an alternative is so much better that what it changes must have been wrong."""
    if not tried.gain.counts:
        return False
    mistake, new = tried.variation.mistake, tried.measured
    if mistake is Mistake.TARGET:
        return True
    if mistake is Mistake.SHIFT and tried.variation.wiring.labels:
        # Another token may be the easier one. A head that was made for it predicts it far better than its own.
        return new.acceptance[0] > now.acceptance[0] + _FAR and new.length - 1 > _TIMES * (now.length - 1)
    if mistake is Mistake.BLOCK and min(new.acceptance) <= floor:
        return False  # the places of a block are all right, or none is
    return new.acceptance[0] > floor + _ABOVE
