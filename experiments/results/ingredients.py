"""What each ingredient of a speedup brings: methods that differ from each other in one ingredient at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from math import prod

from experiments.results import timing
from experiments.results.frame import Frame, Outputs, frame_of, rounds_of
from experiments.results.metrics import mean_acceptance_length
from experiments.results.records import GREEDY_BELOW
from experiments.results.requests import percentile
from experiments.results.statistics import Bootstrap, Interval

LEVERS = ("target", "attention", "forwards", "weights", "dtype", "KV cache", "drafter", "batch", "threads", "engine")
"""All ingredients that are stated, in the order in which they are listed."""
CHANGES_LAW = ("target", "weights", "dtype", "KV cache")
"""Those that decide about the law of the output: a change makes another target of it."""
NO_DRAFTER = "none"

Ingredients = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A method's tokens per second over another's, on the same prompts, with its interval over prompts."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Sameness:
    """How far greedy outputs are those of the first rung.

    Attributes:
        equal: Outputs that are equal to the last token.
        outputs: All that were compared.
        tokens: The share of the first rung's tokens that come before the first difference.
    """

    equal: int
    outputs: int
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A method as a step of the ladder.

    Attributes:
        method: Its name.
        ingredients: What its speed is made of.
        changed: The ingredients in which it differs from the rung before; empty for the first.
        same_law: Whether its output follows the first rung's law; False where weights or cache have another precision.
        tokens_per_second, interval: Output tokens of all users; None where nothing was timed.
        user_tokens_per_second: What one user sees: 1 / TPOT, at the median of all requests.
        over_before, over_first: Its tokens per second over those of the rung before, and of the first.
        sameness: None where outputs were sampled.
        mean_acceptance_length: Tokens per round.
    """

    method: str
    ingredients: Ingredients
    changed: tuple[str, ...]
    same_law: bool
    tokens_per_second: float | None
    interval: Interval | None
    user_tokens_per_second: float | None
    over_before: Ratio | None
    over_first: Ratio | None
    sameness: Sameness | None
    mean_acceptance_length: float | None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one ingredient brings by itself, in two places: added to the first rung, and taken out of the last one.

    Attributes:
        lever: The ingredient.
        value: What it is changed to.
        alone: The first rung with it, over the first rung; None where no method of the run is that.
        alone_method: Its method.
        last: The last rung over the last rung without it; None where the last rung has it in another value, or where
            no method is that.
        last_method: The method without it.
        same_law: Whether the output's law stays.
    """

    lever: str
    value: str
    alone: Ratio | None
    alone_method: str | None
    last: Ratio | None
    last_method: str | None
    same_law: bool


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The whole at one temperature.

    Attributes:
        temperature: The requests'.
        rungs: From the first, which has the fewest ingredients, to the last.
        effects: Each ingredient by itself, in the order of the rungs.
        shared: The ingredients that all rungs have in common.
    """

    temperature: float
    rungs: tuple[Rung, ...]
    effects: tuple[Effect, ...]
    shared: Ingredients

    @property
    def headline(self) -> Ratio | None:
        """The last rung over the first: what would be printed large."""
        return self.rungs[-1].over_first

    @property
    def product_of_alone(self) -> float | None:
        """What the last rung's ratio would be if ingredients multiplied; None where one was not measured alone."""
        last = self.rungs[-1].ingredients
        found = [effect.alone for effect in self.effects if last[effect.lever] == effect.value]
        known = [each.value for each in found if each is not None]
        return prod(known) if known and len(known) == len(found) else None

    def share_of(self, *, same_law: bool) -> float | None:
        """The product of the rungs' ratios that leave the output's law as it is, or of those that change it.

        The two multiply to the headline. A rung counts as changing the law if it changes it against the rung before.
        """
        steps = [
            (rung.over_before, same_law != any(name in CHANGES_LAW for name in rung.changed)) for rung in self.rungs[1:]
        ]
        known = [(ratio.value, counts) for ratio, counts in steps if ratio is not None]
        return prod(value for value, counts in known if counts) if len(known) == len(steps) else None


def ladders(
    outputs: Outputs, ingredients: Mapping[str, Ingredients], order: Sequence[str], bootstrap: Bootstrap
) -> list[Ladder]:
    """Return the ladder of every temperature.

    Args:
        outputs: All of a run.
        ingredients: The ingredients of every method.
        order: The rungs' methods, from the one with the fewest ingredients.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: A method of the order has no records, or as ``check_ladder``.
    """
    check_ladder(ingredients, order)
    frame = frame_of(outputs)
    known = sorted(set(frame.method))
    for method in order:
        if method not in known:
            raise ValueError(f"ladder: the run has no records of {method!r}, it has {', '.join(known)}")
    return [_ladder(float(at), own, ingredients, order, bootstrap) for at, own in frame.groupby("temperature")]


def check_ladder(ingredients: Mapping[str, Ingredients], order: Sequence[str]) -> None:
    """Refuse a ladder of which a rung adds nothing.

    Raises:
        ValueError: Names the rungs, and says what to give.
    """
    for before, after in pairwise(order):
        if not changed(ingredients.get(before, {}), ingredients.get(after, {})):
            raise ValueError(f"ladder: {before} and {after} have the same ingredients: give {after} one more in setups")


def changed(before: Ingredients, after: Ingredients) -> tuple[str, ...]:
    """Return the names of the ingredients in which two methods differ."""
    return tuple(name for name in LEVERS if before.get(name) != after.get(name))


def _ladder(
    temperature: float,
    frame: Frame,
    ingredients: Mapping[str, Ingredients],
    order: Sequence[str],
    bootstrap: Bootstrap,
) -> Ladder:
    own = {method: rows for method in ingredients if len(rows := frame[frame.method == method])}

    def ratio(method: str, over: str) -> Ratio | None:
        timed = timing.timed_calls(own[method], own[over])
        value = timing.speedup(timed)
        return None if value is None else Ratio(value=value, interval=timing.speedup_interval(timed, bootstrap))

    first, last = order[0], order[-1]
    rungs = []
    for before, method in zip([None, *order], order, strict=False):
        timed = timing.timed_calls(own[method], None)
        tpot = own[method].tpot[own[method].tpot > 0].to_numpy()
        rungs.append(
            Rung(
                method=method,
                ingredients=ingredients[method],
                changed=() if before is None else changed(ingredients[before], ingredients[method]),
                same_law=_same_law(ingredients[first], ingredients[method]),
                tokens_per_second=timing.tokens_per_second(timed),
                interval=timing.tokens_per_second_interval(timed, bootstrap),
                user_tokens_per_second=1 / percentile(tpot, 50) if len(tpot) else None,
                over_before=None if before is None else ratio(method, before),
                over_first=None if before is None else ratio(method, first),
                sameness=None if before is None else _sameness(own[method], own[first]),
                mean_acceptance_length=mean_acceptance_length(rounds_of(own[method])),
            )
        )
    effects = []
    for lever, value in _settings(ingredients, order):
        alone = next((m for m in own if _differs_in(ingredients[first], ingredients[m], lever, value)), None)
        start = ingredients[first].get(lever, "")
        is_last = ingredients[last].get(lever) == value
        without = next((m for m in own if _differs_in(ingredients[last], ingredients[m], lever, start)), None)
        without = without if is_last else None
        effects.append(
            Effect(
                lever=lever,
                value=value,
                alone=None if alone is None else ratio(alone, first),
                alone_method=alone,
                last=None if without is None else ratio(last, without),
                last_method=without,
                same_law=lever not in CHANGES_LAW,
            )
        )
    listed = [ingredients[method] for method in order]
    shared = {name: listed[0][name] for name in LEVERS if name in listed[0] and len({i.get(name) for i in listed}) == 1}
    return Ladder(temperature=temperature, rungs=tuple(rungs), effects=tuple(effects), shared=shared)


def _settings(ingredients: Mapping[str, Ingredients], order: Sequence[str]) -> list[tuple[str, str]]:
    """Every value of an ingredient that a rung has and the first has not, in the order in which they are added."""
    first = ingredients[order[0]]
    found: dict[tuple[str, str], None] = {}
    for method in order[1:]:
        for lever in changed(first, ingredients[method]):
            found.setdefault((lever, ingredients[method].get(lever, "")))
    return list(found)


def _differs_in(one: Ingredients, other: Ingredients, lever: str, value: str) -> bool:
    """Whether the other has this value of one ingredient, and is the same in all others."""
    return changed(one, other) == (lever,) and other.get(lever) == value


def _same_law(one: Ingredients, other: Ingredients) -> bool:
    return not any(name in CHANGES_LAW for name in changed(one, other))


def _sameness(own: Frame, first: Frame) -> Sameness | None:
    """How far the outputs are the first rung's; None where there is nothing to compare."""
    keys = ["prompt", "turn", "sample"]
    theirs = first[~first.failed & (first.temperature < GREEDY_BELOW) & (first.turn == 0)]
    both = own[~own.failed].merge(theirs[[*keys, "token_ids"]], on=keys, suffixes=("", "_of_first"))
    pairs = list(zip(both.token_ids, both.token_ids_of_first, strict=True))
    tokens = sum(len(other) for _, other in pairs)
    if not tokens:
        return None
    kept = sum(len(list(takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))) for pair in pairs)
    return Sameness(equal=sum(one == other for one, other in pairs), outputs=len(pairs), tokens=kept / tokens)
