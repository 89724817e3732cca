"""Block verification of the best of several independent paths."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.block import BlockVerifier
from verifiers.target_walk import laws_of_walk
from verifiers.trees import rows_of

_Table = Float[Tensor, "batch node vocab"]
_Rows = Float[Tensor, "batch position vocab"]
_Path = Int[Tensor, "batch position"]


class GreedyMultiPathVerifier(Verifier):
    """Greedy multi-path block verification, GBV (Thomas and Pal 2026, arXiv 2602.16961).

    K paths are drawn from the root, independently of each other. Tokens are ranked by p / q, and the lexicographically
    largest path is selected: at each position the token of the highest rank wins, and the paths that do not have it are
    out. The selected path is verified as a block, not with q but with the law of its tokens given that they were
    selected,

        q~(x | v) = ((A + F_x)^K - (A + F_x - z_x)^K) / ((A + Q_v)^K - A^K),

    where Q_v is the probability of the prefix v under q, A that of all prefixes that rank lower, z_x = Q_v q(x), and
    F_x is Q_v times the probability under q of the tokens that rank no higher than x. The differences of powers are
    factored, a^K - b^K = (a - b) sum a^i b^(K-1-i), and computed relative to A + Q_v, so that nothing cancels or
    vanishes on long paths.

    More paths do not always accept more: acceptance is not monotone in K. With one path it is ``BlockVerifier``.

    The tree has a node for every token of every path, also where paths agree (``TreeShape.branching(K, 1, 1)``): equal
    nodes must not be merged. All paths have one length, or their tokens decide where they end (never which of the paths
    it is). Rows with ``DETERMINISTIC`` nodes, such as greedy requests, are verified as by ``TargetWalkVerifier``.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, DraftSampling.IID})
    walks_greedily = True
    paths_only = True

    def __init__(self):
        self._block = BlockVerifier()

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        """Return the laws of the selected path: nothing ends beside it. p follows its last node."""
        walked = laws_of_walk(tree, target_probs)
        if tree.draft_probs is None or tree.max_children == 0:
            return walked
        path = _largest_path(tree, tree.draft_probs, target_probs)
        along = self._block.laws(*_as_chain(tree, tree.draft_probs, target_probs, path))
        selected = torch.zeros_like(walked.stop).scatter_add(1, path.clamp(min=0), along.stop)
        # The rows with nodes that were not sampled.
        drafted = tree.valid & (tree.parents >= 0)
        certain = (drafted & (tree.law == DraftSampling.DETERMINISTIC)).any(-1)[:, None]

        def after(stop: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
            on_path, place = (path == stop[:, None]).max(-1)
            drawn = along.after(place).where(on_path[:, None], rows_of(stop, target_probs)[0])
            return walked.after(stop).where(certain, drawn)

        return Laws(walked.stop.where(certain, selected), after)


def _ratio(p: Float[Tensor, "..."], q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return p / q, by which tokens are ranked; tokens that are never drafted come last."""
    return (p.double() / q.double()).where(q > 0, -1.0)


def _largest_path(tree: DraftTree, draft_probs: _Table, target_probs: _Table) -> _Path:
    """Return the nodes of the selected path, the root first, -1 padded; the first of several equal paths."""
    nodes = tree.children[:, 0]
    alive = nodes >= 0
    prefix = torch.zeros_like(nodes[:, :1])
    levels = [prefix.expand_as(nodes)]
    for _ in range(tree.max_depth):
        levels.append(nodes)
        token = tree.tokens.gather(1, nodes.clamp(min=0))
        # All paths that are alive have the same prefix, so one node stands for it.
        entry = prefix * target_probs.shape[2] + token
        score = _ratio(target_probs.flatten(1).gather(1, entry), draft_probs.flatten(1).gather(1, entry))
        going = alive & (nodes >= 0)
        score = score.where(going, -2.0)
        best = score == score.amax(-1, keepdim=True)
        winner = token.where(best & going, target_probs.shape[2]).amin(-1, keepdim=True)
        # Rows where all paths have ended keep them.
        alive = torch.where(going.any(-1, keepdim=True), going & best & (token == winner), alive)
        first = alive.byte().argmax(-1, keepdim=True)
        prefix = nodes.gather(1, first).clamp(min=0)
        nodes = tree.children[..., 0].gather(1, nodes.clamp(min=0)).where(nodes >= 0, -1)
    chosen = alive.byte().argmax(-1, keepdim=True)
    return torch.cat([level.gather(1, chosen) for level in levels], 1)


def _as_chain(tree: DraftTree, draft_probs: _Table, target_probs: _Table, path: _Path) -> tuple[DraftTree, _Rows]:
    """Return the selected path as a chain that was drawn from q~, and p along it."""
    nodes = path.clamp(min=0)
    p, q = rows_of(nodes, target_probs, draft_probs)
    q = q.to(p.dtype)
    tokens = tree.tokens.gather(1, nodes)
    paths = (tree.children[:, 0] >= 0).sum(-1).clamp(min=1)[:, None]
    # It is not a number behind a token that q excludes, and at invalid nodes.
    law = _law_of_the_largest(p, q, tokens, paths, tree.max_children).nan_to_num().to(p.dtype)
    chain = Topology.chain(path.shape[1], path.device)
    return DraftTree.of_topology(chain, tokens, valid=path >= 0, sampling=DraftSampling.IID, draft_probs=law), p


def _law_of_the_largest(p: _Rows, q: _Rows, tokens: _Path, paths: Int[Tensor, "batch 1"], most_paths: int) -> _Rows:
    """Return q~ after every position of the selected path, in float64; ``paths`` were drawn in each row."""
    # Descending; stable, so that of equal ratios the lower id ranks higher.
    order = _ratio(p, q).argsort(dim=-1, descending=True, stable=True)
    drafted = q.double().gather(-1, order)
    drafted = drafted / drafted.sum(-1, keepdim=True)
    no_higher = drafted.flip(-1).cumsum(-1).flip(-1)
    lower = torch.nn.functional.pad(no_higher[..., 1:], (0, 1))
    # Probabilities relative to A + Q_v: that of all lower prefixes, and that of v.
    smaller, own = torch.zeros_like(no_higher[:, 0, :1]), torch.ones_like(no_higher[:, 0, :1])
    rows = []
    for position in range(tokens.shape[1]):
        up_to, under = (smaller + own * table[:, position] for table in (no_higher, lower))
        share = _powers(up_to, under, paths, most_paths) / _powers(torch.ones_like(own), smaller, paths, most_paths)
        sorted_row = drafted[:, position] * share
        rows.append(torch.zeros_like(sorted_row).scatter(-1, order[:, position], sorted_row))
        if position + 1 < tokens.shape[1]:
            place = (order[:, position] == tokens[:, position + 1, None]).byte().argmax(-1, keepdim=True)
            total = up_to.gather(-1, place)
            smaller = under.gather(-1, place) / total
            own = own * drafted[:, position].gather(-1, place) / total
    return torch.stack(rows, 1)


def _powers(
    a: Float[Tensor, "batch some"], b: Float[Tensor, "batch some"], k: Int[Tensor, "batch 1"], most: int
) -> Float[Tensor, "batch some"]:
    """Return (a^k - b^k) / (a - b) = sum a^i b^(k-1-i)."""
    total, power = torch.zeros_like(a), torch.ones_like(b)
    for i in range(most):
        total = torch.where(i < k, total * a + power, total)
        power = power * b
    return total
