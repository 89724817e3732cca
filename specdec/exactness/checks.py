"""Checks that drafts are well formed and that a rule takes such drafts; names the first mistake."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from specdec.wellformed import structure

_TOLERANCE = 1e-6  # how far a row's sum may be from 1: tables may come from float32


def check_drafts(verifier: Verifier, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> None:
    """Check that a batch of trees is well formed and that a rule takes such trees.

    This reads every number, so it is for tests and experiments, not for the main path.

    Raises:
        ValueError: Says what is wrong, in which row and at which node.
    """
    rule, vocab = type(verifier).__name__, target_probs.shape[2]
    index = torch.arange(tree.width)
    for flaw in structure(tree):
        raise ValueError(f"row {flaw.row}, node {flaw.node}: {flaw.what}")
    drafted = tree.valid & (index > 0)
    _first(
        drafted & ((tree.tokens < 0) | (tree.tokens >= vocab)),
        lambda row, node: f"row {row}, node {node}: token {int(tree.tokens[row, node])} is none of p's {vocab}",
    )
    fits = torch.zeros(len(DraftSampling), dtype=torch.bool)
    fits[[int(law) for law in verifier.samplings]] = True
    _first(
        drafted & ~fits[tree.law.long()],
        lambda row, node: (
            f"row {row}, node {node} is {DraftSampling(int(tree.law[row, node])).name}, and {rule} takes "
            f"{', '.join(law.name for law in sorted(verifier.samplings))}"
        ),
    )
    if verifier.chain_only:
        same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & drafted[:, None, :] & drafted[:, :, None]
        _first(
            same.tril(-1).any(-1),
            lambda row, node: (
                f"row {row}, node {node} is another child of node {int(tree.parents[row, node])}, and {rule} takes "
                f"chains only"
            ),
        )
    if verifier.paths_only:
        inner = drafted & (tree.parents > 0)
        same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & inner[:, None, :] & inner[:, :, None]
        _first(
            same.tril(-1).any(-1),
            lambda row, node: (
                f"row {row}, node {node} is another child of node {int(tree.parents[row, node])}, and {rule} takes "
                f"paths that share only the root"
            ),
        )
    check_distributions(target_probs, lambda at: f"p in row {at[0]} at node {at[1]}", tree.valid)
    sampled = drafted & (tree.law != DraftSampling.DETERMINISTIC) & (tree.law != DraftSampling.COUPLED)
    if tree.draft_probs is None:
        _first(
            sampled,
            lambda row, node: (
                f"row {row}, node {node} was drawn {DraftSampling(int(tree.law[row, node])).name} and the tree has no "
                f"draft_probs: give the q that it was drawn from"
            ),
        )
        return
    read = torch.zeros_like(tree.valid).long().scatter_add(1, tree.parents.clamp(min=0), sampled.long()) > 0
    if verifier.needs_leaf_probs:
        read = tree.valid
    check_distributions(tree.draft_probs, lambda at: f"q in row {at[0]} at node {at[1]}", read)


def check_distributions(
    rows: Float[Tensor, "*rows vocab"],
    name: Callable[[list[int]], str],
    read: Bool[Tensor, "*rows"] | None = None,
) -> None:
    """Check that rows are distributions.

    Args:
        rows: The rows.
        name: Says in words which row an index stands for.
        read: Which rows are checked; all by default.

    Raises:
        ValueError: A row has an entry that is negative or not finite, or its sum is not 1.
    """
    read = torch.ones(rows.shape[:-1], dtype=torch.bool) if read is None else read
    for bad, what in (
        (~torch.isfinite(rows).all(-1), "has an entry that is not finite"),
        ((rows < 0).any(-1), "has a negative entry"),
        ((rows.sum(-1) - 1).abs() > _TOLERANCE, "does not sum to one"),
    ):
        where = (bad & read).nonzero()
        if len(where):
            at = where[0].tolist()
            raise ValueError(f"{name(at)} {what}: {rows[tuple(at)].tolist()[:10]}")


def _first(wrong: Bool[Tensor, "batch node"], sentence: Callable[[int, int], str]) -> None:
    """Raise a ValueError for the first entry that is wrong; ``sentence`` makes its message from row and node."""
    where = wrong.nonzero()
    if len(where):
        raise ValueError(sentence(*where[0].tolist()))
