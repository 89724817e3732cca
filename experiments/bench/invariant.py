"""The cost of invariant mode: ``nodes=[1,5,16,64] dtype=bfloat16 repeats=20 threads=2``.

The first table times one verify forward over a prefix, as the engine usually runs it and in invariant mode, of a random
110M Llama and of the bundled target. Both take turns; the table shows medians over the rounds, and the median of the
rounds' ratios.

The second table counts how many outputs of the bundled drafters leave plain decoding's, of as many prompts as
``outputs`` says: without invariant mode these are near-ties of the dtype, with it there must be none.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from drafters.medusa import MedusaDrafter
from drafters.model import ModelDrafter
from drafters.ngram import NGramDrafter
from experiments.bench.models import (
    bundled_target,
    chain_scores,
    llama_110m,
    set_threads,
    some_tokens,
    stdlib_prompts,
)
from experiments.bench.options import option, read_options
from experiments.bench.timing import in_turns, show, where
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from verifiers.block import TraversalVerifier

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "ngram": lambda dtype: NGramDrafter(max_draft_tokens=6, branches=2),
    "model": lambda dtype: ModelDrafter.from_pretrained("bundled/drafter", shape=[2, 2, 1], dtype=dtype),
    "medusa": lambda dtype: MedusaDrafter.from_pretrained("bundled/medusa", dtype=dtype),
}
CAPTURED = 26
"""As often as a forward comes before it is captured, and once more."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    nodes: tuple[int, ...] = option((1, 5, 16, 64), "tokens per forward", least=1)
    prefix: int = option(128, "tokens in the cache", least=0)
    dtype: str = option("bfloat16", "of all models", choices=("float32", "bfloat16", "float16"))
    repeats: int = option(20, "forwards that are timed, of each kind", least=1)
    outputs: int = option(12, "prompts of the second table; 0 leaves it out", least=0)
    tokens: int = option(40, "tokens per output", least=1)
    threads: int | None = option(None, "CPU threads; null: torch's choice", least=1)


def compare(model: PreTrainedModel, nodes: int, *, prefix: int, repeats: int) -> list[list[float]]:
    """Return the seconds of forwards as usual and in invariant mode, which take turns."""
    runners = [
        ModelRunner(model, max_batch_size=1, max_length=prefix + 1, max_nodes=nodes, invariant=invariant)
        for invariant in (False, True)
    ]
    tokens = some_tokens(nodes, runners[0].vocab_size).to(model.device)
    for _ in range(CAPTURED):
        chain_scores(runners[0], tokens, prefix)
    return in_turns([lambda r=runner: chain_scores(r, tokens, prefix) for runner in runners], repeats, model.device)


def divergences(target: Target, drafter: str, *, dtype: str, invariant: bool, outputs: int, tokens: int) -> int:
    """Return how many greedy outputs differ from plain decoding's on the same engine, in batches of four."""
    prompts = stdlib_prompts(target, outputs, 48)
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    made = DRAFTERS[drafter](dtype)
    with Engine(target, made, TraversalVerifier(), max_batch_size=4, max_length=1024, invariant=invariant) as engine:
        sides = [engine.generate(prompts, sampling, speculate=speculate) for speculate in (True, False)]
    return sum(a.token_ids != b.token_ids for a, b in zip(*sides, strict=True))


def main() -> None:
    """Measure and print two tables."""
    given = read_options(Options, __doc__)
    set_threads(given.threads)
    models = {
        "110M Llama": llama_110m().to(getattr(torch, given.dtype)),
        "bundled target": bundled_target(dtype=given.dtype).model,
    }
    rows = []
    for name, model in models.items():
        for nodes in given.nodes:
            usual, invariant = compare(model, nodes, prefix=given.prefix, repeats=given.repeats)
            ratio = statistics.median(b / a for a, b in zip(usual, invariant, strict=True))
            medians = [f"{1000 * statistics.median(each):.1f}" for each in (usual, invariant)]
            timed = dict(zip(("as usual, ms", "invariant, ms"), medians, strict=True))
            rows.append({"model": name, "nodes": str(nodes), **timed, "invariant / as usual": f"{ratio:.2f}"})
    title = f"One verify forward in {given.dtype} behind {given.prefix} tokens, {where()}, median of {given.repeats}"
    show(title, rows)
    if not given.outputs:
        return
    rows = []
    for scheme in (None, "int8"):
        target = bundled_target(dtype=given.dtype, quantization=scheme)
        for drafter in DRAFTERS:
            options = {"dtype": given.dtype, "outputs": given.outputs, "tokens": given.tokens}
            usual, invariant = (divergences(target, drafter, invariant=mode, **options) for mode in (False, True))
            counts = {"differ as usual": str(usual), "differ in invariant mode": str(invariant)}
            rows.append({"weights": scheme or given.dtype, "drafter": drafter, **counts})
    show(f"Outputs of {given.tokens} tokens that leave plain decoding's, of {given.outputs}; batches of 4", rows)


if __name__ == "__main__":
    main()
