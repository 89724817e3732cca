"""Findings about a rule or a drafter: the tables of the commands that check, inspect and export."""

from collections.abc import Callable, Mapping, Sequence

from experiments.inspecting.facts import same_model
from experiments.inspecting.mistakes import Inspection, Usual
from experiments.measuring.exactness import SHARED_LAWS, Case
from experiments.reporting.columns import number
from experiments.reporting.table import Cell, Emphasis, Table, left
from specdec.checks.drafter import Finding, Status
from specdec.checks.draws import LEVEL
from specdec.interfaces import Verifier
from specdec.types import Exactness, Noise

_EMPHASIS = {Status.FAILED: Emphasis.MISSED, Status.NOT_TRIED: Emphasis.LOSSY}
HEADERS = {
    "rejection": "RS", "traversal": "trav.", "k-seq": "k-seq", "target walk": "walk", "two drafts": "two",
    "weighted transport": "w. tr", "greedy multi-path": "paths",
}  # fmt: skip
"""Short headings of the known rules: with all of them a row has 80 characters. Block has none, because it equals
traversal on chains and takes nothing else."""


# ---------------------------------------------------------------- rules


def exactness_table(rule: Verifier, done: Sequence[Case]) -> Table:
    """A row per case, narrow enough for 80 columns."""
    shared = rule.noise is Noise.SHARED
    return Table.of(
        done,
        [
            (left("draft"), lambda case: f"{case.shape} {SHARED_LAWS[case.law]}"),
            (left("tables"), lambda case: case.rows),
            ("T", lambda case: f"{case.temperature:g}"),
            *(_SHARED if shared else _usual_columns(rule, done)),
        ],
        title=f"{type(rule).__name__} ({rule.exactness.value})",
        notes=[_ABOUT_SHARED if shared else _ABOUT_USUAL.format(_stated(rule))],
    )


_SHARED: list[tuple[str, Callable[[Case], str]]] = [
    ("differ", lambda case: str(case.differing)),
    ("p", lambda case: f"{case.p_value:.2g}"),
    ("this", lambda case: f"{case.accepted:.3f}"),
    ("rejec-\ntion", lambda case: f"{case.rejection:.3f}"),
]
_ABOUT_SHARED = (
    "differ: outputs that are not plain decoding's; p: smallest p-value of plain decoding against the target; "
    "this: accepted tokens per round; rejec-tion: the same for rejection sampling, drafts without replacement."
)
_ABOUT_USUAL = (
    "TV: largest total variation to {}; all else: expected accepted tokens per round. "
    "Drafts: branches by level; drawn iid, without replacement, or the top k. RS: rejection; trav.: traversal "
    "(on chains: block); walk: target walk; two: two drafts; w. tr: weighted transport; paths: greedy multi-path."
)


def _stated(rule: Verifier) -> str:
    return "the distribution that the rule states" if rule.exactness is Exactness.EXACT_WRT else "the target"


def _usual_columns(rule: Verifier, done: Sequence[Case]) -> list[tuple[str, Callable[[Case], str]]]:
    others = [name for name in HEADERS if any(name in case.known for case in done)]
    mixture = rule.exactness is Exactness.EXACT_WRT
    if mixture:
        others = others[:1]  # what the same drafts give towards p
    return [
        ("TV", lambda case: f"{case.tv:.0e}"),
        *([("TV to\np", lambda case: f"{case.target_tv:.3f}")] if mixture else []),
        ("this", lambda case: f"{case.accepted:.3f}"),
        *((HEADERS[name], lambda case, name=name: number(case.known.get(name), 3)) for name in others),
    ]


# ---------------------------------------------------------------- drafters


def drafter_table(drafter: str, target: str, findings: Sequence[Finding]) -> Table:
    """A row per check of a drafter, by the names of both: how it ended, and what was found."""
    counted = any("p-value" in finding.detail for finding in findings)
    by_chance = 2 * LEVEL * 100_000  # LEVEL for what is drawn, and as much for outputs
    note = (
        f"p-values below the limit are mistakes: at most {by_chance:.0f} of 100,000 right drafters have one, by chance"
    )
    return Table.of(
        findings,
        [
            (left("check", fold=True, max_width=36), lambda each: each.check),
            (left("verdict"), lambda each: Cell(str(each.status), emphasis=_EMPHASIS.get(each.status, Emphasis.NONE))),
            (left("what was found", fold=True), lambda each: each.detail),
        ],
        title=f"{drafter}, tried with {target}",
        notes=[note] if counted else [],
    )


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A row per fact."""
    columns = [(left("what"), lambda each: each[0]), (left("is", fold=True), lambda each: each[1])]
    return Table.of(list(facts.items()), columns, title=title)


def predictions_table(found: Inspection, usual: Usual | None) -> Table:
    """A row per depth."""
    loaded = found.loaded
    notes = ["acceptance: the mean of Σ min(p, q), given that all before was accepted; reached: its product so far"]
    expected = ""
    if usual is not None:
        notes.append(f"usual: published heads of 7 to 8 billion weights' targets, chat to code ({usual.source})")
        expected = f"{usual.first[0]:.2f} to {usual.first[1]:.2f}"
    return Table.of(
        list(enumerate(zip(loaded.acceptance, loaded.unconditional, strict=True), 1)),
        [
            ("depth", lambda row: f"{row[0]}"),
            ("acceptance", lambda row: f"{row[1][0]:.2f}"),
            ("reached", lambda row: f"{row[1][1]:.2f}"),
            ("usual acceptance", lambda row: expected if row[0] == 1 else ""),
        ],
        title=f"acceptance in {len(loaded.prompts)} rounds of {len(loaded.prompts.unique())} texts at T = 1",
        notes=notes,
    )


def tried_table(found: Inspection) -> Table:
    """A row per alternative to the way the drafter was loaded, best first."""
    marks = {True: Emphasis.MISSED, False: Emphasis.NONE}
    return Table.of(
        found.tried,
        [
            (left("with", fold=True), lambda each: each.alternative.name),
            ("length", lambda each: f"{each.acceptance.length:.2f}"),
            ("gain", lambda each: Cell(f"{each.gain.tokens:+.2f}", emphasis=marks[bool(each.gain.counts)])),
            ("± (SE)", lambda each: f"{each.gain.error:.2f}"),
            (left("would mean", fold=True), lambda each: str(each.alternative.mistake)),
        ],
        title="what was tried instead, on the same prompts",
        notes=[
            f"tokens per round as loaded: {found.loaded.length:.2f}",
            *(f"{name} was refused: {reason}" for name, reason in found.refused.items()),
        ],
    )


def verdict(name: str, target: str, found: Inspection, usual: Usual | None, trained_on: str | None = None) -> list[str]:
    """The likely mistakes, in sentences."""
    loaded, mistake = found.loaded, found.mistake
    lines = [f"Tokens per round with a chain of {len(loaded.acceptance)}: {loaded.length:.2f}."]
    if usual is not None:
        lines[0] += f" Published ones have {usual.lengths[0]:g} to {usual.lengths[1]:g} with a chain of {usual.depth} "
        lines[0] += f"({usual.source})."
    if mistake is not None:
        change = mistake.alternative
        lines.append(
            f"{name} was probably loaded with a mistake: {change.mistake}. With {change.name} a round has "
            f"{mistake.acceptance.length:.2f} tokens in place of {loaded.length:.2f} (+{mistake.gain.tokens:.2f} ± "
            f"{mistake.gain.error:.2f}). To mend it: {change.remedy}."
        )
    elif found.knows_nothing:
        lines.append(
            f"It predicts no more than token frequencies do: its acceptance at depth 1 is {loaded.acceptance[0]:.2f}, "
            f"and theirs is {loaded.unigram:.2f}. None of {len(found.tried)} alternatives helps. Either it was hardly "
            f"trained, or it was made for another target: give the target that it was trained on."
        )
    elif found.tried:
        lines.append(f"No mistake was found: none of {len(found.tried)} alternatives raises the acceptance.")
        if usual is not None and loaded.acceptance[0] < usual.first[0]:
            lines.append("It predicts less than published heads of larger targets: trained for less, or hard text.")
    if trained_on is not None:
        other = f"say that it was trained on {trained_on}, and the target is {target}."
        lines.append(f"Its files {'name this target.' if same_model(trained_on, target) else other}")
    return lines
