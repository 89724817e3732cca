"""All drafts that a drafter could make from tables, each with its probability; or a random sample of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.checks.tables import Tables
from specdec.random import draw
from specdec.tree import DraftTree, TreeShape
from specdec.types import DraftSampling

Samplings = DraftSampling | Sequence[DraftSampling] | Mapping[tuple[int, ...], DraftSampling]
"""How nodes are drawn: one law for all, or the law of every sibling rank, or of every path of the shape."""

MOST_NUMBERS = 200_000_000  # in one table of an enumeration: 1.6 GB


@dataclass(frozen=True)
class WeightedDrafts:
    """All possible drafts, one per row, or a random sample of equal probabilities.

    ``prefixes`` is the path to every node as a number (see ``Tables``); ``target_probs`` is NaN at nodes that are not
    drafted, because a rule must not read them.
    """

    tree: DraftTree
    prefixes: Int[Tensor, "batch node"]
    probability: Float[Tensor, " batch"]
    target_probs: Float[Tensor, "batch node vocab"]


def enumerate_drafts(tables: Tables, shape: TreeShape, laws: Samplings, **options: Any) -> WeightedDrafts:
    """Return all drafts of a shape, and how probable each is.

    Args:
        laws: How nodes are drawn. ``DETERMINISTIC`` takes the most probable token that no earlier sibling has.
        **options: ``declared`` and ``declared_q``: the laws and q that the tree states, which differ in tests of what a
            false statement does. ``grows``: whether a node is drafted, from its index and its parent's prefix in every
            row; all are by default. ``leaf_probs``: whether q is given at the leaves, too; otherwise NaN stands there.

    Raises:
        ValueError: The tables do not reach the shape's depth or have no q, a law cannot be drawn from tables, or the
            drafts are too many.
    """

    def every(chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = int(chances.count_nonzero())
        if count * (shape.num_nodes + 1) * tables.vocab > MOST_NUMBERS:
            raise ValueError(
                f"{shape} over {tables.vocab} tokens has at least {count:,} drafts, too many to enumerate: "
                f"estimate from a sample, or take a smaller tree or vocabulary"
            )
        row, token = chances.nonzero(as_tuple=True)
        return row, token, chances[row, token]

    return _draft(tables, shape, laws, every, 1, **options)


def sample_drafts(
    tables: Tables, shape: TreeShape, laws: Samplings, count: int, *, seed: int, **options: Any
) -> WeightedDrafts:
    """Return ``count`` drafts drawn at random; the other arguments are those of ``enumerate_drafts``."""
    generator = torch.Generator().manual_seed(seed)

    def one(chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token = draw(chances, torch.rand(count, generator=generator, dtype=torch.float64))
        return torch.arange(count), token, torch.ones(count, dtype=torch.float64)

    return _draft(tables, shape, laws, one, count, **options)


def num_drafts(shape: TreeShape, law: DraftSampling, vocab: int) -> int:
    """Return how many drafts ``enumerate_drafts`` makes of tables without zeros, with one law for all nodes."""
    if law is DraftSampling.DETERMINISTIC:
        return 1
    if law is DraftSampling.IID:
        return vocab**shape.num_nodes
    # Ordered choices of distinct tokens; siblings beyond the vocabulary are not drafted.
    return math.prod(math.perm(vocab, min(len(children), vocab)) for children in shape.children)


def _draft(
    tables: Tables,
    shape: TreeShape,
    laws: Samplings,
    choose: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    rows: int,
    *,
    declared: Samplings | None = None,
    declared_q: tuple[Tensor, ...] | None = None,
    grows: Callable[[int, Tensor], Tensor] | None = None,
    leaf_probs: bool = False,
) -> WeightedDrafts:
    """Make drafts node by node; there are ``rows`` to begin with.

    From the probability of every token in every row, ``choose`` makes the rows after a node: the row that each
    continues, its token, and the token's probability.
    """
    if tables.depth < shape.max_depth:
        raise ValueError(
            f"the tables end after {tables.depth} tokens and {shape} is {shape.max_depth} deep: they need a row after "
            f"every prefix of up to {shape.max_depth} tokens"
        )
    table, vocab = tables.drafter, tables.vocab
    rank = {child: place for children in shape.children for place, child in enumerate(children)}

    def law_of(given: Samplings, node: int) -> DraftSampling:
        if isinstance(given, DraftSampling):
            return given
        if isinstance(given, Mapping):
            return given[shape.paths[node - 1]]
        if rank[node] >= len(given):
            raise ValueError(
                f"node {node} of {shape} has rank {rank[node]} and laws has {len(given)} entries: give one more"
            )
        return given[rank[node]]

    tokens = torch.zeros(rows, 1, dtype=torch.long)
    valid = torch.ones(rows, 1, dtype=torch.bool)
    prefixes = torch.zeros(rows, 1, dtype=torch.long)
    probability = torch.full((rows,), 1 / rows, dtype=torch.float64)
    for node in range(1, shape.num_nodes + 1):
        parent = shape.parents[node]
        q = table[shape.depths[parent]][prefixes[:, parent]]
        drafted = valid[:, parent] & (True if grows is None else grows(node, prefixes[:, parent]))
        taken = torch.zeros_like(q, dtype=torch.bool)
        for sibling in shape.children[parent][: rank[node]]:
            taken[torch.arange(len(q)), tokens[:, sibling]] |= valid[:, sibling]
        law = law_of(laws, node)
        if law is DraftSampling.DETERMINISTIC:
            chances = torch.zeros_like(q).scatter_(1, q.masked_fill(taken, -1).argmax(1, keepdim=True), 1.0)
        elif law is DraftSampling.IID:
            chances = q
        elif law is DraftSampling.WITHOUT_REPLACEMENT:
            chances = q.masked_fill(taken, 0)
            drafted &= chances.sum(1) > 0
            chances = chances / chances.sum(1, keepdim=True).where(drafted[:, None], 1)
        else:
            raise ValueError(f"{law.name} drafts share noise with the target, which tables do not have")
        # A node that is not drafted holds the same token in every draft, so that it does not multiply the drafts.
        padding = torch.zeros(vocab, dtype=torch.float64)
        padding[vocab - 1] = 1
        row, token, chance = choose(chances.where(drafted[:, None], padding))
        probability = probability[row] * chance
        tokens = torch.cat([tokens[row], token[:, None]], 1)
        valid = torch.cat([valid[row], drafted[row, None]], 1)
        prefixes = torch.cat([prefixes[row], prefixes[row, parent, None] * vocab + token[:, None]], 1)

    declared = laws if declared is None else declared
    law = torch.tensor([0, *(law_of(declared, node) for node in range(1, shape.num_nodes + 1))], dtype=torch.int8)
    claimed = at_nodes(table if declared_q is None else declared_q, shape, prefixes)
    if not leaf_probs:
        inner = torch.tensor([bool(children) for children in shape.children])
        claimed = claimed.where(inner[:, None], torch.nan)  # a rule must not read it
    tree = DraftTree.from_shape(
        shape,
        tokens,
        # As in the engine, the host knows of a law that all nodes have; rules may use that.
        sampling=declared if isinstance(declared, DraftSampling) else law.expand(len(tokens), -1),
        draft_probs=claimed if law.any() else None,
        valid=None if valid.all() else valid,
    )
    target_probs = at_nodes(tables.p, shape, prefixes)
    return WeightedDrafts(tree, prefixes, probability, target_probs.where(valid[..., None], torch.nan))


def at_nodes(
    levels: Sequence[Tensor], shape: TreeShape, prefixes: Int[Tensor, "batch node"]
) -> Float[Tensor, "batch node vocab"]:
    """Return the distribution after every node."""
    return torch.stack([levels[depth][prefixes[:, node]] for node, depth in enumerate(shape.depths)], 1)
