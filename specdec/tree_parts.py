"""Values made of tensors, such as draft trees, as plain tensors and back: what recorded stages take and return."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from specdec.shape import TreeShape
from specdec.topology import Topology
from specdec.tree import DraftTree
from specdec.types import DraftSampling

_SMALL = 16
_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


class TreeKind(NamedTuple):
    """All that the host knows of a batch of trees (see ``Kind``): its static topology, its bounds, and its tensors."""

    topology: Topology | None
    max_depth: int
    max_children: int
    only_law: DraftSampling | None
    there: tuple[bool, ...]  # of tokens, law, parents, valid marks and q

    def tree(self, tensors: Iterator[Tensor]) -> DraftTree:
        """Returns a tree of this kind."""
        tokens, law, parents, valid, probs = [next(tensors) if there else None for there in self.there]
        assert tokens is not None
        law = law if self.only_law is None else self.only_law
        assert law is not None
        if self.topology is not None:
            return DraftTree.of_topology(self.topology, tokens, sampling=law, valid=valid, draft_probs=probs)
        assert parents is not None
        bounds = {"max_depth": self.max_depth, "max_children": self.max_children}
        return DraftTree.build(tokens, parents, sampling=law, valid=valid, draft_probs=probs, **bounds)


def _tree_apart(tree: DraftTree, tensors: list[Tensor]) -> TreeKind:
    """Returns the kind of some trees, and adds their tensors to a list."""
    static, only_law = tree.is_static, tree.only_law
    parts = (
        tree.tokens,
        tree.law if only_law is None else None,
        None if static else tree.topology.parents,
        None if tree.is_whole else tree.valid,
        tree.draft_probs,
    )
    tensors += [part for part in parts if part is not None]
    there = tuple([part is not None for part in parts])
    return TreeKind(tree.topology if static else None, tree.max_depth, tree.max_children, only_law, there)


class Kind(NamedTuple):
    """All of a value but its tensors: values of one kind and of the same shapes take the same operations."""

    type: type
    names: tuple[Any, ...] | None
    parts: tuple[Hashable, ...]


def taken_apart(value: Any, tensors: list[Tensor]) -> Hashable:
    """Returns the kind of a value, and adds its tensors to a list.

    Trees, other dataclasses, dicts, tuples and lists are taken apart; anything else is a constant of the kind.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    kind = type(value)
    if kind is DraftTree:
        return _tree_apart(value, tensors)
    if kind is tuple or kind is list:
        return Kind(kind, None, _parts(value, tensors))
    if kind is dict:
        return Kind(dict, tuple(value), _parts(value.values(), tensors))
    names = _names(kind)
    return value if names is None else Kind(kind, names, _parts([getattr(value, name) for name in names], tensors))


def _parts(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Hashable, ...]:
    # Written for speed: this runs for every stage of a round, and most parts are tensors, or None.
    kinds: list[Hashable] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            kinds.append(Tensor)
        else:
            kinds.append(None if value is None else taken_apart(value, tensors))
    return tuple(kinds)


def builder(kind: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Returns a function from the tensors of a value to the value: made once for a recording, called every round."""
    if kind is Tensor:
        return next
    if isinstance(kind, TreeKind):
        return kind.tree
    if not isinstance(kind, Kind):
        return lambda tensors: kind
    make, parts = kind.type, [builder(part) for part in kind.parts]
    if kind.names is None:
        return lambda tensors: make([part(tensors) for part in parts])
    fixed = {name: part for name, part in zip(kind.names, kind.parts, strict=True) if part is None}
    moving = [(name, part) for name, part in zip(kind.names, parts, strict=True) if name not in fixed]
    if make is dict:
        return lambda tensors: fixed | {name: part(tensors) for name, part in moving}
    return lambda tensors: make(**fixed, **{name: part(tensors) for name, part in moving})


_Value = TypeVar("_Value")


def with_tensors(value: _Value, change: Callable[[Tensor], Tensor]) -> _Value:
    """Returns a value with all of its tensors changed."""
    tensors: list[Tensor] = []
    kind = taken_apart(value, tensors)
    return builder(kind)(map(change, tensors))


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Returns the names of a dataclass's fields; None for another class."""
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else None


def bucketed(tree: DraftTree, *, max_nodes: int, max_depth: int) -> DraftTree:
    """Returns trees padded to one of few sizes, to be recorded; those of a static shape stay. Bounds: the drafter's."""
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
    chains alone, other trees, and no drafts at all. There is room for at least so many drafted ``nodes``.
    """
    nodes = tree.width - 1 if nodes is None else nodes
    if not nodes:
        return tree
    width = 1 + settled_size(nodes, max_nodes)
    chain = TreeShape.chain(width - 1) if is_chain and tree.in_line else None
    return tree.padded(width, max_depth=min(max_depth, width - 1), max_children=width - 1, shape=chain)


def settled_size(nodes: int, most: int) -> int:
    """Returns the size that drafts of ``nodes`` nodes are padded to by ``settled``: 16, 32, 64 …, or ``most``."""
    return min(max(_power(nodes), _SMALL), most)


def size_for(nodes: int) -> int:
    """Returns the next size that ``bucketed`` pads to; each is at most a quarter above the last."""
    return next((size for size in _SIZES if size >= nodes), -(-nodes // 16) * 16)


def common_sizes(nodes: int) -> list[int]:
    """Returns the numbers of nodes that drafts of at most ``nodes`` nodes usually have, ascending."""
    return sorted({size for size in (*range(1, _SMALL + 1), *_SIZES) if size < nodes} | {nodes})


def _power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
