"""The tables of a run, from its results."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.bench.engine.figures import Results, goals
from experiments.reporting.cells import NOTHING
from experiments.reporting.table import Cell, Column, Emphasis, Table


def tables(results: Results) -> Iterator[Table]:
    """Yields the tables of all sections that were measured; the figures to reach come last."""
    makers = {
        "steps": _steps, "prefill": _prefill, "weights": _weights, "rounds": _rounds, "ways": _ways,
        "synthetic": _synthetic,
        "peers": _peers, "llama_cpp": _llama_cpp, "memory": _memory,
    }  # fmt: skip
    for section, make in makers.items():
        if results.get(section):
            yield make(results[section])
    if results["left_out"]:
        yield _left_out(results["left_out"])
    yield goals_table(results)


def device_lines(results: Results) -> list[str]:
    """Returns what was measured of the device, and what runs on it."""
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


def _steps(steps: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("rows"), Column("context"), Column("nodes"), Column("attention", "left"), Column("executor", "left"),
        Column("ms"), Column("/ plain"), Column("least ms"), Column("MBU %"), Column("FLOP %"), Column("launches"),
        Column("note", "left", fold=True),
    ]  # fmt: skip
    table = Table(
        columns,
        "Forwards over the cache: a plain step (1 node) and verify steps",
        ["least: what memory or products need at their measured best", "MBU: weights and KV over the copy's bandwidth"],
    )
    last = None
    for step in sorted(steps, key=lambda s: (s["batch"], s["context"], s["backend"], s["executor"], s["nodes"])):
        group = tuple(step[name] for name in ("batch", "context", "backend", "executor"))
        if last not in (None, group) and table.rows:
            table.sections.add(len(table.rows) - 1)
        last = group
        plain = next((s for s in steps if s["nodes"] == 1 and tuple(s[n] for n in _GROUP) == group), None)
        note = step["note"]
        table.add(
            str(step["batch"]), str(step["context"]), str(step["nodes"]), step["backend"].removeprefix("specdec_"),
            step["executor"].removesuffix("Executor").lower() + ("" if step["captured"] is not False else ", eager"),
            _ms(step["seconds"]), f"{step['seconds'] / plain['seconds']:.2f}" if plain else NOTHING,
            _ms(step["least_seconds"]), _percent(step["bandwidth_utilization"]), _percent(step["flop_utilization"]),
            str(step["launches"]), Cell(note, emphasis=Emphasis.MISSED if "PHYSICS" in note else Emphasis.NONE),
        )  # fmt: skip
    return table


_GROUP = ("batch", "context", "backend", "executor")


def _prefill(records: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        [
            Column("prompt tokens"),
            Column("ms"),
            Column("tokens/s"),
            Column("FLOP %"),
            Column("note", "left", fold=True),
        ],
        "Prefill of one prompt in one piece",
    )
    for each in sorted(records, key=lambda r: r["tokens"]):
        table.add(
            str(each["tokens"]), _ms(each["seconds"]), f"{each['tokens'] / each['seconds']:,.0f}",
            _percent(each["flop_utilization"]), each["note"],
        )  # fmt: skip
    return table


def _weights(records: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("weights", "left"),
        Column("nodes"),
        Column("ms"),
        Column("unquantized, ms"),
        Column("times as fast"),
    ]
    table = Table(columns, "Steps on quantized weights, beside the unquantized ones")
    for each in records:
        ratio = f"{each['ratio']:.2f}"
        table.add(each["scheme"], str(each["nodes"]), _ms(each["seconds"]), _ms(each["unquantized"]), ratio)
    return table


def _rounds(records: Sequence[dict[str, Any]]) -> Table:
    stages = ("draft", "verify", "accept", "commit")
    columns = [
        Column("drafter", "left"), Column("rule", "left"), Column("round, ms"), *(Column(f"{s}, ms") for s in stages),
        Column("outside\nforwards, %"), Column("launches"), Column("outside\nforwards"), Column("host\nreads"),
    ]  # fmt: skip
    table = Table(
        columns,
        "Rounds by stage",
        [
            "launches: operations per round; outside forwards: without those of the models",
            "reads cost nothing on a CPU",
        ],
    )
    for each in records:
        outside = NOTHING if each["outside"] is None else _percent(each["outside"])
        table.add(
            each["drafter"], each["rule"], _ms(each["seconds"]), *[_ms(each["stages"][s]) for s in stages], outside,
            str(each["launches"]), str(each["launches_outside"]), str(each["reads"]),
        )  # fmt: skip
    return table


def _ways(records: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("drafter", "left"), Column("rule", "left"), Column("recording", "left"), Column("invariant", "left"),
        Column("round, ms"), Column("/ first", "right"), Column("verify, ms"), Column("outside\nforwards, %"),
        Column("host\nreads"),
    ]  # fmt: skip
    table = Table(columns, "The same rounds, recorded in other ways, and in invariant mode")
    first: dict[tuple[str, str], float] = {}
    for each in records:
        pair = each["drafter"], each["rule"]
        if table.rows and pair not in first:
            table.sections.add(len(table.rows) - 1)
        base = first.setdefault(pair, each["seconds"])
        outside = NOTHING if each["outside"] is None else _percent(each["outside"])
        table.add(
            *pair, each["recording"], "yes" if each["invariant"] else "no", _ms(each["seconds"]),
            f"{each['seconds'] / base:.2f}" if base else NOTHING, _ms(each["stages"]["verify"]), outside,
            str(each["reads"]),
        )  # fmt: skip
    return table


def _synthetic(records: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("rows"), Column("accepted"), Column("tokens/round:\ngiven"), Column("measured"),
        Column("plain\nstep, ms"), Column("verify\nstep, ms"), Column("draft, ms"), Column("outside, ms"),
        Column("speedup:\nmeasured"), Column("predicted"), Column("measured /\npredicted"), Column("as plain"),
    ]  # fmt: skip
    table = Table(
        columns,
        "Synthetic acceptance: the speedup, and what the costs of single stages predict",
        ["predicted from the tokens per round that were measured", "as plain: outputs equal to plain decoding's"],
    )
    for each in records:
        table.add(
            str(each["batch"]), f"{each['accept']:g} x {each['depth']}", f"{each['tokens_per_round_given']:.2f}",
            f"{each['tokens_per_round']:.2f}", _ms(each["plain_step"]), _ms(each["verify_step"]), _ms(each["draft"]),
            _ms(each["outside"]), f"{each['measured']:.2f}", f"{each['predicted_from_tokens']:.2f}",
            f"{each['ratio']:.2f}", f"{each['equal_to_plain']}/{each['outputs']}",
        )  # fmt: skip
    return table


def _peers(records: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("target", "left"), Column("method", "left"), Column("transformers", "left", fold=True),
        Column("tokens/s:\ntheirs"), Column("ours"), Column("times\nas fast"), Column("least, most"),
        Column("same\ntokens"),
    ]  # fmt: skip
    table = Table(columns, "Whole requests beside transformers' generate, prefill included")
    for each in records:
        if "error" in each:
            dash = [NOTHING] * 5
            table.add(each["target"], each["method"], f"{each['peer']}: {each['error']}", *dash)
            continue
        ratios = each["ratios"]
        table.add(
            each["target"], each["method"], each["peer"], f"{each['tokens'] / each['seconds']:,.1f}",
            f"{each['tokens'] / each['ours']:,.1f}", f"{each['ratio']:.2f}", f"{min(ratios):.2f}, {max(ratios):.2f}",
            "yes" if each["same_tokens"] else "no",
        )  # fmt: skip
    return table


def _llama_cpp(records: Sequence[dict[str, Any]]) -> Table:
    columns = [
        Column("llama.cpp", "left"), Column("what", "left"), Column("theirs, ms"), Column("ours, ms"),
        Column("ours / theirs"), Column("same token"),
    ]  # fmt: skip
    table = Table(columns, "Beside llama.cpp", ["same token: the same weights choose the same token after a prompt"])
    for each in records:
        what = f"forward of {each['nodes']}" if each["nodes"] else "whole token"
        same = "yes" if each["same_token"] else "no"
        table.add(each["precision"], what, _ms(each["theirs"]), _ms(each["ours"]), f"{each['ratio']:.2f}", same)
    return table


def _memory(found: dict[str, Any]) -> Table:
    how = "counted by torch" if found["counted"] else "weights and KV computed, activations from the process's growth"
    size = f"{found['batch']} x {found['nodes']} nodes at context {found['context']}"
    table = Table([Column("memory", "left"), Column("MB")], f"Memory of a step of {size} ({how})")
    names = {
        "weights": "weights", "kv": "KV cache", "activations": "activations, at their peak",
        "graphs": "kept by executors (graphs)", "peak": "peak of the process", "reserved": "reserved by the allocator",
    }  # fmt: skip
    for name, text in names.items():
        table.add(text, NOTHING if found[name] is None else f"{found[name] / 1e6:,.1f}")
    if found.get("once") is not None:
        table.add("first calls of a step of one size (capturing included), ms", f"{1000 * found['once']:.1f}")
    return table


def _left_out(records: Sequence[dict[str, str]]) -> Table:
    table = Table([Column("left out", "left", fold=True), Column("why", "left", fold=True)], "What was not measured")
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in records:
        kind = each["what"].split(" ", 1)[0]
        reasons.setdefault((kind, each["why"]), []).append(each["what"])
    for (_, why), what in reasons.items():
        more = f", and {len(what) - 2} more" if len(what) > 2 else ""
        table.add("; ".join(what[:2]) + more, why)
    return table


def goals_table(results: Results) -> Table:
    """Returns the figures to reach on this kind of device, with those of this run."""
    table = Table(
        [Column("figure", "left", fold=True), Column("wanted"), Column("measured"), Column("met", "left")],
        "Figures to reach",
    )
    for goal in goals(results):
        met = {None: "not measured", True: "yes", False: "NO"}[goal.met]
        table.add(
            goal.what,
            f"{'≤' if goal.at_most else '≥'} {goal.wanted:g}",
            NOTHING if goal.measured is None else f"{goal.measured:.3g}",
            Cell(met, emphasis=Emphasis.MISSED if goal.met is False else Emphasis.NONE),
        )
    return table


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return (
        f"{milliseconds:.3f}"
        if milliseconds < 1
        else f"{milliseconds:.2f}"
        if milliseconds < 100
        else f"{milliseconds:.0f}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
