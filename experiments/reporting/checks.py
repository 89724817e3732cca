"""Findings about a rule, a drafter or a whole decoder: tables and verdicts of the commands that check and audit."""

import math
from collections.abc import Mapping, Sequence

from experiments.inspecting.acceptance import same_model
from experiments.inspecting.mistakes import Inspection
from experiments.measuring.exactness import SHARED_LAWS, Case
from experiments.measuring.gathered import Audit
from experiments.reporting.columns import T
from experiments.reporting.table import Cell, Col, Emphasis, Table, words
from specdec.checks.betting import ESTIMATE, Power
from specdec.checks.drafter import Finding
from specdec.checks.draws import LEVEL
from specdec.checks.mistakes import MISTAKES
from specdec.checks.playing import Status
from specdec.interfaces import Verifier
from specdec.types import Exactness, Noise

_EMPHASIS = {Status.FAILED: Emphasis.MISSED, Status.NOT_TRIED: Emphasis.LOSSY}
_ABOUT_SHARED = (
    "differ: outputs that are not plain decoding's; p: smallest p-value of plain decoding against the target; this: "
    "accepted tokens per round; rejec-tion: the same for rejection sampling, drafts without replacement."
)
_ABOUT_USUAL = (
    "TV: largest total variation to the distribution that the rule states; this: expected accepted tokens per round; "
    "rejec-tion: the same for rejection sampling. Drafts: branches by level; drawn iid, without replacement, or the "
    "top k."
)


def exactness_table(rule: Verifier, done: Sequence[Case]) -> Table:
    """A row per case, narrow enough for 80 columns."""
    shared, mixture = rule.noise is Noise.SHARED, rule.exactness is Exactness.EXACT_WRT
    figures = [Col("TV", "tv", ".0e"), *([Col("TV to\np", "target_tv", ".3f")] if mixture else [])]
    columns = [
        *(words("draft", lambda case: f"{case.shape} {SHARED_LAWS[case.law]}"), words("tables", "rows")),
        *(T, *([Col("differ", "differing", "d"), Col("p", "p_value", ".2g")] if shared else figures)),
        *(Col("this", "accepted", ".3f"), Col("rejec-\ntion", "rejection", ".3f")),
    ]
    title = f"{type(rule).__name__} ({rule.exactness.value})"
    return Table.of(done, columns, title=title, notes=[_ABOUT_SHARED if shared else _ABOUT_USUAL])


def drafter_table(drafter: str, target: str, findings: Sequence[Finding]) -> Table:
    """A row per check of a drafter, by the names of both: how it ended, and what was found."""
    chance = f"at most {LEVEL * 100_000:.0f} of 100,000 right drafters have one, by chance"
    counted = any("p-value" in finding.detail for finding in findings)

    def status(finding: Finding) -> Cell:
        return Cell(str(finding.status), emphasis=_EMPHASIS.get(finding.status, Emphasis.NONE))

    columns = [words("check", "check"), words("verdict", status, min_width=9), words("what was found", "detail")]
    notes = [f"p-values below the limit are mistakes: {chance}"] if counted else []
    return Table.of(findings, columns, title=f"{drafter}, tried with {target}", notes=notes)


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """A row per fact."""
    columns = [words("what", lambda fact: fact[0], min_width=10), words("is", lambda fact: fact[1])]
    return Table.of(list(facts.items()), columns, title=title)


def tried_table(found: Inspection) -> Table:
    """A row per alternative to the way the drafter was loaded, best first."""
    marks = {True: Emphasis.MISSED, False: Emphasis.NONE}
    columns = [
        *(
            words("with", lambda tried: tried.alternative.name),
            Col("length", lambda tried: f"{tried.acceptance.length:.2f}"),
        ),
        Col("gain", lambda tried: Cell(f"{tried.gain.tokens:+.2f}", emphasis=marks[bool(tried.gain.counts)])),
        Col("± (SE)", lambda tried: f"{tried.gain.error:.2f}"),
        words("would mean", lambda tried: str(tried.alternative.mistake)),
    ]
    refused = (f"{name} was refused: {reason}" for name, reason in found.refused.items())
    notes = [f"tokens per round as loaded: {found.loaded.length:.2f}", *refused]
    return Table.of(found.tried, columns, title="what was tried instead, on the same prompts", notes=notes)


def inspected(name: str, target: str, found: Inspection, trained_on: str | None = None) -> list[str]:
    """The likely mistakes, in sentences."""
    loaded, mistake = found.loaded, found.mistake
    known = f"{len(loaded.prompts)} rounds of {len(loaded.prompts.unique())} texts at T = 1, all before accepted"
    rates = ", ".join(f"{rate:.2f}" for rate in loaded.acceptance)
    lines = [f"Acceptance by depth (mean of Σ min(p, q) in {known}): {rates}."]
    lines.append(f"Tokens per round with a chain of {len(loaded.acceptance)}: {loaded.length:.2f}.")
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
    if trained_on is not None:
        other = f"say that it was trained on {trained_on}, and the target is {target}."
        lines.append(f"Its files {'name this target.' if same_model(trained_on, target) else other}")
    return lines


def power_table(
    subject: str, target: str, powers: Sequence[Power], running: Audit, unseen: Sequence[str], level: float
) -> Table:
    """A row per mistake that there is a bet on, before anything is sampled; the plan and the others in notes."""
    best = {mistake: prompt.id for prompt in reversed(running.telling) for mistake in prompt.best_for}
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
        f"at most {len(running.order) * running.block:,} outputs of {running.sampling.max_new_tokens} tokens, over "
        f"{len(running.prompts)} of the prompts; a lossless subject is accused with a probability of at most {level:g}",
    ]
    return Table.of(powers, columns, title=f"what an audit of {subject} with {target} can see", notes=notes)


def bets_table(subject: str, powers: Sequence[Power], running: Audit, level: float) -> Table:
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


def audited(subject: str, running: Audit, ended: str | None, level: float) -> tuple[str, bool]:
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
