"""A suffix tree with counts, of texts that grow token by token: how often has what followed what?"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from specdec.drafting.lookup import Draft


class Text:
    """A text in a tree, which may still grow.

    Attributes:
        tokens: Its tokens so far.
        cursors: Where its suffixes that occur elsewhere, too, end in the tree: the longest first.
        open: Leaves that it has made and whose edges go on beyond its last token.
    """

    __slots__ = ("cursors", "open", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cursors: list[Cursor] = []
        self.open: list[Node] = []


class Node:
    """A node with the edge above it.

    The edge's tokens are ``text.tokens[start : start + length]``, as far as that text goes.

    Attributes:
        length: The number of tokens of the edge; at least 1, except for the root's.
        count: How often the string down to the edge's first token occurs.
        children: The nodes below, by the first tokens of their edges; None for a leaf.
        best: The first of the children in their order: the larger count first (``Level``).
        last: The last of them.
        ahead: The sibling before this node in that order; ``after`` is the one behind it.
        level: The siblings with the same count.
        inside: The cursors that stand in the edge, before its end.
    """

    __slots__ = (
        "after", "ahead", "best", "children", "count", "inside", "last", "length", "level", "parent", "start", "text",
    )  # fmt: skip

    def __init__(self, text: Text, start: int, length: int, count: int, parent: Any) -> None:
        self.text, self.start, self.length, self.count, self.parent = text, start, length, count, parent
        self.children: dict[int, Node] | None = None
        self.best: Node | None = None
        self.last: Node | None = None
        self.ahead: Node | None = None
        self.after: Node | None = None
        self.level: Level
        self.inside: list[Cursor] | None = None

    def count_at(self, offset: int) -> int:
        """The number of occurrences of the string that ends with token ``offset`` of the edge, from 1."""
        if not self.inside:
            return self.count
        left = self.length - offset
        return self.count - sum(cursor.left > left for cursor in self.inside)

    def rise(self) -> None:
        """Count the node once more, and let it take its new place among its siblings."""
        ahead, after = self.ahead, self.after
        if ahead is not None and ahead.count <= self.count + 1:
            place = ahead.level.first
            self.step_out()
            self.count += 1
            self.stand(place.ahead, place)
            return
        if after is not None and after.count == self.count:
            self.level.first = after
            self.level = Level(self)
        self.count += 1

    def step_out(self) -> None:
        """Take the node out of the line of its siblings."""
        ahead, after = self.ahead, self.after
        if self.level.first is self and after is not None and after.count == self.count:
            self.level.first = after
        if after is None:
            self.parent.last = ahead
        else:
            after.ahead = ahead
        if ahead is None:
            self.parent.best = after
        else:
            ahead.after = after

    def stand(self, ahead: "Node | None", after: "Node | None") -> None:
        """Put the node into the line between two siblings."""
        self.ahead, self.after = ahead, after
        if ahead is None:
            self.parent.best = self
        else:
            ahead.after = self
        if after is None:
            self.parent.last = self
        else:
            after.ahead = self
        if ahead is not None and ahead.count == self.count:
            self.level = ahead.level
        elif after is not None and after.count == self.count:
            self.level = after.level
            self.level.first = self
        else:
            self.level = Level(self)

    def give_place(self, new: "Node") -> None:
        """Give the node's place in the line to another one with its count."""
        new.stand(self.ahead, self.after)
        self.ahead = self.after = None
        self.level = Level(self)


class Level:
    """The siblings that have one count, which stand in line; ``first`` is the first of them.

    The order is that of the authors' code (github.com/snowflakedb/ArcticInference, ``suffix_tree.cc``), so that the
    same one of equally frequent tokens is drafted. A new child stands last. A child that occurs again steps in front of
    all that it had been equal to, and behind those that have its new count already; the first of its level in front.
    """

    __slots__ = ("first",)

    def __init__(self, first: Node):
        self.first = first


class Cursor:
    """The end, in a node's edge, of a text's suffix from ``start`` on; ``left`` tokens of the edge are below it."""

    __slots__ = ("left", "node", "start")

    def __init__(self, node: Node, left: int, start: int) -> None:
        self.node, self.left, self.start = node, left, start


ROUNDED = 1 - 1e-6
"""Relative tolerance for rounding in products of shares: 1/3 · 3/10 is no less than 1/10."""

Point = tuple[Node, int]
"""A place in the tree: a node, and how many tokens of its edge lie above the place."""


class SuffixTree:
    """Counts every string of at most ``depth`` tokens of some texts.

    Edges are compressed: a node is where occurrences of a string part, or where one of them ends for good. Every token
    of a text makes at most two nodes, whatever the depth. To add a token, only those suffixes of the text are touched
    that occurred before: a suffix that is new is a leaf, whose edge reads on in the text by itself. So a token costs as
    many steps as the longest repeated suffix has tokens, and at most ``depth``.

    Args:
        depth: Tokens of the longest string that is counted.

    Attributes:
        tokens: The number of all texts' tokens.
    """

    def __init__(self, depth: int):
        self.depth, self.tokens = depth, 0
        self.root = Node(Text(), 0, 0, 0, None)
        self.root.children = {}

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Add tokens to a text's end."""
        depth, root = self.depth, self.root
        sequence = text.tokens
        for token in tokens:
            place = len(sequence)
            sequence.append(token)
            self.tokens += 1
            text.cursors.append(Cursor(root, 0, place))
            kept: list[Cursor] = []
            for cursor in text.cursors:
                node = cursor.node
                if cursor.left:
                    at = node.start + node.length - cursor.left
                    seen = node.text.tokens
                    if at < len(seen) and seen[at] == token:
                        cursor.left -= 1
                        if not cursor.left and node.inside:
                            node.inside.remove(cursor)
                        if place - cursor.start + 1 < depth:
                            kept.append(cursor)
                        continue
                    node = self._split(cursor, text, place)
                child = None if node.children is None else node.children.get(token)
                if child is None:
                    self._add_leaf(node, token, text, place, place - cursor.start)
                    continue
                child.rise()
                cursor.node, cursor.left = child, child.length - 1
                if cursor.left:
                    if child.inside is None:
                        child.inside = [cursor]
                    else:
                        child.inside.append(cursor)
                if place - cursor.start + 1 < depth:
                    kept.append(cursor)
            text.cursors = kept

    def end(self, text: Text) -> None:
        """Note that a text will not grow any more."""
        place = len(text.tokens)
        for cursor in text.cursors:
            if cursor.left:
                self._split(cursor, text, place)
        text.cursors = []
        for leaf in text.open:
            if leaf.text is text and leaf.start + leaf.length > place:
                beyond = leaf.start + leaf.length - place
                leaf.length -= beyond
                for cursor in leaf.inside or ():
                    cursor.left -= beyond
                leaf.inside = [cursor for cursor in leaf.inside or () if cursor.left] or None
        text.open = []

    def find(self, tokens: Sequence[int]) -> Point | None:
        """Returns where a string ends in the tree; None if it does not occur."""
        node, at, size = self.root, 0, len(tokens)
        while True:
            child = None if node.children is None else node.children.get(tokens[at])
            if child is None:
                return None
            take = min(child.length, size - at)
            if child.text.tokens[child.start : child.start + take] != tokens[at : at + take]:
                return None
            node, at = child, at + take
            if at == size:
                return node, take

    def follow(self, point: Point, most: int, least: float) -> Draft:
        """Return the path of at most ``most`` tokens, no less probable than ``least``, of most frequent tokens."""
        node, offset = point
        score, probability, tokens = 0.0, 1.0, list[int]()
        while len(tokens) < most:
            if offset == node.length:
                child = node.best
                if child is None:
                    break
                probability *= child.count / node.count_at(offset)
                node, offset, take = child, 0, 1
            elif node.inside:
                probability *= node.count_at(offset + 1) / node.count_at(offset)
                take = 1
            else:
                take = min(most - len(tokens), node.length - offset)
            at = node.start + offset
            new = node.text.tokens[at : at + take]
            if probability < least * ROUNDED or not new:
                break
            tokens += new
            score += probability * len(new)
            offset += len(new)
        return Draft.path(tokens, score=score, match=0)

    def branch(self, point: Point, most: int, least: float, deepest: int) -> Draft:
        """Return the tree of the ``most`` most probable nodes, on paths no less probable than ``least``."""
        draft, order = Draft(), 0
        # Among equally probable nodes, the one that was found first.
        heap: list[tuple[float, int, Point, int, int]] = [(-1.0, 0, point, -1, 0)]
        while heap and len(draft.tokens) < most:
            negative, _, (node, offset), above, depth = heappop(heap)
            mine = -1
            if depth:
                mine = len(draft.tokens)
                draft.tokens.append(node.text.tokens[node.start + offset - 1])
                draft.parents.append(above)
                draft.score -= negative
            if depth == deepest:
                continue
            for child, at, share in _steps(node, offset, most - len(draft.tokens)):
                probability = -negative * share
                if probability < least * ROUNDED:
                    break
                order += 1
                heappush(heap, (-probability, order, (child, at), mine, depth + 1))
        return draft

    def _add_leaf(self, node: Node, token: int, text: Text, place: int, depth: int) -> None:
        """Begin an edge below a node whose string has ``depth`` tokens; it reads on in the text by itself."""
        leaf = Node(text, place, self.depth - depth, 1, node)
        if node.children is None:
            node.children = {}
        node.children[token] = leaf
        leaf.stand(node.last, None)
        text.open.append(leaf)
        if len(text.open) > 2 * self.depth:
            text.open = [each for each in text.open if each.text is text and each.start + each.length > place]

    def _split(self, cursor: Cursor, text: Text, place: int) -> Node:
        """Make a node where a cursor stands in an edge; what is below it stays the old node."""
        node, below = cursor.node, cursor.left
        length, parent, depth = node.length - below, node.parent, place - cursor.start
        upper = Node(text, place - length, length, node.count, parent)
        parent.children[text.tokens[upper.start]] = upper
        node.give_place(upper)
        before = [each for each in node.inside or () if each.left >= below]
        node.inside = [each for each in node.inside or () if each.left < below] or None
        for each in before:
            each.node, each.left = upper, each.left - below
        upper.inside = [each for each in before if each.left] or None
        node.count -= len(before)
        node.start, node.length, node.parent = node.start + length, below, upper
        other = node.text
        if node.start == len(other.tokens):
            # The leaf of a text that has come no further: its suffix is no longer the only one.
            other.open.remove(node)
            other.cursors.append(Cursor(upper, 0, node.start - depth))
            other.cursors.sort(key=lambda each: each.start)
            return upper
        upper.children = {other.tokens[node.start]: node}
        upper.best = upper.last = node
        return upper


def _steps(node: Node, offset: int, most: int) -> Iterable[tuple[Node, int, float]]:
    """Returns the places one token below a place, the most frequent first, with their share of its occurrences."""
    here = node.count_at(offset)
    if offset < node.length:
        if node.start + offset == len(node.text.tokens):
            return []
        return [(node, offset + 1, node.count_at(offset + 1) / here)]
    found, child = list[tuple[Node, int, float]](), node.best
    while child is not None and len(found) < most:
        found.append((child, 1, child.count / here))
        child = child.after
    return found
