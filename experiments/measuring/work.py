"""How much work it is to check a rule, known before the check begins."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from experiments.measuring.exactness import KNOWN, LAWS, ROWS, SHAPES, SHARED_LAWS, takes
from specdec.exactness.drafts import MOST_NUMBERS, num_drafts, sample_drafts
from specdec.exactness.tables import Tables
from specdec.interfaces import Verifier
from specdec.types import DraftSampling

Part = tuple[str, DraftSampling]
"""A shape's name and a law: drafts of one kind."""

_FEW = 50_000
"""Drafts that take no time worth estimating, unless a rule is very slow."""
_FEW_SAMPLES, _SAMPLES = 32, 1024
"""Drafts in the samples by which a rule's pace is measured."""
_SLOW = 1.0
"""Seconds for the few samples from which on a rule is too slow to be measured on more."""


@dataclass(frozen=True)
class Work:
    """What a check is going to do.

    Attributes:
        drafts: How many drafts every part enumerates per table.
        turns: How many tables every part goes through: kinds of rows, temperatures and tables of each.
        pace: Seconds per draft, measured on a sample, by part; empty where there is little work.
        kinds: The drafts that are enumerated for a part, where they are not its own.
        tables: Tables of every kind.
        rows: How many rows of tables are made, one by one.
        row_seconds: Seconds per row.
    """

    drafts: Mapping[Part, int]
    turns: int
    pace: Mapping[Part, float]
    kinds: Mapping[Part, Part] = field(default_factory=dict)
    tables: int = 1
    rows: int = 0
    row_seconds: float = 0.0

    @property
    def total(self) -> int:
        """Drafts in all."""
        return self.turns * sum(self.drafts.values())

    @property
    def seconds(self) -> float | None:
        """The estimated time; None where there is little work."""
        if not self.pace:
            return None
        return sum(self.turn_seconds(part) for part in self.drafts) * self.turns + self.rows * self.row_seconds

    def turn_seconds(self, part: Part) -> float:
        """The estimated time of one table of a part; where nothing was measured, its drafts."""
        return self.pace.get(part, 1.0) * self.drafts[part]


def work_of(rule: Verifier, vocab: int, tables: int, temperatures: Sequence[float], *, seed: int = 0) -> Work:
    """The work of ``cases`` with these arguments.

    Raises:
        ValueError: One kind of drafts is too many to be enumerated; names the largest vocabulary that is not.
    """
    parts = {(name, law): (name, law) for name, shape in SHAPES.items() for law in LAWS if takes(rule, shape, law)}
    return _work(rule, parts, vocab, tables, temperatures, seed)


def work_of_shared(rule: Verifier, vocab: int, tables: int, temperatures: Sequence[float], *, seed: int = 0) -> Work:
    """The work of ``shared_cases``: what takes long is the known rule that it is compared with, over all drafts.

    Raises:
        ValueError: As for ``work_of``.
    """
    without = DraftSampling.WITHOUT_REPLACEMENT
    parts = {
        (name, law): (name, without) for name, shape in SHAPES.items() for law in SHARED_LAWS if takes(rule, shape, law)
    }
    return _work(KNOWN["rejection"], parts, vocab, tables, temperatures, seed)


def _work(
    rule: Verifier, parts: Mapping[Part, Part], vocab: int, tables: int, temperatures: Sequence[float], seed: int
) -> Work:
    """The work of a rule on parts, each with the drafts of a part that are enumerated for it."""
    kinds = list(dict.fromkeys(parts.values()))
    check_size(kinds, vocab)
    drafts = {part: num_drafts(SHAPES[kind[0]], kind[1], vocab) for part, kind in parts.items()}
    # One-hot rows are tried at temperature 0 alone.
    turns = tables * (len(temperatures) * (len(ROWS) - 1) + 1)
    rows = _rows(kinds, vocab) * tables
    if max(turns * sum(drafts.values()), rows) <= _FEW:
        return Work(drafts, turns, {})
    paces = {kind: pace_of(rule, kind, vocab, seed) for kind in kinds}
    pace = {part: paces[kind] for part, kind in parts.items()}
    begin = time.thread_time()
    Tables.random(vocab, 1, seed=seed)
    return Work(drafts, turns, pace, parts, tables, rows, (time.thread_time() - begin) / (1 + vocab))


def check_size(parts: Sequence[Part], vocab: int) -> None:
    """Refuse drafts that are too many, and outputs that are too many, to be enumerated.

    Raises:
        ValueError: Names the largest vocabulary that can be.
    """
    if not parts or _fits(parts, vocab):
        return
    most = next(size for size in range(vocab, 1, -1) if _fits(parts, size))
    name, law = max(parts, key=lambda part: num_drafts(SHAPES[part[0]], part[1], vocab))
    count = num_drafts(SHAPES[name], law, vocab)
    raise ValueError(
        f"vocab={vocab}: a tree of shape {name}, drafted {law.name.lower()}, has {count:.3g} drafts, and enumerating "
        f"them takes too much memory: give vocab={most} or less"
    )


def check_time(work: Work, vocab: int, max_minutes: float) -> None:
    """Refuse work that takes too long.

    Raises:
        ValueError: Names a vocabulary that fits into the time.
    """
    if work.seconds is None or work.seconds <= 60 * max_minutes:
        return
    smaller = [size for size in range(2, vocab) if _seconds_at(work, size) <= 60 * max_minutes]
    advice = f"give vocab={max(smaller)} or less" if smaller else "give fewer tables or temperatures"
    raise ValueError(
        f"vocab={vocab}: {work.total:,} drafts are to be verified, which takes about {roughly(work.seconds)} and more "
        f"than max_minutes={max_minutes:g} allows: {advice}, or raise max_minutes"
    )


def pace_of(rule: Verifier, part: Part, vocab: int, seed: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds per draft that a rule and the known ones take together, from a sample of drafts.

    Args:
        rule: The rule.
        part: The drafts.
        vocab: Tokens of the tables.
        seed: Seed of tables and sample.
        clock: Tells the time in seconds; the processor's own by default, which other programs do not disturb.
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
    """A time in words that are precise enough for an estimate."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} seconds"


def _fits(parts: Sequence[Part], vocab: int) -> bool:
    """Whether all drafts, and all outputs, of every part fit into a table."""
    for name, law in parts:
        shape = SHAPES[name]
        drafts = num_drafts(shape, law, vocab) * (shape.num_nodes + 1) * vocab
        if max(drafts, vocab ** (shape.max_depth + 1)) > MOST_NUMBERS:
            return False
    return True


def _rows(parts: Sequence[Part], vocab: int) -> int:
    """The rows of one table of each kind, for every depth that occurs."""
    depths = {SHAPES[name].max_depth for name, _ in parts}
    return len(ROWS) * sum(vocab**level for depth in depths for level in range(depth + 1))


def _seconds_at(work: Work, vocab: int) -> float:
    """The time with a smaller vocabulary, whose drafts and rows take no longer each."""
    kinds = {part: work.kinds.get(part, part) for part in work.pace}
    verifying = sum(work.pace[part] * num_drafts(SHAPES[name], law, vocab) for part, (name, law) in kinds.items())
    return work.turns * verifying + _rows(list(kinds.values()), vocab) * work.tables * work.row_seconds
