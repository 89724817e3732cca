"""From measured times to figures: utilization, bounds, and the figures that are to be reached. No torch in here."""

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.physics.bounds import Roof, Work, bandwidth_utilization, flop_utilization, suspicion

Results = dict[str, Any]
"""The measurements of a run, as they are written to ``results.json``."""


def roof_of(device: dict[str, Any]) -> Roof:
    """Return the measured bound of a device: the faster of a copy and a sum, and a product."""
    return Roof(max(device["copy"], device["read"]), device["flops"])


def with_utilization(records: Sequence[dict[str, Any]], device: dict[str, Any]) -> list[dict[str, Any]]:
    """Return timed records with what follows from a device's roof.

    Adds ``bandwidth_utilization`` (against the measured copy), ``flop_utilization``, ``least_seconds`` (nobody can be
    faster), ``of_least`` (the time over that) and ``note`` (why the time is suspect; empty if it is not).
    """
    roof, made = roof_of(device), []
    for record in records:
        work, seconds = Work(record["bytes"], record["flops"]), record["seconds"]
        least = roof.least_seconds(work)
        more = {
            "bandwidth_utilization": bandwidth_utilization(work.bytes, seconds, device["copy"]),
            "flop_utilization": flop_utilization(work.flops, seconds, device["flops"]),
            "least_seconds": least,
            "of_least": seconds / least,
            "note": suspicion(work, seconds, roof, cache_bytes=device["cache_bytes"]),
        }
        made.append({**record, **more})
    return made


def goals(results: Results) -> list[dict[str, Any]]:
    """Return the figures to reach on a device of this kind, with those of this run.

    Returns:
        ``what``, the bound that is ``wanted`` (``at_most``: a figure may not be above it, else not below it),
        ``measured``, and whether it is ``met``; both None if this run has not measured it.
    """
    name = results["model"]["name"]
    rounds = results.get("rounds", [])
    outside = max(_known(r["outside"] for r in rounds if r["rule"] in ("none", "rejection")), default=None)
    found: list[tuple[str, float, float | None, bool]] = []
    if results["device"]["type"] == "cpu":
        is_110m = name == "110m"
        found.append(("share of a round outside its forwards (110M)", 0.05, outside if is_110m else None, True))
        for scheme, least in (("int8", 1.4), ("int4", 1.8)):
            ratio = _scheme(results, scheme) if is_110m else None
            found.append((f"{scheme} / full precision, one token (110M)", least, ratio, False))
        theirs = {(r["precision"], r["nodes"]): r["ratio"] for r in results.get("llama_cpp", []) if is_110m}
        for precision, what in (("F32", "f32"), ("BF16", "16 bits"), ("Q8_0", "8 bits"), ("Q4_0", "4 bits")):
            found.append((f"whole token / llama.cpp's, {what} (110M)", 1.5, theirs.get((precision, 0)), True))
        worst = max(_known(theirs.get((precision, 9)) for precision in ("F32", "BF16")), default=None)
        found.append(("forward of 9 tokens / llama.cpp's, full precision (110M)", 1.1, worst, True))
    synthetic = min((s["ratio"] for s in results.get("synthetic", []) if s["batch"] == 1), default=None)
    found.append(("measured / predicted speedup, synthetic acceptance", 0.95, synthetic, False))
    for rules, most in ((("rejection", "block", "target_walk"), 60), (("traversal", "kseq"), 150)):
        counts = [r["launches_outside"] for r in rounds if r["rule"] in rules]
        what = f"launches per round outside forwards: {', '.join(rules)}"
        found.append((what, most, max(counts, default=None), True))
    timed = [*results.get("steps", []), *results.get("prefill", [])]
    suspect = sum("PHYSICS" in each["note"] for each in timed) if results.get("steps") else None
    found.append(("times that are faster than physics", 0, suspect, True))
    return [goal(*each) for each in found]


def goal(what: str, wanted: float, measured: float | None, at_most: bool) -> dict[str, Any]:
    """Return a figure to reach, and whether it was."""
    met = None if measured is None else measured <= wanted if at_most else measured >= wanted
    return {"what": what, "wanted": wanted, "measured": measured, "at_most": at_most, "met": met}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def best_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest step of every size, over backends and executors."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for step in sorted(steps, key=lambda step: step["seconds"]):
        best.setdefault((step["batch"], step["nodes"], step["context"]), step)
    return list(best.values())


def _scheme(results: Results, scheme: str) -> float | None:
    found = [r["ratio"] for r in results.get("weights", []) if r["nodes"] == 1 and r["scheme"].startswith(scheme)]
    return max(found, default=None)
