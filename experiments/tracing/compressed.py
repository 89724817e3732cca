"""Trees and tables of a round, compressed: all that a rule needs to be asked again, for any size of vocabulary.

Every node keeps its most probable tokens, under p and under q, with their exact probabilities, and the tokens that were
drafted below it. The others become **one more token**, with what is left of p and of q: each at most ``dropped`` times
the total variation between p and q (``dropped`` itself, without a q), because a residual is divided by it.

A rule that compares p and q token by token (all exact rules here) then says exactly what it would say on whole tables
for a target whose total variation to p is at most ``dropped``, at every node; a single chain under rejection sampling
is not changed at all. Rules that look at the entropy or the ranks of p see one token in the place of the merged ones.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.tree import DraftTree
from specdec.types import DraftSampling

DROPPED = 1e-2
"""The largest probability, under p and under q, that the merged tokens may have: as a share of the total variation."""


@dataclass(frozen=True, eq=False)
class Packed:
    """``DraftTree``'s tables of some rows, or of one without a batch, and p and q, compressed, on the host.

    Attributes:
        counts: Kept tokens of every node; none of padding.
        ids, p, q: The kept tokens of all nodes and rows, ascending in each node; q is zero where the node has none.
        rest_p, rest_q: All others' probability, exactly 0 where there are none; ``rest_q`` is -1 without a q.
    """

    tokens: Int[np.ndarray, "*batch node"]
    parents: Int[np.ndarray, "*batch node"]
    valid: Bool[np.ndarray, "*batch node"]
    law: Int[np.ndarray, "*batch node"]
    counts: Int[np.ndarray, "*batch node"]
    ids: Int[np.ndarray, " kept"]
    p: Float[np.ndarray, " kept"]
    q: Float[np.ndarray, " kept"]
    rest_p: Float[np.ndarray, "*batch node"]
    rest_q: Float[np.ndarray, "*batch node"]


def pack(tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], *, dropped: float = DROPPED) -> Packed:
    """Compress a batch of trees and tables; with ``dropped=0`` every token is kept that has any probability.

    Rows of q are kept that anything was drawn from, and others that sum to one (a drafter that goes on to its leaves).
    """
    p, valid = target_probs, tree.valid
    batch, _, vocab = p.shape
    drafted = valid & (tree.parents >= 0)
    drawn = drafted & (tree.law != DraftSampling.DETERMINISTIC) & (tree.law != DraftSampling.COUPLED)
    has_q = torch.zeros_like(tree.parents).scatter_add(1, tree.parents.clamp(min=0), drawn.long()) > 0
    q = torch.zeros_like(p) if tree.draft_probs is None else tree.draft_probs.to(p.dtype)
    has_q |= ((q.sum(-1) - 1).abs() < 1e-3) & (q >= 0).all(-1)
    q = torch.where(has_q[..., None], q, 0.0)
    most = torch.where(has_q[..., None], 0.5 * dropped * (p - q).abs().sum(-1, keepdim=True), dropped)
    keep = _top(p, most)
    if tree.draft_probs is not None:
        keep |= _top(q, most)
    entry = (tree.parents.clamp(min=0) * vocab + tree.tokens).where(drafted, 0)
    first = keep[:, 0, 0].clone()
    keep.view(batch, -1).scatter_(1, entry, True)
    keep[:, 0, 0] = first | ((entry == 0) & drafted).any(1)  # where the rest was sent
    keep &= valid[..., None]

    def rest(probs: Tensor, known: Tensor, otherwise: float) -> np.ndarray:
        return torch.where(known, probs.masked_fill(keep, 0).sum(-1), otherwise).float().cpu().numpy()

    return Packed(
        **{name: getattr(tree, name).cpu().numpy() for name in ("tokens", "parents", "valid", "law")},
        counts=keep.sum(-1).cpu().numpy(),
        ids=keep.nonzero()[:, 2].cpu().numpy(),
        p=p[keep].float().cpu().numpy(),
        q=q[keep].float().cpu().numpy(),
        rest_p=rest(p, valid, 0.0),
        rest_q=rest(q, has_q, -1.0),
    )


def unpack(packed: Packed) -> tuple[DraftTree, Float[Tensor, "batch node vocab"]]:
    """Trees and tables as a rule takes them, in float64.

    Every node has a vocabulary of its own: the tokens that were kept there, in order, and last the rest. A drafted
    token is given by its place in its parent's.
    """
    batch, nodes = packed.tokens.shape
    width = int(packed.counts.max()) + 1
    of = np.repeat(np.arange(batch * nodes), packed.counts.ravel())
    starts = np.concatenate([[0], packed.counts.ravel().cumsum()])
    place = np.arange(len(of)) - starts[of]

    def table(values: np.ndarray, rest: np.ndarray) -> np.ndarray:
        result = np.zeros((batch * nodes, width))
        result[of, place] = values
        result[:, -1] = rest.ravel().clip(min=0)
        return result.reshape(batch, nodes, width)

    # Kept ids ascend within a node, so (node, id) pairs ascend, and a child's stands where a search finds it.
    most = int(max(packed.ids.max(initial=0), packed.tokens.max())) + 1
    parent = np.arange(batch)[:, None] * nodes + packed.parents.clip(min=0)
    found = np.searchsorted(of * most + packed.ids, parent * most + packed.tokens)
    drafted = packed.valid & (packed.parents >= 0)
    q = table(packed.q, packed.rest_q) if (packed.rest_q >= 0).any() else None
    tree = DraftTree.build(
        torch.from_numpy(np.where(drafted, found - starts[parent], 0)),
        torch.from_numpy(packed.parents.astype(np.int64)),
        valid=torch.from_numpy(packed.valid),
        sampling=torch.from_numpy(packed.law.astype(np.int8)),
        draft_probs=None if q is None else torch.from_numpy(q),
        max_depth=int(depths_of(packed.parents)[packed.valid].max()),
        max_children=int(np.bincount(parent[drafted], minlength=1).max()),
    )
    return tree, torch.from_numpy(table(packed.p, packed.rest_p))


def _top(
    probs: Float[Tensor, "batch node vocab"], most: Float[Tensor, "batch node 1"]
) -> Bool[Tensor, "batch node vocab"]:
    """Marks the most probable tokens that leave no more than ``most``; none of probability zero."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    # From the smallest upwards: what is left must not drown in the rounding of a sum near one.
    left = ordered.flip(-1).double().cumsum(-1).flip(-1)
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, ids, (left > most) & (ordered > 0))


def depths_of(parents: Int[np.ndarray, "batch node"]) -> Int[np.ndarray, "batch node"]:
    """The depth of every node."""
    depth, above = np.zeros_like(parents), parents
    for _ in range(parents.shape[1]):
        depth = depth + (above >= 0)
        above = np.where(above >= 0, np.take_along_axis(parents, above.clip(min=0), 1), -1)
    return depth
