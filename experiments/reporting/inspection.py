"""The tables of ``experiments.inspect_drafter``: facts, acceptance by depth, what was tried, and the verdict."""

from collections.abc import Mapping

from experiments.inspecting.facts import same_model
from experiments.inspecting.kinds import Usual
from experiments.inspecting.search import Inspection
from experiments.reporting.table import Cell, Column, Emphasis, Table


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A row per fact."""
    table = Table([Column("what", "left"), Column("is", "left", fold=True)], title)
    for name, text in facts.items():
        table.add(name, text)
    return table


def predictions_table(found: Inspection, usual: Usual | None) -> Table:
    """A row per depth."""
    loaded = found.loaded
    columns = [Column("depth"), Column("acceptance"), Column("reached"), Column("usual acceptance")]
    notes = ["acceptance: the mean of Σ min(p, q), given that all before was accepted; reached: its product so far"]
    if usual is not None:
        notes.append(f"usual: published heads of 7 to 8 billion weights' targets, chat to code ({usual.source})")
    title = f"acceptance in {len(loaded.prompts)} rounds of {len(loaded.prompts.unique())} texts at T = 1"
    table = Table(columns, title, notes)
    for depth, row in enumerate(zip(loaded.acceptance, loaded.unconditional, strict=True)):
        expected = f"{usual.first[0]:.2f} to {usual.first[1]:.2f}" if usual is not None and depth == 0 else ""
        table.add(f"{depth + 1}", f"{row[0]:.2f}", f"{row[1]:.2f}", expected)
    return table


def tried_table(found: Inspection) -> Table:
    """A row per alternative to the way the drafter was loaded, best first."""
    columns = [
        Column("with", "left", fold=True),
        Column("length"),
        Column("gain"),
        Column("± (SE)"),
        Column("would mean", "left", fold=True),
    ]
    notes = [f"tokens per round as loaded: {found.loaded.length:.2f}"]
    notes += [f"{name} was refused: {reason}" for name, reason in found.refused.items()]
    table = Table(columns, "what was tried instead, on the same prompts", notes)
    for each in found.tried:
        emphasis = Emphasis.MISSED if each.gain.counts else Emphasis.NONE
        gained = Cell(f"{each.gain.tokens:+.2f}", emphasis=emphasis)
        length, error = f"{each.acceptance.length:.2f}", f"{each.gain.error:.2f}"
        table.add(each.alternative.name, length, gained, error, str(each.alternative.mistake))
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
    loaded = found.loaded
    lines = [f"Tokens per round with a chain of {len(loaded.acceptance)}: {loaded.length:.2f}.{_usual(usual)}"]
    mistake = found.mistake
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
            lines.append(
                "It predicts less than published heads of larger targets do: it was trained for a short time, on other "
                "text, or its target is harder to predict."
            )
    if trained_on is not None:
        same = same_model(trained_on, target)
        lines.append(
            "Its files name this target."
            if same
            else f"Its files say that it was trained on {trained_on}, and the target is {target}."
        )
    return lines


def _usual(usual: Usual | None) -> str:
    if usual is None:
        return ""
    return (
        f" Published ones have {usual.lengths[0]:g} to {usual.lengths[1]:g} with a chain of {usual.depth} "
        f"({usual.source})."
    )
