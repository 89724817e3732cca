"""The tables and sentences of a plan."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from experiments.planning.drafting import short_count
from experiments.planning.measured import OUTSIDE
from experiments.planning.plan import Phase, Plan, Request, Speculation
from experiments.reporting.table import NOTHING, Cell, Column, Emphasis, Table
from specdec.roofline.bounds import CACHES
from specdec.roofline.capacity import kv_bytes_per_position, weight_bytes, windowed_kv_bytes
from specdec.roofline.serving import load_seconds

DISK = 7e9
"""Bytes per second of a fast disk, from which weights are loaded."""
_GIGA = 1e9
_SHOWN = (256, 1024, 4096, 16_384, 65_536)
"""Contexts whose break-even is said in words."""


def head_lines(plan: Plan) -> list[str]:
    """Returns what is planned, and what the figures mean."""
    asked = plan.asked
    shape, device = asked.shape, asked.device
    active = "" if not shape.is_mixture else f", of which a token uses {short_count(_used(plan))}"
    figures = "measured" if asked.measured else "printed"
    lines = [
        f"{asked.name}: {short_count(shape.weights)} parameters in matrices{active}; {asked.formats}",
        f"{device.title}: {asked.roof.bandwidth / 1e12:.4g} TB/s, {asked.roof.flops / 1e12:.4g} TFLOP/s ({figures}); "
        f"ridge {asked.roof.ridge:.3g} FLOP/byte",
    ]
    if plan.phases[1].work.total.bytes < CACHES * device.cache:
        lines.append(
            f"What a step reads ({_gb(plan.phases[1].work.total.bytes)} GB) is not much larger than the device's last "
            f"cache ({device.cache / 1e6:.0f} MB), which is faster than its memory: the times do not hold for it."
        )
    if not shape.is_counted:
        lines.append(
            f"The sizes are read by the names that most models use: for model_type {shape.kind!r} nobody has compared "
            f"them with the model."
        )
    if asked.drafter is not None:
        lines.append(f"drafter: {asked.drafter.title}; acceptance {_acceptance(plan)}, an assumption")
    return [*lines, _times_in_words(plan)]


def _times_in_words(plan: Plan) -> str:
    """Returns what times are: the least ones, or predicted by costs that were measured."""
    if plan.asked.costs is None:
        return (
            "Times are the least that the device allows: no engine is faster; good ones reach 60 to 85 % of these "
            "speeds."
        )
    rounds = plan.asked.costs.rounds
    box, held = rounds.box, rounds.errors.get("target", {}).get("held_out")
    error = "" if held is None else f", with a median error of {held.median:.1%} at sizes that were held out"
    return (
        f"Times are predicted by costs measured on {rounds.conditions.device}{error}. They hold for "
        f"{_between(box.batch)} rows, {_between(box.context)} positions and {_between(box.drafted)} drafted nodes per "
        f"row, chains of up to {plan.asked.costs.longest}, and pieces of prompts of {_between(box.chunk)} tokens; a "
        f"dash is {OUTSIDE}."
    )


def _between(ends: tuple[int, int]) -> str:
    return f"{ends[0]:,} to {ends[1]:,}" if ends[0] != ends[1] else f"{ends[0]:,}"


def tables(plan: Plan) -> list[Table]:
    """Returns the tables, in the order in which they are read."""
    made = [memory_table(plan), phase_table(plan)]
    if plan.asked.drafter is not None:
        made.append(speculation_table(plan))
    return [*made, request_table(plan)]


def memory_table(plan: Plan) -> Table:
    """Returns what every batch takes, by what it is for."""
    asked = plan.asked
    drafting = asked.drafter is not None and asked.drafter.model is not None
    own = f"slots of {asked.context:,} positions"
    columns = [Column("rows"), Column("weights"), Column("KV cache")]
    columns += [Column("drafter's\nweights"), Column("drafter's\nKV")] if drafting else []
    columns += [Column("draft\nnodes")] if asked.drafter is not None else []
    columns += [
        Column("activations"),
        Column("total"),
        Column("fits", "left"),
        Column("longest that fits\n(positions)"),
    ]
    kv = kv_bytes_per_position(asked.shape, asked.precision)
    table = Table(
        columns,
        title=f"Memory in GB, {own}; {asked.usable / _GIGA:.4g} GB may be used",
        notes=[
            f"a position takes {kv / 1024:,.4g} KiB of KV cache",
            _room_in_words(plan),
            *_windows_in_words(plan),
            f"loading the weights from a disk of {DISK / _GIGA:.0f} GB/s takes "
            f"{load_seconds(weight_bytes(asked.shape, asked.precision), DISK):.3g} s",
        ],
    )
    for room in plan.rooms:
        memory = room.memory
        cells: list[Cell | str] = [f"{room.batch:,}", _gb(memory.weights), _gb(memory.kv)]
        cells += [_gb(memory.drafter), _gb(memory.drafter_kv)] if drafting else []
        cells += [_gb(memory.scratch)] if asked.drafter is not None else []
        cells += [_gb(memory.activations), _gb(memory.total)]
        cells.append("yes" if room.fits else Cell("NO", emphasis=Emphasis.MISSED))
        cells.append(f"{room.longest:,}" if room.longest else "none")
        table.add(*cells)
    return table


def phase_table(plan: Plan) -> Table:
    """Returns what each kind of forward moves and computes, what limits it, and its least time.

    Measured costs take the place of three columns, because a line has only so much room.
    """
    measured = plan.asked.costs is not None
    columns = [Column("forward", "left"), Column("rows")]
    columns += [Column("GB")] if measured else [Column("weights\nGB"), Column("KV\nGB"), Column("other\nGB")]
    columns += [Column("TFLOP")] if measured else [Column("TFLOP"), Column("of these\nattention")]
    columns += [Column("FLOP/\nbyte"), Column("bound by", "left"), Column("least\nms")]
    columns += [Column("predicted\nms"), Column("over the\nleast")] if measured else []
    notes = [
        "tokens/s are over all rows",
        f"prompts are prefilled in chunks of {plan.asked.prefill_chunk:,} tokens, and each reads the weights",
    ]
    if measured:
        notes.append("predicted drafts include the decision about them")
    table = Table(
        [*columns, Column("tokens/s")],
        title=f"Forwards, at {plan.asked.context:,} positions per row",
        notes=notes,
    )
    batch = plan.phases[0].batch
    for number, phase in enumerate(plan.phases):
        table.add(*_phase_cells(plan, phase))
        later = plan.phases[number + 1].batch if number + 1 < len(plan.phases) else batch
        if later != phase.batch or number == 0:
            table.sections.add(len(table.rows) - 1)
    return table


def speculation_table(plan: Plan) -> Table:
    """Returns how long to draft for every batch, and what that brings."""
    measured = plan.asked.costs is not None
    columns = [
        Column("rows"),
        Column("best draft\n(tokens)"),
        Column("tokens\nper round"),
        Column("draft\nms"),
        Column("verify\nms"),
        Column("target\nefficiency"),
        Column("speedup"),
    ]
    columns += [Column("by least\ntimes")] if measured else []
    columns += [Column("tokens/s"), Column("plainly")]
    table = Table(
        columns,
        title=f"Speculation, at {plan.asked.context:,} positions per row and acceptance {_acceptance(plan)}",
        notes=[
            f"drafts of up to {plan.longest} tokens, in a chain",
            "target efficiency is the time of a plain step over that of verifying: 1 where verifying is free",
            "plainly is the speed without drafts",
            *(["by least times: the best draft and its speedup, as the device would allow them"] if measured else []),
            *_too_many(plan),
        ],
    )
    for batch, each in zip(plan.asked.batches, plan.speculations, strict=True):
        if each is None:
            table.add(f"{batch:,}", *[NOTHING] * (len(columns) - 1))
            continue
        table.add(
            f"{each.batch:,}",
            f"{each.best.drafted}" if each.best.drafted else "none pays",
            f"{each.tokens:.2f}",
            _ms(each.draft_seconds),
            _ms(each.verify_seconds),
            f"{each.efficiency:.2f}",
            f"{each.best.speedup:.2f}x",
            *([f"{each.bound.drafted}: {each.bound.speedup:.2f}x"] if measured else []),
            f"{each.tokens_per_second:,.0f}",
            f"{each.tokens_per_second / each.best.speedup:,.0f}",
        )
    return table


def request_table(plan: Plan) -> Table:
    """Returns what a request takes and costs, by batch, without and with speculation."""
    asked = plan.asked
    columns = [Column("rows"), Column("method", "left"), Column("prefill\ns"), Column("per token\nms")]
    columns += [Column("request\ns"), Column("prefill's\nshare"), Column("tokens/s\nper row"), Column("tokens/s")]
    columns += [Column("price of a\nmillion tokens")] if asked.price is not None else []
    notes = ["the rows of a batch arrive together and are prefilled first", *_prefill_unknown(plan)]
    if asked.price is not None:
        notes.append(f"output tokens, prefill included, at {asked.price:g} per hour and no idle time")
    table = Table(
        columns, title=f"A request of {asked.prompt:,} prompt and {asked.output:,} output tokens", notes=notes
    )
    notes += _too_many(plan)
    plainly = plan.requests(speculate=False)
    drafting = plan.requests(speculate=True) if asked.drafter is not None else []
    for number, batch in enumerate(asked.batches):
        _add_request(table, plan, batch, "plain", plainly[number], last=not drafting)
        if drafting:
            _add_request(table, plan, batch, "speculative", drafting[number], last=True)
    return table


def _prefill_unknown(plan: Plan) -> list[str]:
    """Returns what to give for a prefill that costs can predict, if they do not predict any."""
    costs = plan.asked.costs
    if costs is None or plan.phases[0].predicted is not None or costs.rounds.prefill is None:
        return []
    return [
        f"pieces of prompts of {_between(costs.rounds.box.chunk)} tokens were measured, all rows together: give "
        f"engine.prefill_chunk={costs.rounds.box.chunk[1]} and a prompt of whole pieces, or calibrate larger ones"
    ]


def tail_lines(plan: Plan) -> list[str]:
    """Returns what the map says, in words."""
    lines = [_critical_in_words(plan)]
    if plan.asked.drafter is None:
        return [*lines, "No drafter is given, so nothing is said about speculation: drafter=model, eagle, ngram, …"]
    what = f"A fixed draft of {plan.fixed} tokens" if plan.fixed > 1 else "A draft of one token"
    pieces: list[tuple[str, list[int]]] = []
    known = {
        context: batch
        for context, batch, sure in zip(plan.map.contexts, plan.map.break_even, plan.map.known, strict=True)
        if sure
    }
    if not known:
        return [*lines, f"{what}: batches and contexts of the map are {OUTSIDE}."]
    measured = plan.asked.costs is not None
    shown = list(known) if measured else [each for each in _SHOWN if each in known] or list(known)[-1:]
    most = plan.map.most if measured else None
    for context in shown:
        said = _slower(known[context], most)
        if pieces and pieces[-1][0] == said:
            pieces[-1][1].append(context)
        else:
            pieces.append((said, [context]))
    words = [f"{said} with {_range(contexts)}" for said, contexts in pieces]
    return [*lines, f"{what} is slower than plain decoding {', '.join(words)} positions per row."]


def _critical_in_words(plan: Plan) -> str:
    """Returns from which context on memory is the limit at every batch, for plain steps and for those that verify."""
    plain = plan.critical_context(0)
    drafted = plan.fixed if plan.asked.drafter is not None else 0
    verify = plan.critical_context(drafted) if drafted else plain
    never = "bound by operations if there are many rows, at every context: attention alone is above the ridge"
    if plain is None:
        return f"A step is {never}."
    text = f"From a context of {plain:,.0f} on, a plain step is bound by memory however many rows there are"
    if not drafted:
        return f"{text}."
    if verify is None:
        return f"{text}; one that verifies a draft of {drafted} is {never}."
    return f"{text}; one that verifies a draft of {drafted} from {verify:,.0f} on."


def _range(contexts: Sequence[int]) -> str:
    return f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"


def figures_of(plan: Plan) -> dict[str, Any]:
    """Returns all figures by name, for ``plan.json``. Bytes, seconds and operations, without prefixes."""
    asked = plan.asked
    grid = plan.map
    return {
        "schema": 1,
        "asked": {
            "target": asked.name,
            "parameters": asked.shape.weights,
            "formats": asked.formats,
            "precision": asdict(asked.precision),
            "device": asked.device.name,
            "source": asked.device.source,
            "measured": asked.measured,
            "bandwidth": asked.roof.bandwidth,
            "flops": asked.roof.flops,
            "batch": list(asked.batches),
            "context": asked.context,
            "prompt": asked.prompt,
            "output": asked.output,
            "drafter": None if asked.drafter is None else asked.drafter.title,
            "acceptance": asked.acceptance,
            "longest": plan.longest,
            "usable": asked.usable,
            "price": asked.price,
            "costs": None if asked.costs is None else asdict(asked.costs.rounds.conditions),
        },
        "memory": [
            {"batch": r.batch, **asdict(r.memory), "total": r.memory.total, "fits": r.fits, "longest": r.longest}
            for r in plan.rooms
        ],
        "most_rows": plan.most_rows,
        "most_paged_rows": plan.most_paged_rows,
        "forwards": [
            {
                "what": phase.what,
                "batch": phase.batch,
                **asdict(phase.work),
                "intensity": phase.work.total.intensity,
                "bound": phase.work.bound(asked.roof),
                "seconds": phase.seconds,
                "predicted_seconds": phase.predicted,
                "tokens": phase.tokens,
            }
            for phase in plan.phases
        ],
        "speculation": [_dict(each) for each in plan.speculations] if asked.drafter is not None else [],
        "requests": {
            "plain": [_dict(each) for each in plan.requests(speculate=False)],
            "speculative": [_dict(each) for each in plan.requests(speculate=True)] if asked.drafter else [],
        },
        "critical_context": {
            "plain": plan.critical_context(0),
            "verify": plan.critical_context(plan.fixed) if asked.drafter is not None else None,
        },
        "map": {
            "batches": list(grid.batches),
            "contexts": list(grid.contexts),
            "drafted": [[each and each.drafted for each in row] for row in grid.best],
            "speedup": [[each and each.speedup for each in row] for row in grid.best],
            "fits": [list(row) for row in grid.fits],
            "break_even_batch": list(grid.break_even),
            "break_even_known": list(grid.known),
        }
        if asked.drafter is not None
        else None,
    }


def _dict(figures: Speculation | Request | None) -> dict[str, Any] | None:
    return None if figures is None else asdict(figures)


def _phase_cells(plan: Plan, phase: Phase) -> list[Cell | str]:
    work = phase.work
    kv = work.kv_read_bytes + work.kv_write_bytes
    share = work.attention_flops / work.total.flops if work.total.flops else 0.0
    flops = f"{work.total.flops / 1e12:,.3g}"
    if plan.asked.costs is None:
        other = work.activation_bytes + work.logit_bytes
        sizes = [_gb(work.weight_bytes), _gb(kv), _gb(other), flops, f"{share:.0%}"]
    else:
        sizes = [_gb(work.total.bytes), flops]
    return [
        phase.what,
        f"{phase.batch:,}",
        *sizes,
        f"{work.total.intensity:,.3g}",
        work.bound(plan.asked.roof),
        _ms(phase.seconds),
        *_predicted_cells(plan, phase),
    ]


def _predicted_cells(plan: Plan, phase: Phase) -> list[str]:
    """Returns the predicted time and its ratio to the least one, where costs are given, and then tokens/s."""
    if plan.asked.costs is None:
        return [f"{phase.tokens / phase.seconds:,.0f}" if phase.tokens else ""]
    if phase.predicted is None or phase.ratio is None:
        return [NOTHING, NOTHING, NOTHING if phase.tokens else ""]
    speed = f"{phase.tokens / phase.predicted:,.0f}" if phase.tokens else ""
    return [_ms(phase.predicted), f"{phase.ratio:.2f}", speed]


def _add_request(table: Table, plan: Plan, batch: int, method: str, request: Request | None, *, last: bool) -> None:
    named = [f"{batch:,}" if method == "plain" else "", method]
    if request is None:
        table.add(*named, *[NOTHING] * (len(table.columns) - 2), end_section=last)
        return
    cells = [
        _figure(request.prefill_seconds),
        _ms(request.per_token),
        _figure(request.seconds),
        NOTHING if request.prefill_share is None else f"{request.prefill_share:.0%}",
        _rate(1 / request.per_token),
        f"{request.tokens_per_second:,.0f}",
    ]
    if plan.asked.price is not None:
        cells.append(_figure(request.price))
    table.add(*named, *cells, end_section=last)


def _figure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.3g}"


def _used(plan: Plan) -> int:
    shape = plan.asked.shape
    return shape.active_weights + shape.output_weights


def _room_in_words(plan: Plan) -> str:
    """Returns how many slots there is room for, and how many rows if memory is given out in pages."""
    slots, paged = plan.most_rows, plan.most_paged_rows
    if not paged:
        return "not even one row fits"
    return (
        f"{slots:,} such slots fit, or {paged:,} rows in pages of {plan.asked.page} if they are half as long on average"
    )


def _windows_in_words(plan: Plan) -> list[str]:
    """Returns what a cache would take that drops what has left the windows, if that is less."""
    shape, precision, context = plan.asked.shape, plan.asked.precision, plan.asked.context
    whole, least = kv_bytes_per_position(shape, precision) * context, windowed_kv_bytes(shape, precision, context)
    if least >= whole:
        return []
    return [
        f"slots keep whole rows in all layers: one that drops what has left a window takes {least / whole:.0%} of it"
    ]


def _too_many(plan: Plan) -> list[str]:
    """Returns a note about batches that there is no room for."""
    batches = [f"{room.batch:,}" for room in plan.rooms if not room.fits]
    return [f"there is no room for a batch of {' or '.join(batches)}"] if batches else []


def _acceptance(plan: Plan) -> str:
    given = plan.asked.acceptance
    return f"{given:g}" if isinstance(given, float | int) else ", ".join(f"{each:g}" for each in given)


def _slower(batch: int | None, most: int | None) -> str:
    if batch is None:
        return "at no batch" if most is None else f"at no batch up to {most:,}"
    return f"above batch {batch:,}" if batch else "at every batch"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _gb(size: float) -> str:
    return "0" if not size else f"{size / _GIGA:,.3g}" if size >= 1e6 else "<0.001"


def _ms(seconds: float) -> str:
    return "0" if not seconds else f"{1e3 * seconds:,.3g}"
