"""Tables of one run: of a method, of several, by category; and what went wrong in it."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.cells import (
    BOLD,
    EMPTY,
    NOTHING,
    equality,
    interval,
    label_cell,
    length,
    method_name,
    number,
    of_few,
    percent,
    rules_of,
    signed,
    speedup,
    times,
    with_interval,
)
from experiments.reporting.formats import document
from experiments.reporting.table import Cell, Column, Table, left
from experiments.reporting.verdicts import place
from experiments.results.comparison import commit_of, dataset_name
from experiments.results.lossless import explained
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.summary import MethodSummary, Summary

Line = tuple[str, Callable[[MethodSummary], Cell | str]]


def run_table(summary: Summary, title: str) -> Table:
    """One run: a row per figure, a column per method."""
    methods, level = summary.methods, f"[{summary.confidence:.0%}]"
    precise = f"  prompts for ±{summary.width:g}"
    lines: list[Line] = [
        ("mean acceptance length", lambda m: number(m.mean_acceptance_length)),
        (
            f"  interval {level}",
            lambda m: NOTHING if m.method == PLAIN else interval(m.mean_acceptance_length_interval),
        ),
        (precise, lambda m: NOTHING if m.method == PLAIN else number(m.prompts_needed, 0)),
        ("  expected, given the drafts", lambda m: number(m.expected_mean_acceptance_length)),
        ("first token's distance from p: total variation", lambda m: number(m.distance_tv, 4)),
        ("  Kullback-Leibler, nats", lambda m: number(m.distance_kl, 4)),
        ("speedup", lambda m: times(m.speedup)),
        (f"  interval {level}", lambda m: interval(m.speedup_interval)),
        ("tokens/s", lambda m: number(m.tokens_per_second, 1)),
        ("draft acceptance rate", lambda m: percent(m.draft_acceptance_rate)),
        ("drafted depth; nodes per round", _drafted),
    ]
    for position in range(max((len(m.acceptance_by_position.rounds) for m in methods), default=0)):
        lines.append((f"accepted at {position + 1}: of all; if all before", _accepted_at(position)))
    for stage in dict.fromkeys(stage for method in methods for stage in method.stage_seconds):
        lines.append((f"{stage}, ms per token", lambda m, stage=stage: number(stage_milliseconds(m, stage), 3)))
    lines += [
        ("distinct 4-grams", lambda m: percent(m.distinct_4_gram_rate)),
        ("equal to plain decoding", equality),
        ("prompts finished; failed", lambda m: f"{m.finished} of {summary.planned}; {m.failed}"),
        ("tokens; rounds", lambda m: f"{m.tokens}; {m.rounds}"),
    ]
    return Table.upright(methods, [m.label for m in methods], lines, title=title, notes=_notes(summary))


def comparison_table(summary: Summary, title: str) -> Table:
    """Several methods, perhaps at several temperatures: a row each."""
    best = any("speedup" in method.best_in for method in summary.methods)
    return Table.of(
        summary.methods,
        [
            ("T", lambda m: f"{m.temperature:g}"),
            (left("method"), lambda m: _named(m, m.label, joint="\n")),
            ("mean acceptance\nlength", lambda m: length(m, best=False)),
            ("speedup", speedup),
            ("tokens/s", lambda m: number(m.tokens_per_second, 1)),
            ("draft\naccepted", lambda m: percent(m.draft_acceptance_rate)),
            ("distinct\n4-grams", lambda m: percent(m.distinct_4_gram_rate)),
            ("equal\nto plain", equality),
        ],
        title=title,
        notes=[*_notes(summary), *([BOLD] if best else [])],
        section=lambda m: m.temperature,
    )


def methods_table(summary: Summary, title: str, labels: Mapping[str, str]) -> Table:
    """A row per method and temperature, by temperature, readable without the run's configuration."""
    methods = sorted(summary.methods, key=lambda m: m.temperature)
    gains = [method.gain for method in methods if method.gain is not None]
    notes = [
        *_incomplete(summary),
        rules_of(methods),
        "a round is one forward of the target; plain decoding emits one token in it",
        f"brackets: {summary.confidence:.0%} intervals over prompts{prompts_needed(methods, summary.width)}",
        *([BOLD] if any(method.best_in for method in methods) else []),
        *noise_notes(summary),
        *summary.noise.notes,
    ]
    columns: list[tuple[Column | str, Callable[[MethodSummary], Cell | str]]] = [
        ("T", lambda m: f"{m.temperature:g}"),
        (left("method", fold=True), lambda m: _named(m, label_of(m, labels), joint=", ")),
        ("tokens\nper round", length),
        ("drafted nodes\nper round", lambda m: number(m.proposed_nodes_per_round, 1)),
        ("drafting,\nshare of time", lambda m: NOTHING if m.method == PLAIN else percent(drafting_share(m))),
        ("speedup", speedup),
        ("tokens/s", lambda m: number(m.tokens_per_second, 1)),
    ]
    if gains:
        columns.insert(3, ("difference\nin tokens", _gain))
        notes.append(
            f"difference: from {labels.get(gains[0].over, gains[0].over)} on the same prompts, given the drafts"
        )
    return Table.of(methods, columns, title=title, notes=notes, section=lambda m: m.temperature)


def methods_document(run: Run) -> str:
    """The table of a finished run in Markdown, and the sentences that say what made it."""
    table = methods_table(run.summary, "", run.manifest["config"]["labels"])
    notes = [f"{note[0].upper()}{note[1:]}." for note in table.notes if note.startswith("difference")]
    if run.summary.noise.noisy:
        notes.append("NOISY TIMINGS: other programs ran meanwhile.")
    return document(commanded(run), table, "\n".join(notes))


def commanded(run: Run) -> str:
    """The command of a run, and its origin as ``made_with`` has it."""
    given = " ".join(each for each in run.manifest["overrides"] if not each.startswith("out="))
    return f"`python -m experiments.run {given}`: {made_with(run)}"


def made_with(run: Run, *others: Run) -> str:
    """The origin of a run, or of several of other targets and prompts, and what brackets are, in two sentences."""
    manifest, config = run.manifest, run.manifest["config"]
    names = dict.fromkeys(each.manifest["target"]["name"] for each in (run, *others))
    facts = [
        " and ".join(names),
        manifest["dtype"],
        _together([*dict.fromkeys(map(dataset_name, (run, *others)))]),
        f"{config['sampling']['max_new_tokens']} new tokens",
        f"batch {config['engine']['max_batch_size']}",
        f"{manifest['threads']} thread{'s' if manifest['threads'] != 1 else ''} of {manifest['device']}",
        f"commit {commit_of(manifest)}",
    ]
    return f"{', '.join(facts)}. Brackets are {run.summary.confidence:.0%} intervals over prompts."


def _together(datasets: Sequence[str]) -> str:
    """Several datasets in words: ``stdlib and text, each 12 prompts, seed 0``."""
    names, facts = zip(*(each.split(", ", 1) for each in datasets), strict=True)
    alike = len(names) > 1 and len(set(facts)) == 1
    return f"{' and '.join(names)}, each {facts[0]}" if alike else " and ".join(datasets)


def drafting_share(method: MethodSummary) -> float | None:
    """The share of a method's wall time that its drafter took to propose; None where stages were not timed."""
    spent, total = method.stage_seconds.get("draft"), sum(method.stage_seconds.values())
    return spent / total if spent is not None and total else None


def label_of(method: MethodSummary, labels: Mapping[str, str]) -> str:
    """What a method is called."""
    name = "plain decoding" if method.method == PLAIN else labels.get(method.method, method.method)
    return method.label.replace(method.method, name, 1)


def shown_categories(summary: Summary) -> list[str]:
    """Categories of at least two prompts, in alphabetical order; none unless there are several.

    One prompt gives no interval, and says nothing of its category; ``summary.json`` has them all.
    """
    names = {
        name
        for method in summary.methods
        for name, found in method.by_category.items()
        if found.mean_acceptance_length_interval is not None
    }
    return sorted(names) if len(names) > 1 else []


def category_table(summary: Summary) -> Table | None:
    """A row per category, method and temperature, plain decoding left out; None if there is nothing to tell apart."""
    methods = [method for method in summary.methods if method.method != PLAIN]
    rows = [
        (name, method, method.by_category[name])
        for name in shown_categories(summary)
        for method in methods
        if name in method.by_category
    ]
    if not rows:
        return None
    return Table.of(
        rows,
        [
            (left("category"), lambda row: row[0]),
            (left("method"), lambda row: method_name(row[1])),
            ("T", lambda row: f"{row[1].temperature:g}"),
            ("prompts", lambda row: str(row[2].prompts)),
            (f"for ±{summary.width:g}", lambda row: number(row[2].prompts_needed, 0)),
            (
                "mean acceptance length",
                lambda row: with_interval(
                    number(row[2].mean_acceptance_length), row[2].mean_acceptance_length_interval
                ),
            ),
            ("speedup", lambda row: with_interval(times(row[2].speedup), row[2].speedup_interval)),
            ("tokens/s", lambda row: number(row[2].tokens_per_second, 1)),
        ],
        title="By category",
        notes=[*of_few(row[2].prompts for row in rows), *noise_notes(summary)],
        section=lambda row: row[0],
    )


def print_troubles(console: Console, summary: Summary) -> None:
    """Say where outputs leave plain decoding's and no tie explains it, and what went wrong."""
    for method in summary.methods:
        bugs = [each for each in method.divergences if method.not_lossless and not explained(each)]
        _say_first(console, [f"{method.method} leaves plain decoding {place(each)}" for each in bugs], "{} more places")
    for method in summary.methods:
        counted = [f"on {count} of {summary.planned} prompts: {error}" for error, count in method.errors.items()]
        _say_first(console, [f"{method.method} failed {each}" for each in counted], "for {} more reasons")


def _say_first(console: Console, lines: Sequence[str], more: str, limit: int = 5) -> None:
    terminal.say(console, *lines[:limit])
    if len(lines) > limit:
        terminal.say(console, f"… and {more.format(len(lines) - limit)}, listed in summary.json")


def noise_notes(summary: Summary) -> list[str]:
    """The note that stands in every form of a table whose timings are noisy."""
    said = "NOISY TIMINGS: repeat on an idle machine before you rely on tokens/s and speedup"
    return [said] if summary.noise.noisy else []


def _named(method: MethodSummary, name: str, *, joint: str) -> Cell:
    return label_cell(method, name, *([f"{method.failed} failed"] if method.failed else []), joint=joint)


def _gain(method: MethodSummary) -> Cell:
    return EMPTY if method.gain is None else signed(method.gain.tokens, method.gain.interval, 2)


def _incomplete(summary: Summary) -> list[str]:
    done = min((method.finished + method.failed for method in summary.methods), default=0)
    return [] if summary.complete else [f"INCOMPLETE: {done} of {summary.planned} prompts"]


def _notes(summary: Summary) -> list[str]:
    rules = rules_of(summary.methods)
    return [
        *_incomplete(summary),
        *([rules] if rules else []),
        *memory_notes(summary),
        *noise_notes(summary),
        *summary.noise.notes,
    ]


def prompts_needed(methods: Sequence[MethodSummary], width: float) -> str:
    """In words, with how many prompts the widest interval of a mean acceptance length would be ± ``width``."""
    most = max((method.prompts_needed or 0 for method in methods if method.method != PLAIN), default=0)
    return f"; ±{width:g} tokens per round would take about {most} prompts" if most > 1 else ""


def memory_notes(summary: Summary) -> list[str]:
    """A sentence on each method for which caches or preemption did anything."""
    found = []
    for method in summary.methods:
        did = None if method.requests is None else method.requests.memory
        if did is not None and (did.reused or did.preemptions):
            found.append(
                f"{method.label}: {percent(did.hit_rate)} of prompts' tokens were found in the cache; "
                f"{did.preemptions} preemptions, {did.recomputed} tokens prefilled again, {did.swapped} swapped back "
                f"in {did.swap_seconds:.2g} s"
            )
    return found


def _drafted(method: MethodSummary) -> str:
    if method.method == PLAIN:
        return NOTHING
    return f"{number(method.proposed_depth_per_round)}; {number(method.proposed_nodes_per_round)}"


def _accepted_at(position: int) -> Callable[[MethodSummary], str]:
    def cell(method: MethodSummary) -> str:
        by = method.acceptance_by_position
        if position >= len(by.rounds):
            return NOTHING
        parts = []
        for kind in ("unconditional", "conditional"):
            value, low, high = (by[name][position] for name in (kind, f"{kind}_low", f"{kind}_high"))
            parts.append(percent(value) + ("" if low is None else f" [{low:.0%}, {high:.0%}]"))
        return "; ".join(parts)

    return cell


def stage_milliseconds(method: MethodSummary, stage: str) -> float | None:
    """The wall time of a stage per emitted token; None where it was not timed."""
    tokens = (method.tokens_per_second or 0.0) * method.seconds
    return 1000 * method.stage_seconds[stage] / tokens if tokens and stage in method.stage_seconds else None
