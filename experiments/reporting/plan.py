"""A plan as tables, sentences and figures. Needs the standard library only."""

from collections.abc import Sequence
from typing import Any

from experiments.planning.drafting import short_count
from experiments.planning.plan import OUTSIDE, Plan, longest_chain
from experiments.reporting.table import Cell, Col, Emphasis, Table, three_digits, words
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.reading import COUNTED
from specdec.physics.work import CACHES

_SHOWN = (256, 1024, 4096, 16_384, 65_536)
"""Contexts whose break-even is said in words."""
_DRAFTERS = {"drafter": "drafter's\nweights", "drafter_kv": "drafter's\nKV", "scratch": "draft\nnodes"}
_MEMORY = {"weights": "weights", "kv": "KV cache", **_DRAFTERS, "activations": "activations"}
_MEMORY |= {"overhead": "copies,\nprogram", "total": "total"}
_ROWS = Col("rows", "batch", ",d")


def _gb(heading: str, *fields: str) -> Col:
    return Col(heading, lambda row: gigabytes(sum(row[name] for name in fields)))


def _ms(heading: str, field: str) -> Col:
    return Col(heading, field, ",.3g", 1e3)


_TOKENS = Col("tokens/s", "tokens_per_second", ",.0f")
_FITS = [
    words("fits", lambda room: "yes" if room.fits else Cell("NO", emphasis=Emphasis.MISSED)),
    Col("longest that fits\n(positions)", lambda room: f"{room.longest:,}" if room.longest else "none"),
]
_SPECULATION = [
    *(_ROWS, Col("best draft\n(tokens)", "drafted", "d"), Col("tokens\nper round", "tokens")),
    *(_ms("draft\nms", "draft_seconds"), _ms("verify\nms", "verify_seconds"), Col("target\nefficiency", "efficiency")),
    *(Col("speedup", "speedup", ".2fx"), _TOKENS),
]
_REQUEST = [
    *(_ROWS, words("method", "method"), Col("prefill\ns", "prefill_seconds", ",.3g")),
    *(_ms("per token\nms", "per_token"), Col("request\ns", "seconds", ",.3g"), _TOKENS),
]


def tables(plan: Plan) -> list[Table]:
    """Memory, forwards, speculation and requests, in the order in which they are read."""
    asked, drafts = plan.asked, plan.asked.drafter is not None
    left_out = [*([] if drafts else _DRAFTERS), *([] if plan.served.packed else ["overhead"])]
    crowded = [f"{room.batch:,}" for room in plan.rooms if not room.fits]
    no_room = [f"there is no room for a batch of {' or '.join(crowded)}"] if crowded else []
    memory = Table.of(
        plan.rooms,
        [_ROWS, *(_gb(name, part) for part, name in _MEMORY.items() if part not in left_out), *_FITS],
        title=f"Memory in GB, slots of {asked.context:,} positions; {asked.usable / 1e9:.4g} GB may be used",
        notes=[
            f"a position takes {kv_bytes_per_position(asked.shape, asked.precision) / 1024:,.4g} KiB of KV cache",
            f"{plan.most_rows:,} such slots fit" if plan.most_rows else "not even one row fits",
        ],
    )
    gains = [
        {**(gain or {}), "batch": batch}
        | {"drafted": gain and (gain.best.drafted or "none pays"), "speedup": gain and gain.best.speedup}
        for batch, gain in zip(asked.batches, plan.speculations, strict=True)
    ]
    speculation = Table.of(
        gains,
        _SPECULATION,
        title=f"Speculation, at {asked.context:,} positions per row and acceptance {acceptance_in_words(plan)}",
        notes=[
            f"drafts of up to {plan.longest} tokens, in a chain",
            "target efficiency is the time of a plain step over that of verifying: 1 where verifying is free",
            *no_room,
        ],
    )
    methods = {"plain": False, **({"speculative": True} if drafts else {})}
    requests = [
        {"batch": batch, "method": method, **(request or {})}
        for method, speculate in methods.items()
        for batch, request in zip(asked.batches, plan.requests(speculate=speculate), strict=True)
    ]
    priced = f"output tokens, prefill included, at {asked.price or 0:g} per hour and no idle time"
    request = Table.of(
        sorted(requests, key=lambda row: asked.batches.index(row["batch"])),
        [*_REQUEST, *([Col("price of a\nmillion tokens", "price", ",.3g")] if asked.price is not None else [])],
        title=f"A request of {asked.prompt:,} prompt and {asked.output:,} output tokens",
        notes=[
            "the rows of a batch arrive together and are prefilled first",
            *([priced] if asked.price is not None else []),
            *no_room,
        ],
        section=lambda row: row["batch"],
    )
    return [memory, forwards_table(plan), *([speculation] if drafts else []), request]


def forwards_table(plan: Plan) -> Table:
    """Bytes and operations of each kind of forward, its limit, and its least time; with costs, the predicted one."""
    asked, first = plan.asked, plan.phases[0]

    def rate(phase: Any) -> str:
        seconds = phase.seconds if asked.costs is None else phase.predicted_seconds
        return "" if not phase.tokens else three_digits(phase.tokens / seconds if seconds else None)

    notes = [
        "tokens/s are over all rows",
        f"prompts are prefilled in chunks of {asked.prefill_chunk:,} tokens, and each reads the weights",
    ]
    sizes = [_gb("weights\nGB", "weight_bytes"), _gb("KV\nGB", "kv_read_bytes", "kv_write_bytes")]
    sizes, times = [*sizes, _gb("other\nGB", "activation_bytes", "logit_bytes")], [_ms("least\nms", "seconds")]
    if asked.costs is not None:  # a line has only so much room
        notes.append("predicted drafts include the decision about them")
        sizes, times = [_gb("GB", "bytes")], [*times, _ms("predicted\nms", "predicted_seconds")]
    columns = [
        *(words("forward", "what"), _ROWS, *sizes, Col("TFLOP", "flops", ",.3g", 1e-12)),
        *(Col("FLOP/\nbyte", "intensity", ",.3g"), words("bound by", "bound"), *times, Col("tokens/s", rate)),
    ]
    title = f"Forwards, at {asked.context:,} positions per row"
    return Table.of(plan.phases, columns, title=title, notes=notes, section=lambda phase: (phase is first, phase.batch))


def head_lines(plan: Plan) -> list[str]:
    """The question of the plan, and the meaning of its figures."""
    asked, shape, device, costs = plan.asked, plan.asked.shape, plan.asked.device, plan.asked.costs
    used = short_count(shape.active_weights + shape.output_weights)
    active = f", of which a token uses {used}" if shape.is_mixture else ""
    speeds = f"{asked.roof.bandwidth / 1e12:.4g} TB/s, {asked.roof.flops / 1e12:.4g} TFLOP/s"
    figures = "measured" if asked.measured else "printed"
    lines = [
        f"{asked.name}: {short_count(shape.weights)} parameters in matrices{active}; {asked.formats}",
        f"{device.title}: {speeds} ({figures}); ridge {asked.roof.ridge:.3g} FLOP/byte",
    ]
    if plan.phases[1].bytes < CACHES * device.cache:
        lines.append(
            f"What a step reads ({gigabytes(plan.phases[1].bytes)} GB) is not much larger than the device's last cache "
            f"({device.cache / 1e6:.0f} MB), which is faster than its memory: the times do not hold for it."
        )
    if shape.kind not in COUNTED:
        lines.append(f"Nobody has compared the sizes of models of the model_type {shape.kind!r} with such a model.")
    if asked.drafter is not None:
        lines.append(f"drafter: {asked.drafter.title}; acceptance {acceptance_in_words(plan)}, an assumption")
    if costs is None:
        return [*lines, "Times are the least that the device allows: good engines reach 60 to 85 % of these speeds."]
    box, held = costs.box, costs.errors.get("target", {}).get("held_out")
    error = "" if held is None else f", with a median error of {held.median:.1%} at sizes that were held out"
    lines.append(
        f"Times are predicted by costs measured on {costs.conditions.device}{error}. They hold for "
        f"{between(box.batch)} rows, {between(box.context)} positions and {between(box.drafted)} drafted nodes per "
        f"row, chains of up to {longest_chain(costs)}, and pieces of prompts of {between(box.chunk)} tokens; a "
        f"dash is {OUTSIDE}."
    )
    return lines


def tail_lines(plan: Plan) -> list[str]:
    """The limits in words: where memory bounds, and where a draft of a fixed length is slower than plain decoding."""
    lines, drafts, measured = [], plan.asked.drafter is not None, plan.asked.costs is not None
    steps = {"A plain step": 0, **({f"One that verifies {plan.fixed}": plan.fixed} if drafts else {})}
    for name, drafted in steps.items():
        context = plan.critical_context(drafted)
        bound = "operations if there are many rows, at every context: attention alone is above the ridge"
        if context is not None:
            bound = f"memory from a context of {context:,.0f} on, however many rows"
        lines.append(f"{name} is bound by {bound}.")
    if not drafts:
        return [*lines, "No drafter is given, so nothing is said about speculation: drafter=model, eagle, ngram, …"]
    what = f"A fixed draft of {plan.fixed} tokens" if plan.fixed > 1 else "A draft of one token"
    known = plan.break_even
    if not known:
        return [*lines, f"{what}: batches and contexts are {OUTSIDE}."]
    shown = list(known) if measured else [context for context in _SHOWN if context in known] or list(known)[-1:]
    nowhere = f"at no batch up to {plan.most:,}" if measured else "at no batch"
    pieces: dict[str, list[int]] = {}
    for context in shown:
        batch = known[context]
        where = nowhere if batch is None else f"above batch {batch:,}" if batch else "at every batch"
        pieces.setdefault(where, []).append(context)
    said = [f"{where} with {between((contexts[0], contexts[-1]))}" for where, contexts in pieces.items()]
    return [*lines, f"{what} is slower than plain decoding {', '.join(said)} positions per row."]


def between(ends: Sequence[int]) -> str:
    """A range of sizes in words."""
    return f"{ends[0]:,} to {ends[1]:,}" if ends[0] != ends[1] else f"{ends[0]:,}"


def acceptance_in_words(plan: Plan) -> str:
    """How often drafted tokens are assumed to be accepted."""
    given = plan.asked.acceptance
    return ", ".join(f"{rate:g}" for rate in ([given] if isinstance(given, float | int) else given))


def gigabytes(size: float) -> str:
    """Bytes in GB, to three digits."""
    return "0" if not size else f"{size / 1e9:,.3g}" if size >= 1e6 else "<0.001"


def figures_of(plan: Plan) -> dict[str, Any]:
    """All figures by name, for ``plan.json``. Bytes, seconds and operations, without prefixes."""
    asked, drafts = plan.asked, plan.asked.drafter is not None
    names = ("formats", "precision", "measured", "context", "prompt", "output", "acceptance", "usable", "price")
    facts = {name: getattr(asked, name) for name in names} | {
        "target": asked.name, "parameters": asked.shape.weights, "batch": list(asked.batches),
        "device": asked.device.name, "bandwidth": asked.roof.bandwidth, "flops": asked.roof.flops,
        "drafter": asked.drafter and asked.drafter.title, "costs": asked.costs and asked.costs.conditions,
    }  # fmt: skip
    both = {"plain": plan.requests(speculate=False), "speculative": plan.requests(speculate=True) if drafts else []}
    critical = {"plain": plan.critical_context(0), "verify": plan.critical_context(plan.fixed) if drafts else None}
    return {
        "schema": 1, "asked": facts, "memory": plan.rooms, "most_rows": plan.most_rows, "forwards": plan.phases,
        "speculation": plan.speculations if drafts else [], "requests": both, "critical_context": critical,
        "break_even": plan.break_even if drafts else None,
    }  # fmt: skip
