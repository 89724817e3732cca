"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``.

A rule of your own needs a class and a YAML in ``conf/verifier/``, or ``verifier._target_=package.module.Class``. It is
tried on built-in tables, dense and degenerate, by enumeration of all drafts: there is no sampling noise. A rule that is
EXACT_WRT another distribution is compared with that one, and its distance to the target stands beside.

Where drafter and target share their noise, given the tree nothing is random, and the verdict is by another check: over
many seeds, every output is plain decoding's token for token, whatever was drafted, and plain decoding follows the
target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import launch
from experiments.config import build
from specdec.exactness.drafts import enumerate_drafts
from specdec.exactness.outcomes import enumerate_outcome, outcome
from specdec.exactness.shared import check_shared, expected_coupled
from specdec.exactness.tables import ROW_KINDS, Tables
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Exactness, Noise
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
HEADERS = {
    "rejection": "RS",
    "traversal": "trav.",
    "k-seq": "k-seq",
    "target walk": "walk",
    "two drafts": "two",
    "weighted transport": "w. tr",
    "greedy multi-path": "paths",
}
"""Of the known rules that the table shows, narrow: with all of them a row has 80 columns. Block is traversal there."""
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
"""The same where drafter and target share their noise."""
ROWS = {"dense": ("dense",), "mixed": ROW_KINDS, "one-hot": ("one_hot",)}
SHARED_LEVEL = 1e-6
"""p-values below this are no chance, over all cases."""
_NOTHING = "-"


@dataclass(frozen=True)
class Case:
    """One row of the table: means over its tables.

    Attributes:
        shape: Name of the tree.
        law: How it was drawn.
        rows: Kind of the tables' rows.
        temperature: Of p and q.
        tv: Largest total variation to the target, or to what the rule is EXACT_WRT.
        target_tv: Largest total variation to the target.
        accepted: Expected accepted tokens, of the rule.
        known: The same of the known rules that take such drafts.
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
        law: How it was drawn.
        rows: Kind of the tables' rows.
        temperature: Of p and q.
        differing: Outputs that are not plain decoding's.
        p_value: The smallest, of plain decoding against the target's law.
        accepted: Mean of accepted tokens; of COUPLED drafts in closed form.
        rejection: Expected accepted tokens of rejection sampling, with independent drafts without replacement.
    """

    shape: str
    law: DraftSampling
    rows: str
    temperature: float
    differing: int
    p_value: float
    accepted: float
    rejection: float


def check(config: DictConfig) -> list[Case] | list[SharedCase]:
    """Try the configuration's verifier on every case that it takes, and print the verdict.

    Raises:
        ValueError: It says that it is exact, and is not.
    """
    for name, least in (("vocab", 2), ("tables", 1), ("seed", 0), ("streams", 100)):
        if type(config[name]) is not int or config[name] < least:
            raise ValueError(f"{name}={config[name]!r}: give an integer of at least {least}")
    if not config.temperatures or min(config.temperatures) <= 0:
        raise ValueError(f"temperatures={list(config.temperatures)}: give at least one, each above 0")
    rule: Verifier = build(config, "verifier")
    name = type(rule).__name__
    if rule.noise is Noise.SHARED:
        return _check_shared(rule, config)
    done = list(cases(rule, config.vocab, config.tables, config.seed, list(config.temperatures)))
    if not done:
        raise ValueError(f"{name} takes none of the drafts that are tried: chains and trees, {_words(list(LAWS))}")
    console = Console()
    console.print(table(rule, done))
    worst = max(done, key=lambda case: case.tv)
    exact = worst.tv < config.threshold
    where = f"{worst.shape}, {worst.law.name}, {worst.rows} tables, temperature {worst.temperature:g}"
    if rule.exactness is not Exactness.LOSSY and not exact:
        raise ValueError(
            f"{name} says that it is {rule.exactness.value} and is not: total variation {worst.tv:.3g} ({where})"
        )
    found = "exact" if exact else f"not exact: total variation up to {worst.tv:.3g} ({where})"
    if exact and rule.exactness is Exactness.EXACT_WRT:
        distance = max(case.target_tv for case in done)
        found = f"exact with respect to the law that it states, which is up to {distance:.3g} from the target's"
    console.print(f"{name} is {found}, over {len(done)} cases. It says of itself: {rule.exactness.value}.")
    return done


def cases(rule: Verifier, vocab: int, tables: int, seed: int, temperatures: Sequence[float]) -> Iterator[Case]:
    """Every combination of a shape, a law, tables and a temperature that the rule takes."""
    for shape_name, shape in SHAPES.items():
        for law in LAWS:
            if not _takes(rule, shape, law):
                continue
            known = {name: other for name, other in KNOWN.items() if _takes(other, shape, law)}
            for rows, kinds in ROWS.items():
                # One-hot rows are of temperature 0, whatever it is.
                for temperature in temperatures if rows != "one-hot" else (0.0,):
                    results: dict[str, list[float]] = {other: [] for other in ("", *known)}
                    tv = target_tv = 0.0
                    for number in range(tables):
                        made = Tables.random(vocab, shape.max_depth, seed=seed + number, kinds=kinds)
                        made = made.tempered(temperature) if temperature else made
                        drafts = enumerate_drafts(made, shape, law, leaf_probs=rule.needs_leaf_probs)
                        for other, verifier in (("", rule), *known.items()):
                            result = outcome(verifier, made, drafts)
                            results[other].append(result.expected_accepted)
                            if not other:
                                # Not a number is as wrong as can be.
                                tv = max(tv, result.tv) if result.tv == result.tv else float("inf")
                                target_tv = max(target_tv, result.target_tv)
                    means = {other: sum(values) / len(values) for other, values in results.items()}
                    yield Case(shape_name, law, rows, temperature, tv, target_tv, means.pop(""), means)


def shared_cases(
    rule: Verifier, vocab: int, tables: int, seed: int, temperatures: Sequence[float], streams: int
) -> Iterator[SharedCase]:
    """The same of a rule with shared noise, and of all ways of drafting."""
    for shape_name, shape in SHAPES.items():
        for law in SHARED_LAWS:
            if not _takes(rule, shape, law):
                continue
            for rows, kinds in ROWS.items():
                for temperature in temperatures if rows != "one-hot" else (0.0,):
                    differing, p_value, accepted, rejection = 0, 1.0, 0.0, 0.0
                    for number in range(tables):
                        made = Tables.random(vocab, shape.max_depth, seed=seed + number, kinds=kinds)
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
                    yield SharedCase(
                        shape_name, law, rows, temperature, differing, p_value, accepted / tables, rejection / tables
                    )


def table(rule: Verifier, done: Sequence[Case]) -> Table:
    """A row per case."""
    stated = "the law that the rule states" if rule.exactness is Exactness.EXACT_WRT else "the target"
    result = _empty_table(
        rule,
        f"TV: largest total variation to {stated}; all else: expected accepted tokens per round. "
        "Drafts: branches by level; drawn iid, without replacement, or the top k. RS: rejection; trav.: traversal (on "
        "chains: block); walk: target walk; two: two drafts; w. tr: weighted transport; paths: greedy multi-path.",
    )
    others = [name for name in HEADERS if any(name in case.known for case in done)]
    mixture = rule.exactness is Exactness.EXACT_WRT
    if mixture:
        others = others[:1]  # what the same drafts give towards p
    for name in ("T", "TV", *(["TV to\np"] if mixture else []), "this", *(HEADERS[name] for name in others)):
        result.add_column(name, justify="right", no_wrap=True)
    for case in done:
        result.add_row(
            f"{case.shape} {LAWS[case.law]}",
            case.rows,
            f"{case.temperature:g}",
            f"{case.tv:.0e}",
            *([f"{case.target_tv:.3f}"] if mixture else []),
            f"{case.accepted:.3f}",
            *(f"{case.known[name]:.3f}" if name in case.known else _NOTHING for name in others),
        )
    return result


def shared_table(rule: Verifier, done: Sequence[SharedCase]) -> Table:
    """A row per case of a rule with shared noise."""
    result = _empty_table(
        rule,
        "differ: outputs that are not plain decoding's; p: smallest p-value of plain decoding against the target; "
        "this: accepted tokens per round; rejec-tion: the same of rejection sampling, drafts without replacement.",
    )
    for name in ("T", "differ", "p", "this", _header("rejection")):
        result.add_column(name, justify="right", no_wrap=True)
    for case in done:
        result.add_row(
            f"{case.shape} {SHARED_LAWS[case.law]}",
            case.rows,
            f"{case.temperature:g}",
            str(case.differing),
            f"{case.p_value:.2g}",
            f"{case.accepted:.3f}",
            f"{case.rejection:.3f}",
        )
    return result


def _check_shared(rule: Verifier, config: DictConfig) -> list[SharedCase]:
    """The verdict on a rule with shared noise."""
    name = type(rule).__name__
    done = list(shared_cases(rule, config.vocab, config.tables, config.seed, list(config.temperatures), config.streams))
    console = Console()
    console.print(shared_table(rule, done))
    differing = sum(case.differing for case in done)
    p_value = min(case.p_value for case in done)
    if differing or p_value < SHARED_LEVEL:
        raise ValueError(
            f"{name} says that its noise is shared, and {differing} outputs are not those of plain decoding, whose "
            f"law fits the target's with a p-value of {p_value:.2g}"
        )
    console.print(
        f"{name} is exact by its own check: over {len(done)} cases of {config.streams} seeds each, no output differs "
        f"from plain decoding's, which follows the target (smallest p-value {p_value:.2g}). "
        f"It says of itself: {rule.exactness.value}, noise {rule.noise.value}."
    )
    return done


def _empty_table(rule: Verifier, caption: str) -> Table:
    """Narrow enough for 80 columns, with the columns that say what was drafted."""
    result = Table(
        title=f"{type(rule).__name__} ({rule.exactness.value})",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 0, 0, 0),
        pad_edge=False,
    )
    for name in ("draft", "tables"):
        result.add_column(name, no_wrap=True)
    return result


def _takes(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    return law in rule.laws and (shape.is_chain or not (rule.chain_only or (rule.paths_only and not shape.is_paths)))


def _header(name: str) -> str:
    """A narrow column's name, on two lines."""
    return name.replace(" ", "\n") if len(name) < 7 or " " in name else f"{name[:6]}-\n{name[6:]}"


def _words(laws: Sequence[DraftSampling]) -> str:
    return ", ".join(law.name.lower() for law in laws)


def main() -> None:
    """Check a verifier."""
    launch(check, "check_verifier")


if __name__ == "__main__":
    main()
