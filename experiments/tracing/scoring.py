"""The drafts in a trace, and the tokens that every rule expects to accept on them. No acceptance is sampled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

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

_NUMBERS = 2**18  # entries of a batch's table at most: 2 MB, which fits into the processor's caches


@dataclass(frozen=True)
class DraftSet:
    """The drafts that are scored together: those of one method in one run, at one temperature.

    ``settings`` tell them from the replay's others; ``exactness`` is that of the rule that ``ran``, if it is known.
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
    asked, greedy = int(verifier.needs_leaf_probs), drafts.temperature < GREEDY_BELOW
    if greedy and drafts.ran is not None and drafts.ran.needs_leaf_probs != asked:
        return f"{name} asks for p at temperature {asked}, and the trace has it at {1 - asked}: trace its run"
    try:
        verifier.check(TracedDrafter(drafts))
    except ValueError as error:
        return str(error)
    return None


@dataclass
class Score:
    """A rule on some drafts, round by round: ``reach`` is the probability of accepting at least 1, 2, … tokens.

    ``refused``: why it was not asked. ``distance_tv``, ``distance_kl``: of a rule that is not known to be exact.
    """

    drafts: DraftSet
    rule: str
    exactness: str
    refused: str | None = None
    prompts: list[str] = field(default_factory=list)
    depth: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reach: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
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
    depths: list[np.ndarray] = []
    for keys, tree, p in batches(drafts):
        prompts += [key.prompt for key in keys]
        depths.append((tree.depth * tree.valid).amax(-1).numpy())
        for asked, verifier in zip(scores, verifiers.values(), strict=True):
            if asked.refused is None:
                try:
                    reached[asked.rule].append(_reach(asked, verifier, tree, p))
                except ValueError as error:  # a group of siblings that only some rows have
                    asked.refused = str(error)
    for asked in scores:
        if asked.refused is None:
            asked.prompts, asked.depth = prompts, np.concatenate(depths)
            asked.reach = np.concatenate(reached[asked.rule])
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


def figures(scores: Sequence[Score], *, baseline: str, bootstrap: Bootstrap) -> list[Row]:
    """Return a row per rule: ``accepted``, expected tokens per round (the mean acceptance length is one more).

    ``gain``: the same less the baseline's on the same drafts, paired. ``reach.1``: the probability of accepting at
    least 1, 2, … tokens, among rounds that drafted as deep. Others as in ``Score``.
    """
    drafts = scores[0].drafts
    shared: Row = {"drafts": drafts.label, "temperature": drafts.temperature, "folder": str(drafts.folder)}
    base = next((score for score in scores if score.rule == baseline and score.refused is None), None)
    return [shared | _rule(score, base, bootstrap) for score in scores]


def _rule(score: Score, base: Score | None, bootstrap: Bootstrap) -> Row:
    named: Row = {"rule": score.rule, "exactness": score.exactness, "refused": score.refused}
    if score.refused is not None:
        return named
    gain = score.accepted - base.accepted if base is not None and base is not score else None
    deep = {place: score.depth >= place for place in range(1, score.reach.shape[1] + 1)}
    return {
        **named,
        **_mean("accepted", score.prompts, score.accepted, bootstrap),
        **({"gain": None} | ends("gain", None) if gain is None else _mean("gain", score.prompts, gain, bootstrap)),
        **{f"reach.{n}": float(score.reach[rounds, n - 1].mean()) for n, rounds in deep.items() if rounds.any()},
        "distance_tv": mean_of_all(score.distance_tv),
        "distance_kl": mean_of_all(score.distance_kl),
        "rounds": len(score.accepted),
        "prompts": len(set(score.prompts)),
    }


def _mean(name: str, prompts: Sequence[str], values: np.ndarray, bootstrap: Bootstrap) -> Row:
    """Return the mean over rounds, and its interval: rounds depend on each other within a prompt."""
    interval = bootstrap.over_prompts(ratio_of_sums, prompts, [values, np.ones(len(values))])
    return {name: float(values.mean()), **ends(name, interval)}
