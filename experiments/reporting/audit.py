"""An audit in words: what it will see, and what it saw."""

import math
from collections.abc import Sequence

from experiments.measuring.audited import Gathered
from experiments.reporting.table import Cell, Emphasis, Table, left
from specdec.checks.betting import ESTIMATE, Power, Question
from specdec.checks.mistakes import WORDS
from specdec.checks.telling import Telling


def plan_table(subject: str, target: str, powers: Sequence[Power], prompts: Sequence[Telling]) -> Table:
    """A row per mistake, before anything is sampled."""
    return Table.of(
        powers,
        [
            (left("mistake"), lambda each: each.mistake),
            (left("what it is", fold=True), lambda each: WORDS[each.mistake]),
            (left("shows most after", fold=True), lambda each: _where(prompts, each.mistake)),
            ("TV", lambda each: f"{each.distance:.3f}"),
            ("needed", lambda each: "—" if each.samples is None else f"{each.samples:,}"),
            ("power", lambda each: f"{each.power:.3f}"),
            ("by χ²", lambda each: f"{each.chi_square:.3f}"),
        ],
        title=f"what an audit of {subject} with {target} can see",
        notes=[
            "TV: total variation between the laws of the next tokens, where it is largest; needed: outputs "
            "over all prompts after which the e-value has seen the mistake with the wanted power (simulated audits); "
            "power: within the outputs that are planned; by χ²: the same of the chi-square test",
        ],
    )


def plan_lines(outputs: int, question: Question, length: int) -> list[str]:
    """The plan in one sentence."""
    return [
        f"At most {outputs:,} outputs of {length} tokens, over {len(question.laws)} of the prompts; a lossless subject "
        f"is accused with a probability of at most {question.level:g}."
    ]


def verdict_table(subject: str, powers: Sequence[Power], gathered: Gathered, p: float | None) -> Table:
    """A row per bet, after the last output."""
    logs = dict(zip(gathered.question.bets, gathered.wealth.logs[0] / math.log(10), strict=True))
    known = {each.mistake: each for each in powers}
    best = max(logs, key=lambda name: logs[name])
    return Table.of(
        list(logs.items()),
        [
            (left("bet on"), lambda row: row[0]),
            ("TV", lambda row: f"{known[row[0]].distance:.3f}" if row[0] in known else ""),
            ("power", lambda row: f"{known[row[0]].power:.3f}" if row[0] in known else ""),
            ("log10 of wealth", lambda row: _wealth(row[1], gathered.alarm and row[0] == best)),
        ],
        title=f"{subject}: {gathered.blocks * gathered.question.block:,} outputs, {gathered.tokens:,} tokens",
        notes=[
            "an honest subject's wealth, averaged over the bets, ever reaches "
            f"{2 / gathered.question.level:g} with a probability of at most {gathered.question.level / 2:g}; "
            + (
                "the chi-square test is of the planned number of outputs only"
                if p is None
                else f"chi-square p = {p:.2g}"
            )
        ],
    )


def verdict(subject: str, gathered: Gathered, p: float | None, ended: str | None) -> tuple[str, bool]:
    """The verdict in a sentence, and whether it is a bad one."""
    exponent = gathered.wealth.log_e[0] / math.log(10)
    seen = f"{gathered.blocks * gathered.question.block:,} outputs ({gathered.tokens:,} tokens)"
    if gathered.alarm or (p is not None and p <= gathered.question.level / 2):
        logs = gathered.wealth.logs[0]
        name = gathered.question.bets[int(logs.argmax())]
        like = "no mistake with a name" if name == ESTIMATE else f"{name}: {WORDS[name]}"
        tests = "" if p is None else f", chi-square p = {p:.2g}"
        return f"{subject} is not lossless: e = 10^{exponent:.1f}{tests} after {seen}; it looks most like {like}", True
    if ended is not None:
        return f"{subject}: no verdict yet, e = 10^{exponent:.1f} after {seen}; resume=true goes on ({ended})", False
    return f"{subject} shows no sign of a mistake: e = 10^{exponent:.1f}, chi-square p = {p or 0:.2g}, {seen}", False


def _wealth(value: float, found: bool) -> Cell:
    return Cell(f"{value:+.1f}", emphasis=Emphasis.MISSED if found else Emphasis.NONE)


def _where(prompts: Sequence[Telling], mistake: str) -> str:
    return next(each.id for each in prompts if mistake in each.best_for)
