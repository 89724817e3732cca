"""The tables of a plan."""

from experiments.planning.answers import Phase, Request
from experiments.planning.plan import Plan
from experiments.reporting.plan_words import acceptance_in_words, between, gigabytes
from experiments.reporting.table import NOTHING, Cell, Column, Emphasis, Table
from specdec.physics.capacity import kv_bytes_per_position, weight_bytes, windowed_kv_bytes
from specdec.physics.serving import load_seconds

DISK = 7e9
"""Bytes per second of a fast disk, from which weights are loaded."""
_GIGA = 1e9


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
        cells: list[Cell | str] = [f"{room.batch:,}", gigabytes(memory.weights), gigabytes(memory.kv)]
        cells += [gigabytes(memory.drafter), gigabytes(memory.drafter_kv)] if drafting else []
        cells += [gigabytes(memory.scratch)] if asked.drafter is not None else []
        cells += [gigabytes(memory.activations), gigabytes(memory.total)]
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
        title=f"Speculation, at {plan.asked.context:,} positions per row and acceptance {acceptance_in_words(plan)}",
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
        f"pieces of prompts of {between(costs.rounds.box.chunk)} tokens were measured, all rows together: give "
        f"engine.prefill_chunk={costs.rounds.box.chunk[1]} and a prompt of whole pieces, or calibrate larger ones"
    ]


def _phase_cells(plan: Plan, phase: Phase) -> list[Cell | str]:
    work = phase.work
    kv = work.kv_read_bytes + work.kv_write_bytes
    share = work.attention_flops / work.total.flops if work.total.flops else 0.0
    flops = f"{work.total.flops / 1e12:,.3g}"
    if plan.asked.costs is None:
        other = work.activation_bytes + work.logit_bytes
        sizes = [gigabytes(work.weight_bytes), gigabytes(kv), gigabytes(other), flops, f"{share:.0%}"]
    else:
        sizes = [gigabytes(work.total.bytes), flops]
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


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _ms(seconds: float) -> str:
    return "0" if not seconds else f"{1e3 * seconds:,.3g}"
