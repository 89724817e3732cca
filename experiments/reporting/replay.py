"""The reports of a replay: rules on identical drafts, and the best tree; tables, remarks and files."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
from rich.console import Console

from experiments.reporting import terminal
from experiments.reporting.columns import T, lossiness
from experiments.reporting.formats import csv_text, document, publish, write_texts
from experiments.reporting.table import NOTHING, Cell, Col, Table, words
from experiments.results.comparison import commit_of
from experiments.results.rows import Row, family
from experiments.results.statistics import Bootstrap
from experiments.tracing.rates import Recorded
from specdec.drafting.best_shapes import AcceptanceRates, PlannedShape
from specdec.shape import TreeShape

CONTEXTS = (
    "One-round expectations on identical contexts: those that the rule which ran has led to. Another rule would have "
    "met other contexts."
)
ALONG = "Expected rounds of texts that plain decoding wrote, where every round drafts: nothing is drawn at random."


def report_replay(done: Sequence[Row], out: Path, *, confidence: float, manifests: Sequence[Mapping[str, Any]]) -> None:
    """Print a replay's tables, and write ``replay.md``, ``.csv`` and ``.json``."""
    first = manifests[0]
    title = f"{first['target']['name']} ({first['dtype']}) on {first['device']}, {first['prompts']} prompts"
    asked = [row for row in done if row["refused"] is None]
    if not asked:
        raise ValueError(f"none of {', '.join({row['rule'] for row in done})} fits these drafts: {done[0]['refused']}")
    notes = [ALONG if "expected_rounds" in asked[0] else CONTEXTS, *remarks(done)]
    table = replay_table(asked, title, confidence)
    commits = ", ".join(sorted({commit_of(manifest) for manifest in manifests}))
    about = f"{title}; intervals at {confidence:.0%} over prompts."
    publish(
        out,
        "replay",
        tables=[table],
        document=document(about, table, notes, f"Drafts made at commit {commits}."),
        figures={"title": title, "notes": notes, "rows": done},
        said=notes,
        more={"replay.csv": csv_text(pandas.DataFrame(asked))},
    )


def replay_table(rows: Sequence[Row], title: str, confidence: float) -> Table:
    """A row per rule and drafts."""

    def rule(row: Row) -> Cell:
        return Cell(f"{row['rule']} ({row['exactness']})", emphasis=lossiness(row["exactness"]))

    def deeper(row: Row) -> str:
        return " ".join(f"{value:.2f}" for value in list(family(row, "reach").values())[1:]) or NOTHING

    gain = Col("over the\nbaseline", "gain", "+.3f")
    columns = [T, words("drafts", "drafts", min_width=13), words("rule (exactness)", rule, min_width=16)]
    if "expected_rounds" in rows[0]:
        columns += [
            Col("rounds\nper text", "expected_rounds"),
            Col("tokens\nper round", "tokens_per_round", ".3f"),
            gain,
        ]
        about = f"Expected rounds: {title}"
        return Table.of(rows, columns, title=about, section=lambda row: row["temperature"])
    columns += [
        *(Col("accepted\nper round", "accepted", ".3f"), gain),
        *(Col("at\nleast 1", "reach.1", ".3f"), Col("at least\n2, 3, …", deeper)),
        Col("TV; KL\nfrom p", "distance_tv", ".3f", also="distance_kl"),
    ]
    notes = [
        f"accepted per round: expected; intervals at {confidence:.0%} over prompts, differences paired",
        "TV; KL: how far the distribution of a round's first token is from p, for rules not known to be exact",
    ]
    title = f"Rules on identical drafts: {title}"
    return Table.of(rows, columns, title=title, notes=notes, section=lambda row: (row["temperature"], row["drafts"]))


def remarks(done: Sequence[Row]) -> list[str]:
    """Sentences on rules that were not asked."""
    refused: dict[tuple[str, str], tuple[str, dict[str, int]]] = {}
    for row in done:
        if row["refused"] is not None:  # one sentence for all that differ in a row's number or a vocabulary's size
            kind = row["rule"], re.sub(r"[\d,]+", "", row["refused"])
            refused.setdefault(kind, (row["refused"], {}))[1][row["drafts"]] = 1
    return [f"Not asked: {rule}, about {'; '.join(where)}: {why}" for (rule, _), (why, where) in refused.items()]


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """The best tree at a temperature, and of every size; ``costs`` are seconds by nodes and depth, None for tokens."""

    temperature: float
    recorded: Recorded
    rates: AcceptanceRates
    planned: Sequence[PlannedShape]
    costs: Callable[[int, int], float] | None
    best: PlannedShape

    def seconds(self, planned: PlannedShape) -> float | None:
        """The time of a round with a tree; None without costs."""
        return None if self.costs is None else self.costs(planned.nodes, planned.depth)

    def speedup(self, planned: PlannedShape) -> float | None:
        """The predicted speedup of a tree; None without costs."""
        seconds = self.seconds(planned)
        return None if self.costs is None or seconds is None else planned.tokens * self.costs(0, 0) / seconds

    @property
    def pays(self) -> bool:
        """Whether the best tree is faster than plain decoding, as far as that is known."""
        return (speedup := self.speedup(self.best)) is None or bool(speedup > 1)


def written_shape(shape: TreeShape) -> str:
    """A shape as ``drafter.shape=`` takes it, in its shortest form."""
    if shape.is_chain:
        return str(shape.num_nodes)
    nodes = list(zip(shape.depths, shape.children, strict=True))
    widths = [{len(below) for at, below in nodes if at == depth} for depth in range(shape.max_depth)]
    alike = all(len(widths_at) == 1 for widths_at in widths)
    value = [min(widths_at) for widths_at in widths] if alike else [list(path) for path in shape.paths]
    return json.dumps(value, separators=(",", ":"))


def sizes_table(optimized: Optimized) -> Table:
    """A row per size: the best tree with twice as many nodes as the row before, and the chosen one."""
    best_of: dict[int, PlannedShape] = {}  # by tokens per second, without costs by tokens
    for planned in sorted(optimized.planned, key=lambda planned: -planned.tokens / (optimized.seconds(planned) or 1.0)):
        best_of.setdefault(planned.nodes, planned)
    best_of[optimized.best.nodes] = optimized.best
    rows = [
        {"nodes": nodes, "depth": planned.depth, "tokens": planned.tokens, "seconds": optimized.seconds(planned)}
        | {"speedup": optimized.speedup(planned), "best.nodes": planned is optimized.best}
        for nodes, planned in sorted(best_of.items())
        if nodes & (nodes - 1) == 0 or nodes in (optimized.best.nodes, max(best_of))
    ]
    columns = [Col("nodes", "nodes", "d", best=True), Col("depth", "depth", "d")]
    columns += [Col("tokens\nper round", "tokens", ".3f"), Col("ms\nper round", "seconds", ".2f", 1e3)]
    columns.append(Col("speedup", "speedup", ".2fx"))
    title = f"The best trees at T={optimized.temperature:g}"
    return Table.of(rows, columns, title=title, notes=["predicted; bold: chosen"])


def limits_of(optimized: Optimized) -> list[str]:
    """Sentences that a reader of the tables needs: where a bound of the trace or of the search decided the tree."""
    best, rates, said = optimized.best, optimized.rates, []
    if not optimized.recorded.top_down:
        why = "The rule looks below a node before it decides about it, so rates depend on the tree that was recorded"
        said.append(f"{why}: take the predictions as approximate.")
    ranks = zip(best.shape.ranks[1:], best.shape.depths[1:], strict=True)
    if best.depth == rates.max_depth or any(rank + 1 == len(rates.at(depth)) for rank, depth in ranks):
        said.append("It is as deep or as wide as the recorded tree: a larger trace may show a better one.")
    if best.nodes == max(planned.nodes for planned in optimized.planned):
        said.append(f"It has as many nodes as were allowed or recorded ({best.nodes}): a larger max_nodes may help.")
    return said


def report_found(console: Console, optimized: Optimized, out: Path, bootstrap: Bootstrap, about: str) -> None:
    """Print the sizes and the best tree, and write it as an option of ``tree=``, with figures."""
    terminal.show(console, sizes_table(optimized))
    name, at = f"T{optimized.temperature:g}", f"at T={optimized.temperature:g}"
    recorded, best, speedup = optimized.recorded, optimized.best, optimized.speedup(optimized.best)
    shape, noted = written_shape(best.shape), limits_of(optimized)
    interval = recorded.tokens_interval(best.shape, bootstrap)
    over = "" if interval is None else " [{:.2f}, {:.2f}]".format(*interval)
    tokens = f"{best.tokens:.2f}{over} tokens per round predicted {at}"
    advice = f"best tree {at}, {best.nodes} nodes" + ("" if speedup is None else f", predicted at {speedup:.2f}x")
    if not optimized.pays:
        advice = f"none pays here: {at} the fastest tree is predicted at {speedup:.2f}x, so decode plainly"
    told = f"{advice}{':' * optimized.pays}"
    terminal.say(console, *noted, f"{tokens}; intervals at {bootstrap.confidence:.0%} over prompts", told)
    if optimized.pays:
        console.print(f"'drafter.shape={shape}'", highlight=False, markup=False, soft_wrap=True)
    comments = [f"{about}; {tokens}.", f"{advice}.", f"--config-dir {out} tree={name} takes it."]
    lines = ["# @package drafter", *(f"# {comment}" for comment in comments), f"shape: {shape}", ""]
    figures = {
        "about": about,
        "temperature": optimized.temperature,
        "rounds": recorded.rounds,
        "recorded_shape": json.loads(written_shape(recorded.shape)),
        "tokens_per_round_recorded": recorded.tokens,
        "rates": [optimized.rates.at(depth).tolist() for depth in range(1, optimized.rates.max_depth + 1)],
        "planned": [{"tokens": t.tokens, "shape": json.loads(written_shape(t.shape))} for t in optimized.planned],
        "best": json.loads(shape),
        "speedup": speedup,
        "pays": optimized.pays,
        "remarks": noted,
    }
    written = write_texts(out / "tree", {f"{name}.yaml": "\n".join(lines)})
    terminal.list_written(console, [*written, *write_texts(out, {f"{name}.json": figures})])
