"""An audit in words: what it will see, and what it saw."""

import math
from collections.abc import Sequence

from experiments.measuring.gathered import Audit
from experiments.reporting.table import Cell, Col, Emphasis, Table, words
from specdec.checks.betting import ESTIMATE, Power
from specdec.checks.mistakes import MISTAKES
from specdec.checks.telling import Telling


def plan_table(
    subject: str, target: str, powers: Sequence[Power], prompts: Sequence[Telling], unseen: Sequence[str]
) -> Table:
    """A row per mistake that there is a bet on, before anything is sampled; the others in a note."""
    best = {mistake: prompt.id for prompt in reversed(prompts) for mistake in prompt.best_for}
    columns = [
        *(words("mistake", "mistake"), words("what it is", lambda power: MISTAKES[power.mistake][0])),
        *(words("shows most after", lambda power: best[power.mistake]), Col("TV", "distance", ".3f")),
        *(Col("needed", "samples", ",d"), Col("power", "power", ".3f")),
    ]
    seen = "outputs over all prompts after which the e-value has seen the mistake with the wanted power"
    notes = [
        "TV: total variation between the laws of the next tokens, where it is largest",
        *(f"needed: {seen} (simulated audits)", "power: within the outputs that are planned"),
        *([f"no bet on {', '.join(unseen)}: with this sampling they change nothing"] if unseen else []),
    ]
    return Table.of(powers, columns, title=f"what an audit of {subject} with {target} can see", notes=notes)


def plan_lines(running: Audit, level: float) -> list[str]:
    """The plan in one sentence."""
    return [
        f"At most {len(running.order) * running.block:,} outputs of {running.sampling.max_new_tokens} tokens, over "
        f"{len(running.prompts)} of the prompts; a lossless subject is accused with a probability of at most {level:g}."
    ]


def verdict_table(subject: str, powers: Sequence[Power], running: Audit, level: float) -> Table:
    """A row per bet, after the last output."""
    logs = dict(zip(running.wealth.bets, running.wealth.logs[0] / math.log(10), strict=True))
    known = {power.mistake: power for power in powers}
    best, p = max(logs, key=lambda name: logs[name]), running.p_value

    def wealth(name: str) -> Cell:
        alarm = running.alarm and name == best
        return Cell(f"{logs[name]:+.1f}", emphasis=Emphasis.MISSED if alarm else Emphasis.NONE)

    said = "the chi-square test is of the planned number of outputs only" if p is None else f"chi-square p = {p:.2g}"
    columns = [
        *(words("bet on", str), Col("TV", lambda name: f"{known[name].distance:.3f}" if name in known else "")),
        Col("power", lambda name: f"{known[name].power:.3f}" if name in known else ""),
        Col("log10 of wealth", wealth),
    ]
    title = f"{subject}: {running.outputs:,} outputs, {running.tokens:,} tokens"
    odds = f"reaches {2 / level:g} with a probability of at most {level / 2:g}"
    notes = [f"an honest subject's wealth, averaged over the bets, ever {odds}", said]
    return Table.of(list(logs), columns, title=title, notes=notes)


def verdict(subject: str, running: Audit, ended: str | None, level: float) -> tuple[str, bool]:
    """The verdict in a sentence, and whether it is a bad one."""
    exponent, p = running.wealth.log_e[0] / math.log(10), running.p_value
    seen = f"{running.outputs:,} outputs ({running.tokens:,} tokens)"
    if running.alarm or (p is not None and p <= level / 2):
        tests = "" if p is None else f", chi-square p = {p:.2g}"
        return f"{subject} is not lossless: e = 10^{exponent:.1f}{tests} after {seen}; {_likeness(running)}", True
    if ended is not None:
        return f"{subject}: no verdict yet, e = 10^{exponent:.1f} after {seen}; resume=true goes on ({ended})", False
    return f"{subject} shows no sign of a mistake: e = 10^{exponent:.1f}, chi-square p = {p or 0:.2g}, {seen}", False


def _likeness(running: Audit) -> str:
    richest = running.wealth.bets[int(running.wealth.logs[0].argmax())]
    if running.impossible > running.outputs / 2:
        bad = f"{running.impossible:,} of these outputs cannot come from the target"
        return f"{bad}: does the subject have the same model, tokenizer and sampling?"
    if richest == ESTIMATE or running.wealth.logs[0].max() <= 0:  # a chi-square alarm alone
        return "it looks most like no mistake with a name"
    best, *others = running.wealth.likeliest
    return f"it looks most like {best}: {MISTAKES[best][0]}" + (f" (or {', '.join(others)})" if others else "")
