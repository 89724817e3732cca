"""The tables and pictures of a run, from its results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.text import Text

from experiments.bench.engine.goals import Results, best_steps, goals
from experiments.bench.timing import NOTHING, missed, ms, percent, show
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
            "rows": "batch", "accepted": "accepted", "depth": "depth", "tokens/round:\ngiven": "tokens_per_round_given",
            "measured": "tokens_per_round", "plain\nstep, ms": "plain_step", "verify\nstep, ms": "verify_step",
            "draft, ms": "draft", "outside, ms": "outside_seconds", "speedup:\nmeasured": "measured",
            "predicted": "predicted_from_tokens", "measured /\npredicted": "ratio", "as plain": "equal_to_plain",
            "of": "outputs",
        },
        ("predicted from the tokens per round that were measured", "as plain: outputs equal to plain decoding's"),
    ),
    "peers": (
        "Whole requests beside transformers' generate, prefill included",
        {
            "target": "target", "method": "method", "transformers": "peer", "tokens/s:\ntheirs": "rate",
            "ours": "own_rate", "times\nas fast": "ratio", "least": "least", "most": "most",
            "same\ntokens": "same_tokens", "error": "error",
        },
        (),
    ),
    "llama_cpp": (
        "Beside llama.cpp; 0 tokens: a whole plain token with everything around its forward",
        {
            "llama.cpp": "precision", "tokens per forward": "nodes", "theirs, ms": "theirs", "ours, ms": "ours",
            "ours / theirs": "ratio", "same token": "same_token",
        },
        ("same token: the same weights choose the same token after a prompt",),
    ),
    "left_out": ("Not measured", {"left out": "what", "why": "why"}, ()),
    "goals": ("Figures to reach", {"figure": "what", "wanted": "wanted", "measured": "measured", "met": "met"}, ()),
}  # fmt: skip
"""The tables by section: title, the keys of records by heading, notes."""
_SECONDS = {"seconds", "least_seconds", "unquantized", "draft", "verify", "accept", "commit", "plain_step"}
_SECONDS |= {"verify_step", "outside_seconds", "theirs", "ours"}
_SHARES = {"bandwidth_utilization", "flop_utilization", "outside"}


def _cell(record: Record, key: str) -> str | Text:
    """Return a value of a record as text: seconds in milliseconds, shares in percent."""
    value = record.get(key)
    if value is None:
        return NOTHING if key != "error" else ""
    if key in _SECONDS:
        return ms(value)
    if key in _SHARES:
        return percent(value)
    if isinstance(value, bool):
        return missed("yes" if value else "no", wrong=key == "met" and not value)
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return missed(str(value), wrong="PHYSICS" in str(value))


_GROUP = ("batch", "context", "backend", "executor")
_MEMORY = {
    "weights": "weights", "kv": "KV cache", "activations": "activations, at their peak",
    "graphs": "kept by executors (graphs)", "peak": "peak of the process", "reserved": "reserved by the allocator",
}  # fmt: skip


def print_tables(results: Results) -> None:
    """Print the tables of all sections that were measured; the figures to reach come last."""
    prepared = {**results, "left_out": _gathered(results["left_out"])}
    plain = {_group(s): s["seconds"] for s in results.get("steps", []) if s["nodes"] == 1}
    prepared["steps"] = [
        {
            **step,
            "of_plain": step["seconds"] / plain[_group(step)] if _group(step) in plain else None,
            "backend": step["backend"].removeprefix("specdec_"),
            "executor": step["executor"].removesuffix("Executor") + (", eager" if step["captured"] is False else ""),
        }
        for step in sorted(results.get("steps", []), key=lambda s: (*_group(s), s["nodes"]))
    ]
    first: dict[tuple[str, str], float] = {}
    for section in ("rounds", "ways"):
        prepared[section] = [{**each, **each["stages"]} for each in results.get(section, [])]
    for each in prepared["ways"]:
        each["of_first"] = each["seconds"] / first.setdefault((each["drafter"], each["rule"]), each["seconds"])
    prepared["prefill"] = [{**r, "rate": r["tokens"] / r["seconds"]} for r in results.get("prefill", [])]
    prepared["synthetic"] = [
        {**r, "accepted": r["accept"], "outside_seconds": r["outside"]} for r in results.get("synthetic", [])
    ]
    prepared["peers"] = [_with_rates(each) for each in results.get("peers", [])]
    prepared["goals"] = [
        {**vars(goal), "wanted": f"{'≤' if goal.at_most else '≥'} {goal.wanted:g}", "met": goal.met}
        for goal in goals(results)
    ]
    for section, (title, columns, notes) in _TABLES.items():
        if section == "left_out" and results.get("memory"):
            _print_memory(results["memory"])
        if prepared.get(section):
            rows = [{name: _cell(record, key) for name, key in columns.items()} for record in prepared[section]]
            show(title, rows, *notes)


def _group(step: Record) -> tuple[Any, ...]:
    return tuple(step[name] for name in _GROUP)


def _with_rates(record: Record) -> Record:
    if "ratio" not in record:
        return record
    rates = {"rate": record["tokens"] / record["seconds"], "own_rate": record["tokens"] / record["ours"]}
    return {**record, **rates, "least": min(record["ratios"]), "most": max(record["ratios"])}


def _gathered(left_out: Sequence[dict[str, str]]) -> list[Record]:
    """Return what was left out, a record per kind and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        reasons.setdefault((each["what"].split(" ", 1)[0], each["why"]), []).append(each["what"])
    more = {key: f", and {len(what) - 2} more" if len(what) > 2 else "" for key, what in reasons.items()}
    return [{"what": "; ".join(what[:2]) + more[key], "why": key[1]} for key, what in reasons.items()]


def _print_memory(found: Record) -> None:
    how = "counted by torch" if found["counted"] else "weights and KV computed, activations from the process's growth"
    rows = [
        {"memory": text, "MB": NOTHING if found[name] is None else f"{found[name] / 1e6:,.1f}"}
        for name, text in _MEMORY.items()
    ]
    if found.get("once") is not None:
        once = {"memory": "first calls of a step of one size (capturing included), ms", "MB": ms(found["once"])}
        rows.append(once)
    show(f"Memory of a step of {found['batch']} x {found['nodes']} nodes at context {found['context']} ({how})", rows)


def device_lines(results: Results) -> list[str]:
    """Return what was measured of the device, and what runs on it."""
    device, model = results["device"], results["model"]
    threads = "" if device["type"] == "cuda" else f", CPU threads: {device['threads']}"
    ridge = device["flops"] / max(device["copy"], device["read"])
    return [
        f"{device['name']}{threads}: copy {device['copy'] / 1e9:.1f} GB/s, read {device['read'] / 1e9:.1f} GB/s, "
        f"product {device['flops'] / 1e12:.2f} TFLOP/s in {model['dtype']} (ridge: {ridge:.0f} operations per byte), "
        f"caches {device['cache_bytes'] / 2**20:.0f} MiB, {device['free_bytes'] / 2**30:.1f} GiB free",
        f"{model['title']}: {model['parameters'] / 1e6:,.0f}M parameters in {model['dtype']}, "
        f"{model['weight_bytes'] / 1e6:,.1f} MB of weights per token, {model['kv_bytes_per_token']:,} bytes of KV per "
        f"token of context",
    ]


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the steps under the device's roof, and what verifying more nodes costs; return the pictures' paths."""
    if not results.get("steps"):
        return []
    with style.styled():
        return [_roofline(results, folder / "roofline.png"), _verify_cost(results, folder / "verify_cost.png")]


def _subtitle(results: Results) -> str:
    device, model = results["device"], results["model"]
    threads = "" if device["type"] == "cuda" else f", CPU threads: {device['threads']}"
    return f"{model['title']} in {model['dtype']}, {device['name']}{threads}"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _roofline(results: Results, path: Path) -> Path:
    """Operations per second against operations per byte, on logarithmic axes."""
    device = results["device"]
    copy, roof = Roof(device["copy"], device["flops"]), Roof(max(device["copy"], device["read"]), device["flops"])
    figure = style.new_figure(style.PAGE, 3.6)
    axes = figure.subplots()
    series: dict[str, list[tuple[float, float]]] = {}
    for each in (*best_steps(results["steps"]), *results.get("prefill", [])):
        kind = "prefill"
        if "nodes" in each:
            kind = f"{'plain' if each['nodes'] == 1 else 'verify'} steps, {_rows(each['batch'])}"
        point = Work(each["bytes"], each["flops"]).intensity, each["flops"] / each["seconds"]
        series.setdefault(kind, []).append(point)
    everything = [x for points in series.values() for x, _ in points]
    grid = np.geomspace(min(everything) / 2, max(*everything, roof.ridge) * 3, 200)
    axes.plot(grid, [roof.attainable(x) / 1e12 for x in grid], color="black", label="roof, measured")
    if copy != roof:
        axes.plot(grid, [copy.attainable(x) / 1e12 for x in grid], color="black", linestyle=":", label="roof of copies")
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, [y / 1e12 for y in ys], style.marker(number), color=style.color(number), label=name)
    axes.set_xscale("log")
    _logarithmic(axes)
    axes.set_xlabel("operations per byte of weights and KV")
    axes.set_ylabel("TFLOP/s")
    axes.grid(which="major")
    style.title(figure, "Steps and prefill under the device's roof", _subtitle(results))
    style.legend(figure, *axes.get_legend_handles_labels())
    return style.save(figure, path)


def _verify_cost(results: Results, path: Path) -> Path:
    """The time of a verify step over a plain one, against nodes, with a line per batch size."""
    base = results["grid"]["context"][0]
    steps = [step for step in best_steps(results["steps"]) if step["context"] == base]
    figure = style.new_figure(style.PAGE, 3.2)
    left, right = figure.subplots(1, 2)
    highest = [1.0]
    for number, batch in enumerate(sorted({step["batch"] for step in steps})):
        points = sorted((s for s in steps if s["batch"] == batch), key=lambda s: s["nodes"])
        plain = next((s["seconds"] for s in points if s["nodes"] == 1), None)
        if plain is None:
            continue
        nodes = [s["nodes"] for s in points]
        look = {"color": style.color(number), "marker": style.marker(number)}
        left.plot(nodes, [1000 * s["seconds"] for s in points], label=_rows(batch), **look)
        left.plot(nodes, [1000 * s["least_seconds"] for s in points], color=style.color(number), linestyle=":")
        highest.append(max(s["seconds"] for s in points) / plain)
        right.plot(nodes, [s["seconds"] / plain for s in points], label=_rows(batch), **look)
    handles, labels = left.get_legend_handles_labels()
    dotted = left.plot([], [], color="black", linestyle=":")
    for axes, label in ((left, "one forward (ms)"), (right, "verify / plain step")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("nodes per row, root included")
        axes.set_ylabel(label)
        axes.grid()
    _logarithmic(left)
    if max(highest) > 10:
        _logarithmic(right)
    else:
        right.set_ylim(bottom=0)
    right.axhline(1.0, color="black", linewidth=0.9, linestyle="--", zorder=1)
    style.title(figure, f"What verifying more nodes costs, context {base}", _subtitle(results))
    style.legend(figure, [*handles, *dotted], [*labels, "least possible"])
    return style.save(figure, path)


def _logarithmic(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers at 1, 2 and 5 of every decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
