"""The cost of a KV cache in one byte per number: ``keys=[128,1024] nodes=[1,9]``.

The first table shows how far the bundled models' distributions move, place by place of held-out Python code: the
divergence from the same model with a cache in its own dtype, how often the most probable token stays the same, and the
perplexity of the code. The second one times forwards of a random 110M Llama behind prefixes of different lengths. The
caches take turns, round after round; it shows medians, and medians of the rounds' ratios.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.bench.models import chain_scores, forward_figures, llama_110m, set_threads
from experiments.bench.options import option, read_options
from experiments.bench.timing import NOTHING, show, where
from experiments.datasets.context import Context
from specdec.cache.formats import FORMATS
from specdec.machine import dtype_name
from specdec.target.runner import ModelRunner
from specdec.target.target import Target

CACHES: tuple[str | None, ...] = (None, *FORMATS)
PIECE = 64
"""Tokens per forward of the first table."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    dtype: str = option("float32", "the models' dtype", choices=("float32", "bfloat16"))
    prompts: int = option(20, "pieces of code for the first table", least=1)
    tokens: int = option(512, "tokens of each piece", least=2)
    keys: tuple[int, ...] = option((128, 1024, 4096), "entries of the cache in the second table; [] leaves it out")
    nodes: tuple[int, ...] = option((1, 9), "tokens per forward", least=1)
    repeats: int = option(20, "forwards that are timed, of each kind", least=1)
    threads: int | None = option(None, "CPU threads; null: torch's choice", least=1)


def logits_of(runner: ModelRunner, tokens: Tensor) -> Tensor:
    """Return the logits at every place of a sequence that is fed in pieces, ``[position, vocab]`` in float32."""
    starts = range(0, len(tokens), PIECE)
    return torch.cat([chain_scores(runner, tokens[None, at : at + PIECE], at)[0].float() for at in starts])


def closeness(name: str, given: Options) -> list[dict[str, str]]:
    """Return a row per format: how far a model with that cache is from the same model with its own."""
    target = Target.from_pretrained(name, dtype=given.dtype)
    assert target.tokenizer is not None, "the bundled models have one"
    pieces = Context(count=given.prompts, tokens=given.tokens, longest=given.tokens).load()[: given.prompts]
    ids = [target.tokenizer(piece.turns[0], return_tensors="pt")["input_ids"][0, -given.tokens :] for piece in pieces]
    own: list[Tensor] = []
    lines = []
    for cache in CACHES:
        runner = ModelRunner(target.model, max_batch_size=1, max_length=given.tokens, kv_cache=cache)
        found = [logits_of(runner, row.to(target.device)).log_softmax(-1) for row in ids]
        own = own or found
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(own, found, strict=True)])
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(own, found, strict=True)])
        loss = torch.cat([-q[:-1].gather(1, row[1:, None])[:, 0] for q, row in zip(found, ids, strict=True)])
        moved = [f"{kl.mean():.2g}", f"{kl.quantile(0.99):.2g}", f"{same.float().mean():.2%}"]
        mean, most, top = moved if cache is not None else [NOTHING] * 3
        lines.append(
            {
                "model": name, "cache": cache or dtype_name(target.dtype),
                "bytes per\nposition": str(runner.bytes_per_token), "KL, mean\n(nats)": mean, "KL, 99%\n(nats)": most,
                "same\ntop token": top, "perplexity": f"{math.exp(loss.mean()):.3f}",
            }
        )  # fmt: skip
    return lines


def times(model: PreTrainedModel, keys: int, given: Options) -> list[dict[str, str]]:
    """Return a row per number of nodes: milliseconds of a forward behind ``keys`` entries, for every cache."""
    sizes: dict[str, Any] = {"max_batch_size": 1, "max_length": keys + 1, "max_nodes": max(given.nodes)}
    runners = {cache or given.dtype: ModelRunner(model, **sizes, kv_cache=cache) for cache in CACHES}
    prompt = torch.randint(0, model.config.vocab_size, (1, keys), generator=torch.Generator().manual_seed(0))
    for runner in runners.values():
        for start in range(0, keys, 512):
            chain_scores(runner, prompt[:, start : start + 512], start)
    return [
        {"keys": str(keys), "nodes": str(nodes)} | forward_figures(runners, prompt[:, :nodes], keys, given.repeats)
        for nodes in given.nodes
    ]


def main() -> None:
    """Measure and print two tables."""
    given = read_options(Options, __doc__)
    set_threads(given.threads)
    title = f"Distributions with a quantized cache, {given.prompts} pieces of {given.tokens} tokens"
    show(title, [row for name in ("bundled/target", "bundled/drafter") for row in closeness(name, given)])
    if not given.keys:
        return
    model = llama_110m().to(getattr(torch, given.dtype))
    model.config.max_position_embeddings = max(given.keys) + 1 + max(given.nodes)
    rows = [row for keys in given.keys for row in times(model, keys, given)]
    show(f"One forward of a random 110M Llama, {where()}, median of {given.repeats}", rows)
