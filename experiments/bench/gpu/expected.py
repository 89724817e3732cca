"""The figures that an H100 or an H200 must reach, and what it means where one is not reached. No torch in here.

Times are a tenth above what is published for one H100: 5.1 to 5.5 ms for a plain token of Llama-3.1-8B (vLLM), 7.5 to
8 ms for an EAGLE-3 round (SGLang). An H200 has 1.43 times the bandwidth, so its times are scaled by about 0.78.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Expected(NamedTuple):
    """A figure to reach, by the name under which a part reports it, and what it means where it is missed.

    Bounds that depend on the GPU are by a word of its name. A miss that ``stops`` makes the part red: what comes after
    it would be worth nothing.
    """

    figure: str
    what: str
    sign: str
    bound: float | Mapping[str, float]
    otherwise: str
    stops: bool = False


EXPECTED: Mapping[str, tuple[Expected, ...]] = {
    "smoke": (
        Expected("failed", "drafters that raised", "<=", 0, "after an error of CUDA all others fail, too", True),
        Expected("different", "drafters with other tokens than eagerly", "<=", 0, "graphs overwrite each other", True),
        Expected("refused", "stages that could not be recorded", "<=", 0, "they run eagerly; see the warnings", True),
        Expected("replayed", "replayed rounds, lowest share", ">=", 0.8, "kinds of rounds do not come again", True),
        Expected("tried", "drafters tried", ">=", 8, "the time was up: compiling or capturing is slow"),
    ),
    "measure": (
        Expected("copy", "copy, TB/s", ">=", {"H100": 2.6, "H200": 3.8}, "low clocks or a neighbour: trust no time"),
        Expected("product", "bf16 product, TFLOP/s", ">=", 550, "low clocks or little power: trust no time"),
        Expected("plain", "plain step, ms", "<=", {"H100": 5.8, "H200": 4.5}, "small kernels between products"),
        Expected("nodes_9", "9 nodes / plain step", "<=", 1.05, "products or attention cost more than memory does"),
        Expected("nodes_60", "60 nodes / plain step", "<=", 1.15, "products or attention cost more than memory does"),
        Expected("refused", "stages that could not be recorded", "<=", 0, "they run eagerly; see the warnings"),
        Expected("replayed", "replayed rounds, lowest share", ">=", 0.8, "kinds of rounds do not come again"),
        Expected("outside", "round without draft and verify, ms", "<=", 0.2, "judging, committing or the host"),
        Expected("eagle3", "EAGLE-3 round, ms", "<=", {"H100": 8.5, "H200": 6.8}, "building the tree, or judging it"),
        Expected("eager", "eager plain round / recorded", ">=", 2, "the host decides in recorded rounds, too"),
        Expected("int4", "int4 products / bf16, 1 to 60 rows", "<=", 0.6, "dequantizing costs more than memory does"),
        Expected("int8", "int8 products / bf16, 1 to 60 rows", "<=", 0.65, "dequantizing costs more than memory does"),
        Expected("fp8", "fp8 products / bf16, 1 to 60 rows", "<=", 0.65, "dequantizing costs more than memory does"),
        Expected("many_rows", "quantized / bf16, 72 rows", "<=", 1.2, "every forward writes dequantized weights"),
        Expected("attention", "attention at 32k: KV / copy's speed", ">=", 0.7, "too few pieces, or too few in flight"),
        Expected("fp8_keys", "attention at 32k: fp8 / bf16", "<=", 0.65, "converting costs more than memory does"),
        Expected("prefill", "prompt of 2,048 / product's speed", ">=", 0.5, "chunks are eager, and the host decides"),
        Expected("kernels", "kernels of a plain verify per layer", "<=", 15, "norms, rotations, gates are not fused"),
    ),
    "tests": (
        Expected("failed", "tests that failed", "<=", 0, "see 3-tests.log", True),
        Expected("passed", "tests that passed", ">=", 400, "skipped, or the time was up: see 3-tests.log"),
    ),
    "profile": (
        Expected("verify", "products, attention / verify's kernels", ">=", 0.85, "the rest is not fused"),
        Expected("draft", "products, attention / draft's kernels", ">=", 0.6, "building the tree takes too long"),
    ),
}
"""The bounds of every part's figures, the most telling first."""


def judged(part: str, figures: Mapping[str, float | None], device: str, *, rehearsal: bool) -> list[dict[str, Any]]:
    """Return what is expected of a part beside the figures that were found on a device of this name.

    A rehearsal is judged by those bounds alone that stop what follows: no time of it means anything.
    """
    rows = []
    for each in EXPECTED[part]:
        known = each.bound if isinstance(each.bound, Mapping) else {"": each.bound}
        bound = next((value for word, value in known.items() if word in device), None)
        found, met = figures.get(each.figure), None
        if found is not None and bound is not None and (each.stops or not rehearsal):
            met = found <= bound if each.sign == "<=" else found >= bound
        wanted = "-" if bound is None else f"{each.sign} {bound:g}"
        rows.append({**each._asdict(), "wanted": wanted, "found": found, "met": met})
    return rows
