"""The effect of a rule on the output's distribution: drafts enumerated over built-in tables, dense and degenerate.

There is no sampling noise, except for rules with shared noise, which are tried over many seeds.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean
from typing import Any

import torch

from experiments.results.origin import Figures
from specdec.checks.drafts import MOST_NUMBERS, enumerate_drafts, num_drafts, sample_drafts
from specdec.checks.outcomes import check_shared, enumerate_outcome, expected_coupled, outcome
from specdec.checks.tables import ROW_KINDS, Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Noise
from verifiers import (
    BlockVerifier,
    GreedyMultiPathVerifier,
    KSeqVerifier,
    RejectionVerifier,
    TargetWalkVerifier,
    TraversalVerifier,
    TwoDraftVerifier,
    WeightedTransportVerifier,
)

KNOWN: dict[str, Verifier] = {
    "rejection": RejectionVerifier(),
    "block": BlockVerifier(),
    "traversal": TraversalVerifier(),
    "k-seq": KSeqVerifier(),
    "target walk": TargetWalkVerifier(),
    "two drafts": TwoDraftVerifier(),
    "weighted transport": WeightedTransportVerifier(),
    "greedy multi-path": GreedyMultiPathVerifier(),
}
SHAPES = {
    "chain 3": TreeShape.chain(3),
    "2": TreeShape.branching(2),
    "2 x 2": TreeShape.branching(2, 2),
    "2 x 1": TreeShape.branching(2, 1),
    "2, 1": TreeShape.from_paths([(0,), (1,), (1, 0)]),
}
LAWS = {
    DraftSampling.DETERMINISTIC: "top",
    DraftSampling.IID: "iid",
    DraftSampling.WITHOUT_REPLACEMENT: "w/o",
}
"""The ways of drafting, with the table's words."""
SHARED_LAWS = {DraftSampling.COUPLED: "coupled", **LAWS}
"""The ways of drafting, with the table's words, where drafter and target share their noise."""
ROWS = {"dense": ("dense",), "mixed": ROW_KINDS, "one-hot": ("one_hot",)}
Part = tuple[str, DraftSampling]
"""A shape's name and a law: drafts of one kind."""
SHARED_LEVEL = 1e-6
"""p-values below this are taken for a bias, not for chance, over all cases."""
_FEW = 50_000
"""Drafts that take no time worth estimating, unless a rule is very slow."""
_FEW_SAMPLES, _SAMPLES = 32, 1024
"""Drafts in the samples by which a rule's pace is measured."""
_SLOW = 1.0
"""Seconds for the few samples from which on a rule is too slow to be measured on more."""


def cases(
    rule: Verifier,
    vocab: int,
    tables: int,
    seed: int,
    temperatures: Sequence[float],
    *,
    streams: int = 0,
    advance: Callable[[Part], object] = lambda part: None,
) -> Iterator[Figures]:
    """Yield every combination of a shape, a law, tables and a temperature that the rule takes.

    Args:
        temperatures: The temperatures at which p and q are taken from the tables.
        streams: For a rule with shared noise: seeds that it is tried with.
        advance: Called when one table of a part is done.

    Yields:
        A row of the table: ``shape``, ``law``, kind of ``rows`` and ``temperature`` of the drafts, and the rule's
        expected ``accepted`` tokens per round, on average over the tables. Of a usual rule: the largest total variation
        to the target (``target_tv``), and to what the rule is EXACT_WRT or else to the target (``tv``); ``known``:
        the accepted tokens of the known rules that take such drafts, by name. Of a rule with shared noise, whose
        ``accepted`` are in closed form for COUPLED drafts alone: outputs that are not plain decoding's
        (``differing``), the smallest ``p_value`` of plain decoding against the target's distribution, and the accepted
        tokens of ``rejection`` sampling, on independent drafts without replacement.
    """
    shared = rule.noise is Noise.SHARED
    for part, rows, temperature in _combinations(rule, SHARED_LAWS if shared else LAWS, temperatures):
        shape, law = SHAPES[part[0]], part[1]
        found: list[Figures] = []
        for number in range(tables):
            made = _tables(vocab, shape.max_depth, seed + number, rows, temperature)
            found.append(_shared(rule, made, shape, law, streams, seed) if shared else _usual(rule, made, shape, law))
            advance(part)
        merged = {name: merge([each[name] for each in found]) for name, merge in _MERGED.items() if name in found[0]}
        yield Figures(shape=part[0], law=law, rows=rows, temperature=temperature, **merged)


def _usual(rule: Verifier, made: Tables, shape: TreeShape, law: DraftSampling) -> Figures:
    """The figures of a rule, and of the known ones, on all drafts over some tables."""
    drafts = enumerate_drafts(made, shape, law, leaf_probs=rule.needs_leaf_probs)
    own = outcome(rule, made, drafts)
    known = {
        name: outcome(other, made, drafts).expected_accepted
        for name, other in KNOWN.items()
        if takes(other, shape, law)
    }
    tv = own.tv if own.tv == own.tv else float("inf")  # NaN counts as infinitely wrong
    return Figures(tv=tv, target_tv=own.target_tv, accepted=own.expected_accepted, known=known)


def _shared(rule: Verifier, made: Tables, shape: TreeShape, law: DraftSampling, streams: int, seed: int) -> Figures:
    """The figures of a rule with shared noise over some tables."""
    result = check_shared(rule, made, shape, law, samples=streams, seed=seed)
    independent = enumerate_outcome(KNOWN["rejection"], made, shape, DraftSampling.WITHOUT_REPLACEMENT)
    return Figures(
        differing=result.differing,
        p_value=result.p_value,
        accepted=expected_coupled(made, shape) if law is DraftSampling.COUPLED else result.accepted,
        rejection=independent.expected_accepted,
    )


_MERGED: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("tv", "target_tv"), max),
    **dict.fromkeys(("accepted", "rejection"), mean),
    "known": lambda found: {name: mean(each[name] for each in found) for name in found[0]},
    "differing": sum,
    "p_value": min,
}
"""The way from the figures of several tables to one."""


def _combinations(
    rule: Verifier, laws: Iterable[DraftSampling], temperatures: Sequence[float]
) -> Iterator[tuple[Part, str, float]]:
    """Yields parts, kinds of rows and temperatures; one-hot rows stand for temperature 0 alone."""
    for part in _parts(rule, laws):
        for rows in ROWS:
            for temperature in temperatures if rows != "one-hot" else (0.0,):
                yield part, rows, temperature


def _parts(rule: Verifier, laws: Iterable[DraftSampling]) -> list[Part]:
    return [(name, law) for name, shape in SHAPES.items() for law in laws if takes(rule, shape, law)]


@lru_cache(maxsize=16)
def _tables(vocab: int, depth: int, seed: int, rows: str, temperature: float) -> Tables:
    """The same tables for all laws: large ones take long to make, row by row."""
    made = Tables.random(vocab, depth, seed=seed, kinds=ROWS[rows])
    return made.tempered(temperature) if temperature else made


def takes(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    """Return whether the rule takes drafts of this shape that are drawn so."""
    return law in rule.samplings and (
        shape.is_chain or not (rule.chain_only or (rule.paths_only and not shape.is_paths))
    )


@dataclass(frozen=True)
class Work:
    """The work of a check.

    Attributes:
        drafts: The number of drafts that every part enumerates per table.
        turns: The number of tables that every part goes through: kinds of rows, temperatures and tables of each.
        pace: Seconds per draft, measured on a sample, by part; empty where there is little work.
        kinds: The drafts that are enumerated for each part.
    """

    drafts: Mapping[Part, int]
    turns: int
    pace: Mapping[Part, float]
    kinds: Mapping[Part, Part]

    @property
    def total(self) -> int:
        """Drafts in all."""
        return self.turns * sum(self.drafts.values())

    @property
    def seconds(self) -> float | None:
        """The estimated time; None where there is little work."""
        return self.turns * sum(self.pace[part] * count for part, count in self.drafts.items()) if self.pace else None

    def check_time(self, vocab: int, max_minutes: float) -> None:
        """Refuse work that takes too long."""
        if self.seconds is None or self.seconds <= 60 * max_minutes:
            return

        def seconds(size: int) -> float:
            counts = {part: num_drafts(SHAPES[name], law, size) for part, (name, law) in self.kinds.items()}
            return self.turns * sum(self.pace[part] * count for part, count in counts.items())

        smaller = [size for size in range(2, vocab) if seconds(size) <= 60 * max_minutes]
        advice = f"give vocab={max(smaller)} or less" if smaller else "give fewer tables or temperatures"
        raise ValueError(
            f"vocab={vocab}: {self.total:,} drafts are to be verified, which takes about {roughly(self.seconds)} and "
            f"more than max_minutes={max_minutes:g} allows: {advice}, or raise max_minutes"
        )


def work_of(rule: Verifier, vocab: int, tables: int, temperatures: Sequence[float], *, seed: int = 0) -> Work:
    """Return the work of ``cases``.

    A rule with shared noise takes long because of the known rule that it is compared with, over all drafts.

    Raises:
        ValueError: One kind of drafts is too many to be enumerated; names the largest vocabulary that is not.
    """
    timed, kinds = rule, {part: part for part in _parts(rule, LAWS)}
    if rule.noise is Noise.SHARED:
        without = DraftSampling.WITHOUT_REPLACEMENT
        timed, kinds = KNOWN["rejection"], {part: (part[0], without) for part in _parts(rule, SHARED_LAWS)}
    check_size(list(kinds.values()), vocab)
    drafts = {part: num_drafts(SHAPES[name], law, vocab) for part, (name, law) in kinds.items()}
    turns = tables * (len(temperatures) * (len(ROWS) - 1) + 1)
    work = Work(drafts, turns, {}, kinds)
    if work.total <= _FEW:
        return work
    paces = {kind: pace_of(timed, kind, vocab, seed) for kind in set(kinds.values())}
    return replace(work, pace={part: paces[kind] for part, kind in kinds.items()})


def check_size(parts: Sequence[Part], vocab: int) -> None:
    """Refuse drafts, or outputs, that are too many to be enumerated."""

    def numbers(part: Part, size: int) -> int:
        shape = SHAPES[part[0]]
        return max(num_drafts(shape, part[1], size) * (shape.num_nodes + 1) * size, size ** (shape.max_depth + 1))

    def fits(size: int) -> bool:
        return all(numbers(part, size) <= MOST_NUMBERS for part in parts)

    if fits(vocab):
        return
    name, law = max(parts, key=lambda part: num_drafts(SHAPES[part[0]], part[1], vocab))
    count = num_drafts(SHAPES[name], law, vocab)
    raise ValueError(
        f"vocab={vocab}: a tree of shape {name}, drafted {law.name.lower()}, has {count:.3g} drafts, and enumerating "
        f"them takes too much memory: give vocab={next(filter(fits, range(vocab, 0, -1)))} or less"
    )


def pace_of(rule: Verifier, part: Part, vocab: int, seed: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the seconds per draft that a rule and the known ones take together, from a sample of drafts.

    The clock is the processor's own by default, which other programs do not disturb.
    """
    shape, law = SHAPES[part[0]], part[1]
    made = Tables.random(vocab, shape.max_depth, seed=seed)
    rules = [rule, *(known for known in KNOWN.values() if takes(known, shape, law))]

    def seconds(count: int, sample: int) -> float:
        drafts = sample_drafts(made, shape, law, count, seed=sample, leaf_probs=rule.needs_leaf_probs)
        begin = clock()
        for each in rules:
            laws = each.laws(drafts.tree, drafts.target_probs)
            for node in range(drafts.tree.width):
                laws.after(torch.full((count,), node))
        return clock() - begin

    # What a rule computes once and keeps (a linear program, say) falls into the first sample, and what a call costs
    # however many drafts it has cancels out of the difference of the other two.
    first = seconds(_FEW_SAMPLES, 0)
    if first > _SLOW:
        return first / _FEW_SAMPLES
    few, many = seconds(_FEW_SAMPLES, 1), min(seconds(_SAMPLES, 2), seconds(_SAMPLES, 3))
    return max(many - few, 0.1 * many) / (_SAMPLES - _FEW_SAMPLES)


def roughly(seconds: float) -> str:
    """Return a time in words that are precise enough for an estimate."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"
