"""The page: verdict first, then what made it, figures, pictures and outputs; style, code and data inside.

The token view is drawn when a reader asks for it, from the outputs of runs as compact data, which ``tokens.js`` reads:

- ``runs``: for each run its ``name``, its ``texts`` (token id → text), its ``prompts``, and its ``outputs``.
- A prompt is ``{id, category, turns}``.
- An output names its prompt by number (``p``), and has ``method``, ``T`` (temperature), ``turn`` and ``sample``; the
  ids of its tokens (``k``), and for each of them its round (``r``) and its source (``s``, a number: see ``SOURCES``);
  the texts (``x``) of tokens that read differently in their context; ``rounds``; and what its record says.
- A round is ``{a, d, n}`` (accepted, proposed depth, proposed nodes). With a trace it also has ``e``, the expected
  number of accepted tokens, and the tree: for every node its token (``k``), parent (``up``), and p and q after its
  parent (``p``, ``q``; null where unknown); the numbers of the accepted nodes (``path``); the token that followed
  (``next``: id, p, q); and the likely tokens at the root and along the path (``likely``: lists of id, p, q).
"""

import base64
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from experiments.reporting.columns import ACCEPTED, DISTINCT, EQUAL, LENGTH, METHOD, NODES, SPEEDUP, TOKENS, T
from experiments.reporting.comparison import pictures, remarks
from experiments.reporting.run_tables import noise_notes
from experiments.reporting.table import Col, Table, words
from experiments.reporting.verdicts import evidence
from experiments.results import lossless
from experiments.results.comparison import commit_of, differences, distinguishing, entries_of, title
from experiments.results.lossless import NOT_LOSSLESS, OTHER_TARGET, Verdict, explained
from experiments.results.origin import replace_text
from experiments.results.records import PLAIN, RECORDS, Record, Source, read_records
from experiments.results.rows import ALL, Row
from experiments.results.runs import Run
from experiments.results.texts import in_context, read_prompts, text_of
from experiments.tracing.rounds import DraftedRound, Odds, Output, outputs_of


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
    shared = len(set(settings)) < len(settings)
    folders = [f" ({run.folder.name})" if shared else "" for run in runs]
    return [own + folder if own else run.folder.name for own, folder, run in zip(settings, folders, runs, strict=True)]


def findings(runs: Sequence[Run]) -> list[Finding]:
    """A verdict for every method that drafts, in every run and at every temperature."""
    named = list(zip(runs, names_of(runs), strict=True))
    return [_finding(row, name, run) for run, name in named for row in run.rows if row["method"] != PLAIN]


def _finding(row: Row, named: str, run: Run) -> Finding:
    name = f"{row['label']}{f', {named}' if named else ''}, temperature {row['temperature']:g}"
    if row["lossless"] is not None:
        said = evidence(row, run.of(row))
        return Finding(*_JUDGED[row["lossless"]], name, f"{said[0].upper()}{said[1:]}.")
    kind, head, detail = "unknown", "not compared", "No output could be compared with plain decoding's."
    if (row["exactness"] or "").endswith(OTHER_TARGET):
        detail = "Other weights, or another cache, than plain decoding's: its outputs follow another law."
        kind, head = "lossy", OTHER_TARGET
    elif row["exactness"] is not None and not lossless.promises_exact(row["exactness"]):
        far = row["distance_tv"]
        distance = "" if far is None else f": total variation to p {far:.3f} per round"
        kind, head, detail = "lossy", "lossy rule", f"The rule does not promise the target's distribution{distance}."
    elif not row["finished"]:
        kind, head, detail = "broken", "failed", "Every prompt failed."
    elif row["temperature"] > 0:
        detail = "An exact rule. Sampled outputs differ from plain decoding's by chance: nothing to compare here."
        kind, head = "sampled", "exact rule, sampled"
    return Finding(kind, head, name, detail)


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
    """The origin of a run, in words."""
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


def outputs_to_show(runs: Sequence[Run], max_prompts: int) -> tuple[list[list[Output]], list[str]]:
    """The outputs of every run for the token view, and sentences on what is left out.

    ``max_prompts`` counts over all runs together; every run shows at least one, unless it is 0.
    """
    share = max(max_prompts // len(runs), min(max_prompts, 1))
    shown, notes = [], []
    for run, name in zip(runs, names_of(runs), strict=True):
        records = read_records(run.folder / RECORDS)
        chosen, total = set(choose_prompts(records, share)), len({record.prompt for record in records})
        outputs, remarks = outputs_of(run.folder, [record for record in records if record.prompt in chosen])
        shown.append(outputs)
        notes += [f"{name}: {note}" if name else note for note in remarks]
        if len(chosen) < total:
            where = f"{len(chosen)} of {total} prompts{f' of {name}' if name else ''}"
            notes.append(f"{where} are shown, those with divergences first: max_prompts={max_prompts} is the limit.")
    return shown, list(dict.fromkeys(notes))


def write_page(
    runs: Sequence[Run],
    outputs: Sequence[Sequence[Output]],
    texts: Sequence[Mapping[int, bytes]],
    path: Path,
    *,
    notes: Sequence[str] = (),
) -> None:
    """Write the report into one file."""
    names = names_of(runs)
    data = [run_data(*of_run) for of_run in zip(names, runs, outputs, texts, strict=True)]
    here = Path(__file__).parent
    files = "style.css", "tables.js", "tree.js", "tokens.js"
    style, *scripts = ((here / name).read_text(encoding="utf-8") for name in files)
    code = "\n".join(scripts)
    mixed = [f"MIXED: the runs {text}." for text in differences(runs)]
    categories = [row["category"] for run in runs for row in run.all_rows]
    named = {output.record.category for own in outputs for output in own} | {*categories}
    loader = FileSystemLoader(here.parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters["lines"] = lambda text: Markup("<br>").join(escape(text).split("\n"))
    page = pages.get_template("report/page.html").render(
        policy=_policy(style, code),
        style=style,
        code=code,
        title=title(runs),
        verdicts=findings(runs),
        remarks=[*mixed, *(note.rstrip(".") + "." for note in remarks(runs))],
        figures=figures_table(runs),
        categories=categories,
        made_by=[(name, facts_of(run)) for name, run in zip(names, runs, strict=True)],
        pictures=_pictures(runs),
        options=sorted(named - {ALL, ""}),
        notes=notes,
        data=as_script(data),
    )
    replace_text(path, page)


def _policy(style: str, code: str) -> str:
    """The page's own style and code by their hashes, pictures inside the page, and nothing else: no network at all."""
    hashes = (f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, code))
    allowed = "default-src 'none'; img-src data:; style-src {}; script-src {}; base-uri 'none'; form-action 'none'"
    return allowed.format(*hashes)


def _pictures(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Name and address of every picture of the page: those of the runs together, and those that each run has drawn."""
    shown = []
    if len(runs) > 1:
        with tempfile.TemporaryDirectory() as scratch:
            drawn = pictures(entries_of(runs), Path(scratch), title(runs))
            shown += [_figure(path.with_suffix(".svg"), "") for path in drawn]
    for run, name in (
        zip(runs, names_of(runs), strict=True) if len(runs) <= 12 else ()
    ):  # of more, the comparison's alone
        shown += [_figure(path, name) for path in sorted(run.folder.glob("*.svg"))]
    return shown


def _figure(path: Path, run: str) -> tuple[str, str]:
    address = f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return f"{path.stem.replace('_', ' ')}{f', {run}' if run else ''}", address


SOURCES = tuple(Source)
"""Sources by their numbers in the data."""
LONGEST_PROMPT = 4000
"""Characters of a prompt's turn that are shown; of a longer one, its end."""


def choose_prompts(records: Sequence[Record], limit: int) -> list[str]:
    """Ids of at most ``limit`` prompts, in the run's order: where outputs differ from plain decoding's first."""
    differs = {record.prompt for record in records if record.equals_plain is False and not explained(record)}
    ties = {record.prompt for record in records if record.equals_plain is False}
    order = list(dict.fromkeys(record.prompt for record in records))
    ranked = sorted(order, key=lambda prompt: (prompt not in differs, prompt not in ties))
    chosen = set(ranked[:limit])
    return [prompt for prompt in order if prompt in chosen]


def tokens_of(outputs: Sequence[Output]) -> set[int]:
    """Ids of all tokens that the token view of some outputs names."""
    tokens = {token for output in outputs for token in output.record.token_ids}
    return tokens | {odds.token for output in outputs for each in output.rounds for odds in each.tokens()}


def as_script(runs: Sequence[Mapping[str, Any]]) -> str:
    """The data of all runs as the text of a script element: no character of it can end it or begin another."""
    data = {"version": 1, "sources": [str(source) for source in SOURCES], "runs": runs}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", errors="replace").decode()  # lone surrogates would make the file unreadable


def run_data(name: str, run: Run, outputs: Sequence[Output], texts: Mapping[int, bytes]) -> dict[str, Any]:
    """The data of a run for the token view, as the module's text describes; ``name`` is empty for the only run."""
    prompts = list(dict.fromkeys(output.record.prompt for output in outputs))
    categories = {output.record.prompt: output.record.category for output in outputs}
    turns, place = read_prompts(run.folder), {prompt: number for number, prompt in enumerate(prompts)}
    return {
        "name": name,
        "texts": {str(token): text_of(token, texts) for token in sorted(tokens_of(outputs))},
        "prompts": [
            {"id": prompt, "category": categories[prompt], "turns": [_cut(turn) for turn in turns.get(prompt, ())]}
            for prompt in prompts
        ],
        "outputs": [_output(output, place[output.record.prompt], texts) for output in outputs],
    }


def _cut(turn: str) -> str:
    return turn if len(turn) <= LONGEST_PROMPT else "… " + turn[-LONGEST_PROMPT:]


def _output(output: Output, prompt: int, texts: Mapping[int, bytes]) -> dict[str, Any]:
    record = output.record
    ids = [token.token for token in output.tokens]
    words = in_context(ids, texts)
    return {
        "p": prompt,
        "method": record.method,
        "T": record.temperature,
        "turn": record.turn,
        "sample": record.sample,
        "k": ids,
        "r": [token.round for token in output.tokens],
        "s": [SOURCES.index(token.source) for token in output.tokens],
        "x": {str(i): word for i, (k, word) in enumerate(zip(ids, words, strict=True)) if word != text_of(k, texts)},
        "rounds": [
            {"a": a, "d": d, "n": n, **(_tree(output.rounds[number]) if output.rounds else {})}
            for number, (a, d, n) in enumerate(
                zip(record.accepted, record.proposed_depth, record.proposed_nodes, strict=True)
            )
        ],
        "finish": record.finish_reason,
        "error": record.error,
        "promptTokens": record.prompt_tokens,
        "equal": record.equals_plain,
        "differs": record.divergence,
        "margin": _short(record.margin),
        "tie": explained(record) if record.equals_plain is False else None,
    }


def _tree(drafted: DraftedRound) -> dict[str, Any]:
    return {
        "e": _short(drafted.expected_accepted),
        "k": [node.token for node in drafted.nodes],
        "up": list(drafted.parents),
        "p": [_short(node.p) for node in drafted.nodes],
        "q": [_short(node.q) for node in drafted.nodes],
        "path": list(drafted.path),
        "next": _odds(drafted.next),
        "likely": [[_odds(odds) for odds in likely] for likely in drafted.likely],
    }


def _odds(odds: Odds) -> list[Any]:
    return [odds.token, _short(odds.p), _short(odds.q)]


def _short(value: float | None) -> float | None:
    """Three digits, which is what a reader takes in; None for what JSON cannot say."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")
