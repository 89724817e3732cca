"""From measured times to figures: utilization, bounds, and the figures that are to be reached. No torch in here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.physics.bounds import Roof, Work, bandwidth_utilization, flop_utilization, suspicion

Results = dict[str, Any]
"""The measurements of a run, as they are written to ``results.json``."""


def with_utilization(records: Sequence[dict[str, Any]], device: dict[str, Any]) -> list[dict[str, Any]]:
    """Return timed records with what follows from a device's roof.

    Adds ``bandwidth_utilization`` (against the measured copy), ``flop_utilization``, ``least_seconds`` (nobody can be
    faster), ``of_least`` (the time over that) and ``note`` (why the time is suspect; empty if it is not).
    """
    roof = Roof(max(device["copy"], device["read"]), device["flops"])
    made = []
    for record in records:
        work, seconds = Work(record["bytes"], record["flops"]), record["seconds"]
        least = roof.least_seconds(work)
        made.append(
            {
                **record,
                "bandwidth_utilization": bandwidth_utilization(work.bytes, seconds, device["copy"]),
                "flop_utilization": flop_utilization(work.flops, seconds, device["flops"]),
                "least_seconds": least,
                "of_least": seconds / least,
                "note": suspicion(work, seconds, roof, cache_bytes=device["cache_bytes"]),
            }
        )
    return made


@dataclass(frozen=True)
class Goal:
    """A figure to reach.

    Attributes:
        what: Its name.
        wanted: The bound.
        measured: The figure; None if this run has not measured it.
        at_most: The figure may not be above the bound; else it may not be below it.
    """

    what: str
    wanted: float
    measured: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it is reached; None if it was not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


def goals(results: Results) -> list[Goal]:
    """Return the figures to reach on a device of this kind, with those of this run."""
    found = _on_gpu(results) if results["device"]["type"] == "cuda" else _on_cpu(results)
    return [*found, *_everywhere(results)]


def _on_gpu(results: Results) -> Iterator[Goal]:
    name, where = results["model"]["name"], "8B, context 1024, batch 1"
    is_8b = name == "llama-8b" and results["model"]["quantization"] is None
    steps = results.get("steps", []) if is_8b else []
    plain = _fastest(steps, batch=1, nodes=1, context=1024)
    used = None if plain is None else plain["bandwidth_utilization"]
    yield Goal(f"plain decoding, bandwidth utilization ({where})", 0.80, used)
    for nodes, most in ((16, 1.05), (64, 1.15)):
        verify = _fastest(steps, batch=1, nodes=nodes, context=1024)
        ratio = verify["seconds"] / plain["seconds"] if verify and plain else None
        yield Goal(f"verify / plain step, {nodes} nodes ({where})", most, ratio, at_most=True)
    yield Goal("share of a round outside its forwards (8B)", 0.05, _outside(results) if is_8b else None, at_most=True)
    for scheme, least in (("int8", 1.6), ("fp8", 1.6), ("int4", 2.2)):
        yield Goal(f"{scheme} / {results['model']['dtype']}, one token", least, _scheme(results, scheme))
    yield Goal("plain / transformers generate, its best setting", 1.5, _peer(results, "plain", name))
    yield Goal("attention, context 32768, batch 8, 16 nodes: KV over bandwidth", 0.70, attention_utilization(results))
    large = results.get("large")
    yield Goal("a 70B shape in int4 decodes (tokens)", 1, None if large is None else large["tokens"])
    reads = [r["reads"] for r in results.get("rounds", [])]
    yield Goal("synchronizations per round", 1, max(reads, default=None), at_most=True)


def _on_cpu(results: Results) -> Iterator[Goal]:
    is_110m = results["model"]["name"] == "110m"
    yield Goal("plain / transformers generate, 110M", 1.5, _peer(results, "plain", "110m"))
    yield Goal("plain / transformers generate, bundled", 1.4, _peer(results, "plain", "bundled"))
    yield Goal("prompt lookup / transformers' own, bundled", 1.8, _peer(results, "prompt lookup", "bundled"))
    yield Goal("small model / transformers' own, bundled", 2.0, _peer(results, "small model", "bundled"))
    outside = _outside(results) if is_110m else None
    yield Goal("share of a round outside its forwards (110M)", 0.05, outside, at_most=True)
    for scheme, least in (("int8", 1.4), ("int4", 1.8)):
        yield Goal(f"{scheme} / full precision, one token (110M)", least, _scheme(results, scheme) if is_110m else None)
    for precision, what in (("F32", "f32"), ("BF16", "16 bits"), ("Q8_0", "8 bits"), ("Q4_0", "4 bits")):
        ratio = _llama_cpp(results, precision, 0) if is_110m else None
        yield Goal(f"whole token / llama.cpp's, {what} (110M)", 1.5, ratio, at_most=True)
    nine = [_llama_cpp(results, precision, 9) for precision in ("F32", "BF16")] if is_110m else []
    worst = max((ratio for ratio in nine if ratio is not None), default=None)
    yield Goal("forward of 9 tokens / llama.cpp's, full precision (110M)", 1.1, worst, at_most=True)


def _everywhere(results: Results) -> Iterator[Goal]:
    synthetic = [s["ratio"] for s in results.get("synthetic", []) if s["batch"] == 1]
    yield Goal("measured / predicted speedup, synthetic acceptance", 0.95, min(synthetic, default=None))
    for rules, most in ((("rejection", "block", "target_walk"), 60), (("traversal", "kseq"), 150)):
        counts = [r["launches_outside"] for r in results.get("rounds", []) if r["rule"] in rules]
        what = f"launches per round outside forwards: {', '.join(rules)}"
        yield Goal(what, most, max(counts, default=None), at_most=True)
    suspect = [r for r in (*results.get("steps", []), *results.get("prefill", [])) if "PHYSICS" in r["note"]]
    counted = len(suspect) if results.get("steps") else None
    yield Goal("times that are faster than physics", 0, counted, at_most=True)


def attention_utilization(results: Results, *, batch: int = 8, nodes: int = 16, context: int = 32768) -> float | None:
    """Return the share of the bandwidth that attention alone reads keys and values with; None if it was not measured.

    Attention's time is that of a step with a long context without that of a step with the shortest one; likewise its
    bytes.
    """
    steps = results.get("steps", [])
    long = _fastest(steps, batch=batch, nodes=nodes, context=context)
    contexts = [s["context"] for s in steps if s["batch"] == batch and s["nodes"] == nodes]
    short = _fastest(steps, batch=batch, nodes=nodes, context=min(contexts, default=0))
    if long is None or short is None or short["context"] == context or long["seconds"] <= short["seconds"]:
        return None
    moved = long["kv_bytes"] - short["kv_bytes"]
    return bandwidth_utilization(moved, long["seconds"] - short["seconds"], results["device"]["copy"])


def best_steps(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest step of every size, over backends and executors."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for step in steps:
        size = step["batch"], step["nodes"], step["context"]
        if size not in best or step["seconds"] < best[size]["seconds"]:
            best[size] = step
    return list(best.values())


def _fastest(steps: Sequence[dict[str, Any]], **setting: int) -> dict[str, Any] | None:
    fitting = [s for s in best_steps(steps) if all(s[name] == value for name, value in setting.items())]
    return min(fitting, key=lambda s: s["seconds"], default=None)


def _outside(results: Results) -> float | None:
    """Return the largest share outside the forwards, over the rounds with rejection."""
    shares = [r["outside"] for r in results.get("rounds", []) if r["rule"] in ("none", "rejection")]
    return max((share for share in shares if share is not None), default=None)


def _scheme(results: Results, scheme: str) -> float | None:
    found = [r["ratio"] for r in results.get("weights", []) if r["nodes"] == 1 and r["scheme"].startswith(scheme)]
    return max(found, default=None)


def _peer(results: Results, method: str, target: str) -> float | None:
    """Return our speed over the fastest peer's."""
    found = [r for r in results.get("peers", []) if r["target"] == target and r["method"].startswith(method)]
    return min((r["ratio"] for r in found if "ratio" in r), default=None)


def _llama_cpp(results: Results, precision: str, nodes: int) -> float | None:
    found = results.get("llama_cpp", [])
    return next((r["ratio"] for r in found if r["precision"] == precision and r["nodes"] == nodes), None)
