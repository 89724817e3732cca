"""The report's own tables and facts: verdicts, figures by method and category, and what made each run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.reporting.cells import equality, label_cell, number, percent, times, with_interval
from experiments.reporting.table import NOTHING, Cell, Table, left
from experiments.reporting.verdicts import evidence
from experiments.results.comparison import commit_of, distinguishing
from experiments.results.lossless import NOT_LOSSLESS, OTHER_TARGET, Verdict, of_another_target, promises_exact
from experiments.results.records import PLAIN
from experiments.results.runs import Run
from experiments.results.summary import MethodSummary

ALL = "all"
"""Stands for all categories together, in the tables and in the page's filter."""


class Finding(NamedTuple):
    """The verdict on a method, as the page shows it first.

    ``kind`` decides about its color and sign: ``equal``, ``ties``, ``broken``, ``sampled``, ``lossy`` or ``unknown``.
    ``name`` is the method, with its run where there are several; ``head`` the verdict in a word or two, ``detail`` the
    evidence.
    """

    kind: str
    head: str
    name: str
    detail: str


_JUDGED = {
    Verdict.EQUAL: ("equal", "equal"),
    Verdict.TIES: ("ties", "equal up to ties"),
    Verdict.NOT_LOSSLESS: ("broken", NOT_LOSSLESS),
}


def names_of(runs: Sequence[Run]) -> list[str]:
    """A name for every run: the settings in which it differs, or its folder; empty where there is one run only."""
    if len(runs) == 1:
        return [""]
    settings = [
        ", ".join(part for part in own if not part.startswith("sampling.temperature="))  # it has a column of its own
        for own in distinguishing([run.manifest for run in runs])
    ]
    if len(set(settings)) == len(settings):
        return [own or run.folder.name for own, run in zip(settings, runs, strict=True)]
    return [f"{own} ({run.folder.name})" if own else run.folder.name for own, run in zip(settings, runs, strict=True)]


def findings(runs: Sequence[Run]) -> list[Finding]:
    """A verdict for every method that drafts, in every run and at every temperature."""
    return [
        _finding(method, name)
        for run, name in zip(runs, names_of(runs), strict=True)
        for method in run.summary.methods
        if method.method != PLAIN
    ]


def _finding(method: MethodSummary, run: str) -> Finding:
    name = f"{method.label}{f', {run}' if run else ''}, temperature {method.temperature:g}"
    found = method.lossless
    if found is not None:
        said = evidence(found)
        return Finding(*_JUDGED[found.verdict], name, f"{said[0].upper()}{said[1:]}.")
    if of_another_target(method.exactness):
        detail = "Other weights, or another cache, than plain decoding's: its outputs follow another law."
        return Finding("lossy", OTHER_TARGET, name, detail)
    if method.exactness is not None and not promises_exact(method.exactness):
        distance = "" if method.distance_tv is None else f": total variation to p {method.distance_tv:.3f} per round"
        return Finding("lossy", "lossy rule", name, f"The rule does not promise the target's distribution{distance}.")
    if not method.finished:
        return Finding("broken", "failed", name, "Every prompt failed.")
    if method.temperature > 0:
        detail = "An exact rule. Sampled outputs differ from plain decoding's by chance: nothing to compare here."
        return Finding("sampled", "exact rule, sampled", name, detail)
    return Finding("unknown", "not compared", name, "No output could be compared with plain decoding's.")


def figures_table(runs: Sequence[Run]) -> tuple[Table, list[str]]:
    """A row per run, method, temperature and category; and the category of every row (``ALL`` for all together)."""
    rows = [
        (name, method, category, found)
        for run, name in zip(runs, names_of(runs), strict=True)
        for method in run.summary.methods
        for category, found in [(ALL, method), *method.by_category.items()]
    ]

    def whole(cell: Callable[[MethodSummary], Cell | str]) -> Callable[[Any], Cell | str]:
        return lambda row: cell(row[1]) if row[2] == ALL else NOTHING

    def interval(name: str, show: Callable[[float | None], str]) -> Callable[[Any], Cell]:
        return lambda row: with_interval(show(row[3][name]), row[3][f"{name}_interval"])

    run = [(left("run"), lambda row: row[0])] if len(runs) > 1 else []
    columns = [
        (left("method"), lambda row: label_cell(row[1])),
        ("T", lambda row: f"{row[1].temperature:g}"),
        (left("category"), lambda row: row[2]),
        ("prompts", lambda row: str(row[1].finished if row[2] == ALL else row[3].prompts)),
        ("mean acceptance length", interval("mean_acceptance_length", number)),
        ("speedup", interval("speedup", times)),
        ("tokens/s", lambda row: number(row[3].tokens_per_second, 1)),
        ("draft accepted", whole(lambda method: percent(method.draft_acceptance_rate))),
        ("nodes/round", whole(lambda method: number(method.proposed_nodes_per_round, 1))),
        ("distinct 4-grams", whole(lambda method: percent(method.distinct_4_gram_rate))),
        ("equal to plain", whole(equality)),
    ]
    table = Table.of(rows, [*run, *columns], notes=[f"Intervals at {runs[0].summary.confidence:.0%}."])
    return table, [category for _, _, category, _ in rows]


def facts_of(run: Run) -> dict[str, str]:
    """What made a run, in words."""
    manifest = run.manifest
    target = manifest.get("target", {})
    parameters = target.get("parameters")
    size = f" ({parameters / 1e6:,.1f}M parameters)" if isinstance(parameters, int) else ""
    machine, noise = manifest.get("machine", {}), run.summary.noise
    timings = [*noise.notes, *([noise.warning] if noise.warning is not None else [])]
    versions = manifest.get("versions", {})
    return {
        "target": f"{target.get('name', 'unknown')}{size}",
        "dtype": str(manifest.get("dtype_reason") or manifest.get("dtype", "unknown")),
        "attention": str(manifest.get("attention_reason", "unknown")),
        "device": f"{manifest.get('device', 'unknown')}, {manifest.get('threads', '?')} CPU threads",
        "machine": ", ".join(str(machine[key]) for key in ("system", "processor") if machine.get(key)) or "unknown",
        "commit": commit_of(manifest),
        "settings": " ".join(map(str, manifest.get("overrides", []))) or "the defaults",
        "prompts": f"{manifest.get('prompts', '?')}, hash {manifest.get('prompts_hash', 'unknown')}",
        "seeds": ", ".join(f"{name} {seed}" for name, seed in manifest.get("seeds", {}).items()) or "unknown",
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value) or "unknown",
        "timings": "; ".join(timings) or "noise not measured",
        "started": str(manifest.get("started", "unknown")),
        "folder": str(run.folder),
    }
