"""How the nodes of a static shape may be taken together: tables made once per shape, so that no round makes them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.topology import Topology


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes of a static shape that have children, the same in every row of a batch.

    Attributes:
        nodes: The nodes.
        children: Their children in sibling order; 0, the root, where there is none.
        place: Where the group's nodes stand in a table, if they stand side by side: first and last + 1.
        having: How many of the nodes have a child of each rank.
        by_rank: All first children, then all second ones, and so on; only where nodes with more children come first.
        unsorted: Where the entries of ``children`` stand in ``by_rank``, node by node; one past the end for no child.
        last_first: The children of each rank, last rank first; 0, the root, where there is none.
        filled: The same with a node's first child where there is none.
        missing: Where there is none; None if every node has a child of every rank.
        start: 1 for every node's first child, 0 for what comes before it and for later children.
    """

    nodes: Int[Tensor, " some"]
    children: Int[Tensor, "some rank"]
    place: tuple[int, int] | None
    having: tuple[int, ...]
    by_rank: Int[Tensor, " child"]
    unsorted: Int[Tensor, " entry"]
    last_first: Int[Tensor, "rank some"]
    filled: Int[Tensor, "rank some"]
    missing: Bool[Tensor, "rank some"] | None
    start: Float[Tensor, "rank1 some"]


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one depth that have children, and those children, which stand side by side.

    Attributes:
        nodes: The nodes, those with most children first.
        siblings: Those of them with several children; None if there are none.
        columns: Where the nodes stand in ``Groups.parents_in_turn``: first and last + 1.
        places: Where ``siblings`` stand in ``Groups.siblings_in_turn``.
        first: The first of the children.
        last: One past the last of them.
        above: Their parents, as they stand in the tree.
        one_each: Whether the parents stand side by side, and each has one child.
        picks: As ``Groups.picks``, but for the children alone, without the sums after all of them.
    """

    nodes: Group
    siblings: Group | None
    columns: slice
    places: slice
    first: int
    last: int
    above: Int[Tensor, " child"]
    one_each: bool
    picks: Int[Tensor, " place"]


@dataclass(frozen=True, eq=False)
class Groups:
    """How the nodes of a static shape may be taken together.

    Attributes:
        parents: All nodes that have children, those with most of them first.
        siblings: The nodes with several children, those with most of them first; None if there are none.
        levels: The nodes that have children, depth by depth; within a depth those with most of them first.
        descent: The same nodes with their children, for rules that go down level by level.
        parents_in_turn: The nodes of all levels, one level after the other.
        siblings_in_turn: Those of them with several children; None if there are none.
        ends_in_turn: As ``picks``, in the order of ``parents_in_turn``: the sums after every node's children.
        drafted: Which nodes are drafted: all but the root.
        above: The parent of every node; the root's own is the root.
        earlier: ``earlier[i, j]``: node j is an earlier sibling of node i.
        has_child: Which nodes have a child.
        first_child: The first child of every node; 0 where there is none.
        place_among_siblings: Where every node stands in ``siblings``; -1 if it is not there.
        in_turn: The nodes of all ``levels``, one level after the other.
        place_among_parents: Where every node stands in ``in_turn``; 0 if it is not there.
        strictly_above: ``strictly_above[i, j]``: node j is above node i.
        no_factor: If siblings are tried in turn, the probability that a path ends at a node is a product: of accepting
            it and each node above it but the root, and of rejecting their earlier siblings and its own children.
            ``no_factor[i, 0, j]``: accepting node j is not a part of that of node i; ``no_factor[i, 1, j]``: nor is
            rejecting it.
        not_earlier: ``not_earlier[i, j]``: node j does not come before node i in post-order: it is not below it, nor
            below or at an earlier sibling of it or of a node above it.
        picks: Where the numbers of every node stand in the table of ``verifiers.thresholds``, if it is flattened: those
            before its turn, those taken at its turn, and those after its children.
        signs: 1 and -1.
        zero: 0, on the device. A number from Python would be copied there in every round.
        infinite: Infinity.
        offsets: 0 and 1. With a probability c, ``offsets + signs c`` is c and 1 - c.
    """

    parents: Group
    siblings: Group | None
    levels: tuple[Group, ...]
    descent: tuple[Level, ...]
    parents_in_turn: Group
    siblings_in_turn: Group | None
    ends_in_turn: Int[Tensor, " end"]
    drafted: Bool[Tensor, " node"]
    above: Int[Tensor, " node"]
    earlier: Bool[Tensor, "node node"]
    has_child: Bool[Tensor, " node"]
    first_child: Int[Tensor, " node"]
    place_among_siblings: Int[Tensor, " node"]
    in_turn: Int[Tensor, " parent"]
    place_among_parents: Int[Tensor, " node"]
    strictly_above: Bool[Tensor, "node node"]
    no_factor: Bool[Tensor, "node 2 node"]
    not_earlier: Bool[Tensor, "node node"]
    picks: Int[Tensor, " place"]
    signs: Float[Tensor, "2 1"]
    offsets: Float[Tensor, "2 1"]
    zero: Float[Tensor, ""]
    infinite: Float[Tensor, ""]


@lru_cache(maxsize=1024)
def groups_of(topology: Topology) -> Groups:
    """Returns the groups of a static topology; made once, so that no round looks at parents or copies an index."""
    parents = topology.parents[0].tolist()
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    device = topology.parents.device

    def group(nodes: list[int]) -> Group:
        most = max((len(children[node]) for node in nodes), default=0)
        table = [[*children[node], *[0] * (most - len(children[node]))] for node in nodes]
        by_rank = [children[node][rank] for rank in range(most) for node in nodes if len(children[node]) > rank]
        at = {child: place for place, child in enumerate(by_rank)}
        unsorted = [at.get(child, len(by_rank)) for row in table for child in row]
        filled = [[(children[node] + children[node][:1] * most)[rank] for node in nodes] for rank in range(most)][::-1]
        missing = [[len(children[node]) <= rank for node in nodes] for rank in range(most)][::-1]
        side_by_side = bool(nodes) and nodes == list(range(nodes[0], nodes[-1] + 1))
        with torch.inference_mode(False):
            return Group(
                nodes=torch.tensor(nodes, dtype=torch.long, device=device),
                children=torch.tensor(table, dtype=torch.long, device=device).view(len(nodes), most),
                place=(nodes[0], nodes[-1] + 1) if side_by_side else None,
                having=tuple(sum(len(children[node]) > rank for node in nodes) for rank in range(most)),
                by_rank=torch.tensor(by_rank, dtype=torch.long, device=device),
                unsorted=torch.tensor(unsorted, dtype=torch.long, device=device),
                start=torch.tensor([[float(rank == 0)] * len(nodes) for rank in range(-1, most)], device=device),
                last_first=torch.tensor(table, dtype=torch.long, device=device)
                .view(len(nodes), most)
                .T.flip(0)
                .contiguous(),
                filled=torch.tensor(filled, dtype=torch.long, device=device).view(most, len(nodes)),
                missing=torch.tensor(missing, device=device) if any(map(any, missing)) else None,
            )

    having = [node for node in range(len(parents)) if children[node]]
    fullest_first = sorted(having, key=lambda node: -len(children[node]))
    by_level = [[node for node in fullest_first if depth[node] == level] for level in range(max(depth))]
    several = [node for node in fullest_first if len(children[node]) > 1]
    in_turn = [node for level in by_level for node in level]
    several_in_turn = [node for node in in_turn if len(children[node]) > 1]
    before, taken, after = _picks(parents, children, in_turn)

    def numbers(values: list[int]) -> Int[Tensor, " number"]:
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.long, device=device)

    def descend(nodes: list[int]) -> Level:
        below = sorted(child for node in nodes for child in children[node])
        above = [parents[child] for child in below]
        more = [node for node in nodes if len(children[node]) > 1]
        assert below == list(range(below[0], below[-1] + 1)), "static shapes number their nodes level by level"
        column, place = in_turn.index(nodes[0]), several_in_turn.index(more[0]) if more else 0
        return Level(
            nodes=group(nodes),
            siblings=group(more) if more else None,
            columns=slice(column, column + len(nodes)),
            places=slice(place, place + len(more)),
            first=below[0],
            last=below[-1] + 1,
            above=numbers(above),
            one_each=above == list(range(above[0], above[-1] + 1)),
            picks=numbers([table[child] for table in (before, taken) for child in below]),
        )

    with torch.inference_mode(False):
        index = torch.arange(len(parents), device=device)
        same = topology.parents[0][:, None] == topology.parents[0]
        earlier = same.tril(-1)
        above = topology.parents[0].clamp(min=0)
        drafted = topology.parents[0] >= 0
        first_child = torch.tensor([(below or [0])[0] for below in children], device=device)
        places = [several.index(node) if node in several else -1 for node in range(len(parents))]
        place_among_siblings = torch.tensor(places, device=device)
        places = [in_turn.index(node) if node in in_turn else 0 for node in range(len(parents))]
        place_among_parents = torch.tensor(places, device=device)
        ancestors = topology.ancestors[0]
        strictly_above = ancestors & ~torch.eye(len(parents), dtype=torch.bool, device=device)
        # Sums of ones and zeros, so exact; booleans have no matrix product.
        left_of_path = (ancestors.double() @ earlier.double()) > 0
        below_left = (left_of_path.double() @ ancestors.T.double()) > 0
        children_too = left_of_path | (topology.parents == index[:, None])
        no_factor = ~torch.stack([ancestors & drafted, children_too], 1)
        first, second, last = _picks(parents, children, fullest_first)
        signs = torch.tensor([[1.0], [-1.0]], device=device)
    return Groups(
        parents=group(fullest_first),
        siblings=group(several) if several else None,
        levels=tuple(group(level) for level in by_level),
        descent=tuple(descend(level) for level in by_level),
        parents_in_turn=group(in_turn),
        siblings_in_turn=group(several_in_turn) if several_in_turn else None,
        ends_in_turn=numbers(after),
        drafted=drafted,
        above=above,
        earlier=earlier,
        has_child=first_child > 0,
        first_child=first_child,
        place_among_siblings=place_among_siblings,
        in_turn=torch.tensor(in_turn, dtype=torch.long, device=device),
        place_among_parents=place_among_parents,
        strictly_above=strictly_above,
        no_factor=no_factor,
        not_earlier=~(below_left | strictly_above.T),
        picks=numbers(first + second + last),
        signs=signs,
        offsets=(1 - signs) / 2,
        zero=torch.zeros((), device=device),
        infinite=torch.full((), torch.inf, device=device),
    )


def _picks(parents: list[int], children: list[list[int]], having: list[int]) -> tuple[list[int], ...]:
    """Returns where every node's three numbers stand in a table of 2 kinds, ranks from -1 on, and the ``having`` nodes.

    The first kind is what is taken at a rank, the second the sum up to and with that rank. The three numbers are:
    the sum before the node's turn, what is taken at its turn, and the sum after its own children.
    """
    if not having:
        return [], [], []
    ranks = max(map(len, children)) + 1
    place = {node: at for at, node in enumerate(having)}

    def at(kind: int, rank: int, node: int) -> int:
        return (kind * ranks + rank + 1) * len(having) + place[node]

    # The root's own numbers are not read, and after a leaf nothing was taken.
    known = [(parent, children[parent].index(node)) for node, parent in enumerate(parents) if parent >= 0]
    above = [(having[0], 0), *known]
    before = [at(1, rank - 1, parent) for parent, rank in above]
    taken = [at(0, rank, parent) for parent, rank in above]
    after = [at(1, ranks - 2, node) if children[node] else at(1, -1, having[0]) for node in range(len(parents))]
    return before, taken, after
