"""For drafters that look up: draft trees from the host, and sessions that know how good a draft is before its round."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int

from specdec.arguments import whole
from specdec.batch import Batch
from specdec.interfaces import Drafter, Session, Sizes
from specdec.requests import SamplingParams
from specdec.shape import MOST_NODES
from specdec.target.target import Target
from specdec.topology import Topology
from specdec.tree import DraftTree


def nodes_of_draft(name: str, value: object) -> int:
    """Return the checked number of a draft's nodes."""
    nodes = whole(name, value, least=1)
    if nodes > MOST_NODES:
        raise ValueError(f"{name}={nodes}: a tree may have at most {MOST_NODES:,} nodes")
    return nodes


@dataclass
class Draft:
    """Tokens that may follow a sequence.

    Attributes:
        tokens: The token of every node, parents before children.
        parents: The parent of each: -1 for the root, else a place in ``tokens``.
        score: How many of them are expected to be accepted.
        match: The number of tokens that the draft follows.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0
    match: int = 0

    @classmethod
    def path(cls, tokens: list[int], *, score: float, match: int) -> "Draft":
        return cls(tokens, list(range(-1, len(tokens) - 1)), score, match)

    @classmethod
    def merged(cls, branches: Iterable[Iterable[int]]) -> "Draft":
        draft, known = cls(), dict[tuple[int, int], int]()
        for branch in branches:
            node = -1
            for token in branch:
                if (node, token) not in known:
                    known[node, token] = draft.add(token, node)
                node = known[node, token]
        return draft

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class RatedSession(Session):
    """A session that can say how many tokens of its next draft it expects to be accepted."""

    @abstractmethod
    def rate(self, batch: Batch) -> Float[np.ndarray, " batch"]: ...


class RatedDrafter(Drafter):
    """A drafter whose sessions rate their drafts. ``ChoiceDrafter`` asks whether its draft or a model's is better."""

    runs = "nothing"

    @abstractmethod
    def bind(self, target: Target, sizes: Sizes) -> RatedSession: ...


class LookUpSession(RatedSession):
    """A session that looks up on the host, row by row, and keeps a row's draft until its sequence has grown."""

    reads_host = True
    lookback = 0

    def __init__(self, drafter: RatedDrafter, sizes: Sizes):
        self._is_chain, self._max_depth = drafter.is_chain, drafter.max_depth
        self._found: list[tuple[Draft, int, int]] = [(Draft(), 0, 0)] * sizes.max_batch_size

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._found[slot] = Draft(), 0, 0

    def read(self, slot: int, sequence: Int[np.ndarray, " position"]) -> None:
        """Take note of what is new of a sequence, root included, before any row of the batch is drafted for."""

    @abstractmethod
    def draft(self, slot: int, sequence: Int[np.ndarray, " position"], depth: int) -> Draft: ...

    def rate(self, batch: Batch) -> Float[np.ndarray, " batch"]:
        return np.array([draft.score for draft in self._drafts(batch)])

    def propose(self, batch: Batch) -> DraftTree:
        drafts = self._drafts(batch)
        if not any(draft.tokens for draft in drafts):
            return DraftTree.root_only(batch.roots)
        roots = batch.on_host.tokens[np.arange(len(batch)), batch.on_host.lengths]
        if not self._is_chain:
            return trees(roots, drafts, batch.device)
        branches = np.full((len(drafts), self._max_depth), -1, dtype=np.int64)
        for row, draft in enumerate(drafts):
            branches[row, : len(draft.tokens)] = draft.tokens
        return chains(roots, branches, batch.device)

    def _drafts(self, batch: Batch) -> list[Draft]:
        host, drafts = batch.on_host, [Draft()] * len(batch)
        asked = []
        for row in np.flatnonzero(host.drafting & (host.max_depth > 0)).tolist():
            slot, sequence = int(host.slots[row]), host.tokens[row, : host.lengths[row] + 1]
            self.read(slot, sequence)
            asked.append((row, slot, sequence))
        for row, slot, sequence in asked:  # after all rows have been read, so that their order does not matter
            length, depth = len(sequence), min(int(host.max_depth[row]), self._max_depth)
            if self._found[slot][1:] != (length, depth):
                self._found[slot] = self.draft(slot, sequence, depth), length, depth
            drafts[row] = self._found[slot][0]
        return drafts


def chains(roots: Int[np.ndarray, " batch"], paths: Int[np.ndarray, "batch depth"], device: torch.device) -> DraftTree:
    """Return one branch per row (-1 padded, at least one token); its width is a power of two, to be captured."""
    sizes = (paths >= 0).sum(1)
    width = min(1 << (int(sizes.max()) - 1).bit_length(), paths.shape[1])
    tokens = np.concatenate([roots[:, None], paths[:, :width].clip(min=0)], axis=1, dtype=np.int64)
    valid = None
    if sizes.min() < width:
        valid = torch.from_numpy(np.arange(width + 1) <= sizes[:, None]).to(device, non_blocking=True)
    drafted = torch.from_numpy(tokens).to(device, non_blocking=True)
    return DraftTree.of_topology(Topology.chain(width + 1, device), drafted, valid=valid)


def trees(
    roots: Int[np.ndarray, " batch"],
    drafts: Sequence[Draft],
    device: torch.device,
    valid: Sequence[int] | None = None,
) -> DraftTree:
    """Return one tree per row, in as few columns as the rows need.

    ``valid`` is how many of each row's tokens may be accepted, the first ones; None for all.
    """
    sizes = np.array([len(each.tokens) for each in drafts])
    counts = sizes if valid is None else np.array(valid)
    columns = np.arange(int(sizes.max()))
    drafted = columns < sizes[:, None]
    # Tokens, parents and validity in one array, which is one copy to the device.
    packed = np.zeros((3, len(drafts), 1 + drafted.shape[1]), dtype=np.int64)
    packed[0, :, 1:][drafted] = np.concatenate([np.asarray(each.tokens, dtype=np.int64) for each in drafts])
    packed[1, :, 1:][drafted] = 1 + np.concatenate([np.asarray(each.parents, dtype=np.int64) for each in drafts])
    packed[2, :, 1:] = columns < counts[:, None]
    packed[0, :, 0], packed[1, :, 0], packed[2, :, 0] = roots, -1, 1
    ids, above, accepted = torch.from_numpy(packed).to(device, non_blocking=True).unbind()
    kept = [each.parents[:count] for each, count in zip(drafts, counts, strict=True) if count]
    return DraftTree.build(
        ids,
        above,
        valid=accepted.bool(),
        max_depth=max((_depth(each.parents) for each in drafts), default=0),
        max_children=int(max((np.bincount(1 + np.asarray(row)).max() for row in kept), default=0)),
    )


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
