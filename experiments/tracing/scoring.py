"""The tokens that every rule expects to accept on the very drafts of a trace. No acceptance is sampled."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.results.lossless import EXACT, stated_exactness
from experiments.results.statistics import mean_of_all
from experiments.tracing.compressed import unpack
from experiments.tracing.distance import first_token_distances
from experiments.tracing.draft_sets import DraftSet, refusal
from experiments.tracing.trace import Shard, TraceKey, read_trace
from specdec.interfaces import Verifier
from specdec.tree import DraftTree
from specdec.types import DraftSampling
from verifiers.transport import optimal_acceptance

_NUMBERS = 2**18  # entries of a batch's table at most: 2 MB, which fits into the processor's caches


@dataclass
class Score:
    """A rule on some drafts.

    Attributes:
        refused: Why it was not asked; None if it was.
        depth: Depth of every row's longest branch.
        reach: For every row, the probability of accepting at least 1, 2, … tokens.
        logged: For every row, the accepted tokens that the rule that ran had expected.
        distance_tv, distance_kl: For every row, how far a rule that is not known to be exact is from the target.
    """

    drafts: DraftSet
    rule: str
    exactness: str
    refused: str | None = None
    prompts: list[str] = field(default_factory=list)
    depth: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reach: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    logged: np.ndarray = field(default_factory=lambda: np.zeros(0))
    distance_tv: list[float | None] = field(default_factory=list)
    distance_kl: list[float | None] = field(default_factory=list)

    @property
    def accepted(self) -> np.ndarray:
        """Expected accepted tokens of every row."""
        return self.reach.sum(-1)


@dataclass
class Bound:
    """The most that any lossless rule can accept, for every group of sampled siblings.

    Attributes:
        depth: Depth of every row's longest branch.
        first: ``sibling_bound`` at every row's root; NaN where it is not known.
        levels: Mean over all groups of siblings at depth 1, 2, …; None where it is not known.
    """

    prompts: list[str]
    depth: np.ndarray
    first: np.ndarray
    levels: list[float | None]


def score(drafts: DraftSet, verifiers: Mapping[str, Verifier]) -> tuple[list[Score], Bound]:
    """Ask rules about all rows of some drafts; those that do not fit, or refuse on the way, say why."""
    scores = {
        name: Score(drafts, name, stated_exactness(verifier), refusal(verifier, drafts))
        for name, verifier in verifiers.items()
    }
    parts: dict[str, list[np.ndarray]] = {name: [] for name in verifiers}
    prompts: list[str] = []
    depths, logged, firsts = [], [], []
    levels: list[list[float | None]] = [[] for _ in range(drafts.max_depth)]
    for keys, tree, p in batches(drafts):
        prompts += [key.prompt for key in keys]
        logged += [key.expected_accepted for key in keys]
        depths.append((tree.depth * tree.valid).amax(-1).numpy())
        firsts.append(_bounds(tree, p, levels))
        for name, verifier in verifiers.items():
            found = scores[name]
            if found.refused is not None:
                continue
            try:
                stop_law = verifier.laws(tree, p).stop
                if found.exactness != EXACT:
                    for each in first_token_distances(verifier, tree, p):
                        found.distance_tv.append(each.tv)
                        found.distance_kl.append(each.kl)
            except ValueError as error:  # a group of siblings that only some rows have
                found.refused = str(error)
                continue
            if not torch.isfinite(stop_law).all():
                found.refused = "its probabilities are not finite on these drafts"
                continue
            at = torch.zeros(len(keys), drafts.max_depth + 1, dtype=stop_law.dtype).scatter_add_(
                1, tree.depth, stop_law
            )
            parts[name].append(at[:, 1:].flip(-1).cumsum(-1).flip(-1).numpy())
    for name, found in scores.items():
        if found.refused is None:
            found.prompts, found.depth = prompts, np.concatenate(depths)
            found.reach, found.logged = np.concatenate(parts[name]), np.array(logged)
    means = [mean_of_all(values) for values in levels]
    return list(scores.values()), Bound(prompts, np.concatenate(depths), np.concatenate(firsts), means)


def batches(drafts: DraftSet) -> Iterator[tuple[list[TraceKey], DraftTree, torch.Tensor]]:
    """All rows in batches, with rows of similar size together: whose they are, the trees, and p."""
    for shard in read_trace(drafts.folder):
        rows = [
            row
            for row, key in enumerate(shard.keys)
            if (key.method, key.exactness, key.temperature) == (drafts.method, drafts.exactness, drafts.temperature)
        ]
        rows.sort(key=shard.width)
        batch: list[int] = []
        for row in [*rows, None]:
            if batch and (row is None or (len(batch) + 1) * (shard.width(row) + 1) * drafts.max_nodes > _NUMBERS):
                yield _batch(shard, batch)
                batch = []
            if row is not None:
                batch.append(row)


def _batch(shard: Shard, rows: list[int]) -> tuple[list[TraceKey], DraftTree, torch.Tensor]:
    return [shard.keys[row] for row in rows], *unpack(shard.packed(rows))


def _bounds(tree: DraftTree, p: torch.Tensor, levels: list[list[float | None]]) -> np.ndarray:
    """Put the bound of every group of siblings that were drawn alike into ``levels``, and return each root's."""
    first = np.full(len(p), np.nan)
    if tree.draft_probs is None or tree.max_children == 0:
        return first
    children = tree.children
    exists = children >= 0
    laws = tree.law[:, None].expand(-1, tree.width, -1).gather(2, children.clamp(min=0)).where(exists, -1)
    same = ((laws == laws[..., :1]) | ~exists).all(-1)
    count = exists.sum(-1).where(same, 0)
    for law in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT):
        for number in range(1, tree.max_children + 1):
            row, node = ((laws[..., 0] == law) & (count == number)).nonzero(as_tuple=True)
            if not len(row):
                continue
            bound = sibling_bound(p[row, node], tree.draft_probs[row, node], number, law)
            depth = tree.depth[row, node]
            for level in depth.unique().tolist():
                levels[level] += (
                    [None] * int((depth == level).sum()) if bound is None else bound[depth == level].tolist()
                )
            if bound is not None:
                first[row[depth == 0].numpy()] = bound[depth == 0].numpy()
    return first


def sibling_bound(
    p: Float[Tensor, "row vocab"], q: Float[Tensor, "row vocab"], children: int, law: DraftSampling
) -> Float[Tensor, " row"] | None:
    """The largest probability, over the draws of some siblings, with which a lossless rule can accept one of them.

    For siblings drawn without replacement ``optimal_acceptance`` would enumerate all tuples of tokens. Here two or
    three siblings are added up by cumulative sums, so a large vocabulary is no obstacle. None for more than three.
    """
    if law is DraftSampling.IID or children == 1:
        return optimal_acceptance(p, q, children, DraftSampling.IID)
    if law is not DraftSampling.WITHOUT_REPLACEMENT or children > 3:
        return None
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, -torch.inf))
    order = ratio.argsort(dim=-1, descending=True)
    mass, drafted = p.gather(-1, order).cumsum(-1), q.gather(-1, order)
    drafted = drafted / drafted.sum(-1, keepdim=True)
    inside = torch.stack([_all_inside(row, children) for row in drafted]) if len(drafted) else drafted
    return 1 + (mass - inside).amin(-1).clamp(max=0)


def _all_inside(q: Float[Tensor, " vocab"], children: int) -> Float[Tensor, " vocab"]:
    """Probability that all of two or three draws without replacement are among the first 1, 2, … tokens.

    The last draw is inside with (q(H) - q(a)) / (1 - q(a)) after one draw a, likewise after two:
    1 - (1 - q(H)) / (1 - q(a) - q(b)).
    """
    total = q.cumsum(0)
    outside = (1 - total).clamp(min=0)
    after = 1 - q
    one = q / after.where(after > 0, 1.0)
    two = total - outside * one.cumsum(0)
    if children == 2:
        return two
    left = after[:, None] - q
    pairs = one[:, None] * q / left.where(left > 1e-12, torch.inf)
    pairs.fill_diagonal_(0)
    # What the m-th token adds to the sum over all pairs of the first m.
    added = pairs.triu().sum(0) + pairs.tril().sum(1)
    return two - outside * added.cumsum(0)
