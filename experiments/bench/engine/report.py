"""The tables and pictures of a run, from its results."""

from collections.abc import Callable, Mapping, Sequence
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
Columns = Mapping[str, Callable[[Record], str | Text]]
"""The headings of a table, and the text of each for a record."""

_STAGES = ("draft", "verify", "accept", "commit")
_BESIDE: Columns = {
    "drafter": lambda r: r["drafter"],
    "rule": lambda r: r["rule"],
}
_TABLES: dict[str, tuple[str, Columns, tuple[str, ...]]] = {
    "steps": (
        "Forwards over the cache: a plain step (1 node) and verify steps",
        {
            "rows": lambda r: str(r["batch"]),
            "context": lambda r: str(r["context"]),
            "nodes": lambda r: str(r["nodes"]),
            "attention": lambda r: r["backend"].removeprefix("specdec_"),
            "executor": lambda r: (
                r["executor"].removesuffix("Executor").lower() + ("" if r["captured"] is not False else ", eager")
            ),
            "ms": lambda r: ms(r["seconds"]),
            "/ plain": lambda r: f"{r['seconds'] / r['plain']:.2f}" if r["plain"] else NOTHING,
            "least ms": lambda r: ms(r["least_seconds"]),
            "MBU %": lambda r: percent(r["bandwidth_utilization"]),
            "FLOP %": lambda r: percent(r["flop_utilization"]),
            "launches": lambda r: str(r["launches"]),
            "note": lambda r: missed(r["note"], wrong="PHYSICS" in r["note"]),
        },
        (
            "least: what memory or products need at their measured best",
            "MBU: weights and KV over the copy's bandwidth",
        ),
    ),
    "prefill": (
        "Prefill of one prompt in one piece",
        {
            "prompt tokens": lambda r: str(r["tokens"]),
            "ms": lambda r: ms(r["seconds"]),
            "tokens/s": lambda r: f"{r['tokens'] / r['seconds']:,.0f}",
            "FLOP %": lambda r: percent(r["flop_utilization"]),
            "note": lambda r: r["note"],
        },
        (),
    ),
    "weights": (
        "Steps on quantized weights, beside the unquantized ones",
        {
            "weights": lambda r: r["scheme"],
            "nodes": lambda r: str(r["nodes"]),
            "ms": lambda r: ms(r["seconds"]),
            "unquantized, ms": lambda r: ms(r["unquantized"]),
            "times as fast": lambda r: f"{r['ratio']:.2f}",
        },
        (),
    ),
    "rounds": (
        "Rounds by stage",
        {
            **_BESIDE,
            "round, ms": lambda r: ms(r["seconds"]),
            **{f"{stage}, ms": lambda r, stage=stage: ms(r["stages"][stage]) for stage in _STAGES},
            "outside\nforwards, %": lambda r: percent(r["outside"]),
            "launches": lambda r: str(r["launches"]),
            "outside\nforwards": lambda r: str(r["launches_outside"]),
            "host\nreads": lambda r: str(r["reads"]),
        },
        (
            "launches: operations per round; outside forwards: without those of the models",
            "reads cost nothing on a CPU",
        ),
    ),
    "ways": (
        "The same rounds, recorded in other ways, and in invariant mode",
        {
            **_BESIDE,
            "recording": lambda r: r["recording"],
            "invariant": lambda r: "yes" if r["invariant"] else "no",
            "round, ms": lambda r: ms(r["seconds"]),
            "/ first": lambda r: f"{r['seconds'] / r['first']:.2f}" if r["first"] else NOTHING,
            "verify, ms": lambda r: ms(r["stages"]["verify"]),
            "outside\nforwards, %": lambda r: percent(r["outside"]),
            "host\nreads": lambda r: str(r["reads"]),
        },
        (),
    ),
    "synthetic": (
        "Synthetic acceptance: the speedup, and what the costs of single stages predict",
        {
            "rows": lambda r: str(r["batch"]),
            "accepted": lambda r: f"{r['accept']:g} x {r['depth']}",
            "tokens/round:\ngiven": lambda r: f"{r['tokens_per_round_given']:.2f}",
            "measured": lambda r: f"{r['tokens_per_round']:.2f}",
            "plain\nstep, ms": lambda r: ms(r["plain_step"]),
            "verify\nstep, ms": lambda r: ms(r["verify_step"]),
            "draft, ms": lambda r: ms(r["draft"]),
            "outside, ms": lambda r: ms(r["outside"]),
            "speedup:\nmeasured": lambda r: f"{r['measured']:.2f}",
            "predicted": lambda r: f"{r['predicted_from_tokens']:.2f}",
            "measured /\npredicted": lambda r: f"{r['ratio']:.2f}",
            "as plain": lambda r: f"{r['equal_to_plain']}/{r['outputs']}",
        },
        ("predicted from the tokens per round that were measured", "as plain: outputs equal to plain decoding's"),
    ),
    "peers": (
        "Whole requests beside transformers' generate, prefill included",
        {
            "target": lambda r: r["target"],
            "method": lambda r: r["method"],
            "transformers": lambda r: r["peer"] + (f": {r['error']}" if "error" in r else ""),
            "tokens/s:\ntheirs": lambda r: f"{r['tokens'] / r['seconds']:,.1f}" if "ratio" in r else NOTHING,
            "ours": lambda r: f"{r['tokens'] / r['ours']:,.1f}" if "ratio" in r else NOTHING,
            "times\nas fast": lambda r: f"{r['ratio']:.2f}" if "ratio" in r else NOTHING,
            "least, most": lambda r: f"{min(r['ratios']):.2f}, {max(r['ratios']):.2f}" if "ratio" in r else NOTHING,
            "same\ntokens": lambda r: {True: "yes", False: "no"}.get(r.get("same_tokens"), NOTHING),
        },
        (),
    ),
    "llama_cpp": (
        "Beside llama.cpp",
        {
            "llama.cpp": lambda r: r["precision"],
            "what": lambda r: f"forward of {r['nodes']}" if r["nodes"] else "whole token",
            "theirs, ms": lambda r: ms(r["theirs"]),
            "ours, ms": lambda r: ms(r["ours"]),
            "ours / theirs": lambda r: f"{r['ratio']:.2f}",
            "same token": lambda r: "yes" if r["same_token"] else "no",
        },
        ("same token: the same weights choose the same token after a prompt",),
    ),
    "left_out": ("Not measured", {"left out": lambda r: r["what"], "why": lambda r: r["why"]}, ()),
    "goals": (
        "Figures to reach",
        {
            "figure": lambda r: r["what"],
            "wanted": lambda r: f"{'≤' if r['at_most'] else '≥'} {r['wanted']:g}",
            "measured": lambda r: NOTHING if r["measured"] is None else f"{r['measured']:.3g}",
            "met": lambda r: missed(
                {None: "not measured", True: "yes", False: "NO"}[r["met"]], wrong=r["met"] is False
            ),
        },
        (),
    ),
}
_GROUP = ("batch", "context", "backend", "executor")
_MEMORY = {
    "weights": "weights", "kv": "KV cache", "activations": "activations, at their peak",
    "graphs": "kept by executors (graphs)", "peak": "peak of the process", "reserved": "reserved by the allocator",
}  # fmt: skip


def print_tables(results: Results) -> None:
    """Print the tables of all sections that were measured; the figures to reach come last."""
    prepared = {**results, "steps": _ordered(results.get("steps", [])), "left_out": _gathered(results["left_out"])}
    first: dict[tuple[str, str], float] = {}
    for each in results.get("ways", []):
        each["first"] = first.setdefault((each["drafter"], each["rule"]), each["seconds"])
    prepared["goals"] = [{**vars(goal), "met": goal.met} for goal in goals(results)]
    for section, (title, columns, notes) in _TABLES.items():
        if section == "left_out" and results.get("memory"):
            _print_memory(results["memory"])
        if prepared.get(section):
            rows = [{name: text(record) for name, text in columns.items()} for record in prepared[section]]
            show(title, rows, *notes)


def _ordered(steps: Sequence[Record]) -> list[Record]:
    """Return the steps in the order of their sizes, each with the seconds of its plain step."""
    plain = {tuple(s[name] for name in _GROUP): s["seconds"] for s in steps if s["nodes"] == 1}
    found = [{**s, "plain": plain.get(tuple(s[name] for name in _GROUP))} for s in steps]
    return sorted(found, key=lambda s: (*(s[name] for name in _GROUP), s["nodes"]))


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
