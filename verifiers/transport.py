"""Optimal transport from the drafted siblings to the next token: the most that a level can accept."""

import functools
import math

import numpy as np
import scipy.optimize
import scipy.sparse
import torch
from jaxtyping import Float
from torch import Tensor

from specdec.interfaces import Laws, Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Exactness
from verifiers.walk import Family, Tried, top_down

_MOST_TUPLES = 20_000  # variables of a linear program are this many times the siblings

SAMPLED = (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)


class TransportVerifier(Verifier):
    """Optimal acceptance of every group of siblings, by a linear program (SpecTr, Sun et al. 2023, arXiv 2310.15141).

    Among all couplings of the drafted siblings T ~ Q with a token y ~ p, take one that maximizes the probability that y
    is among T. With f(T, y) the mass that leads from T to its member y, it maximizes sum f, where f(T, .) <= Q(T) and
    f(., y) <= p(y) in total. Sibling y of the drafted T is accepted with probability f(T, y) / Q(T); if none is, the
    next token is drawn from N(p - sum_T f(T, .)).

    This is a **reference** for tiny vocabularies, against which affordable rules are measured. It solves one program
    for every node that has children, with vocab^siblings x siblings variables, on the host, node by node in Python. The
    acceptance of a level is the optimum. The plan that reaches it is not unique, and the acceptance of deeper levels
    depends on the plan.

    Siblings may mix laws. ``DETERMINISTIC`` siblings enter the program of the sampled ones that follow them, as members
    of every T. Sampled siblings before them may have decided which tokens they are, so those are in a program of their
    own, and what it leaves of p is for the others. The number of siblings in a program must not depend on their tokens.

    Raises:
        ValueError: A group of siblings is too large for its vocabulary; says at which row and node.
    """

    exactness = Exactness.EXACT
    samplings = frozenset({DraftSampling.DETERMINISTIC, *SAMPLED})
    walks_greedily = True

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        return top_down(tree, target_probs, try_by_program)


def try_by_program(family: Family, weight: Float[Tensor, "batch some"]) -> Tried:
    """Try the children of some nodes, each group of siblings by a linear program of its own (``walk.TryChildren``)."""
    tokens, laws = family.tokens.cpu().numpy(), family.laws.cpu().numpy()
    q = family.q.double().cpu().numpy()
    counts = family.exists.sum(-1).cpu().numpy()
    weights, weights_left, next_laws = (
        table.double().cpu().numpy().copy() for table in (0 * family.tokens, weight, family.p)
    )
    for at in np.ndindex(*family.nodes.shape):
        count = int(counts[at])
        if count == 0:
            continue
        try:
            p, drafted = next_laws[at].tobytes(), (tuple(each[at][:count].tolist()) for each in (tokens, laws))
            found, weights_left[at], left = _try_one(p, float(weights_left[at]), q[at].tobytes(), *drafted)
        except ValueError as error:
            raise ValueError(f"row {at[0]}, node {int(family.nodes[at])}: {error}") from None
        weights[at][:count] = found
        if left is not None:
            next_laws[at] = left
    chances, own, next_law = (torch.from_numpy(table).to(weight) for table in (weights, weights_left, next_laws))
    return chances, own, next_law


@functools.lru_cache(maxsize=4096)
def _try_one(
    p_bytes: bytes, weight: float, q_bytes: bytes, tokens: tuple[int, ...], laws: tuple[int, ...]
) -> tuple[np.ndarray, float, np.ndarray | None]:
    """Try the children of one node; the law of the next token is None where nothing is left.

    Results are kept, because tables and siblings repeat, above all in a batch of all drafts.
    """
    weights = np.zeros(len(tokens))
    p = np.frombuffer(p_bytes)
    mass, next_law = weight * p, None if weight == 0 else p
    first = 0
    while first < len(tokens):
        sampled = next((i for i in range(first, len(laws)) if laws[i] in SAMPLED), len(laws))
        # A program has siblings of one law: whether one exists must not depend on the others in its program.
        last = next((i for i in range(sampled, len(laws)) if laws[i] != laws[sampled]), len(laws))
        fixed, drawn = tokens[first:sampled], tokens[sampled:last]
        if not drawn:
            accepted = np.array([mass[token] * (token not in fixed[:rank]) for rank, token in enumerate(fixed)])
            left = mass.copy()
            left[list(fixed)] = 0
        else:
            taken = tuple(sorted(set(tokens[:sampled])))
            plan = _solve(mass.tobytes(), q_bytes, fixed, taken, laws[sampled:last])
            accepted = plan.given(drawn)
            left = (mass - plan.arrivals).clip(min=0)
        failed = 1 - np.append(0, accepted.cumsum()[:-1])
        weights[first:last] = np.divide(accepted, failed, out=np.zeros_like(accepted), where=failed > 0).clip(max=1)
        z = left.sum()
        # Added in this order, because z may be far below the precision of 1.
        weight = z / (z + (1 - weight)) if z > 0 else 0.0
        next_law = left / z if z > 0 else None
        mass = np.zeros_like(p) if next_law is None else weight * next_law
        first = last
    return weights, weight, next_law


def _tuples(q: np.ndarray, taken: tuple[int, ...], laws: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return all that siblings drawn from q can be, Int[tuple rank], in lexicographic order, and the probabilities."""
    vocab = len(q)
    if vocab ** len(laws) > _MOST_TUPLES:
        most = int(math.log(_MOST_TUPLES) / math.log(vocab))
        raise ValueError(
            f"{len(laws)} siblings over {vocab} tokens make {vocab ** len(laws):,} drafts, too many for a linear "
            f"program: draft at most {most}, or use TwoDraftVerifier or RejectionVerifier"
        )
    tuples, chances = np.zeros((1, 0), dtype=np.int64), np.ones(1)
    for law in laws:
        row = np.tile(q, (len(tuples), 1))
        if law == DraftSampling.WITHOUT_REPLACEMENT:
            row[:, list(taken)] = 0
            np.put_along_axis(row, tuples, 0.0, 1)
            total = row.sum(-1, keepdims=True)
            row = np.divide(row, total, out=np.zeros_like(row), where=total > 0)
        above, token = row.nonzero()
        tuples = np.concatenate([tuples[above], token[:, None]], 1)
        chances = chances[above] * row[above, token]
    return tuples, chances


class _Plan:
    """A solved program: the possible drafts, their probabilities, and the mass that leads from each to its members."""

    def __init__(self, tuples: np.ndarray, mass: np.ndarray, members: np.ndarray, flow: np.ndarray, vocab: int):
        self._index = {tuple(draft): number for number, draft in enumerate(tuples.tolist())}
        self._mass, self._flow = mass, flow
        self.arrivals = np.bincount(members.ravel(), flow.ravel(), minlength=vocab)

    def given(self, drawn: tuple[int, ...]) -> np.ndarray:
        """Return the probability of accepting each member of a draft; all zero for a draft that cannot be drawn."""
        number = self._index.get(drawn)
        return np.zeros(self._flow.shape[1]) if number is None else self._flow[number] / self._mass[number]


@functools.lru_cache(maxsize=4096)
def _solve(
    capacity_bytes: bytes, q_bytes: bytes, fixed: tuple[int, ...], taken: tuple[int, ...], laws: tuple[int, ...]
) -> _Plan:
    """Maximize the mass that leads from drafts to their members; token y takes at most its capacity, w p(y).

    ``fixed`` tokens are members of every draft; the others are drawn by ``laws``, without the ``taken`` tokens.
    """
    capacity, q = np.frombuffer(capacity_bytes), np.frombuffer(q_bytes)
    tuples, mass = _tuples(q, taken, laws)
    members = np.concatenate([np.tile(np.array(fixed, dtype=np.int64), (len(tuples), 1)), tuples], 1)
    # One variable for every distinct member of every draft.
    earlier = members[:, :, None] == members[:, None, :]
    distinct = ~np.tril(earlier, -1).any(-1)
    draft, rank = distinct.nonzero()
    column = np.arange(len(draft))
    rows, shape = np.concatenate([draft, len(tuples) + members[draft, rank]]), (len(tuples) + len(q), len(column))
    ones = scipy.sparse.coo_array((np.ones(2 * len(column)), (rows, np.tile(column, 2))), shape=shape).tocsr()
    flow = np.zeros(members.shape)
    if len(column) == 0:  # nothing can be drawn
        return _Plan(tuples, mass, members, flow, len(q))
    solution = scipy.optimize.linprog(
        -np.ones(len(column)), A_ub=ones, b_ub=np.concatenate([mass, capacity]), bounds=(0, None), method="highs"
    )
    if not solution.success:
        raise RuntimeError(f"the program of {len(laws)} siblings over {len(q)} tokens failed: {solution.message}")
    flow[draft, rank] = solution.x.clip(min=0)
    # The solver meets constraints to 1e-7; scaling down meets them to rounding, so that the rule is exact.
    leaves = flow.sum(1)
    flow *= np.divide(mass, leaves, out=np.ones_like(mass), where=leaves > mass)[:, None]
    arrives = np.bincount(members.ravel(), flow.ravel(), minlength=len(q))
    flow *= np.divide(capacity, arrives, out=np.ones_like(capacity), where=arrives > capacity)[members]
    return _Plan(tuples, mass, members, flow, len(q))
