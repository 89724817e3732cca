"""One token at a time against several at once: what a forward's company changes in its logits, and in the output.

A text is decoded greedily, one token per forward. The same tokens then go through the model again in chains or trees,
over a cache that was filled in such pieces, as rounds of speculation whose drafts are all right: the text takes one
path of every tree. So the first place at which the two forwards have another likeliest token is also the place at which
the two greedy outputs part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

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


class Step(Protocol):
    """Appends a path to every row, and returns the logits behind each of its tokens."""

    def __call__(
        self, tokens: Int[Tensor, "batch node"], shape: TreeShape | None = None, path: Sequence[int] = (0,), /
    ) -> Float[Tensor, "batch depth vocab"]:
        """Have the nodes of a tree go through the model at once (None: the root alone); only the path stays."""
        ...


Begin = Callable[[Int[Tensor, "batch position"]], Step]
"""Begins with prompts of one length, of which all but the last token go through the model."""


@dataclass(frozen=True)
class Cell:
    """A kind of forward.

    Attributes:
        batch: Its rows.
        shape: The tokens of a row besides the first; None for none.
        tree: The shape as a configuration has it; None for a chain.
    """

    batch: int
    shape: TreeShape | None = None
    tree: str | None = None

    @property
    def facts(self) -> Figures:
        """The same as figures, with the ``size``: the tokens of a row."""
        return Figures(batch=self.batch, size=1 + (self.shape.num_nodes if self.shape else 0), tree=self.tree)


def through_runner(runner: ModelRunner) -> Begin:
    """Forwards as the engine's rounds make them: a tree behind a row, of which a path is then committed."""

    def begin(prompts: Tensor) -> Step:
        rows, done = len(prompts), prompts.shape[1] - 1
        slots, states = torch.arange(rows, device=runner.device), runner.cache.states
        if states is not None:
            for slot in range(rows):
                states.clear(slot)
        if done:
            zeros = np.zeros(rows, dtype=np.int64)
            runner.run(ForwardBatch.of_chunk(prompts[:, :-1], host_slots=np.arange(rows), host_lengths=zeros))

        def step(tokens: Tensor, shape: TreeShape | None = None, path: Sequence[int] = (0,)) -> Tensor:
            nonlocal done
            tree = DraftTree.root_only(tokens[:, 0]) if shape is None else DraftTree.from_shape(shape, tokens)
            batch = ForwardBatch.of_tree(tree, host_slots=np.arange(rows), host_lengths=np.full(rows, done))
            logits = runner.run(batch).scores[:, list(path)]
            kept = torch.tensor(path[1:], dtype=torch.long, device=runner.device)
            runner.cache.commit(slots, torch.full_like(slots, done), kept.expand(rows, -1))
            done += len(path)
            return logits

        return step

    return begin


def through_model(model: PreTrainedModel) -> Begin:
    """Forwards of transformers' own modules over its own growing cache: chains, as its decoding verifies no trees."""
    name = cache_argument(signature(type(model).forward).parameters)

    def begin(prompts: Tensor) -> Step:
        past: Any = None

        def step(tokens: Tensor, shape: TreeShape | None = None, path: Sequence[int] = (0,)) -> Tensor:
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
        logits.append(step(tokens[-1]))
        tokens.append(logits[-1].argmax(-1))
    return torch.cat(tokens[1:], 1), torch.cat(logits, 1)


@torch.inference_mode()
def in_pieces(
    begin: Begin, prompts: Tensor, outputs: Tensor, plain: Tensor | None = None, shape: TreeShape | None = None
) -> Tensor:
    """Return the logits behind which every token of given outputs stands, from forwards of a shape (None: of a token).

    The text takes every longest path of a tree in turn. All other nodes have the likeliest tokens at their depth.

    Args:
        plain: The logits that tell which tokens are likely, for a shape.
    """
    step, ends = begin(prompts), torch.cat([prompts[:, -1:], outputs], 1)
    found: list[Tensor] = []
    if plain is None or shape is None:
        return torch.cat([step(each) for each in ends[:, :-1].split(1, 1)], 1)
    ranked = plain.scatter(2, outputs[..., None], torch.inf).topk(shape.max_children).indices
    done = 0
    while done < outputs.shape[1]:
        left = outputs.shape[1] - done - 1
        root = ends[:, done : done + 1]
        if not left:
            found.append(step(root))
            break
        cut = shape.cut(left)
        leaves = [node for node, depth in enumerate(cut.depths) if depth == cut.max_depth]
        path, ranks = _filled(cut, leaves[len(found) % len(leaves)])
        drafted = ranked[:, [done + depth - 1 for depth in cut.depths[1:]], ranks[1:]]
        found.append(step(torch.cat([root, drafted], 1), cut, path))
        done += len(path)
    return torch.cat(found, 1)


def _filled(shape: TreeShape, leaf: int) -> tuple[list[int], list[int]]:
    """Return the path to a node, root first, and the rank of every node's token: 0 for the text's on the path."""
    path = [leaf]
    while path[0]:
        path.insert(0, shape.parents[path[0]])
    ranks = [0]
    for node in range(1, len(shape.parents)):
        siblings = sorted(shape.children[shape.parents[node]], key=lambda each: each not in path)
        ranks.append(siblings.index(node))
    return path, ranks


def parity(begin: Begin, prompts: Tensor, *, tokens: int, cells: Sequence[Cell]) -> Iterator[Figures]:
    """Yield how forwards differ from those of one token, for every kind of forward (``compared``).

    Several rows of one token are compared with a row alone.

    Args:
        prompts: Prompts of one length, as many as the largest batch at least.
        tokens: The length of the outputs.
    """
    alone = prompts, torch.empty(0)  # a row alone comes first
    for batch in sorted({1, *(cell.batch for cell in cells)}):
        groups = prompts[: len(prompts) // batch * batch].split(batch)
        made = [one_by_one(begin, each, tokens) for each in groups]
        outputs, plain = (torch.cat(parts) for parts in zip(*made, strict=True))
        if batch == 1:
            alone = outputs, plain
        for cell in cells:
            if cell.batch != batch:
                continue
            told, against = (outputs, plain) if cell.shape is not None else alone
            told, against = told[: len(groups) * batch], against[: len(groups) * batch]
            each_group = zip(groups, told.split(batch), against.split(batch), strict=True)
            found = [in_pieces(begin, group, text, logits, cell.shape) for group, text, logits in each_group]
            yield cell.facts | compared(against, torch.cat(found))


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
