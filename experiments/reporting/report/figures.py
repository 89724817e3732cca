"""The report's own tables and facts: verdicts, figures by method and category, and what made each run."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.reporting.columns import ACCEPTED, DISTINCT, EQUAL, LENGTH, METHOD, NODES, SPEEDUP, TOKENS, T
from experiments.reporting.run_tables import noise_notes
from experiments.reporting.table import Col, Table, words
from experiments.reporting.verdicts import evidence
from experiments.results.comparison import commit_of, distinguishing
from experiments.results.lossless import NOT_LOSSLESS, OTHER_TARGET, Verdict, of_another_target, promises_exact
from experiments.results.records import PLAIN
from experiments.results.rows import Row
from experiments.results.runs import Run


class Finding(NamedTuple):
    """The verdict on a method: ``kind`` decides about its color and sign, ``detail`` is the evidence."""

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
        _finding(row, name, run)
        for run, name in zip(runs, names_of(runs), strict=True)
        for row in run.rows
        if row["method"] != PLAIN
    ]


def _finding(row: Row, named: str, run: Run) -> Finding:
    name = f"{row['label']}{f', {named}' if named else ''}, temperature {row['temperature']:g}"
    if row["lossless"] is not None:
        said = evidence(row, run.of(row))
        return Finding(*_JUDGED[row["lossless"]], name, f"{said[0].upper()}{said[1:]}.")
    if of_another_target(row["exactness"]):
        detail = "Other weights, or another cache, than plain decoding's: its outputs follow another law."
        return Finding("lossy", OTHER_TARGET, name, detail)
    if row["exactness"] is not None and not promises_exact(row["exactness"]):
        far = row["distance_tv"]
        distance = "" if far is None else f": total variation to p {far:.3f} per round"
        return Finding("lossy", "lossy rule", name, f"The rule does not promise the target's distribution{distance}.")
    if not row["finished"]:
        return Finding("broken", "failed", name, "Every prompt failed.")
    if row["temperature"] > 0:
        detail = "An exact rule. Sampled outputs differ from plain decoding's by chance: nothing to compare here."
        return Finding("sampled", "exact rule, sampled", name, detail)
    return Finding("unknown", "not compared", name, "No output could be compared with plain decoding's.")


def figures_table(runs: Sequence[Run]) -> Table:
    """A row per run, method, temperature and category (``ALL`` for all together)."""
    rows = [row | {"run": name} for run, name in zip(runs, names_of(runs), strict=True) for row in run.all_rows]
    columns = [
        *([words("run", "run")] if len(runs) > 1 else []),
        *(METHOD, T, words("category", "category"), Col("prompts", "finished", "d")),
        *(LENGTH, SPEEDUP, TOKENS, ACCEPTED, NODES, DISTINCT, EQUAL),
    ]
    return Table.of(rows, columns, notes=[f"Intervals at {rows[0]['confidence']:.0%}."])


def facts_of(run: Run) -> dict[str, str]:
    """What made a run, in words."""
    manifest = {"target": {}, "machine": {}, "versions": {}, "seeds": {}, **run.manifest}
    parameters = manifest["target"].get("parameters")
    size = f" ({parameters / 1e6:,.1f}M parameters)" if isinstance(parameters, int) else ""
    facts = {
        "target": f"{manifest['target'].get('name', 'unknown')}{size}",
        "dtype": manifest.get("dtype_reason") or manifest.get("dtype"),
        "attention": manifest.get("attention_reason"),
        "device": f"{manifest.get('device', 'unknown')}, {manifest.get('threads', '?')} CPU threads",
        "machine": ", ".join(str(manifest["machine"].get(key) or "") for key in ("system", "processor")).strip(", "),
        "commit": commit_of(manifest),
        "settings": " ".join(map(str, manifest.get("overrides", []))) or "the defaults",
        "prompts": f"{manifest.get('prompts', '?')}, hash {manifest.get('prompts_hash', 'unknown')}",
        "seeds": ", ".join(f"{name} {seed}" for name, seed in manifest["seeds"].items()),
        "versions": ", ".join(f"{name} {value}" for name, value in manifest["versions"].items() if value),
        "timings": "; ".join(noise_notes(run)) or "noise not measured",
        "started": manifest.get("started"),
        "folder": run.folder,
    }
    return {name: str(value or "unknown") for name, value in facts.items()}
