"""Tables of one run: of a method, of several, by category, of requests, of the device; and what went wrong in it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from experiments.measuring.forwards import Timed
from experiments.reporting import columns as cols
from experiments.reporting import terminal
from experiments.reporting.table import NOTHING, Cell, Col, Table, words
from experiments.results import timing
from experiments.results.records import PLAIN
from experiments.results.rows import Row, family
from experiments.results.runs import Run
from experiments.results.summary import RANKED
from experiments.results.timing import MODEL_STAGES, STAGES, noise_verdict, noise_words

NOISY = "NOISY TIMINGS: repeat on an idle machine before you rely on tokens/s and speedup"


def run_table(run: Run, title: str) -> Table:
    """One run: a row per figure, a column per method."""
    stages = stages_of(run.rows)
    rows: list[Row] = [row | {f"stage_ms.{at}": stage_milliseconds(row, at) for at in stages} for row in run.rows]
    positions = range(1, 1 + max((len(family(row, "rounds_at")) for row in rows), default=0))
    lines = [
        cols.unless_plain(Col("mean acceptance length", "mean_acceptance_length")),
        Col("  expected, given the drafts", "expected_mean_acceptance_length"),
        Col("first token's distance from p: total variation", "distance_tv", ".4f"),
        Col("  Kullback-Leibler, nats", "distance_kl", ".4f"),
        *(cols.SPEEDUP, cols.TOKENS, Col("draft acceptance rate", "draft_acceptance_rate", ".0%")),
        Col("drafted depth; nodes per round", "proposed_depth_per_round", also="proposed_nodes_per_round"),
        *(_accepted_at(at) for at in positions),
        *(Col(f"{stage}, ms per token", f"stage_ms.{stage}", ".3f") for stage in stages),
        *(Col("distinct 4-grams", "distinct_4_gram_rate", ".0%"), Col("equal to plain decoding", cols.equality)),
        Col("prompts finished; failed", lambda row: f"{row['finished']} of {row['planned']}; {row['failed']}"),
        Col("tokens; rounds", "tokens", "d", also="rounds"),
    ]
    notes = [*_notes(run), *(f"brackets: {row['confidence']:.0%} intervals over prompts" for row in rows[:1])]
    return Table.upright(rows, [row["label"] for row in rows], lines, title=title, notes=notes)


def comparison_table(run: Run, title: str) -> Table:
    """A row per method and temperature, by temperature; with differences where the run compares with a method."""
    rows = sorted(run.rows, key=lambda row: row["temperature"])
    names = {row["method"]: row["label"] for row in rows}
    over = next((names.get(row["gain_over"], row["gain_over"]) for row in rows if row["gain_over"] is not None), None)
    notes = [*_notes(run), *([cols.BOLD] if any(row.get(f"best.{name}") for row in rows for name in RANKED) else [])]
    notes += [] if over is None else [f"difference: from {over} on the same prompts, given the drafts"]
    columns = [cols.T, words("method", _named), cols.unless_plain(cols.LENGTH)]
    columns += [] if over is None else [Col("difference\nin tokens", "gain", "+.2f")]
    columns += [Col("speedup", "speedup", ".2fx", best=True), cols.TOKENS]
    columns += [cols.TTFT, cols.TPOT] if run.manifest.get("contenders") else [cols.ACCEPTED, cols.NODES, cols.DISTINCT]
    columns += [cols.EQUAL]
    return Table.of(rows, columns, title=title, notes=notes, section=lambda row: row["temperature"])


def category_table(run: Run) -> Table | None:
    """A row per category of several prompts, drafting method and temperature; None if there are fewer than two."""
    parts = [row for row in run.parts if row["method"] != PLAIN and row["mean_acceptance_length_low"] is not None]
    if len({part["category"] for part in parts}) < 2:
        return None
    parts.sort(key=lambda part: part["category"])
    columns = [words("category", "category"), cols.METHOD, cols.T, cols.LENGTH, cols.SPEEDUP, cols.TOKENS]
    notes = [*cols.of_few(part["finished"] for part in parts), *([NOISY] if run.noisy else [])]
    return Table.of(parts, columns, title="By category", notes=notes, section=lambda row: row["category"])


def print_troubles(console: Console, run: Run, most: int = 5) -> None:
    """Say what went wrong: of each method, the first reasons."""
    for row in run.rows:
        failed, errors = f"{row['method']} failed on", errors_of(run, row)
        lines = [f"{failed} {count} of {row['planned']} prompts: {error}" for error, count in errors.items()]
        more = [f"… and {len(lines) - most} more, listed in records.jsonl"] if len(lines) > most else []
        terminal.say(console, *lines[:most], *more)


def errors_of(run: Run, row: Row) -> dict[str, int]:
    """What went wrong with a row's method, and how often."""
    own = run.of(row)
    return dict(Counter(error or "unknown" for error in own.error[own.failed]))


REQUESTS = "What a user feels"
_ALWAYS = [
    *(cols.T, cols.METHOD, cols.TTFT, cols.TPOT),
    Col("to end, ms\np50; p99", "e2e.p50", "3", 1e3, also="e2e.p99", bounds=False),
    *(Col("requests\n/s", "requests_per_second"), cols.ALL_USERS, cols.USER),
]
_WHERE_KNOWN = [
    Col("within\nlimits", "attainment", ".0%"),
    Col("goodput,\nreq./s", "goodput"),
    Col("price of\n1M tokens", "price_per_million_tokens"),
    Col("J per\ntoken", "joules_per_token", "3"),
]


def requests_table(run: Run, title: str = REQUESTS) -> Table | None:
    """A row per method and temperature; None if no engine told when anything happened."""
    known = [row for row in run.rows if row.get("ttft.p50") is not None]
    if not known:
        return None
    notes = [cols.CLOSED, "TTFT: time to first token; TPOT: time per further token"]
    notes += [f"limits: {known[0]['limits']}"] if known[0]["limits"] else []
    silent = ", ".join(row["label"] for row in run.rows if row["requests"] is not None and row not in known)
    notes += [f"left out, because they do not tell when tokens come: {silent}"] if silent else []
    notes.append(f"intervals: {known[0]['confidence']:.0%}, over prompts")
    columns = [*_ALWAYS, *(col for col in _WHERE_KNOWN if any(col.cell(row).text != NOTHING for row in known))]
    return Table.of(known, columns, title=title, notes=notes, section=lambda row: row["temperature"])


DEVICE = "Use of the device"


def utilization_table(run: Run, title: str = DEVICE) -> Table | None:
    """A row per method and stage; None where no work was counted, or with nothing to compare it with."""
    names = dict(zip(cols.labels_of(run.rows), run.rows, strict=True))
    known = [
        {"name": name, "stage": stage} | {figure: row[f"{figure}.{stage}"] for figure in ("mbu", "mfu", "of_least")}
        for name, row in names.items()
        for stage in MODEL_STAGES
        if row.get(f"mbu.{stage}") is not None
    ]
    if not known:
        return None
    notes = [
        "MBU: bytes of weights, keys and values that had to move, over what the memory could have moved",
        "MFU: operations of all verified nodes, over what the device could have computed meanwhile",
        "both of the measured peaks; time over the least that these allow",
        "less than the least time: caches hold what is read, or time, peaks or the count of the work are wrong",
    ]
    columns = [words("method", "name"), words("stage", "stage"), Col("MBU", "mbu", ".0%"), Col("MFU", "mfu", ".0%")]
    columns.append(Col("time /\nleast", "of_least", "3"))
    return Table.of(known, columns, title=title, notes=notes, section=lambda row: row["name"])


def not_recorded(recordings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on stages of rounds that failed to be recorded, which makes a GPU several times slower."""
    failed: dict[str, list[str]] = {}  # methods that share an engine fail together
    for method, counts in recordings.items():
        for stage, reasons in counts["refused"].items():
            failed.setdefault(f"{stage} ({'; '.join(reasons)})", []).append(method)
    return [f"{', '.join(methods)}: not recorded, so that it ran slower: {what}" for what, methods in failed.items()]


def memory_table(held: Mapping[str, Any]) -> Table:
    """The bytes that engines hold, those of the program before it loaded them, and the process now and at most."""
    parts = {
        "weights": "weights", "drafter": "drafter", "kv": "KV\ncache", "drafter_kv": "drafter's\nKV",
        "scratch": "draft\nnodes", "copies": "copies", "program": "program",
    }  # fmt: skip
    process = Col("process\nnow; at most", "process", "3", 1e-6, also="most")
    columns = [*(Col(heading, name, "3", 1e-6) for name, heading in parts.items()), process]
    return Table.of([held], columns, title="Memory held, in MB")


def stages_of(rows: Sequence[Row]) -> list[str]:
    """The stages that were timed, in the order of a round."""
    known = dict.fromkeys(stage for row in rows for stage in family(row, "stage_seconds"))
    order = [*STAGES, *(stage for stage in known if stage not in (*STAGES, "other")), "other"]
    return [stage for stage in order if stage in known]


def stage_milliseconds(row: Row, stage: str) -> float | None:
    """The wall time of a stage per emitted token; None where it was not timed."""
    tokens, seconds = (row["tokens_per_second"] or 0.0) * row["seconds"], row.get(f"stage_seconds.{stage}")
    return 1000 * seconds / tokens if tokens and seconds is not None else None


def load_notes(load: Mapping[str, float], timed: Sequence[Timed] = ()) -> list[str]:
    """The same of forwards that were timed, judged as a run's timings are."""
    spread = float(np.median([each.spread for each in timed])) if timed else None
    noise = noise_verdict(spread, load.get("own"), load.get("others"), round(load.get("cores", 0)))
    return [*([NOISY] if noise["noisy"] else []), *noise_words(noise, "passes")]


def noise_notes(run: Run) -> list[str]:
    """The noise of a run's timings in words; a warning first where they are noisy."""
    return [*([NOISY] if run.noisy else []), *(noise_words(run.rows[0]) if run.rows else [])]


def _notes(run: Run) -> list[str]:
    done = min((row["finished"] + row["failed"] for row in run.rows), default=0)
    incomplete = f"INCOMPLETE: {done} of {run.rows[0]['planned']} prompts" if run.rows and not run.complete else ""
    return [*(note for note in (incomplete, cols.rules_of(run.rows)) if note), *engines(run), *noise_notes(run)]


def engines(run: Run) -> list[str]:
    """The fastest of several engines, by speed over plain decoding in the same turn, and how far that speed moved."""
    theirs, said, speeds = run.manifest.get("contenders") or {}, [], []
    named = {row["label"].removesuffix(f", {row['exactness']}"): row for row in run.rows}
    own = {name: "" for name, row in named.items() if row["method"] not in theirs}
    over = {name: 1.0 if row["method"] == PLAIN else row["speedup"] or 0.0 for name, row in named.items()}
    ranked = sorted(over, key=lambda label: -over[label])
    engine = {label: own.get(label, label.partition(cols.FAMILY)[0]) for label in ranked}
    plainly = [label for label in ranked if "plain" in label]
    for what, labels in (("fastest plainly", plainly), ("fastest of all", ranked)) if theirs else ():
        if following := [label for label in labels if engine[label] != engine[labels[0]] and over[label]]:
            said.append(f"{what}: {labels[0]}, {over[labels[0]] / over[following[0]]:.2f} times {following[0]}")
    plain = run.outputs[run.outputs.method == PLAIN]
    for turn in {frozenset(own.batch) for name, own in run.outputs.groupby("method") if name != PLAIN and theirs}:
        calls = timing.timed_calls(plain[plain.batch.isin(turn)], None)
        speeds += [timing.tokens_per_second(calls)] if len(calls) else []
    moved = f"plain decoding's speed moved by {max(speeds) / min(speeds) - 1:.0%}" if speeds[1:] else ""
    return [*said, *([f"engines in turn, each beside plain decoding: {moved} between turns"] if moved else [])]


def _named(row: Row) -> Cell:
    return cols.method_cell(row, "", *([f"{row['failed']} failed"] if row["failed"] else []), joint="\n")


def _accepted_at(position: int) -> Col:
    def cell(row: Row) -> str:
        if row.get(f"rounds_at.{position}") is None:
            return NOTHING
        return "; ".join(cols.percent(row.get(f"{kind}acceptance_at.{position}")) for kind in ("", "conditional_"))

    return Col(f"accepted at {position}: of all; if all before", cell)
