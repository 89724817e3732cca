"""The tables of ``experiments.inspect_drafter``: what a head is, what it predicts, what was tried, and the verdict."""

from collections.abc import Mapping

from experiments.inspecting.facts import named_alike
from experiments.inspecting.families import Usual
from experiments.inspecting.measured import RANKS
from experiments.inspecting.search import Inspection, Tried
from experiments.inspecting.wiring import Mistake
from experiments.reporting.table import Cell, Column, Emphasis, Table

_SHOWN = 12
"""Alternatives in the table, of several dozen."""


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A row per fact."""
    table = Table([Column("what", "left"), Column("is", "left", fold=True)], title)
    for name, text in facts.items():
        table.add(name, text)
    return table


def predictions_table(found: Inspection, usual: Usual | None) -> Table:
    """A row per depth: acceptance, and accuracy by rank."""
    columns = [Column("depth"), Column("acceptance"), Column("reached")]
    columns += [Column("accuracy: rank 1"), *(Column(f"rank {rank}") for rank in range(2, RANKS + 1))]
    columns.append(Column("usual acceptance"))
    places, prompts = len(found.loaded.alpha), len(found.loaded.rows.unique())
    notes = [
        "acceptance: the mean of Σ min(p, q) at T = 1, given that all before was accepted; reached: its product so far",
        "rank r: how often the target's most probable token is the head's r-th",
    ]
    if usual is not None:
        notes.append(f"usual: published heads of 7 to 8 billion weights' targets, chat to code ({usual.source})")
    title = f"what it predicts, at {places} places of {prompts} texts that the target wrote at T = 1"
    table = Table(columns, title, notes)
    measured = found.loaded
    ranks = [measured.accuracy(rank) for rank in range(RANKS)]
    for depth, (alpha, reached) in enumerate(zip(measured.acceptance, measured.reached, strict=True)):
        expected = f"{usual.first[0]:.2f} to {usual.first[1]:.2f}" if usual is not None and depth == 0 else ""
        shares = [f"{rank[depth]:.1%}" for rank in ranks]
        table.add(f"{depth + 1}", f"{alpha:.2f}", f"{reached:.2f}", *shares, expected)
    return table


def tried_table(found: Inspection) -> Table:
    """A row per alternative to the way the head was loaded, best first."""
    columns = [
        Column("with", "left", fold=True),
        Column("length"),
        Column("gain"),
        Column("± (SE)"),
        Column("would mean", "left", fold=True),
    ]
    shown = found.tried[:_SHOWN]
    notes = [f"simulated length as loaded: {found.loaded.length:.2f}"]
    if len(shown) < len(found.tried):
        notes.append(f"{len(found.tried) - len(shown)} more are worse")
    table = Table(columns, "what was tried instead, on the same places", notes)
    for each in shown:
        emphasis = Emphasis.MISSED if each.gain.counts else Emphasis.NONE
        table.add(
            each.variation.name,
            f"{each.measured.length:.2f}",
            Cell(f"{each.gain.tokens:+.2f}", emphasis=emphasis),
            f"{each.gain.error:.2f}",
            str(each.variation.mistake),
        )
    return table


def verdict(name: str, target: str, found: Inspection, usual: Usual | None, trained_on: str | None = None) -> list[str]:
    """Returns what is probably wrong, in sentences.

    Args:
        name: The drafter's name.
        target: The target's.
        found: What was found out.
        usual: What such heads usually bring.
        trained_on: The target that its files name.
    """
    depth, length = found.loaded.alpha.shape[1], found.loaded.length
    lines = [f"Simulated length of a chain of {depth}: {length:.2f}.{_usual(usual)}"]
    other = trained_on is not None and not named_alike(trained_on, target)
    if found.knows_nothing:
        lines.append(
            f"It predicts no more than token frequencies do: its acceptance at depth 1 is "
            f"{found.best.acceptance[0]:.2f}, and theirs is {found.ignorance:.2f}. None of {len(found.tried)} "
            f"alternatives helps."
        )
        if trained_on is not None and not other:
            lines.append(f"Its files name this target, so {name} was hardly trained, or the target has changed since.")
        else:
            said = f", {trained_on} as its files say" if other else ""
            lines.append(
                f"{name} was probably made for {Mistake.TARGET}{said}: give the target that it was trained on. If it "
                f"is this one, the head was hardly trained."
            )
    elif found.mistakes:
        before = found.loaded.length
        for number, each in enumerate(found.mistakes):
            begin = f"{name} was probably loaded with a mistake" if number == 0 else "On top of that"
            lines.append(f"{begin}: {_explained(each, before)}")
            before = each.measured.length
    elif found.tried:
        lines.append(f"No mistake was found: none of {len(found.tried)} alternatives raises the acceptance.")
        if usual is not None and found.loaded.acceptance[0] < usual.first[0]:
            lines.append(
                "It predicts less than published heads of larger targets do: it was trained for a short time, on other "
                "text, or its target is harder to predict."
            )
    if other and not found.knows_nothing:
        lines.append(f"Its files say that it was trained on {trained_on}, and the target is {target}.")
    return lines


def _explained(tried: Tried, before: float) -> str:
    change = tried.variation
    return (
        f"{change.mistake}. With {change.name} the simulated length is {tried.measured.length:.2f} in place of "
        f"{before:.2f} (+{tried.gain.tokens:.2f} ± {tried.gain.error:.2f}). To mend it: {change.remedy}."
    )


def _usual(usual: Usual | None) -> str:
    if usual is None:
        return ""
    return (
        f" Published ones have {usual.lengths[0]:g} to {usual.lengths[1]:g} with a chain of {usual.depth} "
        f"({usual.source})."
    )
