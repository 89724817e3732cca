"""One token at a time against k + 1 at once: what a forward's company changes in its logits, and in the output.

    python examples/parity.py                                     the bundled target
    python examples/parity.py FOLDER --dtype bfloat16 --quantization int8 --sizes 2 4 16

A text is decoded greedily, one token per forward. The same tokens then go through the model in chains of several, as
rounds of speculation whose drafts are all right. The first place at which the two forwards have another likeliest token
is also the place at which the two greedy outputs part. Invariant mode is the control: there, nothing may differ.
"""

import argparse
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from experiments.datasets.prompt import choose
from experiments.datasets.stdlib import Stdlib
from specdec import Target
from specdec.cache.transformers_cache import cache_argument
from specdec.engine.text import encode_prompt
from specdec.forward import ForwardBatch
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree

Begin = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""Begins with prompts ``[batch, position]``; the result appends tokens ``[batch, depth]`` and gives logits."""


def through_runner(runner: ModelRunner) -> Begin:
    """Forwards as the engine's rounds make them: a chain behind a row, which is then committed."""

    def begin(prompts: Tensor) -> Callable[[Tensor], Tensor]:
        slots, done = np.arange(len(prompts)), prompts.shape[1] - 1
        if runner.cache.states is not None:
            for slot in slots.tolist():
                runner.cache.states.clear(slot)
        zeros = np.zeros(len(prompts), dtype=np.int64)
        runner.run(ForwardBatch.of_chunk(prompts[:, :-1], host_slots=slots, host_lengths=zeros))

        def step(tokens: Tensor) -> Tensor:
            nonlocal done
            count = tokens.shape[1]
            tree = DraftTree.root_only(tokens[:, 0])
            if count > 1:
                tree = DraftTree.from_shape(TreeShape.chain(count - 1), tokens)
            batch = ForwardBatch.of_tree(tree, host_slots=slots, host_lengths=np.full(len(slots), done))
            logits = runner.run(batch).scores[:, :count]
            path = torch.arange(1, count, device=runner.device).expand(len(slots), -1)
            rows = torch.arange(len(slots), device=runner.device)
            runner.cache.commit(rows, torch.full_like(rows, done), path)
            done += count
            return logits

        return step

    return begin


def through_model(model: PreTrainedModel) -> Begin:
    """Forwards of transformers' own modules over its own growing cache."""
    name = cache_argument(signature(type(model).forward).parameters)

    def begin(prompts: Tensor) -> Callable[[Tensor], Tensor]:
        past: Any = None

        def step(tokens: Tensor) -> Tensor:
            nonlocal past
            output = model(tokens, **{name: past}, use_cache=True)
            past = getattr(output, name)
            return output.logits

        step(prompts[:, :-1])
        return step

    return begin


@torch.inference_mode()
def one_by_one(begin: Begin, prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Greedy outputs of so many tokens, one per forward, and the logits that they were chosen from."""
    step, tokens, logits = begin(prompts), [prompts[:, -1:]], []
    for _ in range(count):
        logits.append(step(tokens[-1]))
        tokens.append(logits[-1].argmax(-1))
    return torch.cat(tokens, 1), torch.cat(logits, 1)


@torch.inference_mode()
def compared(begin: Begin, prompts: Tensor, count: int, size: int) -> list[str]:
    """How forwards of ``size`` tokens differ from those of one: cells of the table."""
    outputs, plain = one_by_one(begin, prompts, count)
    step = begin(prompts)
    other = torch.cat([step(piece) for piece in outputs[:, :-1].split(size, 1)], 1)
    flips = plain.argmax(-1) != other.argmax(-1)
    top = plain.float().topk(2, -1).values
    margins = (top[..., 0] - top[..., 1])[flips]
    lost = (plain.float().softmax(-1) - other.float().softmax(-1)).abs().sum(-1).mean() / 2
    return [
        f"{100 * float((plain != other).double().mean()):.3g} %",
        f"{float((plain.float() - other.float()).abs().max()):.1g}",
        f"{int(flips.sum())} of {flips.numel()}",
        f"{float(margins.max()):.2g}" if len(margins) else "-",
        f"{float(lost):.0e}",
        f"{int(flips.any(1).sum())} of {len(flips)}",
    ]


def main() -> None:
    """Print a row per way to run the model and size of the chain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="bundled/target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    target = Target.from_pretrained(given.target, dtype=given.dtype, quantization=given.quantization)
    chosen, _ = choose(Stdlib(count=given.prompts))
    texts = [list(encode_prompt(target.tokenizer, prompt.turns[0]))[:32] for prompt in chosen]
    prompts = torch.tensor([text for text in texts if len(text) == 32], device=target.device)
    sizes: Any = {"max_batch_size": len(prompts), "max_length": 32 + given.tokens, "max_nodes": max(given.sizes) - 1}
    ways = {"transformers": through_model(target.model)}
    for name, options in {"specdec": {}, "specdec, invariant": {"invariant": True}}.items():
        ways[name] = through_runner(ModelRunner(target.model, **sizes, **options))
    table = Table(
        title=f"{target.name}, {given.dtype}, {given.quantization or 'not quantized'}: k + 1 tokens against one"
    )
    for heading in ("way", "k + 1", "logits that differ", "largest", "other token", "margin", "lost", "outputs parted"):
        table.add_column(heading)
    for name, begin in ways.items():
        for size in given.sizes:
            table.add_row(name, str(size), *compared(begin, prompts, given.tokens, size))
    Console().print(table)


if __name__ == "__main__":
    main()
