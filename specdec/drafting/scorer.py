"""Scorers of the tokens that may follow the nodes of a growing draft tree, and the levels of a static one."""

from abc import ABC
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdec.batch import Batch
from specdec.cache.storage import Cache
from specdec.forward import ForwardBatch, Wants
from specdec.shape import TreeShape
from specdec.target.runner import ModelRunner
from specdec.topology import Topology
from specdec.types import Outcome

Logits = Float[Tensor, "batch node vocab"]
LevelScores = Callable[[Int[Tensor, "batch node"], Topology | None, int], Float[Tensor, "batch some vocab"]]


class Scorer:
    """Gives logits for the children of a draft tree's nodes, level by level, and follows what becomes final.

    A tree builder asks for one tree at a time: ``prepare``, ``root_logits``, then ``level_logits`` level by level. All
    but ``admit``, ``prepare``, ``skip`` and ``release`` may be recorded and replayed without its Python.

    Attributes:
        per_depth: Whether the logits depend on the depth alone; it then has ``all_logits`` in place of the other two.
        cheap_levels: Whether a level's logits take no forward of a model, unless all depths have the same ones.
        max_depth: The deepest node that it can score the tokens of; None without a limit.
        has_confidence: Whether it predicts acceptance (``confidence``).
        vocab_size: The number of columns of its logits.
        needs_state: Whether it reads the target's states, so that rows in which no token is committed get no drafts.
    """

    per_depth: bool = False
    cheap_levels: bool = False
    max_depth: int | None = None
    has_confidence: bool = False
    needs_state: bool = False
    vocab_size: int
    model: ModelRunner | nn.Module | None = None
    caches: tuple[Cache, ...] = ()
    lookback: int | None = None

    @property
    def models(self) -> tuple[ModelRunner | nn.Module, ...]:
        return () if self.model is None else (self.model,)

    def root_logits(self, batch: Batch) -> Float[Tensor, "batch 1 vocab"]:
        raise NotImplementedError

    def level_logits(self, batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, depth: int) -> Logits:
        """Return logits for the children of some nodes of one depth, the last ones of all that it was shown."""
        raise NotImplementedError

    def all_logits(self, batch: Batch, depth: int) -> Float[Tensor, "batch depth vocab"]:
        raise NotImplementedError

    def levels(self, batch: Batch, depth: int) -> LevelScores:
        """Return a function to be called for every level in turn; one node's logits serve all if ``per_depth``."""
        if self.per_depth:
            marginals = self.all_logits(batch, depth)
            return lambda tokens, topology, level: marginals[:, level : level + 1]

        def scores(tokens: Tensor, topology: Any, level: int) -> Tensor:
            return self.level_logits(batch, tokens, topology, level) if level else self.root_logits(batch)

        return scores

    def confidence(self, tokens: Int[Tensor, "batch node"], depth: int) -> Float[Tensor, "batch node"] | None:
        """Return how likely a child of each scored node is to be accepted if the node is; None if nothing is known."""
        return None

    def admit(self, slot: int, length: int) -> None:
        """Begin a request in an empty slot, of which so many tokens are observed before its first round."""

    def held(self, slot: int, length: int) -> int:
        return length

    def release(self, slot: int) -> None: ...

    def observe(self, outcome: Outcome, nodes: Int[Tensor, "batch depth"] | None) -> None:
        """Take note of tokens that have become final, those of a round if the outcome has a path.

        ``nodes`` are then the numbers under which it was shown the path's nodes, -1 for none; None for 1, 2, 3, …
        """

    def prepare(self, batch: Batch) -> Hashable:
        """Do on the host what must come before a tree is grown; return everything that its recording depends on."""
        return None

    def skip(self, batch: Batch) -> None:
        """Note that no tree is grown in this round, which is not recorded."""


class Follower(Scorer, ABC):
    """Scores with a model that follows the target; the last token of ``slots`` slots is kept."""

    def __init__(self, runner: ModelRunner, *, slots: int = 0):
        self.model, self.runner, self.vocab_size = runner, runner, runner.vocab_size
        self.caches = (runner.cache,)
        with torch.inference_mode(False):
            self._last_token = torch.zeros(slots, dtype=torch.long, device=runner.device)

    def prepare(self, batch: Batch) -> Hashable:
        return self.runner.version

    def keep_last(self, outcome: Outcome) -> None:
        slots = outcome.slots
        self._last_token[slots] = outcome.last_tokens.where(outcome.counts > 0, self._last_token[slots])

    def read(self, tokens: Int[Tensor, "batch position"], slots: Tensor, starts: Tensor, **more: Any) -> None:
        chain = Topology.chain(tokens.shape[1], tokens.device)
        inputs: Any = {"tokens": tokens, "slots": slots, "lengths": starts, "topology": chain, **more}
        self.runner.run(ForwardBatch(wants=Wants(logits=0), **inputs))


def forward_of(
    batch: Batch, tokens: Int[Tensor, "batch node"], topology: Topology, lengths: Tensor | None = None, **more: Any
) -> ForwardBatch:
    """Return a forward of some nodes of a batch's rows, behind as many positions as are committed or ``lengths``."""
    given = {"slots": batch.slots, "lengths": batch.lengths if lengths is None else lengths, "topology": topology}
    return ForwardBatch(tokens=tokens, **{"key_bound": batch.key_bound, **given, **more})


class Level:
    """One level of a shape.

    Attributes:
        topology: The topology of all nodes before ``stop``, of which those from ``start`` on are forwarded.
        parents: The nodes of this depth that have children; with ``leaves``, all nodes of this depth.
        rows: Which of the forwarded nodes are parents; None if all are.
        children_at: All their children, which always stand side by side.
        parent_of: Each child's parent as a node; ``row_of`` as an index into ``parents``.
        chosen_of: The rank that the shape's path gives each child; below ``most`` ranks, some of which may be left out.
        width: The largest number of children of a parent; 0 at the last level, which exists only with ``leaves``.
    """

    def __init__(self, shape: TreeShape, depth: int, device: torch.device, *, leaves: bool):
        parents = [node for node, d in enumerate(shape.depths) if d == depth and (leaves or shape.children[node])]
        self.depth = depth
        family = [(child, row, rank) for row, p in enumerate(parents) for rank, child in enumerate(shape.children[p])]
        family.sort()
        self.start, self.stop = parents[0], parents[-1] + 1
        self.width = max(len(shape.children[parent]) for parent in parents)
        self.one_each = all(len(shape.children[parent]) == 1 for parent in parents)
        index = partial(torch.tensor, dtype=torch.long, device=device)
        self.topology = Topology.of_shape(shape, device).first(self.stop)
        self.parents = index(parents)
        self.rows = None if len(parents) == self.stop - self.start else self.parents - self.start
        first = family[0][0] if family else 0
        self.children_at = slice(first, first + len(family))
        self.row_of = index([row for _, row, _ in family])
        self.rank_of = index([rank for _, _, rank in family])
        ranks = [shape.ranks[child] for child, _, _ in family]
        self.chosen_of, self.most = index(ranks), 1 + max(ranks, default=0)
        self.parent_of = self.parents[self.row_of]


class LevelPlan:
    """A shape's levels and index tensors, made once; ``rank_of`` has every node's rank among its siblings."""

    def __init__(self, shape: TreeShape, device: torch.device, *, leaves: bool = False):
        self.shape = shape
        with torch.inference_mode(False):
            self.levels = [Level(shape, depth, device, leaves=leaves) for depth in range(shape.max_depth + leaves)]
            ranks = [each.rank_of for each in self.levels]
            self.rank_of = nn.functional.pad(torch.cat(ranks), (1, 0))[None]

    @classmethod
    def by_depth(cls, shape: TreeShape, device: torch.device, *, leaves: bool = False) -> dict[int, "LevelPlan"]:
        return {depth: cls(shape.cut(depth), device, leaves=leaves) for depth in range(1, shape.max_depth + 1)}
