"""The tables and pictures of a run, from its results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from experiments.bench.engine.goals import Results, best_steps, goals, roof_of
from experiments.bench.timing import NOTHING, missed, ms, show
from experiments.reporting import style
from specdec.physics.bounds import Roof, Work

Record = dict[str, Any]

_TABLES: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "steps": (
        "Forwards over the cache: a plain step (1 node) and verify steps",
        {
            "rows": "batch", "context": "context", "nodes": "nodes", "attention": "backend", "executor": "executor",
            "ms": "seconds", "/ plain": "of_plain", "least ms": "least_seconds", "MBU %": "bandwidth_utilization",
            "FLOP %": "flop_utilization", "launches": "launches", "note": "note",
        },
        ("least: what memory or products need at their measured best", "MBU: weights and KV over the copy's bandwidth"),
    ),
    "prefill": (
        "Prefill of one prompt in one piece",
        {"prompt tokens": "tokens", "ms": "seconds", "tokens/s": "rate", "FLOP %": "flop_utilization", "note": "note"},
        (),
    ),
    "weights": (
        "Steps on quantized weights, beside the unquantized ones",
        {
            "weights": "scheme", "nodes": "nodes", "ms": "seconds", "unquantized, ms": "unquantized",
            "times as fast": "ratio",
        },
        (),
    ),
    "rounds": (
        "Rounds by stage",
        {
            "drafter": "drafter", "rule": "rule", "round, ms": "seconds", "draft, ms": "draft", "verify, ms": "verify",
            "accept, ms": "accept", "commit, ms": "commit", "outside\nforwards, %": "outside", "launches": "launches",
            "outside\nforwards": "launches_outside", "host\nreads": "reads",
        },
        ("launches: operations per round; outside forwards: without those of the models", "reads are free on a CPU"),
    ),
    "ways": (
        "The same rounds, recorded in other ways, and in invariant mode",
        {
            "drafter": "drafter", "rule": "rule", "recording": "recording", "invariant": "invariant",
            "round, ms": "seconds", "/ first": "of_first", "verify, ms": "verify", "outside\nforwards, %": "outside",
            "host\nreads": "reads",
        },
        (),
    ),
    "synthetic": (
        "Synthetic acceptance: the speedup, and what the costs of single stages predict",
        {
            "rows": "batch", "accepted": "accept_rate", "depth": "depth",
            "tokens/round:\ngiven": "tokens_per_round_given", "measured": "tokens_per_round",
            "plain\nstep, ms": "plain_step", "verify\nstep, ms": "verify_step", "draft, ms": "draft",
            "outside, ms": "outside_seconds", "speedup:\nmeasured": "measured", "predicted": "predicted_from_tokens",
            "measured /\npredicted": "ratio", "as plain": "equal_to_plain", "of": "outputs",
        },
        ("predicted from the tokens per round that were measured", "as plain: outputs equal to plain decoding's"),
    ),
    "llama_cpp": (
        "Beside llama.cpp; 0 tokens: a whole plain token with everything around its forward",
        {
            "llama.cpp": "precision", "tokens per forward": "nodes", "theirs, ms": "theirs", "ours, ms": "ours",
            "ours / theirs": "ratio", "same token": "same_token",
        },
        ("same token: the same weights choose the same token after a prompt",),
    ),
    "memory": ("Memory of a step", {"memory": "what", "MB": "megabytes"}, ()),
    "left_out": ("Not measured", {"left out": "what", "why": "why"}, ()),
    "goals": ("Figures to reach", {"figure": "what", "wanted": "bound", "measured": "measured", "met": "met"}, ()),
}  # fmt: skip
"""The tables by section: title, the keys of records by heading, notes."""
_SECONDS = {"seconds", "least_seconds", "unquantized", "draft", "verify", "accept", "commit", "plain_step"}
_SECONDS |= {"verify_step", "outside_seconds", "theirs", "ours"}
_SHARES = {"bandwidth_utilization", "flop_utilization", "outside"}
_MEMORY = {
    "weights": "weights", "kv": "KV cache", "activations": "activations, at their peak",
    "graphs": "kept by executors (graphs)", "peak": "peak of the process", "reserved": "reserved by the allocator",
}  # fmt: skip


def _cell(record: Record, key: str) -> str | Text:
    """Return a value of a record as text: seconds in milliseconds, shares in percent."""
    value = record.get(key)
    if value is None:
        return NOTHING
    if key in _SECONDS:
        return ms(value)
    if key in _SHARES:
        return f"{100 * value:.1f}"
    if isinstance(value, bool):
        return missed("yes" if value else "no", wrong=key == "met" and not value)
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return missed(str(value), wrong="PHYSICS" in str(value))


def print_tables(results: Results) -> None:
    """Print the tables of all sections that were measured; the figures to reach come last."""
    prepared = _prepared(results)
    for section, (title, columns, notes) in _TABLES.items():
        if section == "memory" and prepared["memory"]:
            found = results["memory"]
            counted = "weights and KV computed, activations from the process's growth"
            counted = "counted by torch" if found["counted"] else counted
            title = f"{title} of {found['batch']} x {found['nodes']} nodes at context {found['context']} ({counted})"
        if prepared[section]:
            rows = [{name: _cell(record, key) for name, key in columns.items()} for record in prepared[section]]
            show(title, rows, *notes)


def _prepared(results: Results) -> dict[str, list[Record]]:
    """Return the records of every table, with what is shown of them and not kept."""

    def of(section: str) -> list[Record]:
        return [dict(record) for record in results.get(section, [])]

    made = {section: of(section) for section in ("steps", "prefill", "weights", "rounds", "ways", "synthetic")}
    made |= {"llama_cpp": of("llama_cpp"), "left_out": _gathered(results["left_out"]), "goals": goals(results)}
    group = ("batch", "context", "backend", "executor")
    made["steps"].sort(key=lambda step: (*(step[name] for name in group), step["nodes"]))
    plain: dict[tuple[Any, ...], float] = {}
    for step in made["steps"]:
        key = tuple(step[name] for name in group)
        if step["nodes"] == 1:
            plain[key] = step["seconds"]
        step["of_plain"] = step["seconds"] / plain[key] if key in plain else None
        step["backend"] = step["backend"].removeprefix("specdec_")
        step["executor"] = step["executor"].removesuffix("Executor") + (", eager" if step["captured"] is False else "")
    first: dict[tuple[str, str], float] = {}
    for each in (*made["rounds"], *made["ways"]):
        each |= each["stages"]
    for each in made["ways"]:
        each["of_first"] = each["seconds"] / first.setdefault((each["drafter"], each["rule"]), each["seconds"])
    for each in made["prefill"]:
        each["rate"] = each["tokens"] / each["seconds"]
    for each in made["synthetic"]:
        each |= {"accept_rate": each["accept"], "outside_seconds": each["outside"]}
    for each in made["goals"]:
        each["bound"] = f"{'≤' if each['at_most'] else '≥'} {each['wanted']:g}"
    made["memory"] = []
    if found := results.get("memory"):
        sizes = {text: found[name] for name, text in _MEMORY.items()}
        made["memory"] = [
            {"what": text, "megabytes": None if size is None else f"{size / 1e6:,.1f}"} for text, size in sizes.items()
        ]
        if found.get("once") is not None:
            what = "first calls of a step of one size (capturing included), ms"
            made["memory"].append({"what": what, "megabytes": ms(found["once"])})
    return made


def _gathered(left_out: Sequence[dict[str, str]]) -> list[Record]:
    """Return what was left out, a record per kind and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        reasons.setdefault((each["what"].split(" ", 1)[0], each["why"]), []).append(each["what"])
    return [
        {"what": "; ".join(what[:2]) + (f", and {len(what) - 2} more" if len(what) > 2 else ""), "why": why}
        for (_, why), what in reasons.items()
    ]


def device_lines(results: Results) -> list[str]:
    """Return what was measured of the device, and what runs on it."""
    device, model = results["device"], results["model"]
    return [
        f"{device['name']}{_threads(device)}: copy {device['copy'] / 1e9:.1f} GB/s, read {device['read'] / 1e9:.1f} "
        f"GB/s, product {device['flops'] / 1e12:.2f} TFLOP/s in {model['dtype']} (ridge: {roof_of(device).ridge:.0f} "
        f"operations per byte), caches {device['cache_bytes'] / 2**20:.0f} MiB, "
        f"{device['free_bytes'] / 2**30:.1f} GiB free",
        f"{model['title']}: {model['parameters'] / 1e6:,.0f}M parameters in {model['dtype']}, "
        f"{model['weight_bytes'] / 1e6:,.1f} MB of weights per token, {model['kv_bytes_per_token']:,} bytes of KV per "
        f"token of context",
    ]


def _threads(device: Record) -> str:
    return "" if device["type"] == "cuda" else f", CPU threads: {device['threads']}"


# ---------------------------------------------------------------- pictures


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the steps under the device's roof, and what verifying more nodes costs; return the pictures' paths."""
    if not results.get("steps"):
        return []
    device, model = results["device"], results["model"]
    about = f"{model['title']} in {model['dtype']}, {device['name']}{_threads(device)}"
    with style.styled():
        return [
            _roofline(results, folder / "roofline.png", about),
            _verify_cost(results, folder / "verify_cost.png", about),
        ]


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _roofline(results: Results, path: Path, about: str) -> Path:
    """Operations per second against operations per byte, on logarithmic axes."""
    device = results["device"]
    copy, roof = Roof(device["copy"], device["flops"]), roof_of(device)
    figure = style.new_figure(style.PAGE, 3.6)
    axes = figure.subplots()
    series: dict[str, list[tuple[float, float]]] = {}
    for each in (*best_steps(results["steps"]), *results.get("prefill", [])):
        kind = "prefill"
        if "nodes" in each:
            kind = f"{'plain' if each['nodes'] == 1 else 'verify'} steps, {_rows(each['batch'])}"
        point = Work(each["bytes"], each["flops"]).intensity, each["flops"] / each["seconds"] / 1e12
        series.setdefault(kind, []).append(point)
    everything = [x for points in series.values() for x, _ in points]
    grid = np.geomspace(min(everything) / 2, max(*everything, roof.ridge) * 3, 200)
    bounds = [(roof, "-", "roof, measured"), (copy, ":", "roof of copies")]
    for bound, line, label in bounds if copy != roof else bounds[:1]:
        axes.plot(grid, [bound.attainable(x) / 1e12 for x in grid], line, color="black", label=label)
    for number, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), linestyle="none", label=name, **style.looks(number))
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights and KV", ylabel="TFLOP/s")
    style.plain_log(axes.yaxis)
    axes.grid(which="major")
    style.legend_of(figure, axes)
    return style.finish(figure, path, "Steps and prefill under the device's roof", about)


def _verify_cost(results: Results, path: Path, about: str) -> Path:
    """The time of a verify step over a plain one, against nodes, with a line per batch size."""
    base = results["grid"]["context"][0]
    steps = sorted((s for s in best_steps(results["steps"]) if s["context"] == base), key=lambda s: s["nodes"])
    figure = style.new_figure(style.PAGE, 3.2)
    left, right = figure.subplots(1, 2)
    highest = 1.0
    for number, batch in enumerate(sorted({step["batch"] for step in steps})):
        points = [step for step in steps if step["batch"] == batch]
        if points[0]["nodes"] != 1:
            continue
        nodes, seconds = [s["nodes"] for s in points], np.array([s["seconds"] for s in points])
        left.plot(nodes, 1000 * seconds, label=_rows(batch), **style.looks(number))
        left.plot(nodes, [1000 * s["least_seconds"] for s in points], color=style.color(number), linestyle=":")
        right.plot(nodes, seconds / seconds[0], label=_rows(batch), **style.looks(number))
        highest = max(highest, seconds.max() / seconds[0])
    handles, labels = left.get_legend_handles_labels()
    dotted = left.plot([], [], color="black", linestyle=":")
    for axes, label in ((left, "one forward (ms)"), (right, "verify / plain step")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="nodes per row, root included", ylabel=label)
        axes.grid()
        if axes is left or highest > 10:
            axes.set_yscale("log")
            style.plain_log(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
    style.baseline(right)
    style.legend(figure, [*handles, *dotted], [*labels, "least possible"])
    return style.finish(figure, path, f"What verifying more nodes costs, context {base}", about)
