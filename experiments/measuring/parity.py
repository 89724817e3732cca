"""One token at a time against k + 1 tokens at once: what a forward's company changes in its logits, and in the output.

A text is decoded greedily, one token per forward. The same tokens then go through the model again in pieces of k + 1,
over a cache that was filled in such pieces, as rounds of speculation whose drafts are all right. So the first place at
which the two forwards have another likeliest token is also the place at which the two greedy outputs part.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from experiments.results.frame import Figures
from specdec.cache.base import cache_argument
from specdec.execution.executor import evaluating
from specdec.forward import ForwardBatch
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.tree import DraftTree

MARGINS = (0.01, 0.1, 1.0, float("inf"))
"""Upper ends of the ranges of margins, in nats, by which flips are counted."""

Step = Callable[[Int[Tensor, "batch node"]], Float[Tensor, "batch node vocab"]]
"""Appends tokens to every row, and returns the logits behind each."""
Begin = Callable[[Int[Tensor, "batch position"]], Step]
"""Begins with prompts of one length, of which all but the last token go through the model."""


def through_runner(runner: ModelRunner) -> Begin:
    """Forwards as the engine's rounds make them: a tree of one chain behind a row, all of which is then committed."""

    def begin(prompts: Tensor) -> Step:
        rows, done = len(prompts), prompts.shape[1] - 1
        slots, states = torch.arange(rows, device=runner.device), runner.cache.states
        if states is not None:
            for slot in range(rows):
                states.clear(slot)
        if done:
            zeros = np.zeros(rows, dtype=np.int64)
            runner.run(ForwardBatch.of_chunk(prompts[:, :-1], host_slots=np.arange(rows), host_lengths=zeros))

        def step(tokens: Tensor) -> Tensor:
            nonlocal done
            count = tokens.shape[1]
            tree = (
                DraftTree.from_shape(TreeShape.chain(count - 1), tokens)
                if count > 1
                else DraftTree.root_only(tokens[:, 0])
            )
            lengths = np.full(rows, done)
            logits = runner.run(ForwardBatch.of_tree(tree, host_slots=np.arange(rows), host_lengths=lengths)).scores
            path = torch.arange(1, count, device=runner.device).expand(rows, -1)
            runner.cache.commit(slots, torch.full_like(slots, done), path)
            done += count
            return logits

        return step

    return begin


def through_model(model: PreTrainedModel) -> Begin:
    """Forwards of transformers' own modules over its own growing cache."""
    name = cache_argument(signature(type(model).forward).parameters)

    def begin(prompts: Tensor) -> Step:
        past: Any = None

        def step(tokens: Tensor) -> Tensor:
            nonlocal past
            with evaluating([module for module in model.modules() if module.training]):
                output = model(tokens, **{name: past}, use_cache=True)
            past = getattr(output, name)
            return output.logits

        if prompts.shape[1] > 1:
            step(prompts[:, :-1])
        return step

    return begin


@torch.inference_mode()
def one_by_one(begin: Begin, prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return greedy outputs of so many tokens, one per forward, and the logits that they were chosen from."""
    step, tokens, logits = begin(prompts), [prompts[:, -1:]], []
    for _ in range(count):
        logits.append(step(tokens[-1]).clone())
        tokens.append(logits[-1].argmax(-1))
    return torch.cat(tokens[1:], 1), torch.cat(logits, 1)


@torch.inference_mode()
def in_pieces(begin: Begin, prompts: Tensor, outputs: Tensor, size: int) -> Tensor:
    """Return the logits behind which every token of given outputs stands, from forwards of ``size`` tokens per row."""
    step, fed = begin(prompts), torch.cat([prompts[:, -1:], outputs[:, :-1]], 1)
    return torch.cat([step(piece).clone() for piece in fed.split(size, 1)], 1)


def parity(
    begin: Begin, prompts: Tensor, *, tokens: int, batches: Sequence[int], sizes: Sequence[int]
) -> Iterator[Figures]:
    """Yield how forwards of several tokens differ from those of one, by batch and by tokens per row (``compared``).

    Several rows of one token are compared with a row alone.

    Args:
        prompts: Prompts of one length, as many as the largest batch at least.
        tokens: The length of the outputs.
        batches: Rows of a forward.
        sizes: Tokens per row of a forward, each 2 or more.
    """
    alone = prompts, torch.empty(0)  # a row alone comes first
    for batch in sorted({1, *batches}):
        groups = prompts[: len(prompts) // batch * batch].split(batch)
        made = [one_by_one(begin, each, tokens) for each in groups]
        outputs, plain = (torch.cat(parts) for parts in zip(*made, strict=True))
        if batch == 1:
            alone = outputs, plain
        for size in (1, *sizes) if batch in batches else ():
            against, told = (plain, outputs) if size > 1 else (alone[1], alone[0])
            if batch * size > 1:
                told = told[: len(groups) * batch].split(batch)
                found = [in_pieces(begin, *each, size) for each in zip(groups, told, strict=True)]
                yield Figures(batch=batch, size=size) | compared(against[: len(groups) * batch], torch.cat(found))


def compared(plain: Float[Tensor, "row place vocab"], other: Float[Tensor, "row place vocab"]) -> Figures:
    """Return how logits differ from those of forwards of one token.

    Returns:
        ``places``; the shares of ``logits`` and of their ``bits`` that differ; the ``largest`` difference; ``flips``,
        the places with another likeliest token, and of them and of all places how many there are ``by_margin`` between
        the two largest plain logits (``upto`` nats); the largest margin that was ``flipped``; ``parted``, for every row
        the place of its first flip (None: its greedy output is the same); and ``lost``: the mean total variation
        between the two laws at temperature 1. A drafter that drafts by the plain law is accepted always by that, and
        less often by so much by the other; no drafter loses more (its acceptance is the sum of min(p, q)).
    """
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[plain.element_size()]
    changed = plain.contiguous().view(kind) ^ other.contiguous().view(kind)
    some, width = changed[changed != 0], 8 * plain.element_size()
    bits = sum(int((some >> bit & 1).sum()) for bit in range(width))
    flips = plain.argmax(-1) != other.argmax(-1)
    top = plain.float().topk(2, -1).values
    distance = (plain.float().softmax(-1) - other.float().softmax(-1)).abs().sum(-1) / 2
    return Figures(
        logits=len(some) / changed.numel(),
        bits=bits / (changed.numel() * width),
        largest=float((plain.float() - other.float()).abs().max()),
        lost=float(distance.mean()),
    ) | counted((top[..., 0] - top[..., 1]).tolist(), flips.tolist())


def counted(margins: Sequence[Sequence[float]], flips: Sequence[Sequence[bool]]) -> Figures:
    """Return the figures of flips, by the margins of all places, row by row."""
    places = [pair for row in zip(margins, flips, strict=True) for pair in zip(*row, strict=True)]
    below = [0.0, *MARGINS[:-1]]
    ranges = [
        [flip for margin, flip in places if low <= margin < high] for low, high in zip(below, MARGINS, strict=True)
    ]
    return Figures(
        places=len(places),
        flips=sum(flip for _, flip in places),
        flipped=max((margin for margin, flip in places if flip), default=None),
        by_margin=[
            Figures(upto=upto, places=len(inside), flips=sum(inside))
            for upto, inside in zip(MARGINS, ranges, strict=True)
        ],
        parted=[row.index(True) if any(row) else None for row in flips],
    )
