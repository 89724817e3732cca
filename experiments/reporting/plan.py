"""A plan as tables, sentences and figures. Needs the standard library only."""

from collections.abc import Sequence
from typing import Any

from experiments.planning.drafting import short_count
from experiments.planning.measured import OUTSIDE, longest_chain
from experiments.planning.plan import Plan
from experiments.reporting.table import Cell, Col, Emphasis, Table, three_digits, value_of, words
from specdec.physics.capacity import kv_bytes_per_position
from specdec.physics.reading import COUNTED
from specdec.physics.work import CACHES

_SHOWN = (256, 1024, 4096, 16_384, 65_536)
"""Contexts whose break-even is said in words."""
_SPECULATION = ("tokens", "efficiency", "draft_seconds", "verify_seconds", "tokens_per_second")
_REQUEST = ("prefill_seconds", "per_token", "seconds", "tokens_per_second", "price")
ROWS = Col("rows", "batch", ",d")


def tables(plan: Plan) -> list[Table]:
    """The tables, in the order in which they are read."""
    speculation = [] if plan.asked.drafter is None else [speculation_table(plan)]
    return [memory_table(plan), phase_table(plan), *speculation, request_table(plan)]


def _gb(heading: str, *fields: str) -> Col:
    return Col(heading, lambda row: gigabytes(sum(value_of(row, name) for name in fields)))


def _ms(heading: str, field: str) -> Col:
    return Col(heading, field, ",.3g", 1e3)


def memory_table(plan: Plan) -> Table:
    """The memory of every batch, by purpose."""
    asked, drafter = plan.asked, plan.asked.drafter
    parts = {"weights": "weights", "KV cache": "kv"}
    if drafter is not None:
        parts |= {"drafter's\nweights": "drafter", "drafter's\nKV": "drafter_kv", "draft\nnodes": "scratch"}
    parts |= {"activations": "activations", "total": "total"}
    notes = [
        f"a position takes {kv_bytes_per_position(asked.shape, asked.precision) / 1024:,.4g} KiB of KV cache",
        f"{plan.most_rows:,} such slots fit" if plan.most_rows else "not even one row fits",
    ]
    columns = [
        *(ROWS, *(_gb(name, part) for name, part in parts.items())),
        words("fits", lambda room: "yes" if room.fits else Cell("NO", emphasis=Emphasis.MISSED)),
        Col("longest that fits\n(positions)", lambda room: f"{room.longest:,}" if room.longest else "none"),
    ]
    title = f"Memory in GB, slots of {asked.context:,} positions; {asked.usable / 1e9:.4g} GB may be used"
    return Table.of(plan.rooms, columns, title=title, notes=notes)


def phase_table(plan: Plan) -> Table:
    """Bytes and operations of each kind of forward, its limit, and its least time; with costs, the predicted one."""
    asked, first = plan.asked, plan.phases[0]

    def rate(phase: Any) -> str:
        seconds = phase.seconds if asked.costs is None else phase.predicted_seconds
        return "" if not phase.tokens else three_digits(phase.tokens / seconds if seconds else None)

    notes = [
        "tokens/s are over all rows",
        f"prompts are prefilled in chunks of {asked.prefill_chunk:,} tokens, and each reads the weights",
    ]
    sizes = [
        *(_gb("weights\nGB", "weight_bytes"), _gb("KV\nGB", "kv_read_bytes", "kv_write_bytes")),
        _gb("other\nGB", "activation_bytes", "logit_bytes"),
    ]
    times = [_ms("least\nms", "seconds")]
    if asked.costs is not None:  # a line has only so much room
        notes.append("predicted drafts include the decision about them")
        sizes, times = [_gb("GB", "bytes")], [*times, _ms("predicted\nms", "predicted_seconds")]
    columns = [
        *(words("forward", "what"), ROWS, *sizes, Col("TFLOP", "flops", ",.3g", 1e-12)),
        *(Col("FLOP/\nbyte", "intensity", ",.3g"), words("bound by", "bound"), *times, Col("tokens/s", rate)),
    ]
    title = f"Forwards, at {asked.context:,} positions per row"
    return Table.of(plan.phases, columns, title=title, notes=notes, section=lambda phase: (phase is first, phase.batch))


def speculation_table(plan: Plan) -> Table:
    """The length of the best draft for every batch, and its gain."""
    rows: list[dict[str, Any]] = []
    for batch, found in zip(plan.asked.batches, plan.speculations, strict=True):
        rows.append({"batch": batch})
        if found is not None:
            rows[-1] |= {name: value_of(found, name) for name in _SPECULATION}
            rows[-1] |= {"drafted": found.best.drafted or "none pays", "speedup": found.best.speedup}
    notes = [
        f"drafts of up to {plan.longest} tokens, in a chain",
        "target efficiency is the time of a plain step over that of verifying: 1 where verifying is free",
    ]
    columns = [
        *(ROWS, Col("best draft\n(tokens)", "drafted", "d"), Col("tokens\nper round", "tokens")),
        *(_ms("draft\nms", "draft_seconds"), _ms("verify\nms", "verify_seconds")),
        *(Col("target\nefficiency", "efficiency"), Col("speedup", "speedup", ".2fx")),
        Col("tokens/s", "tokens_per_second", ",.0f"),
    ]
    title = f"Speculation, at {plan.asked.context:,} positions per row and acceptance {acceptance_in_words(plan)}"
    return Table.of(rows, columns, title=title, notes=[*notes, *_too_many(plan)])


def request_table(plan: Plan) -> Table:
    """Times and costs of a request by batch, without and with speculation."""
    asked = plan.asked
    methods = {"plain": plan.requests(speculate=False)}
    if asked.drafter is not None:
        methods["speculative"] = plan.requests(speculate=True)
    rows: list[dict[str, Any]] = [
        {"batch": batch, "method": name}
        | ({} if found[place] is None else {key: value_of(found[place], key) for key in _REQUEST})
        for place, batch in enumerate(asked.batches)
        for name, found in methods.items()
    ]
    notes = ["the rows of a batch arrive together and are prefilled first"]
    priced = [] if asked.price is None else [Col("price of a\nmillion tokens", "price", ",.3g")]
    if priced:
        notes.append(f"output tokens, prefill included, at {asked.price:g} per hour and no idle time")
    columns = [
        *(ROWS, words("method", "method"), Col("prefill\ns", "prefill_seconds", ",.3g")),
        *(_ms("per token\nms", "per_token"), Col("request\ns", "seconds", ",.3g")),
        *(Col("tokens/s", "tokens_per_second", ",.0f"), *priced),
    ]
    title = f"A request of {asked.prompt:,} prompt and {asked.output:,} output tokens"
    said = [*notes, *_too_many(plan)]
    return Table.of(rows, columns, title=title, notes=said, section=lambda row: row["batch"])


def head_lines(plan: Plan) -> list[str]:
    """The question of the plan, and the meaning of its figures."""
    asked, shape, device = plan.asked, plan.asked.shape, plan.asked.device
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
    rounds = asked.costs
    if rounds is None:
        return [*lines, "Times are the least that the device allows: good engines reach 60 to 85 % of these speeds."]
    box, held = rounds.box, rounds.errors.get("target", {}).get("held_out")
    error = "" if held is None else f", with a median error of {held.median:.1%} at sizes that were held out"
    lines.append(
        f"Times are predicted by costs measured on {rounds.conditions.device}{error}. They hold for "
        f"{between(box.batch)} rows, {between(box.context)} positions and {between(box.drafted)} drafted nodes per "
        f"row, chains of up to {longest_chain(rounds)}, and pieces of prompts of {between(box.chunk)} tokens; a "
        f"dash is {OUTSIDE}."
    )
    return lines


def tail_lines(plan: Plan) -> list[str]:
    """The map in words: where memory bounds, and where a draft of a fixed length is slower than plain decoding."""
    lines = []
    for name, drafted in {"A plain step": 0, f"One that verifies {plan.fixed}": plan.fixed}.items():
        if drafted and plan.asked.drafter is None:
            break
        context = plan.critical_context(drafted)
        bound = "operations if there are many rows, at every context: attention alone is above the ridge"
        if context is not None:
            bound = f"memory from a context of {context:,.0f} on, however many rows"
        lines.append(f"{name} is bound by {bound}.")
    if plan.asked.drafter is None:
        return [*lines, "No drafter is given, so nothing is said about speculation: drafter=model, eagle, ngram, …"]
    what = f"A fixed draft of {plan.fixed} tokens" if plan.fixed > 1 else "A draft of one token"
    grid, measured = plan.map, plan.asked.costs is not None
    even = zip(grid.contexts, grid.break_even_batch, grid.break_even_known, strict=True)
    known = {context: batch for context, batch, sure in even if sure}
    if not known:
        return [*lines, f"{what}: batches and contexts of the map are {OUTSIDE}."]
    pieces: dict[str, list[int]] = {}
    for context in list(known) if measured else [shown for shown in _SHOWN if shown in known] or list(known)[-1:]:
        batch = known[context]
        nowhere = f"at no batch up to {grid.most:,}" if measured else "at no batch"
        where = nowhere if batch is None else f"above batch {batch:,}" if batch else "at every batch"
        pieces.setdefault(where, []).append(context)
    said = [f"{where} with {between((contexts[0], contexts[-1]))}" for where, contexts in pieces.items()]
    return [*lines, f"{what} is slower than plain decoding {', '.join(said)} positions per row."]


def _too_many(plan: Plan) -> list[str]:
    """A note about batches that there is no room for."""
    batches = [f"{room.batch:,}" for room in plan.rooms if not room.fits]
    return [f"there is no room for a batch of {' or '.join(batches)}"] if batches else []


def between(ends: Sequence[int]) -> str:
    """A range of sizes in words."""
    return f"{ends[0]:,} to {ends[1]:,}" if ends[0] != ends[1] else f"{ends[0]:,}"


def acceptance_in_words(plan: Plan) -> str:
    """How often drafted tokens are assumed to be accepted."""
    given = plan.asked.acceptance
    return f"{given:g}" if isinstance(given, float | int) else ", ".join(f"{each:g}" for each in given)


def gigabytes(size: float) -> str:
    """Bytes in GB, to three digits."""
    return "0" if not size else f"{size / 1e9:,.3g}" if size >= 1e6 else "<0.001"


def figures_of(plan: Plan) -> dict[str, Any]:
    """All figures by name, for ``plan.json``. Bytes, seconds and operations, without prefixes."""
    asked, drafts = plan.asked, plan.asked.drafter is not None
    names = ("formats", "precision", "measured", "context", "prompt", "output", "acceptance", "usable", "price")
    facts = {name: getattr(asked, name) for name in names}
    facts |= {"target": asked.name, "parameters": asked.shape.weights, "batch": list(asked.batches)}
    facts |= {"device": asked.device.name, "bandwidth": asked.roof.bandwidth, "flops": asked.roof.flops}
    facts |= {"drafter": None if asked.drafter is None else asked.drafter.title}
    facts |= {"costs": None if asked.costs is None else asked.costs.conditions}
    speculative = plan.requests(speculate=True) if drafts else []
    return {
        "schema": 1,
        "asked": facts,
        "memory": plan.rooms,
        "most_rows": plan.most_rows,
        "forwards": plan.phases,
        "speculation": plan.speculations if drafts else [],
        "requests": {"plain": plan.requests(speculate=False), "speculative": speculative},
        "critical_context": {
            "plain": plan.critical_context(0),
            "verify": plan.critical_context(plan.fixed) if drafts else None,
        },
        "map": plan.map if drafts else None,
    }
