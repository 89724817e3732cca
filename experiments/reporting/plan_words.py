"""The sentences of a plan."""

from collections.abc import Sequence

from experiments.planning.drafting import short_count
from experiments.planning.measured import OUTSIDE
from experiments.planning.plan import Plan
from specdec.physics.bounds import CACHES

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
        read = gigabytes(plan.phases[1].work.total.bytes)
        lines.append(
            f"What a step reads ({read} GB) is not much larger than the device's last "
            f"cache ({device.cache / 1e6:.0f} MB), which is faster than its memory: the times do not hold for it."
        )
    if not shape.is_counted:
        lines.append(
            f"The sizes are read by the names that most models use: for model_type {shape.kind!r} nobody has compared "
            f"them with the model."
        )
    if asked.drafter is not None:
        lines.append(f"drafter: {asked.drafter.title}; acceptance {acceptance_in_words(plan)}, an assumption")
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
        f"{between(box.batch)} rows, {between(box.context)} positions and {between(box.drafted)} drafted nodes per "
        f"row, chains of up to {plan.asked.costs.longest}, and pieces of prompts of {between(box.chunk)} tokens; a "
        f"dash is {OUTSIDE}."
    )


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


def _used(plan: Plan) -> int:
    shape = plan.asked.shape
    return shape.active_weights + shape.output_weights


def _slower(batch: int | None, most: int | None) -> str:
    if batch is None:
        return "at no batch" if most is None else f"at no batch up to {most:,}"
    return f"above batch {batch:,}" if batch else "at every batch"


def between(ends: tuple[int, int]) -> str:
    """Returns a range of sizes in words."""
    return f"{ends[0]:,} to {ends[1]:,}" if ends[0] != ends[1] else f"{ends[0]:,}"


def acceptance_in_words(plan: Plan) -> str:
    """Returns how often drafted tokens are assumed to be accepted."""
    given = plan.asked.acceptance
    return f"{given:g}" if isinstance(given, float | int) else ", ".join(f"{each:g}" for each in given)


def gigabytes(size: float) -> str:
    """Returns bytes in GB, to three digits."""
    return "0" if not size else f"{size / _GIGA:,.3g}" if size >= 1e6 else "<0.001"
