"""What a KV cache in one byte per number costs: ``python -m experiments.bench kv_cache keys=[128,1024] nodes=[1,9]``.

The first table shows how far the bundled models' distributions move, place by place of held-out Python code: the
divergence from the same model with a cache in its own dtype, how often the most probable token stays the same, and the
perplexity of the code. The second one times forwards of a random 110M Llama behind prefixes of different lengths. The
caches take turns, round after round; it shows medians, and medians of the rounds' ratios.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.bench.options import option, read_options
from experiments.bench.speed import llama_110m
from experiments.datasets.context import Context
from experiments.reporting import terminal
from experiments.reporting.table import Column, Table
from specdec.cache.formats import FORMATS
from specdec.forward import ForwardBatch
from specdec.machine import dtype_name
from specdec.target.runner import ModelRunner
from specdec.target.target import Target
from specdec.topology import Topology

CACHES: tuple[str | None, ...] = (None, *FORMATS)
PIECE = 64
"""Tokens per forward of the first table."""


def logits_of(runner: ModelRunner, tokens: Tensor) -> Tensor:
    """The logits at every place of a sequence that is fed in pieces, ``[position, vocab]`` in float32."""
    parts = []
    for start in range(0, len(tokens), PIECE):
        piece = tokens[None, start : start + PIECE]
        parts.append(forward(runner, piece, start)[0].float())
    return torch.cat(parts)


def forward(runner: ModelRunner, tokens: Tensor, start: int) -> Tensor:
    """The logits at a chain of tokens in slot 0, behind ``start`` entries of the cache."""
    batch = ForwardBatch(
        tokens=tokens,
        slots=torch.zeros(1, dtype=torch.long, device=runner.device),
        lengths=torch.full((1,), start, device=runner.device),
        topology=Topology.chain(tokens.shape[1], runner.device),
    )
    return runner.run(batch).scores


def closeness(name: str, dtype: str, prompts: int, tokens: int) -> list[list[str]]:
    """A row per format: how far a model with that cache is from the same model with its own."""
    target = Target.from_pretrained(name, dtype=dtype)
    assert target.tokenizer is not None, "the bundled models have one"
    texts = [prompt.turns[0] for prompt in Context(count=prompts, tokens=tokens, longest=tokens).load()][:prompts]
    rows = [target.tokenizer(text, return_tensors="pt")["input_ids"][0, -tokens:] for text in texts]
    runners = [ModelRunner(target.model, max_batch_size=1, max_length=tokens, kv_cache=cache) for cache in CACHES]
    own, *others = [[logits_of(runner, row.to(target.device)).log_softmax(-1) for row in rows] for runner in runners]
    lines = []
    for cache, runner, given in zip(CACHES, runners, [own, *others], strict=True):
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(own, given, strict=True)])
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(own, given, strict=True)])
        loss = torch.cat([-q[:-1].gather(1, row[1:, None])[:, 0] for q, row in zip(given, rows, strict=True)])
        compared = cache is not None
        lines.append(
            [
                name,
                cache or dtype_name(target.dtype),
                str(runner.bytes_per_token),
                f"{kl.mean():.2g}" if compared else "-",
                f"{kl.quantile(0.99):.2g}" if compared else "-",
                f"{same.float().mean():.2%}" if compared else "-",
                f"{math.exp(loss.mean()):.3f}",
            ]
        )
    return lines


def times(model: PreTrainedModel, keys: int, nodes: Sequence[int], repeats: int) -> list[list[str]]:
    """A row per number of nodes: milliseconds of a forward behind ``keys`` entries, for every cache."""
    runners = [
        ModelRunner(model, max_batch_size=1, max_length=keys + 1, max_nodes=max(nodes), kv_cache=cache)
        for cache in CACHES
    ]
    prompt = torch.randint(0, model.config.vocab_size, (1, keys), generator=torch.Generator().manual_seed(0))
    for runner in runners:
        for start in range(0, keys, 512):
            forward(runner, prompt[:, start : start + 512], start)
    lines = []
    for count in nodes:
        taken: list[list[float]] = [[] for _ in runners]
        for repeat in range(30 + repeats):  # the first ones are captured, and not counted
            for index in range(len(runners)):
                number = (index + repeat) % len(runners)
                start = time.perf_counter()
                forward(runners[number], prompt[:, :count], keys)
                taken[number].append(1000 * (time.perf_counter() - start))
        kept = [each[30:] for each in taken]
        ratios = [statistics.median(b / a for a, b in zip(kept[0], each, strict=True)) for each in kept[1:]]
        medians = [f"{statistics.median(each):.1f}" for each in kept]
        lines.append([str(keys), str(count), *medians, *(f"{ratio:.2f}" for ratio in ratios)])
    return lines


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


def main() -> None:
    """Measure and print two tables."""
    arguments = read_options(Options, __doc__)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    console = terminal.console()
    headings = ["cache", "bytes per\nposition", "KL, mean\n[nats]", "KL, 99%\n[nats]", "same\ntop token", "perplexity"]
    table = Table(
        [Column("model", "left"), Column(headings[0], "left"), *(Column(heading) for heading in headings[1:])],
        f"Distributions with a quantized cache, {arguments.prompts} pieces of {arguments.tokens} tokens",
    )
    for name in ("bundled/target", "bundled/drafter"):
        for cells in closeness(name, arguments.dtype, arguments.prompts, arguments.tokens):
            table.add(*cells)
    console.print(terminal.render(table))
    if not arguments.keys:
        return
    model = llama_110m().to(getattr(torch, arguments.dtype))
    model.config.max_position_embeddings = max(*arguments.keys, 0) + 1 + max(arguments.nodes)
    table = Table(
        [
            *(Column(heading) for heading in ("keys", "nodes")),
            *(Column(f"{cache or arguments.dtype},\nms") for cache in CACHES),
            *(Column(f"{cache} /\n{arguments.dtype}") for cache in FORMATS),
        ],
        f"One forward of a random 110M Llama, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"median of {arguments.repeats}",
    )
    for keys in arguments.keys:
        for cells in times(model, keys, arguments.nodes, arguments.repeats):
            table.add(*cells)
    console.print(terminal.render(table))


if __name__ == "__main__":
    main()
