"""The one place where randomness meets a verifier: draw where the path stops, then the token that follows."""

from dataclasses import fields, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.interfaces import Laws, Verifier
from specdec.kernels import usable
from specdec.random import draw_with_total
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import Exactness, Verdict

MOST_ENTRIES = 2**27
"""Rows are judged together as long as p has at most this many entries (512 MiB in float32), larger batches in parts: a
rule makes a few tables of that size at most (k-seq ten)."""


def parts_of(count: int, entries: int) -> list[slice]:
    """Return the parts in which things of so many entries are taken, none with more than ``MOST_ENTRIES`` entries."""
    together = max(1, MOST_ENTRIES // max(entries, 1))
    return [slice(first, min(first + together, count)) for first in range(0, count, together)]


def accept(
    verifier: Verifier,
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    uniforms: Float[Tensor, "batch 2"],
) -> Verdict:
    """Draw accepted paths and next tokens by a verifier's laws; of a row's two uniforms, one draws the stop node."""
    if tree.width == 1:
        return _without_draft(verifier, tree, target_probs, uniforms)
    parts = parts_of(len(target_probs), target_probs[0].numel())
    if len(parts) == 1:
        return _accept(verifier, tree, target_probs, uniforms)
    verdicts = [_accept(verifier, tree.rows(part), target_probs[part], uniforms[part]) for part in parts]
    names = [field.name for field in fields(Verdict)]
    return Verdict(**{name: torch.cat([getattr(verdict, name) for verdict in verdicts]) for name in names})


def _accept(
    verifier: Verifier,
    tree: DraftTree,
    target_probs: Float[Tensor, "batch node vocab"],
    uniforms: Float[Tensor, "batch 2"],
) -> Verdict:
    laws = verifier.laws(tree, target_probs)
    stop, total = draw_with_total(laws.stop, uniforms[:, 0])
    next_token, next_total = draw_with_total(laws.after(stop), uniforms[:, 1])
    path, num_accepted = _path_and_depth(tree, stop)
    return Verdict(
        path=path,
        num_accepted=num_accepted,
        expected_accepted=(laws.stop * tree.depth).sum(-1).float(),
        next_token=next_token,
        valid=total + next_total < torch.inf,  # one operation, as none is negative; ``isfinite`` takes four
    )


def _without_draft(
    verifier: Verifier,
    tree: DraftTree,
    target_probs: Float[Tensor, "batch 1 vocab"],
    uniforms: Float[Tensor, "batch 2"],
) -> Verdict:
    """Return the verdict on trees without drafted nodes: only the next token is drawn."""
    root = torch.zeros_like(tree.tokens[:, 0])
    next_token, total = draw_with_total(verifier.laws(tree, target_probs).after(root), uniforms[:, 1])
    return replace(certain(tree, next_token[:, None]), valid=total < torch.inf)


def certain(tree: DraftTree, following: Int[Tensor, "batch node"]) -> Verdict:
    """Return the verdict where one token follows every node for certain: the path goes down while it is a child.

    So all rules that ``walks_greedily`` judge greedy rows, in trees without a node drawn at random. Of siblings
    with the same token, the first one counts.
    """
    if tree.width == 1:
        next_token = following[:, 0]
        path, num_accepted = tree.tokens[:, :0], torch.zeros_like(next_token)
        expected = torch.zeros_like(next_token, dtype=torch.float32)
    elif usable(tree.tokens):
        from specdec.kernels.trees import walk

        path, num_accepted, expected, next_token = walk(
            tree.tokens, tree.parents, tree.valid, following, tree.max_depth
        )
    else:
        stop = _end_of_walk(tree, following)
        path, num_accepted = _path_and_depth(tree, stop)
        expected, next_token = num_accepted.float(), following.gather(1, stop[:, None])[:, 0]
    return Verdict(
        path=path,
        num_accepted=num_accepted,
        expected_accepted=expected,
        next_token=next_token,
        valid=torch.ones_like(next_token, dtype=torch.bool),
    )


def _end_of_walk(tree: DraftTree, following: Int[Tensor, "batch node"]) -> Int[Tensor, " batch"]:
    """Return the last node of the walk along certain tokens."""
    if tree.in_line:
        matches = (tree.tokens[:, 1:] == following[:, :-1]) & tree.valid[:, 1:]
        return matches.long().cumprod(-1).sum(-1)
    above = tree.parents.clamp(min=0)
    matches = (tree.tokens == following.gather(1, above)) & tree.valid & (tree.parents >= 0)
    if tree.max_children > 1:
        index = torch.arange(tree.width, device=above.device).expand_as(above)
        # Numbers count down, so that the largest one is the first child; the root matches nothing.
        number = (tree.width - index) * matches
        matches &= number == torch.zeros_like(number).scatter_reduce_(1, above, number, "amax").gather(1, above)
    matches[:, 0].fill_(True)
    # Parents stand before their children, so of the nodes that are reached the last one is the deepest.
    reached = torch.where(tree.ancestors, matches[:, None], True).all(-1)
    return (reached * torch.arange(tree.width, device=above.device)).amax(-1)


def _path_and_depth(
    tree: DraftTree, stop: Int[Tensor, " batch"]
) -> tuple[Int[Tensor, "batch depth"], Int[Tensor, " batch"]]:
    if tree.in_line:
        return path_to(tree, stop), stop
    if tree.topology.static:
        both = _depth_and_path(tree.topology).index_select(0, stop)
        return both[:, 1:], both[:, 0]
    return path_to(tree, stop), tree.depth.gather(1, stop[:, None])[:, 0]


@lru_cache(maxsize=1024)
def _depth_and_path(topology: Topology) -> Int[Tensor, "node column"]:
    """Return every node's depth and, in the columns after it, its path; made once per static shape."""
    with torch.inference_mode(False):
        return torch.cat([topology.depth[0][:, None], topology.paths[0]], 1)


def path_to(tree: DraftTree, stop: Tensor) -> Tensor:
    """Return the nodes from the root's child down to ``stop``, -1 padded: Int[batch] to Int[batch depth]."""
    if tree.topology.static:
        return tree.topology.paths[0].index_select(0, stop)
    batch, nodes = tree.tokens.shape
    on_path = tree.ancestors.gather(1, stop[:, None, None].expand(-1, 1, nodes))[:, 0]
    # Every depth has at most one node of the path. The root and all other nodes go to a column that is cut off.
    path = torch.full((batch, tree.max_depth + 1), -1, dtype=torch.long, device=stop.device)
    index = torch.arange(nodes, device=stop.device).expand(batch, -1)
    return path.scatter_(1, tree.depth * on_path, index)[:, 1:]


class Plain(Verifier):
    """Nothing was drafted: draw the next token from p. The rule of plain decoding."""

    exactness = Exactness.EXACT
    samplings = frozenset()  # it takes no drafts
    walks_greedily = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return Laws(ends_at_root(target_probs), lambda _: target_probs[:, 0])


def ends_at_root(target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
    """Return the law of a path that ends at the root for certain."""
    return nn.functional.pad(torch.ones_like(target_probs[:, :1, 0]), (0, target_probs.shape[1] - 1))
