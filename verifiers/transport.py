"""Optimal transport from the drafted siblings to the next token: the most that a level can accept."""

import functools
import itertools
import math

import numpy as np
import scipy.optimize
import scipy.sparse
import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.rejection import RejectionVerifier
from verifiers.siblings import law_of_stop

_MOST_TUPLES = 20_000  # variables of a linear program are this many times the siblings

SAMPLED = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)


class TransportVerifier(Verifier):
    """Optimal acceptance of every group of siblings, by a linear program (SpecTr, Sun et al. 2023, arXiv 2310.15141).

    Of all couplings of the drafted siblings T ~ Q with a token y ~ p, take one that maximizes the probability that y
    is among T: with f(T, y) the mass that leads from T to its member y, maximize sum f where f(T, .) <= Q(T) and
    f(., y) <= p(y) in total. Sibling y of the drafted T is accepted with probability f(T, y) / Q(T); if none is, the
    next token is drawn from N(p - sum_T f(T, .)).

    A **reference** for tiny vocabularies, against which affordable rules are measured: it solves one program for every
    node that has children, with vocab^siblings x siblings variables, on the host, node by node in Python. The
    acceptance of a level is the optimum, ``optimal_acceptance``; the plan that reaches it is not unique, and what
    deeper levels accept depends on it.

    Siblings are all ``DETERMINISTIC`` (then it equals ``RejectionVerifier``) or all sampled, ``IID`` and
    ``WITHOUT_REPLACEMENT`` mixed at will. How many there are must not depend on their tokens.

    Raises:
        ValueError: A group of siblings is too large for its vocabulary, or mixes sampled and deterministic ones.
    """

    exactness = Exactness.EXACT
    laws = frozenset({DraftSampling.DETERMINISTIC, *SAMPLED})

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        """Probability, given this tree, that the accepted path ends at each node."""
        step = torch.zeros_like(target_probs[:, :, 0])
        for row in range(len(step)):
            for node in (tree.children[row] >= 0).any(-1).nonzero()[:, 0].tolist():
                children, accepted, _ = self._plan(tree, target_probs, row, node)
                step[row, children] = torch.from_numpy(accepted).to(step)
        step[:, 0] = 1
        return law_of_stop(tree, step)

    def next_law(
        self,
        tree: DraftTree,
        target_probs: Float[Tensor, "batch node vocab"],
        stop: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch vocab"]:
        """Law of the token that follows: what the plan leaves of p at ``stop``, which does not depend on the draft."""
        result = target_probs[torch.arange(len(stop), device=stop.device), stop].clone()
        for row, node in enumerate(stop.tolist()):
            if (tree.children[row, node] >= 0).any():
                _, _, left = self._plan(tree, target_probs, row, node)
                if left.sum() > 0:
                    result[row] = torch.from_numpy(left / left.sum()).to(result)
        return result

    def _plan(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], row: int, node: int
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The children of a node, the probability that each is accepted, and what is left of p."""
        children = [child for child in tree.children[row, node].tolist() if child >= 0]
        laws = tuple(DraftSampling(int(tree.law[row, child])) for child in children)
        tokens = [int(tree.tokens[row, child]) for child in children]
        p = target_probs[row, node].double().cpu().numpy()
        if all(law is DraftSampling.DETERMINISTIC for law in laws):
            first = [token not in tokens[:rank] for rank, token in enumerate(tokens)]
            left = p.copy()
            left[tokens] = 0
            return children, p[tokens] * first, left
        if DraftSampling.DETERMINISTIC in laws:
            raise ValueError(
                f"row {row}, node {node} has both sampled and DETERMINISTIC children, and TransportVerifier takes no "
                f"such mixture: use {RejectionVerifier.__name__}"
            )
        assert tree.draft_probs is not None
        q = tree.draft_probs[row, node].double().cpu().numpy()
        mass, plan = _solve(p.tobytes(), q.tobytes(), laws)
        index = np.ravel_multi_index(tokens, (len(p),) * len(tokens))
        left = p - _arrivals(plan, len(p))
        # A plan fills no more than the first of equal siblings.
        return children, plan[index] / mass[index] if mass[index] > 0 else 0 * plan[index], left.clip(min=0)


def optimal_acceptance(
    p: Float[Tensor, "*rows vocab"], q: Float[Tensor, "*rows vocab"], children: int, law: DraftSampling
) -> Float[Tensor, "*rows"]:
    """The most probable acceptance of one of some siblings that a lossless rule can reach (no program is solved).

    1 + min_H [p(H) - Q(all siblings in H)] over sets H of tokens; the best are those with the largest q / p (Hu et al.
    2025, arXiv 2502.18779, theorem 3). For two independent siblings it is the optimum of Khisti et al. 2024, arXiv
    2410.18234.

    Args:
        p: The target's law.
        q: What the siblings are drawn from.
        children: How many.
        law: ``IID``, or ``WITHOUT_REPLACEMENT`` where vocab^children is small.
    """
    if law not in SAMPLED or children < 1:
        raise ValueError(f"{children} {law.name} siblings: the bound is for one or more, IID or WITHOUT_REPLACEMENT")
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, -torch.inf))
    order = ratio.argsort(dim=-1, descending=True)
    mass, drafted = p.gather(-1, order).cumsum(-1), q.gather(-1, order)
    if law is DraftSampling.IID:
        inside = drafted.cumsum(-1) ** children
    else:
        vocab = p.shape[-1]
        rows = []
        for row in drafted.reshape(-1, vocab).double().cpu().numpy():
            # Once q is exhausted no more siblings are drawn.
            count = min(children, int((row > 0).sum()))
            chances = _tuples(row, (law,) * count)
            last = np.indices((vocab,) * count).reshape(count, -1).max(0)
            rows.append(np.bincount(last, chances, minlength=vocab).cumsum())
        inside = torch.from_numpy(np.stack(rows)).to(p).view(p.shape)
    return 1 + (mass - inside).amin(-1).clamp(max=0)


def _tuples(q: np.ndarray, laws: tuple[DraftSampling, ...]) -> np.ndarray:
    """Probability of every tuple of siblings, flat."""
    vocab = len(q)
    if vocab ** len(laws) > _MOST_TUPLES:
        most = int(math.log(_MOST_TUPLES) / math.log(vocab))
        raise ValueError(
            f"{len(laws)} siblings over {vocab} tokens make {vocab ** len(laws):,} drafts, too many for a linear "
            f"program: draft at most {most}, or use RejectionVerifier or KSeqVerifier"
        )
    chances = np.ones(())
    for rank, law in enumerate(laws):
        row = np.broadcast_to(q, (vocab,) * (rank + 1)).copy()
        if law is DraftSampling.WITHOUT_REPLACEMENT:
            index = np.indices((vocab,) * (rank + 1))
            row[(index[:-1] == index[-1]).any(0)] = 0
            total = row.sum(-1, keepdims=True)
            row = np.divide(row, total, out=np.zeros_like(row), where=total > 0)
        chances = chances[..., None] * row
    return chances.flatten()


@functools.lru_cache(maxsize=4096)
def _solve(p_bytes: bytes, q_bytes: bytes, laws: tuple[DraftSampling, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Probability of every tuple of siblings, and the mass that leads from it to each of its places.

    Rows and tables repeat, in a batch of all drafts above all, so solutions are kept.
    """
    p, q = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
    mass = _tuples(q, laws)
    places = _places(len(p), len(laws))
    used = np.flatnonzero(mass)
    # One variable for every distinct token of every tuple that can be drafted.
    tuples, ranks = [], []
    for index in used.tolist():
        tokens = places[index].tolist()
        distinct = [rank for rank, token in enumerate(tokens) if token not in tokens[:rank]]
        tuples += [index] * len(distinct)
        ranks += distinct
    column = np.arange(len(tuples))
    row_of = np.searchsorted(used, tuples)
    constraints = scipy.sparse.coo_array(
        (
            np.ones(2 * len(column)),
            (np.concatenate([row_of, len(used) + places[tuples, ranks]]), np.tile(column, 2)),
        ),
        shape=(len(used) + len(p), len(column)),
    ).tocsr()
    solution = scipy.optimize.linprog(
        -np.ones(len(column)), A_ub=constraints, b_ub=np.concatenate([mass[used], p]), bounds=(0, None), method="highs"
    )
    if not solution.success:
        raise RuntimeError(
            f"the linear program of {len(laws)} siblings over {len(p)} tokens failed: {solution.message}"
        )
    plan = np.zeros((len(mass), len(laws)))
    plan[tuples, ranks] = solution.x.clip(min=0)
    # The solver keeps constraints to 1e-7; scaling down keeps them to rounding, so that the rule is exact.
    leaves = plan.sum(1)
    plan *= np.divide(mass, leaves, out=np.ones_like(mass), where=leaves > mass)[:, None]
    arrives = _arrivals(plan, len(p))
    plan *= np.divide(p, arrives, out=np.ones_like(p), where=arrives > p)[places]
    return mass, plan


def _arrivals(plan: np.ndarray, vocab: int) -> np.ndarray:
    """Mass that a plan leads to every token."""
    return np.bincount(_places(vocab, plan.shape[1]).ravel(), plan.ravel(), minlength=vocab)


@functools.lru_cache(maxsize=64)
def _places(vocab: int, siblings: int) -> np.ndarray:
    """Tokens of every tuple of siblings: Int[tuple rank]."""
    return np.array(list(itertools.product(range(vocab), repeat=siblings)), dtype=np.int64)
