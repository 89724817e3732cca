"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``.

A rule of your own needs a class and a YAML in ``conf/verifier/``, or ``verifier._target_=package.module.Class``. It is
tried on built-in tables, dense and degenerate, by enumeration of all drafts: there is no sampling noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import launch
from experiments.config import build
from specdec.exactness import KINDS, Tables, enumerate_drafts, outcome
from specdec.interfaces import Verifier
from specdec.tree import TreeShape
from specdec.types import DraftSampling, Exactness
from verifiers import BlockVerifier, KSeqVerifier, RejectionVerifier, TargetWalkVerifier, TraversalVerifier

KNOWN: dict[str, Verifier] = {
    "rejection": RejectionVerifier(),
    "block": BlockVerifier(),
    "traversal": TraversalVerifier(),
    "k-seq": KSeqVerifier(),
    "target walk": TargetWalkVerifier(),
}
SHAPES = {
    "chain 3": TreeShape.chain(3),
    "2": TreeShape.branching(2),
    "2 x 2": TreeShape.branching(2, 2),
    "2, 1": TreeShape.from_paths([(0,), (1,), (1, 0)]),
}
LAWS = {
    DraftSampling.DETERMINISTIC: "top",
    DraftSampling.IID: "iid",
    DraftSampling.WITHOUT_REPLACEMENT: "w/o",
}
"""How drafts are drawn, with the table's words for it."""
ROWS = {"dense": ("dense",), "mixed": KINDS, "one-hot": ("one_hot",)}
_NOTHING = "-"


@dataclass(frozen=True)
class Case:
    """One row of the table: means over its tables.

    Attributes:
        shape: Name of the tree.
        law: How it was drawn.
        rows: Kind of the tables' rows.
        temperature: Of p and q.
        tv: Largest total variation to the target.
        accepted: Expected accepted tokens, of the rule.
        known: The same of the known rules that take such drafts.
    """

    shape: str
    law: DraftSampling
    rows: str
    temperature: float
    tv: float
    accepted: float
    known: dict[str, float]


def check(config: DictConfig) -> list[Case]:
    """Try the configuration's verifier on every case that it takes, and print the verdict.

    Raises:
        ValueError: It says that it is exact, and is not.
    """
    for name, least in (("vocab", 2), ("tables", 1), ("seed", 0)):
        if type(config[name]) is not int or config[name] < least:
            raise ValueError(f"{name}={config[name]!r}: give an integer of at least {least}")
    if not config.temperatures or min(config.temperatures) <= 0:
        raise ValueError(f"temperatures={list(config.temperatures)}: give at least one, each above 0")
    rule: Verifier = build(config, "verifier")
    name = type(rule).__name__
    done = list(cases(rule, config.vocab, config.tables, config.seed, list(config.temperatures)))
    if not done:
        raise ValueError(f"{name} takes none of the drafts that are tried: chains and trees, {_words(list(LAWS))}")
    console = Console()
    console.print(table(rule, done))
    worst = max(done, key=lambda case: case.tv)
    exact = worst.tv < config.threshold
    where = f"{worst.shape}, {worst.law.name}, {worst.rows} tables, temperature {worst.temperature:g}"
    if rule.exactness is Exactness.EXACT and not exact:
        raise ValueError(f"{name} says that it is exact and is not: total variation {worst.tv:.3g} ({where})")
    found = "exact" if exact else f"not exact: total variation up to {worst.tv:.3g} ({where})"
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
                    tv = 0.0
                    for number in range(tables):
                        made = Tables.random(vocab, shape.max_depth, seed=seed + number, kinds=kinds)
                        made = made.tempered(temperature) if temperature else made
                        drafts = enumerate_drafts(made, shape, law)
                        for other, verifier in (("", rule), *known.items()):
                            result = outcome(verifier, made, drafts)
                            results[other].append(result.expected_accepted)
                            if not other:
                                # Not a number is as wrong as can be.
                                tv = max(tv, result.tv) if result.tv == result.tv else float("inf")
                    means = {other: sum(values) / len(values) for other, values in results.items()}
                    yield Case(shape_name, law, rows, temperature, tv, means.pop(""), means)


def table(rule: Verifier, done: Sequence[Case]) -> Table:
    """A row per case."""
    result = Table(
        title=f"{type(rule).__name__} ({rule.exactness.value})",
        caption="TV: largest total variation to the target; all else: expected accepted tokens per round. "
        "Drafts: branches by level; drawn iid, without replacement, or the top k.",
        title_justify="left",
        caption_justify="left",
        # Narrow enough for 80 columns.
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("draft", "tables"):
        result.add_column(name, no_wrap=True)
    others = [name for name in KNOWN if any(name in case.known for case in done)]
    for name in ("T", "TV", "this", *(_header(name) for name in others)):
        result.add_column(name, justify="right", no_wrap=True)
    for case in done:
        result.add_row(
            f"{case.shape} {LAWS[case.law]}",
            case.rows,
            f"{case.temperature:g}",
            f"{case.tv:.0e}",
            f"{case.accepted:.3f}",
            *(f"{case.known[name]:.3f}" if name in case.known else _NOTHING for name in others),
        )
    return result


def _takes(rule: Verifier, shape: TreeShape, law: DraftSampling) -> bool:
    return law in rule.laws and (shape.is_chain or not rule.chain_only)


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
