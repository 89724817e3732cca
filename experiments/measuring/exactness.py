"""What a rule does to the output's distribution: drafts enumerated over built-in tables, dense and degenerate.

There is no sampling noise, except for rules with shared noise, which are tried over many seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, outcome
from specdec.exactness.shared import check_shared, expected_coupled
from specdec.exactness.tables import ROW_KINDS, Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling
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
"""How drafts are drawn, with the table's words for it."""
SHARED_LAWS = {DraftSampling.COUPLED: "coupled", **LAWS}
"""The ways of drafting, with the table's words, where drafter and target share their noise."""
ROWS = {"dense": ("dense",), "mixed": ROW_KINDS, "one-hot": ("one_hot",)}
SHARED_LEVEL = 1e-6
"""p-values below this are taken for a bias, not for chance, over all cases."""


@dataclass(frozen=True)
class Case:
    """One row of the table: means over its tables.

    Attributes:
        shape: Name of the tree.
        law: How drafts are drawn.
        rows: Kind of the tables' rows.
        temperature: Temperature of p and q.
        tv: Largest total variation to the target, or to what the rule is EXACT_WRT.
        target_tv: Largest total variation to the target.
        accepted: The rule's expected accepted tokens.
        known: Expected accepted tokens of the known rules that take such drafts, by name.
    """

    shape: str
    law: DraftSampling
    rows: str
    temperature: float
    tv: float
    target_tv: float
    accepted: float
    known: dict[str, float]


@dataclass(frozen=True)
class SharedCase:
    """One row of the table of a rule with shared noise.

    Attributes:
        shape: Name of the tree.
        law: How drafts are drawn.
        rows: Kind of the tables' rows.
        temperature: Temperature of p and q.
        differing: Outputs that are not plain decoding's.
        p_value: The smallest p-value of plain decoding against the target's distribution.
        accepted: Mean accepted tokens per round; for COUPLED drafts in closed form.
        rejection: Expected accepted tokens of rejection sampling, on independent drafts without replacement.
    """

    shape: str
    law: DraftSampling
    rows: str
    temperature: float
    differing: int
    p_value: float
    accepted: float
    rejection: float


def cases(
    rule: Verifier,
    vocab: int,
    tables: int,
    seed: int,
    temperatures: Sequence[float],
    *,
    advance: Callable[[str, DraftSampling], object] = lambda shape, law: None,
) -> Iterator[Case]:
    """Every combination of a shape, a law, tables and a temperature that the rule takes.

    Args:
        rule: The rule.
        vocab: Tokens of the tables.
        tables: Tables of every kind.
        seed: Seed of the tables.
        temperatures: The temperatures at which p and q are taken from the tables.
        advance: Called with the shape's name and the law when one table of a case is done.
    """
    for shape_name, shape in SHAPES.items():
        for law in LAWS:
            if not takes(rule, shape, law):
                continue
            known = {name: other for name, other in KNOWN.items() if takes(other, shape, law)}
            for rows, kinds in ROWS.items():
                # One-hot rows stand for temperature 0, so other temperatures make no difference.
                for temperature in temperatures if rows != "one-hot" else (0.0,):
                    results: dict[str, list[float]] = {other: [] for other in ("", *known)}
                    tv = target_tv = 0.0
                    for number in range(tables):
                        made = _tables(vocab, shape.max_depth, seed + number, kinds)
                        made = made.tempered(temperature) if temperature else made
                        drafts = enumerate_drafts(made, shape, law, leaf_probs=rule.needs_leaf_probs)
                        for other, verifier in (("", rule), *known.items()):
                            result = outcome(verifier, made, drafts)
                            results[other].append(result.expected_accepted)
                            if not other:
                                # NaN counts as infinitely wrong.
                                tv = max(tv, result.tv) if result.tv == result.tv else float("inf")
                                target_tv = max(target_tv, result.target_tv)
                        advance(shape_name, law)
                    means = {other: sum(values) / len(values) for other, values in results.items()}
                    yield Case(shape_name, law, rows, temperature, tv, target_tv, means.pop(""), means)


def shared_cases(
    rule: Verifier,
    vocab: int,
    tables: int,
    seed: int,
    temperatures: Sequence[float],
    streams: int,
    *,
    advance: Callable[[str, DraftSampling], object] = lambda shape, law: None,
) -> Iterator[SharedCase]:
    """Every combination for a rule with shared noise, with all ways of drafting; arguments as for ``cases``."""
    for shape_name, shape in SHAPES.items():
        for law in SHARED_LAWS:
            if not takes(rule, shape, law):
                continue
            for rows, kinds in ROWS.items():
                for temperature in temperatures if rows != "one-hot" else (0.0,):
                    differing, p_value, accepted, rejection = 0, 1.0, 0.0, 0.0
                    for number in range(tables):
                        made = _tables(vocab, shape.max_depth, seed + number, kinds)
                        made = made.tempered(temperature) if temperature else made
                        result = check_shared(rule, made, shape, law, samples=streams, seed=seed)
                        differing += result.differing
                        p_value = min(p_value, result.p_value)
                        coupled = law is DraftSampling.COUPLED
                        accepted += expected_coupled(made, shape) if coupled else result.accepted
                        independent = enumerate_outcome(
                            KNOWN["rejection"], made, shape, DraftSampling.WITHOUT_REPLACEMENT
                        )
                        rejection += independent.expected_accepted
                        advance(shape_name, law)
                    yield SharedCase(
                        shape_name, law, rows, temperature, differing, p_value, accepted / tables, rejection / tables
                    )


@lru_cache(maxsize=16)
def _tables(vocab: int, depth: int, seed: int, kinds: tuple[str, ...]) -> Tables:
    """The same tables for all laws and temperatures: large ones take long to make, row by row."""
    return Tables.random(vocab, depth, seed=seed, kinds=kinds)


def takes(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    """The rule takes drafts of this shape that are drawn so."""
    return law in rule.samplings and (
        shape.is_chain or not (rule.chain_only or (rule.paths_only and not shape.is_paths))
    )
