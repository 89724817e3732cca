"""The drafts in a trace, and the tokens that every rule expects to accept on them. No acceptance is sampled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.results.lossless import EXACT, stated_exactness
from experiments.results.rows import Row, ends
from experiments.results.statistics import Bootstrap, mean_of_all, ratio_of_sums
from experiments.tracing.compressed import unpack
from experiments.tracing.distance import first_token_distances
from experiments.tracing.trace import TracedRound, TraceKey, packed, read_trace
from specdec.interfaces import Drafter, Session, Sizes, Verifier
from specdec.requests import GREEDY_BELOW
from specdec.target.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling, Noise

RAN = "as it ran"
"""Name of the rule that ran: it is asked again, to see how much the trace's compression changes."""
_NUMBERS = 2**18  # entries of a batch's table at most: 2 MB, which fits into the processor's caches


@dataclass(frozen=True)
class DraftSet:
    """The drafts that are scored together: those of one method in one run, at one temperature.

    Attributes:
        settings: Overrides that tell these drafts from the replay's others.
        exactness: What the rule promises that ran and has made the contexts.
        max_nodes: The most of any tree, root not counted.
        ran: The rule that ran, if it is known.
    """

    settings: tuple[str, ...]
    folder: Path
    method: str
    exactness: str
    temperature: float
    laws: frozenset[DraftSampling] = frozenset()
    max_nodes: int = 0
    max_depth: int = 0
    is_chain: bool = True
    is_paths: bool = True
    has_leaf_probs: bool = True
    ran: Verifier | None = None

    def has(self, traced: TracedRound) -> bool:
        """Whether a round of the run's trace is among them."""
        key = traced.key
        return (key.method, key.exactness, key.temperature) == (self.method, self.exactness, self.temperature)

    @property
    def label(self) -> str:
        """Which drafts, in words."""
        laws = ", ".join(law.name.lower().replace("_", " ") for law in sorted(self.laws))
        settings = [part for part in self.settings if not part.startswith("drafter.sampling=")]
        return ", ".join([self.method, *settings, laws])


class TracedDrafter(Drafter):
    """Stands for the drafter that made a trace, so that a rule's own check decides whether it fits."""

    def __init__(self, drafts: DraftSet):
        self.max_nodes, self.max_depth, self.laws = drafts.max_nodes, drafts.max_depth, drafts.laws
        self.is_chain, self.is_paths, self.has_leaf_probs = drafts.is_chain, drafts.is_paths, drafts.has_leaf_probs

    def bind(self, target: Target, sizes: Sizes) -> Session:
        raise NotImplementedError("nothing is decoded: the drafts are in the trace")


def find_drafts(folder: Path, settings: Sequence[str] = (), ran: Verifier | None = None) -> list[DraftSet]:
    """The drafts in a run's trace, by method and temperature; ``settings`` tell them from other runs'."""
    sets: dict[tuple[str, str, float], DraftSet] = {}
    for traced in chain.from_iterable(read_trace(folder, tables=False)):
        key, depth, valid = traced.key, traced.depths, traced.valid
        drafted = valid & (traced.parents >= 0)
        children = np.bincount(traced.parents[drafted], minlength=len(valid))
        leaves = depth[drafted & (children == 0)]
        own = key.method, key.exactness, key.temperature
        known = sets.get(own) or DraftSet(tuple(settings), folder, *own, ran=ran)
        sets[own] = replace(
            known,
            laws=known.laws | {DraftSampling(law) for law in traced.law[drafted].tolist()},
            is_chain=known.is_chain and bool((children <= 1).all()),
            is_paths=known.is_paths and bool((children[1:] <= 1).all() and (leaves == depth.max()).all()),
            has_leaf_probs=known.has_leaf_probs and bool((traced.rest_q[valid] >= 0).all()),
            max_nodes=max(known.max_nodes, int(drafted.sum())),
            max_depth=max(known.max_depth, int(depth.max())),
        )
    return list(sets.values())


def refusal(verifier: Verifier, drafts: DraftSet) -> str | None:
    """Why a rule is not to be asked about these drafts; None if it is."""
    shared = drafts.ran is not None and drafts.ran.noise is Noise.SHARED
    name = type(verifier).__name__
    if shared and verifier.noise is not Noise.SHARED:
        return f"{name} asks for p, and the trace has the tokens that the target had drawn: trace another rule's run"
    if verifier.noise is Noise.SHARED and not shared:
        return f"{name} asks for the tokens that the target draws with shared noise, and the trace has p: trace its run"
    if drafts.temperature < GREEDY_BELOW and drafts.ran is not None:
        if drafts.ran.needs_leaf_probs and not verifier.needs_leaf_probs:
            return f"{name} asks for p at temperature 0, and the trace has it at 1, for {type(drafts.ran).__name__}"
        if verifier.needs_leaf_probs and not drafts.ran.needs_leaf_probs:
            return f"{name} asks for p and q at temperature 1, and the trace has them at 0: trace its run"
    try:
        verifier.check(TracedDrafter(drafts))
    except ValueError as error:
        return str(error)
    return None


@dataclass
class Score:
    """A rule on some drafts. The lists and arrays have a row per round.

    Attributes:
        refused: Why it was not asked; None if it was.
        depth: Depth of the longest branch.
        reach: The probability of accepting at least 1, 2, … tokens.
        logged: The accepted tokens that the rule that ran had expected.
        bound: ``sibling_bound`` at the root; NaN where it is not known.
        distance_tv: How far a rule that is not known to be exact is from the target, like ``distance_kl``.
    """

    drafts: DraftSet
    rule: str
    exactness: str
    refused: str | None = None
    prompts: list[str] = field(default_factory=list)
    depth: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reach: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    logged: np.ndarray = field(default_factory=lambda: np.zeros(0))
    bound: np.ndarray = field(default_factory=lambda: np.zeros(0))
    distance_tv: list[float | None] = field(default_factory=list)
    distance_kl: list[float | None] = field(default_factory=list)

    @property
    def accepted(self) -> np.ndarray:
        """Expected accepted tokens."""
        return self.reach.sum(-1)


def score(drafts: DraftSet, verifiers: Mapping[str, Verifier]) -> list[Score]:
    """Ask rules about all rows of some drafts; those that do not fit, or refuse on the way, say why."""
    scores = [
        Score(drafts, name, stated_exactness(verifier), refusal(verifier, drafts))
        for name, verifier in verifiers.items()
    ]
    reached: dict[str, list[np.ndarray]] = {name: [] for name in verifiers}
    prompts: list[str] = []
    depths, logged, bounds = [], [], []
    for keys, tree, p in batches(drafts):
        prompts += [key.prompt for key in keys]
        logged += [key.expected_accepted for key in keys]
        depths.append((tree.depth * tree.valid).amax(-1).numpy())
        bounds.append(_root_bounds(tree, p))
        for asked, verifier in zip(scores, verifiers.values(), strict=True):
            if asked.refused is None:
                try:
                    reached[asked.rule].append(_reach(asked, verifier, tree, p))
                except ValueError as error:  # a group of siblings that only some rows have
                    asked.refused = str(error)
    for asked in scores:
        if asked.refused is None:
            asked.prompts, asked.logged, asked.reach = prompts, np.array(logged), np.concatenate(reached[asked.rule])
            asked.depth, asked.bound = np.concatenate(depths), np.concatenate(bounds)
    return scores


def _reach(asked: Score, verifier: Verifier, tree: DraftTree, p: torch.Tensor) -> np.ndarray:
    stop = verifier.laws(tree, p).stop
    if not torch.isfinite(stop).all():
        raise ValueError("its probabilities are not finite on these drafts")
    if asked.exactness != EXACT:
        distances = first_token_distances(verifier, tree, p)
        asked.distance_tv += [distance.tv for distance in distances]
        asked.distance_kl += [distance.kl for distance in distances]
    at = stop.new_zeros(len(stop), asked.drafts.max_depth + 1).scatter_add_(1, tree.depth, stop)
    return at[:, 1:].flip(-1).cumsum(-1).flip(-1).numpy()


def batches(drafts: DraftSet) -> Iterator[tuple[list[TraceKey], DraftTree, torch.Tensor]]:
    """All rows in batches, with rows of similar size together: whose they are, the trees, and p."""
    for shard in read_trace(drafts.folder):
        batch: list[TracedRound] = []
        for traced in sorted(filter(drafts.has, shard), key=lambda traced: traced.width):
            if batch and (len(batch) + 1) * (traced.width + 1) * drafts.max_nodes > _NUMBERS:
                yield [other.key for other in batch], *unpack(packed(batch))
                batch = []
            batch.append(traced)
        if batch:
            yield [other.key for other in batch], *unpack(packed(batch))


def _root_bounds(tree: DraftTree, p: torch.Tensor) -> np.ndarray:
    """Return the bound of every root whose children were drawn alike, NaN for the others."""
    bounds = np.full(len(p), np.nan)
    if tree.draft_probs is None or tree.max_children == 0:
        return bounds
    children = tree.children[:, 0]
    laws = tree.law.gather(1, children.clamp(min=0)).where(children >= 0, -1)
    alike = ((laws == laws[:, :1]) | (children < 0)).all(-1)
    for law in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT):
        for number in range(1, tree.max_children + 1):
            (rows,) = (alike & (laws[:, 0] == law) & ((children >= 0).sum(-1) == number)).nonzero(as_tuple=True)
            known = sibling_bound(p[rows, 0], tree.draft_probs[rows, 0], number, law) if len(rows) else None
            if known is not None:
                bounds[rows.numpy()] = known.numpy()
    return bounds


def sibling_bound(
    p: Float[Tensor, "row vocab"], q: Float[Tensor, "row vocab"], children: int, law: DraftSampling
) -> Float[Tensor, " row"] | None:
    """The largest probability, over the draws of some siblings, with which a lossless rule can accept one of them.

    1 + min_H [p(H) - Q(all siblings in H)] over sets H of tokens; the best are those with the largest q / p (Hu et al.
    2025, arXiv 2502.18779, theorem 3). None for more than three siblings drawn without replacement.
    """
    if law is not DraftSampling.IID and children > 3:
        return None
    ratio = torch.where(p > 0, q / p, torch.where(q > 0, torch.inf, -torch.inf))
    order = ratio.argsort(dim=-1, descending=True)
    mass, drafted = p.gather(-1, order).cumsum(-1), q.gather(-1, order)
    drafted = drafted / drafted.sum(-1, keepdim=True)
    if law is DraftSampling.IID or children == 1:
        inside = drafted.cumsum(-1) ** children
    else:
        inside = torch.stack([_all_inside(row, children) for row in drafted])
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


# ---------------------------------------------------------------- figures


def figures(scores: Sequence[Score], *, baseline: str, bootstrap: Bootstrap) -> list[Row]:
    """Return a row per rule from the rules' scores of some drafts.

    Args:
        baseline: Name of the rule that gains are over.

    Returns:
        ``accepted``: expected accepted tokens per round (the mean acceptance length is one more). ``gain``: the same
        less the baseline's on the same drafts, paired. ``reach.1``: probability of accepting at least 1, 2, … tokens,
        among rounds that drafted as deep. ``bound``: the best acceptance of the root's siblings that any lossless rule
        can have; None where it is not known. ``distance_tv``, ``distance_kl``: of a rule that may not be exact.
        ``log_error``, ``log_error_most``: by how much the rule that ran expects more here than when it ran, on average
        and in a single round. ``refused``: why the rule was not asked.
    """
    ran = next((score for score in scores if score.rule == RAN and score.refused is None), None)
    off = None if ran is None else ran.accepted - ran.logged
    drafts = scores[0].drafts
    shared: Row = {
        "drafts": drafts.label,
        "temperature": drafts.temperature,
        "folder": str(drafts.folder),
        "log_error": None if off is None else float(off.mean()),
        "log_error_most": None if off is None else float(np.abs(off).max()),
    }
    asked = [score for score in scores if score.rule != RAN]
    base = next((score for score in asked if score.rule == baseline and score.refused is None), None)
    return [shared | _rule(score, base, bootstrap) for score in asked]


def _rule(score: Score, base: Score | None, bootstrap: Bootstrap) -> Row:
    named: Row = {"rule": score.rule, "exactness": score.exactness, "refused": score.refused}
    if score.refused is not None:
        return named
    gain = score.accepted - base.accepted if base is not None and base is not score else None
    bound = np.where(score.depth >= 1, score.bound, 0.0)
    known = bool((score.depth >= 1).any()) and not np.isnan(bound).any()
    deep = {place: score.depth >= place for place in range(1, score.reach.shape[1] + 1)}
    return {
        **named,
        **_mean("accepted", score.prompts, score.accepted, bootstrap),
        **({"gain": None} | ends("gain", None) if gain is None else _mean("gain", score.prompts, gain, bootstrap)),
        **{f"reach.{n}": float(score.reach[rounds, n - 1].mean()) for n, rounds in deep.items() if rounds.any()},
        "bound": float(bound[score.depth >= 1].mean()) if known else None,
        "distance_tv": mean_of_all(score.distance_tv),
        "distance_kl": mean_of_all(score.distance_kl),
        "rounds": len(score.accepted),
        "prompts": len(set(score.prompts)),
    }


def _mean(name: str, prompts: Sequence[str], values: np.ndarray, bootstrap: Bootstrap) -> Row:
    """Return the mean over rounds, and its interval: rounds depend on each other within a prompt."""
    interval = bootstrap.over_prompts(ratio_of_sums, prompts, [values, np.ones(len(values))])
    return {name: float(values.mean()), **ends(name, interval)}
