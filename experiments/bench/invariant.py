"""The cost of invariant mode: ``nodes=[1,5,16,64] dtype=bfloat16 repeats=20 threads=2``.

The first table times one verify forward over a prefix, as the engine usually runs it and in invariant mode, of a random
110M Llama and of the bundled target. Both take turns; the table shows medians over the rounds, and the median of the
rounds' ratios.

The second table counts how many outputs of the bundled drafters leave plain decoding's, of as many prompts as
``outputs`` says: without invariant mode these are near-ties of the dtype, with it there must be none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from drafters.medusa import MedusaDrafter
from drafters.ngram import NGramDrafter
from experiments.bench.models import (
    bundled_target,
    forward_figures,
    llama_110m,
    set_threads,
    small_model,
    some_tokens,
    stdlib_prompts,
)
from experiments.bench.options import option, read_options
from experiments.bench.timing import show, where
from specdec.engine.engine import Engine
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from verifiers.block import TraversalVerifier

DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "ngram": lambda target: NGramDrafter(max_draft_tokens=6, branches=2),
    "model": lambda target: small_model(target, [2, 2, 1], dtype=target.dtype),
    "medusa": lambda target: MedusaDrafter.from_pretrained("bundled/medusa", dtype=target.dtype),
}


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


def forward_row(name: str, model: PreTrainedModel, nodes: int, given: Options) -> dict[str, str]:
    """Return milliseconds of forwards as usual and in invariant mode, and their ratio."""
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_length": given.prefix + 1, "max_nodes": nodes}
    ways = {"as usual": False, "invariant": True}
    runners = {way: ModelRunner(model, **sizes, invariant=invariant) for way, invariant in ways.items()}
    tokens = some_tokens(nodes, runners["as usual"].vocab_size).to(model.device)
    return {"model": name, "nodes": str(nodes), **forward_figures(runners, tokens, given.prefix, given.repeats)}


def divergences(target: Target, drafter: str, given: Options, *, invariant: bool) -> int:
    """Return how many greedy outputs differ from plain decoding's on the same engine, in batches of four."""
    prompts = stdlib_prompts(target, given.outputs, 48)
    sampling = SamplingParams(max_new_tokens=given.tokens, ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_length": 1024}
    with Engine(target, DRAFTERS[drafter](target), TraversalVerifier(), **sizes, invariant=invariant) as engine:
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
    rows = [forward_row(name, model, nodes, given) for name, model in models.items() for nodes in given.nodes]
    show(
        f"One verify forward in {given.dtype} behind {given.prefix} tokens, {where()}, median of {given.repeats}", rows
    )
    if not given.outputs:
        return
    rows = []
    for scheme in (None, "int8"):
        target = bundled_target(dtype=given.dtype, quantization=scheme)
        for drafter in DRAFTERS:
            usual, invariant = (str(divergences(target, drafter, given, invariant=mode)) for mode in (False, True))
            counts = {"differ as usual": usual, "differ in invariant mode": invariant}
            rows.append({"weights": scheme or given.dtype, "drafter": drafter, **counts})
    show(f"Outputs of {given.tokens} tokens that leave plain decoding's, of {given.outputs}; batches of 4", rows)
