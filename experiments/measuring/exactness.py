"""The effect of a rule on the output's distribution: drafts enumerated over built-in tables, dense and degenerate.

There is no sampling noise, except for rules with shared noise, which are tried over many seeds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean
from typing import Any

from specdec.checks.drafts import MOST_NUMBERS, enumerate_drafts, num_drafts
from specdec.checks.outcomes import check_shared, enumerate_outcome, outcome
from specdec.checks.tables import ROW_KINDS, Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Noise
from verifiers import RejectionVerifier

REJECTION = RejectionVerifier()
"""The rule that others are compared with."""
SHAPES = {
    "chain 3": TreeShape.chain(3),
    "2": TreeShape.branching(2),
    "2 x 2": TreeShape.branching(2, 2),
    "2 x 1": TreeShape.branching(2, 1),
    "2, 1": TreeShape.from_paths([(0,), (1,), (1, 0)]),
}
LAWS = {DraftSampling.DETERMINISTIC: "top", DraftSampling.IID: "iid", DraftSampling.WITHOUT_REPLACEMENT: "w/o"}
"""The ways of drafting, with the table's words."""
SHARED_LAWS = {DraftSampling.COUPLED: "coupled", **LAWS}
"""The ways of drafting, with the table's words, where drafter and target share their noise."""
ROWS = {"dense": ("dense",), "mixed": ROW_KINDS, "one-hot": ("one_hot",)}
SHARED_LEVEL = 1e-6
"""p-values below this are taken for a bias, not for chance, over all cases."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rule on drafts of one kind: means over the tables, and the worst of them.

    Attributes:
        rows: The kind of rows of the tables.
        temperature: The temperature at which p and q are taken from the tables.
        accepted: Expected accepted tokens per round; of a rule with shared noise the mean over its seeds.
        tv: Largest total variation to the distribution that the rule states, which is the target's unless it is
            ``EXACT_WRT`` another; infinite for NaN.
        target_tv: Largest total variation to the target.
        rejection: The same of rejection sampling on these drafts, None if it takes none; beside a rule with shared
            noise on independent drafts without replacement.
        differing: Of a rule with shared noise: outputs that are not plain decoding's.
        p_value: Likewise: the smallest of plain decoding against the target's distribution.
    """

    shape: str
    law: DraftSampling
    rows: str
    temperature: float
    accepted: float
    rejection: float | None
    tv: float = 0.0
    target_tv: float = 0.0
    differing: int = 0
    p_value: float = 1.0


def cases(
    rule: Verifier,
    vocab: int,
    tables: int,
    seed: int,
    temperatures: Sequence[float],
    *,
    streams: int = 0,
    advance: Callable[[str], object] = lambda step: None,
) -> Iterator[Case]:
    """Yield every combination of a shape, a law, tables and a temperature that the rule takes.

    Args:
        temperatures: The temperatures at which p and q are taken from the tables; one-hot rows stand for 0 alone.
        streams: For a rule with shared noise: seeds that it is tried with.
        advance: Called with the words of every case before it begins.

    Raises:
        ValueError: Drafts of one kind are too many to be enumerated; names the largest vocabulary that is not.
    """
    shared = rule.noise is Noise.SHARED
    parts = [(name, law) for name in SHAPES for law in (SHARED_LAWS if shared else LAWS) if takes(rule, name, law)]
    # A rule with shared noise is compared with rejection sampling on all drafts without replacement.
    check_size([(name, DraftSampling.WITHOUT_REPLACEMENT if shared else law) for name, law in parts], vocab)
    for name, law in parts:
        for rows in ROWS:
            for temperature in temperatures if rows != "one-hot" else (0.0,):
                advance(f"{name}, {SHARED_LAWS[law]}, {rows} tables, T={temperature:g}")
                seeds, depth = range(seed, seed + tables), SHAPES[name].max_depth
                made = [_tables(vocab, depth, number, rows, temperature) for number in seeds]
                at = {"shape": name, "law": law, "rows": rows, "temperature": temperature}
                yield _shared(rule, made, at, streams, seed) if shared else _usual(rule, made, at)


def _usual(rule: Verifier, tables: Sequence[Tables], at: Mapping[str, Any]) -> Case:
    """A rule, and rejection sampling, on all drafts over some tables."""
    shape, law = SHAPES[at["shape"]], at["law"]
    outcomes, rejection = [], []
    for made in tables:
        drafts = enumerate_drafts(made, shape, law, leaf_probs=rule.needs_leaf_probs)
        outcomes.append(outcome(rule, made, drafts))
        if takes(REJECTION, at["shape"], law):
            rejection.append(outcome(REJECTION, made, drafts).expected_accepted)
    return Case(
        **at,
        accepted=mean(each.expected_accepted for each in outcomes),
        rejection=mean(rejection) if rejection else None,
        tv=max(each.tv if each.tv == each.tv else float("inf") for each in outcomes),
        target_tv=max(each.target_tv for each in outcomes),
    )


def _shared(rule: Verifier, tables: Sequence[Tables], at: Mapping[str, Any], streams: int, seed: int) -> Case:
    """A rule with shared noise over some tables."""
    shape, without = SHAPES[at["shape"]], DraftSampling.WITHOUT_REPLACEMENT
    results = [check_shared(rule, made, shape, at["law"], samples=streams, seed=seed) for made in tables]
    return Case(
        **at,
        accepted=mean(result.accepted for result in results),
        rejection=mean(enumerate_outcome(REJECTION, made, shape, without).expected_accepted for made in tables),
        differing=sum(result.differing for result in results),
        p_value=min(result.p_value for result in results),
    )


@lru_cache(maxsize=16)
def _tables(vocab: int, depth: int, seed: int, rows: str, temperature: float) -> Tables:
    """The same tables for all laws: large ones take long to make, row by row."""
    made = Tables.random(vocab, depth, seed=seed, kinds=ROWS[rows])
    return made.tempered(temperature) if temperature else made


def takes(rule: Verifier, name: str, law: DraftSampling) -> bool:
    """Return whether the rule takes drafts of the shape of this name that are drawn so."""
    shape = SHAPES[name]
    return law in rule.samplings and (
        shape.is_chain or not (rule.chain_only or (rule.paths_only and not shape.is_paths))
    )


def check_size(parts: Sequence[tuple[str, DraftSampling]], vocab: int) -> None:
    """Refuse drafts of some shapes and laws, or outputs, that are too many to be enumerated."""

    def fits(size: int) -> bool:
        sizes = [(num_drafts(SHAPES[name], law, size) * size, SHAPES[name]) for name, law in parts]
        numbers = (max(count * (shape.num_nodes + 1), size ** (shape.max_depth + 1)) for count, shape in sizes)
        return all(number <= MOST_NUMBERS for number in numbers)

    if fits(vocab):
        return
    count, name, law = max((num_drafts(SHAPES[name], law, vocab), name, law) for name, law in parts)
    raise ValueError(
        f"vocab={vocab}: a tree of shape {name}, drafted {law.name.lower()}, has {count:.3g} drafts, and enumerating "
        f"them takes too much memory: give vocab={next(filter(fits, range(vocab, 0, -1)))} or less"
    )
