"""What each ingredient of a speedup brings: methods that differ from each other in one ingredient at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from experiments.results import timing
from experiments.results.records import Record
from experiments.results.requests.timeline import timeline_of
from experiments.results.statistics import Bootstrap, Interval, ratio_of_sums

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
        if not found or any(each is None for each in found):
            return None
        product = 1.0
        for each in found:
            product *= each.value if each is not None else 1.0
        return product

    def share_of(self, *, same_law: bool) -> float | None:
        """The product of the rungs' ratios that leave the output's law as it is, or of those that change it.

        The two multiply to the headline. A rung counts as changing the law if it changes it against the rung before.
        """
        product = 1.0
        for rung in self.rungs[1:]:
            if rung.over_before is None:
                return None
            if same_law != any(name in CHANGES_LAW for name in rung.changed):
                product *= rung.over_before.value
        return product


def ladders(
    records: Sequence[Record], ingredients: Mapping[str, Ingredients], order: Sequence[str], bootstrap: Bootstrap
) -> list[Ladder]:
    """Returns the ladder of every temperature.

    Args:
        records: All records of a run.
        ingredients: The ingredients of every method.
        order: The rungs' methods, from the one with the fewest ingredients.
        bootstrap: Settings of the intervals.

    Raises:
        ValueError: A method of the order has no records, or as ``check_ladder``.
    """
    check_ladder(ingredients, order)
    known = {record.method for record in records}
    for method in order:
        if method not in known:
            raise ValueError(f"ladder: the run has no records of {method!r}, it has {', '.join(sorted(known))}")
    return [
        _ladder(temperature, [r for r in records if r.temperature == temperature], ingredients, order, bootstrap)
        for temperature in sorted({record.temperature for record in records})
    ]


def check_ladder(ingredients: Mapping[str, Ingredients], order: Sequence[str]) -> None:
    """Refuse a ladder of which a rung adds nothing.

    Raises:
        ValueError: Names the rungs, and says what to give.
    """
    for before, after in pairwise(order):
        if not changed(ingredients.get(before, {}), ingredients.get(after, {})):
            raise ValueError(f"ladder: {before} and {after} have the same ingredients: give {after} one more in setups")


def changed(before: Ingredients, after: Ingredients) -> tuple[str, ...]:
    """Returns the names of the ingredients in which two methods differ."""
    return tuple(name for name in LEVERS if before.get(name) != after.get(name))


def _ladder(
    temperature: float,
    records: Sequence[Record],
    ingredients: Mapping[str, Ingredients],
    order: Sequence[str],
    bootstrap: Bootstrap,
) -> Ladder:
    own = {method: [r for r in records if r.method == method] for method in ingredients}
    own = {method: rows for method, rows in own.items() if rows}

    def ratio(method: str, over: str) -> Ratio | None:
        timed = timing.timed_batches(own[method], own[over])
        value = timing.speedup(timed)
        return None if value is None else Ratio(value=value, interval=timing.speedup_interval(timed, bootstrap))

    first, last = order[0], order[-1]
    rungs = []
    for before, method in zip([None, *order], order, strict=False):
        speed, interval = _speed(own[method], bootstrap)
        rungs.append(
            Rung(
                method=method,
                ingredients=ingredients[method],
                changed=() if before is None else changed(ingredients[before], ingredients[method]),
                same_law=_same_law(ingredients[first], ingredients[method]),
                tokens_per_second=speed,
                interval=interval,
                user_tokens_per_second=_user_speed(own[method]),
                over_before=None if before is None else ratio(method, before),
                over_first=None if before is None else ratio(method, first),
                sameness=None if before is None else _sameness(own[method], own[first]),
                mean_acceptance_length=_tokens_per_round(own[method]),
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


def _speed(records: list[Record], bootstrap: Bootstrap) -> tuple[float | None, Interval | None]:
    """Tokens per second, with the interval over prompts; what was timed together stays together."""
    timed = timing.timed_batches(records, None)
    columns = [[batch.tokens for batch in timed], [batch.seconds for batch in timed]]
    interval = bootstrap.over_prompts(ratio_of_sums, [batch.ids for batch in timed], columns) if timed else None
    return timing.tokens_per_second(timed), interval


def _user_speed(records: Sequence[Record]) -> float | None:
    lines = [timeline_of(record) for record in records if not record.failed]
    values = sorted(line.tpot for line in lines if line is not None and line.tpot)
    return 1 / values[(len(values) - 1) // 2] if values else None


def _tokens_per_round(records: Sequence[Record]) -> float | None:
    good = [record for record in records if not record.failed]
    rounds = sum(len(record.accepted) for record in good)
    return (sum(sum(record.accepted) for record in good) + rounds) / rounds if rounds else None


def _sameness(records: Sequence[Record], first: Sequence[Record]) -> Sameness | None:
    """How far the outputs are the first rung's; None where there is nothing to compare."""
    theirs = {(r.prompt, r.turn, r.sample): r.token_ids for r in first if not r.failed and r.greedy and not r.turn}
    pairs = [
        (record.token_ids, theirs[key])
        for record in records
        if not record.failed and (key := (record.prompt, record.turn, record.sample)) in theirs
    ]
    tokens = sum(len(other) for _, other in pairs)
    if not tokens:
        return None
    kept = sum(_common(own, other) for own, other in pairs)
    return Sameness(equal=sum(own == other for own, other in pairs), outputs=len(pairs), tokens=kept / tokens)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens before the first difference."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
