"""A suffix tree with counts, of texts that grow token by token: how often has what followed what?"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from drafters.suffix_nodes import Cursor, Node, Text
from specdec.drafting.lookup import Draft

ROUNDED = 1 - 1e-6
"""So much smaller a product of shares may be computed: 1/3 · 3/10 is no less than 1/10."""


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
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node(Text(), 0, 0, 0, None)
        self.root.children = {}

    def extend(self, text: Text, tokens: Iterable[int]) -> None:
        """Add tokens to a text's end."""
        depth, root = self.depth, self.root
        sequence = text.tokens
        for token in tokens:
            place = len(sequence)
            sequence.append(token)
            text.cursors.append(Cursor(root, 0, place))
            kept: list[Cursor] = []
            for cursor in text.cursors:
                node = cursor.node
                if cursor.left:
                    at = node.start + node.length - cursor.left
                    seen = node.text.tokens
                    if at < len(seen) and seen[at] == token:
                        cursor.left -= 1
                        if not cursor.left:
                            assert node.inside is not None, "the cursor is in it"
                            node.inside.remove(cursor)
                            # The newest occurrence: when an old text is forgotten, nothing refers to it.
                            node.text, node.start = text, place + 1 - node.length
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
                else:
                    child.text, child.start = text, place
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

    def forget(self, text: Text) -> None:
        """Take a text that has ended out of the counts."""
        tokens = text.tokens
        for start in range(len(tokens)):
            node, at, stop = self.root, start, min(start + self.depth, len(tokens))
            while at < stop:
                assert node.children is not None, "the text's strings are in the tree"
                child = node.children[tokens[at]]
                if child.count == 1:
                    child.step_out()
                    child.count = 0
                    del node.children[tokens[at]]
                    break
                child.fall()
                at += child.length
                node = child
            self._join(node)

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
                return (node, take) if node.count_at(take) else None

    def follow(self, point: Point, most: int, least: float) -> Draft:
        """Returns the path that goes on with the most frequent token every time.

        Args:
            point: Where it begins.
            most: Its length at most.
            least: It ends before its probability would fall below this, which is read up to rounding.
        """
        node, offset = point
        draft, probability, tokens = Draft(), 1.0, []
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
            draft.score += probability * len(new)
            offset += len(new)
        draft.tokens, draft.parents = tokens, list(range(-1, len(tokens) - 1))
        return draft

    def branch(self, point: Point, most: int, least: float, deepest: int) -> Draft:
        """Returns the tree of the most probable paths.

        Args:
            point: Where it begins.
            most: Its number of nodes at most.
            least: No path is less probable, up to rounding.
            deepest: No path is longer.
        """
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
            node.children = {token: leaf}
        else:
            node.children[token] = leaf
        leaf.stand_behind(node.last)
        text.open.append(leaf)
        if len(text.open) > 2 * self.depth:
            text.open = [each for each in text.open if each.text is text and each.start + each.length > place]

    def _split(self, cursor: Cursor, text: Text, place: int) -> Node:
        """Make a node where a cursor stands in an edge; what is below it stays the old node."""
        node, below = cursor.node, cursor.left
        length, parent, depth = node.length - below, node.parent, place - cursor.start
        assert parent is not None and parent.children is not None, "the root has no edge"
        # The pointer to the text that is here now: other occurrences may have been forgotten.
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
        if not node.count:
            return upper  # what was below has been forgotten
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

    def _join(self, node: Node) -> None:
        """Take a node out at which nothing ends and nothing parts any more."""
        if node.parent is None or node.inside or not node.children or len(node.children) > 1:
            return
        (child,) = node.children.values()
        if child.count != node.count:
            return
        assert node.parent.children is not None, "it is one of them"
        node.parent.children[node.text.tokens[node.start]] = child
        node.give_place(child)
        child.parent = node.parent
        child.start, child.length = child.start - node.length, child.length + node.length


def _steps(node: Node, offset: int, most: int) -> Iterable[tuple[Node, int, float]]:
    """Returns the places one token below a place, the most frequent first, with their share of its occurrences."""
    here = node.count_at(offset)
    if not here or not most:
        return []
    if offset < node.length:
        if node.start + offset == len(node.text.tokens):
            return []
        return [(node, offset + 1, node.count_at(offset + 1) / here)]
    return [(child, 1, child.count / here) for child in islice(node.in_order(), most)]
