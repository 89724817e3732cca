"""Values made of tensors, such as draft trees, as plain tensors and back: what recorded stages take and return."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.shape import TreeShape
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_SMALL = 16
_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


@dataclass(frozen=True)
class TreeKind:
    """All that the host knows of a batch of trees (see ``Kind``).

    Attributes:
        topology: The topology of a static shape, which is made once; None if every row has its own.
        max_depth: See ``DraftTree``.
        max_children: See ``DraftTree``.
        whole: Whether the shape is static and all nodes are valid.
        has_probs: Whether there is q.
        only_law: The law of all nodes, if the host knows it.
    """

    topology: Topology | None
    max_depth: int
    max_children: int
    whole: bool
    has_probs: bool
    only_law: DraftSampling | None

    @classmethod
    def of(cls, tree: DraftTree) -> "TreeKind":
        """Returns the kind of some trees."""
        return cls(
            topology=tree.topology if tree.is_static else None,
            max_depth=tree.max_depth,
            max_children=tree.max_children,
            whole=tree.is_whole,
            has_probs=tree.draft_probs is not None,
            only_law=tree.only_law,
        )

    def parts(self, tree: DraftTree) -> list[Tensor]:
        """Returns the tensors of a tree of this kind."""
        parts = [tree.tokens]
        if self.only_law is None:
            parts.append(tree.law)
        if self.topology is None:
            parts.append(tree.topology.parents)
        if not self.whole:
            parts.append(tree.valid)
        if tree.draft_probs is not None:
            parts.append(tree.draft_probs)
        return parts

    def tree(self, parts: Iterator[Tensor]) -> DraftTree:
        """Returns a tree of these tensors."""
        tokens = next(parts)
        law = next(parts) if self.only_law is None else self.only_law
        parents = None if self.topology is not None else next(parts)
        valid = None if self.whole else next(parts)
        probs = next(parts) if self.has_probs else None
        if self.topology is not None:
            return DraftTree.of_topology(self.topology, tokens, sampling=law, valid=valid, draft_probs=probs)
        assert parents is not None
        return DraftTree.build(
            tokens,
            parents,
            sampling=law,
            valid=valid,
            draft_probs=probs,
            max_depth=self.max_depth,
            max_children=self.max_children,
        )


class Kind(NamedTuple):
    """All of a value but its tensors: its class, what its parts are called, and their kinds.

    Two values of one kind and of tensors of the same shapes take the same operations.
    """

    type: type
    names: tuple[Any, ...] | None
    parts: tuple[Hashable, ...]


def taken_apart(value: Any, tensors: list[Tensor]) -> Hashable:
    """Returns the kind of a value, and adds its tensors to a list.

    Values are trees, other dataclasses, mappings, tuples and lists of such; anything else is a constant of the kind.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, DraftTree):
        kind = TreeKind.of(value)
        tensors += kind.parts(value)
        return kind
    if isinstance(value, (tuple, list)):
        return Kind(type(value), None, tuple([taken_apart(part, tensors) for part in value]))
    if isinstance(value, Mapping):
        return Kind(dict, tuple(value), tuple([taken_apart(part, tensors) for part in value.values()]))
    if is_dataclass(value):
        names = _names(type(value))
        return Kind(type(value), names, tuple([taken_apart(getattr(value, name), tensors) for name in names]))
    return value


def builder(kind: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Returns a function from the tensors of a value to the value: made once for a recording, called every round."""
    if kind is Tensor:
        return next
    if isinstance(kind, TreeKind):
        return kind.tree
    if not isinstance(kind, Kind):
        return lambda tensors: kind
    make, names, parts = kind.type, kind.names, [builder(part) for part in kind.parts]
    if names is None:
        return lambda tensors: make([part(tensors) for part in parts])
    named = list(zip(names, parts, strict=True))
    if make is dict:
        return lambda tensors: {name: part(tensors) for name, part in named}
    return lambda tensors: make(**{name: part(tensors) for name, part in named})


_Value = TypeVar("_Value")


def with_tensors(value: _Value, change: Callable[[Tensor], Tensor]) -> _Value:
    """Returns a value with all of its tensors changed."""
    tensors: list[Tensor] = []
    kind = taken_apart(value, tensors)
    return builder(kind)(map(change, tensors))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def bucketed(tree: DraftTree, *, max_nodes: int, max_depth: int) -> DraftTree:
    """Returns the trees padded to one of few sizes, so that what is done with them can be recorded and replayed.

    Trees of a static shape come in few sizes anyway, and stay as they are.

    Args:
        max_nodes: The drafter's.
        max_depth: The drafter's.
    """
    if tree.is_static:
        return tree
    width = 1 + min(size_for(tree.width - 1), max_nodes)
    depth, children = min(_power(tree.max_depth), max_depth, width - 1), min(_power(tree.max_children), width - 1)
    if (width, depth, children) == (tree.width, tree.max_depth, tree.max_children):
        return tree
    return tree.padded(width, max_depth=max(depth, tree.max_depth), max_children=max(children, tree.max_children))


def settled(tree: DraftTree, nodes: int | None = None, *, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
    """Returns the trees padded to one of very few kinds, for a device to which a few nodes more cost nothing.

    Whatever is drafted on the host, all rounds are then recorded before requests run: chains where the drafter drafts
    chains alone, other trees, and no drafts at all.

    Args:
        nodes: The least number of drafted nodes that there is room for; None for as many as there are.
        max_nodes: The drafter's.
        max_depth: The drafter's.
        is_chain: Whether it drafts chains alone.
    """
    nodes = tree.width - 1 if nodes is None else nodes
    if not nodes:
        return tree
    width = 1 + settled_size(nodes, max_nodes)
    if not (is_chain and tree.in_line):
        return tree.padded(width, max_depth=min(max_depth, width - 1), max_children=width - 1)
    more = width - tree.width
    return DraftTree.from_shape(
        TreeShape.chain(width - 1),
        torch.cat([tree.tokens, tree.tokens[:, :1].expand(-1, more)], dim=1),
        sampling=pad(tree.law, (0, more)) if tree.only_law is None else tree.only_law,
        valid=pad(tree.valid, (0, more)),
        draft_probs=None if tree.draft_probs is None else pad(tree.draft_probs, (0, 0, 0, more)),
    )


def settled_size(nodes: int, most: int) -> int:
    """Returns the size that batches of ``nodes`` drafted nodes are padded to: 16, 32, 64 …, or ``most``."""
    return min(max(_power(nodes), _SMALL), most)


def size_for(nodes: int) -> int:
    """Returns the next of the sizes that batches of trees are padded to; each is at most a quarter above the last."""
    return next((size for size in _SIZES if size >= nodes), -(-nodes // 16) * 16)


def common_sizes(nodes: int) -> list[int]:
    """Returns the numbers of nodes that drafts of at most ``nodes`` nodes usually have, in ascending order.

    Chains may have any length; other trees are padded (``size_for``).
    """
    return sorted({size for size in (*range(1, _SMALL + 1), *_SIZES) if size < nodes} | {nodes})


def _power(number: int) -> int:
    """Returns the next power of two."""
    return 1 << max(number - 1, 0).bit_length()
