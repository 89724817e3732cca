"""The nodes of a suffix tree, whose children stand in line: the more frequent first."""

from collections.abc import Iterator


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
        text: A text in which the edge occurs.
        start: Where.
        length: The number of tokens of the edge; at least 1, except for the root's.
        count: How often the string down to the edge's first token occurs.
        parent: The node above.
        children: The nodes below, by the first tokens of their edges; None for a leaf.
        best: The first of the children in their order: the larger count first (``Level``).
        last: The last of them.
        ahead: The sibling before this node in that order.
        after: The sibling behind it.
        level: The siblings with the same count.
        inside: The cursors that stand in the edge, before its end.
    """

    __slots__ = (
        "after", "ahead", "best", "children", "count", "inside", "last", "length", "level", "parent", "start", "text",
    )  # fmt: skip

    def __init__(self, text: Text, start: int, length: int, count: int, parent: "Node | None") -> None:
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

    def in_order(self) -> "Iterator[Node]":
        """Return the children, the most frequent first."""
        child = self.best
        while child is not None:
            yield child
            child = child.after

    def rise(self) -> None:
        """Count the node once more, and let it take its new place among its siblings."""
        ahead, after = self.ahead, self.after
        if ahead is not None and ahead.count <= self.count + 1:
            place = ahead.level.first
            self.step_out()
            self.count += 1
            self.stand_before(place)
            return
        if after is not None and after.count == self.count:
            self.level.first = after
            self.level = Level(self)
        self.count += 1

    def fall(self) -> None:
        """Count the node once less, and let it take its new place: the first of those that have its count now."""
        after = self.after
        while after is not None and after.count == self.count:
            after = after.after
        self.step_out()
        self.count -= 1
        if after is None:
            assert self.parent is not None, "it has a parent, as every node that occurs"
            self.stand_behind(self.parent.last)
        else:
            self.stand_before(after)

    def step_out(self) -> None:
        """Take the node out of the line of its siblings."""
        ahead, after, parent = self.ahead, self.after, self.parent
        assert parent is not None, "the root has no siblings"
        if self.level.first is self and after is not None and after.count == self.count:
            self.level.first = after
        if after is None:
            parent.last = ahead
        else:
            after.ahead = ahead
        if ahead is None:
            parent.best = after
        else:
            ahead.after = after

    def stand_before(self, after: "Node") -> None:
        """Put the node into the line before a sibling."""
        ahead, parent = after.ahead, self.parent
        assert parent is not None, "the root has no siblings"
        self.ahead, self.after, after.ahead = ahead, after, self
        if ahead is None:
            parent.best = self
        else:
            ahead.after = self
        if ahead is not None and ahead.count == self.count:
            self.level = ahead.level
        elif after.count == self.count:
            self.level = after.level
            self.level.first = self
        else:
            self.level = Level(self)

    def stand_behind(self, ahead: "Node | None") -> None:
        """Put the node behind the last of its siblings, or make it the only child."""
        assert self.parent is not None, "the root has no siblings"
        self.ahead, self.after, self.parent.last = ahead, None, self
        if ahead is None:
            self.parent.best = self
        else:
            ahead.after = self
        self.level = ahead.level if ahead is not None and ahead.count == self.count else Level(self)

    def give_place(self, new: "Node") -> None:
        """Give the node's place in the line to another one with its count."""
        parent = self.parent
        assert parent is not None, "the root has no siblings"
        new.ahead, new.after, new.level = self.ahead, self.after, self.level
        if new.level.first is self:
            new.level.first = new
        if new.ahead is None:
            parent.best = new
        else:
            new.ahead.after = new
        if new.after is None:
            parent.last = new
        else:
            new.after.ahead = new
        self.ahead = self.after = None
        self.level = Level(self)


class Level:
    """The siblings that have one count, which stand in line.

    The order is that of the authors' code (github.com/snowflakedb/ArcticInference, ``suffix_tree.cc``), so that the
    same one of equally frequent tokens is drafted. A new child stands last: of children that occurred once, the one
    that was first stays first. A child that occurs again steps in front of all that it had been equal to, and behind
    those that have its new count already. The first of its level, which they stand next to, steps in front of these.

    Attributes:
        first: The first of them.
    """

    __slots__ = ("first",)

    def __init__(self, first: Node):
        self.first = first


class Cursor:
    """Where a suffix of a text ends in the tree.

    Attributes:
        node: The node in whose edge it ends.
        left: How many tokens of the edge are below it; 0 at the node itself.
        start: Where the suffix begins in its text.
    """

    __slots__ = ("left", "node", "start")

    def __init__(self, node: Node, left: int, start: int) -> None:
        self.node, self.left, self.start = node, left, start
