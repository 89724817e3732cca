"""An audit in words: what it will see, and what it saw."""

import math
from collections.abc import Sequence

from experiments.measuring.gathered import AgainstLaw, Greedy, Sampled
from experiments.reporting.table import Cell, Emphasis, Table, left
from specdec.checks.betting import ESTIMATE, Power
from specdec.checks.mistakes import WORDS
from specdec.checks.telling import Telling
from specdec.checks.two_samples import TOKENS

_ODDS = (
    ("TV", lambda each: f"{each.distance:.3f}"),
    ("needed", lambda each: "—" if each.samples is None else f"{each.samples:,}"),
    ("power", lambda each: f"{each.power:.3f}"),
    ("by χ²", lambda each: f"{each.chi_square:.3f}"),
)


def plan_table(
    subject: str, target: str, powers: Sequence[Power], prompts: Sequence[Telling], unseen: Sequence[str]
) -> Table:
    """A row per mistake that there is a bet on, before anything is sampled; the others in a note."""
    return Table.of(
        powers,
        [
            (left("mistake"), lambda each: each.mistake),
            (left("what it is", fold=True), lambda each: WORDS[each.mistake]),
            (left("shows most after", fold=True), lambda each: _where(prompts, each.mistake)),
            *_ODDS,
        ],
        title=f"what an audit of {subject} with {target} can see",
        notes=[
            "TV: total variation between the laws of the next tokens, where it is largest; needed: outputs "
            "over all prompts after which the e-value has seen the mistake with the wanted power (simulated audits); "
            "power: within the outputs that are planned; by χ²: the same of the chi-square test",
            *([f"no bet on {', '.join(unseen)}: with this sampling they change nothing"] if unseen else []),
        ],
    )


def shift_table(subject: str, reference: str, powers: Sequence[Power]) -> Table:
    """A row per amount of probability that moves, before anything is sampled."""
    return Table.of(
        powers,
        list(_ODDS),
        title=f"what an audit of {subject} against {reference} can see",
        notes=[
            f"TV: probability that moves from the likelier half of the first tokens to the other half, after every "
            f"prompt (tried with {TOKENS} tokens whose probabilities are as 1 / rank); needed: outputs of both together"
        ],
    )


def plan_lines(running: Sampled, level: float) -> list[str]:
    """The plan in one sentence."""
    return [
        f"At most {running.steps * running.block:,} outputs of {running.sampling.max_new_tokens} tokens, over "
        f"{len(running.prompts)} of the prompts; a lossless subject is accused with a probability of at most {level:g}."
    ]


def verdict_table(subject: str, powers: Sequence[Power], running: Sampled, level: float) -> Table:
    """A row per bet, after the last output."""
    logs = dict(zip(running.wealth.bets, running.wealth.logs[0] / math.log(10), strict=True))
    known = {each.mistake: each for each in powers}
    best = max(logs, key=lambda name: logs[name])
    p = running.p_value
    return Table.of(
        list(logs.items()),
        [
            (left("bet on"), lambda row: row[0]),
            ("TV", lambda row: f"{known[row[0]].distance:.3f}" if row[0] in known else ""),
            ("power", lambda row: f"{known[row[0]].power:.3f}" if row[0] in known else ""),
            ("log10 of wealth", lambda row: _wealth(row[1], running.alarm and row[0] == best)),
        ],
        title=f"{subject}: {running.outputs:,} outputs, {running.tokens:,} tokens",
        notes=[
            "an honest subject's wealth, averaged over the bets, ever reaches "
            f"{2 / level:g} with a probability of at most {level / 2:g}; "
            + (
                "the chi-square test is of the planned number of outputs only"
                if p is None
                else f"chi-square p = {p:.2g}"
            )
        ],
    )


def verdict(subject: str, running: Sampled, ended: str | None, level: float) -> tuple[str, bool]:
    """The verdict in a sentence, and whether it is a bad one."""
    exponent, p = running.wealth.log_e[0] / math.log(10), running.p_value
    seen = f"{running.outputs:,} outputs ({running.tokens:,} tokens)"
    if running.alarm or (p is not None and p <= level / 2):
        tests = "" if p is None else f", chi-square p = {p:.2g}"
        return f"{subject} is not lossless: e = 10^{exponent:.1f}{tests} after {seen}; {_likeness(running)}", True
    if ended is not None:
        return f"{subject}: no verdict yet, e = 10^{exponent:.1f} after {seen}; resume=true goes on ({ended})", False
    return f"{subject} shows no sign of a mistake: e = 10^{exponent:.1f}, chi-square p = {p or 0:.2g}, {seen}", False


def _likeness(running: Sampled) -> str:
    richest = running.wealth.bets[int(running.wealth.logs[0].argmax())]
    if not isinstance(running, AgainstLaw):
        return f"what differs most from the reference: {richest}"
    if running.impossible > running.outputs / 2:
        return (
            f"{running.impossible:,} of these outputs cannot come from the target: does the subject have the same "
            f"model, tokenizer and sampling?"
        )
    if richest == ESTIMATE or running.wealth.logs[0].max() <= 0:  # a chi-square alarm alone
        return "it looks most like no mistake with a name"
    best, *others = running.wealth.likeliest
    return f"it looks most like {best}: {WORDS[best]}" + (f" (or {', '.join(others)})" if others else "")


def differences_table(subject: str, running: Greedy) -> Table | None:
    """A row per prompt whose greedy output parts from plain decoding's; None if there is none."""
    if not running.differences:
        return None
    return Table.of(
        running.differences,
        [
            (left("prompt", fold=True), lambda each: each["prompt"]),
            ("token", lambda each: f"{each['divergence'] + 1}"),
            (left("subject's"), lambda each: repr(each["texts_at_divergence"][0])),
            (left("plain decoding's"), lambda each: repr(each["texts_at_divergence"][1])),
            ("margin", lambda each: _nats(each["margin"])),
            ("by rounding", lambda each: _nats(each["tie_bound"])),
        ],
        title=f"where {subject} parts from plain decoding",
        notes=[
            "margin: how far the lower of both tokens is below the largest logit, in nats; by rounding: the largest "
            "margin that the dtype explains there"
        ],
    )


def greedy_verdict(subject: str, running: Greedy, ended: str | None) -> tuple[str, bool]:
    """The verdict on greedy outputs in a sentence, and whether it is a bad one."""
    seen = f"{running.done:,} of {running.steps:,} prompts, {running.compared:,} tokens"
    ties = len(running.differences) - len(running.unexplained)
    within = f"{ties} outputs part from plain decoding's where rounding explains it"
    if running.alarm:
        worst = running.unexplained[0]
        ours, plain = (repr(text) for text in worst["texts_at_divergence"])
        margin = "" if worst["margin"] is None else f", {worst['margin']:.2g} nats below"
        explained = "" if worst["tie_bound"] is None else f", where rounding explains {worst['tie_bound']:.1g}"
        return (
            f"{subject} is not lossless: after {worst['prompt']}, token {worst['divergence'] + 1} is {ours} and plain "
            f"decoding's {plain}{margin}{explained} ({seen})",
            True,
        )
    if ended is not None:
        return f"{subject}: no verdict yet after {seen}; resume=true goes on ({ended})", False
    return f"{subject} follows plain decoding: {seen}; {within if ties else 'all are equal'}", False


def _nats(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}"


def _wealth(value: float, found: bool) -> Cell:
    return Cell(f"{value:+.1f}", emphasis=Emphasis.MISSED if found else Emphasis.NONE)


def _where(prompts: Sequence[Telling], mistake: str) -> str:
    return next(each.id for each in prompts if mistake in each.best_for)
