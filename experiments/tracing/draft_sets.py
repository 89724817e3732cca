"""The drafts in a trace, in sets that are scored together; and which rules may be asked about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.tracing.trace import read_trace
from specdec.interfaces import Drafter, Session, Sizes, Verifier
from specdec.requests import GREEDY_BELOW
from specdec.target.target import Target
from specdec.types import DraftSampling, Noise


@dataclass(frozen=True)
class DraftSet:
    """The drafts that are scored together: those of one method in one run, at one temperature.

    Attributes:
        settings: Overrides that tell these drafts from the replay's others.
        method, exactness: The method that ran, and what its rule promises; it has made the contexts.
        max_nodes, max_depth: The largest of any tree, root not counted.
        is_paths, has_leaf_probs: As for a ``Drafter``.
        ran: The rule that ran, if it is known.
    """

    settings: tuple[str, ...]
    folder: Path
    method: str
    exactness: str
    temperature: float
    laws: frozenset[DraftSampling]
    max_nodes: int
    max_depth: int
    is_chain: bool = True
    is_paths: bool = True
    has_leaf_probs: bool = True
    ran: Verifier | None = None

    @property
    def label(self) -> str:
        """Which drafts, in words."""
        laws = ", ".join(law.name.lower().replace("_", " ") for law in sorted(self.laws))
        settings = [part for part in self.settings if not part.startswith("drafter.sampling=")]
        return ", ".join([self.method, *settings, laws])


class TracedDrafter(Drafter):
    """Stands for the drafter that made a trace, so that a rule's own check decides whether it fits."""

    def __init__(self, drafts: DraftSet):
        self.max_nodes, self.max_depth = drafts.max_nodes, drafts.max_depth
        self.laws, self.is_chain, self.is_paths = drafts.laws, drafts.is_chain, drafts.is_paths
        self.has_leaf_probs = drafts.has_leaf_probs

    def bind(self, target: Target, sizes: Sizes) -> Session:
        """Not called: nothing is decoded, and the drafts are in the trace."""
        raise NotImplementedError


def find_drafts(folder: Path, settings: Sequence[str] = (), ran: Verifier | None = None) -> list[DraftSet]:
    """The drafts in a run's trace, by method and temperature.

    Args:
        settings: Overrides that tell its drafts from other runs'.
    """
    found: dict[tuple[str, str, float], DraftSet] = {}
    for shard in read_trace(folder, tables=False):
        for row, key in enumerate(shard.keys):
            own = key.method, key.exactness, key.temperature
            if own not in found:
                none = {"laws": frozenset(), "max_nodes": 0, "max_depth": 0}
                found[own] = DraftSet(tuple(settings), folder, *own, **none, ran=ran)
            known, parents, valid = found[own], shard.of("parents", row), shard.of("valid", row)
            drafted, depth = valid & (parents >= 0), shard.depths(row)
            children = np.bincount(parents[drafted], minlength=len(parents))
            leaves = depth[drafted & (children == 0)]
            found[own] = replace(
                known,
                laws=known.laws | {DraftSampling(law) for law in shard.of("law", row)[drafted].tolist()},
                is_chain=known.is_chain and bool((children <= 1).all()),
                is_paths=known.is_paths and bool((children[1:] <= 1).all() and (leaves == depth.max()).all()),
                has_leaf_probs=known.has_leaf_probs and bool((shard.of("rest_q", row)[valid] >= 0).all()),
                max_nodes=max(known.max_nodes, int(drafted.sum())),
                max_depth=max(known.max_depth, int(depth.max())),
            )
    return list(found.values())


def refusal(verifier: Verifier, drafts: DraftSet) -> str | None:
    """Why a rule is not to be asked about these drafts; None if it is."""
    shared = drafts.ran is not None and drafts.ran.noise is Noise.SHARED
    name = type(verifier).__name__
    if shared and verifier.noise is not Noise.SHARED:
        return f"{name} asks for p, and the trace has the tokens that the target had drawn: trace another rule's run"
    if verifier.noise is Noise.SHARED and not shared:
        return f"{name} asks for the tokens that the target draws with shared noise, and the trace has p: trace its run"
    if drafts.temperature < GREEDY_BELOW and drafts.ran is not None and drafts.ran.needs_leaf_probs:
        if not verifier.needs_leaf_probs:
            return f"{name} asks for p at temperature 0, and the trace has it at 1, for {type(drafts.ran).__name__}"
    elif drafts.temperature < GREEDY_BELOW and verifier.needs_leaf_probs and drafts.ran is not None:
        return f"{name} asks for p and q at temperature 1, and the trace has them at 0: trace its run"
    try:
        verifier.check(TracedDrafter(drafts))
    except ValueError as error:
        return str(error)
    return None
