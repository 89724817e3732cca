"""Suffix trees against counting by hand: every string, whatever texts grow, end and are forgotten in between."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.suffix_tree import Node, SuffixTree, Text

Strings = Counter[tuple[int, ...]]


def strings(texts: Iterable[Sequence[int]], depth: int) -> Strings:
    """How often each string occurs."""
    found: Strings = Counter()
    for tokens in texts:
        for start in range(len(tokens)):
            for stop in range(start + 1, min(start + depth, len(tokens)) + 1):
                found[tuple(tokens[start:stop])] += 1
    return found


def held(tree: SuffixTree) -> Strings:
    """What a tree says of itself; checks on the way that its parts fit each other."""
    found: Strings = Counter()

    def visit(node: Node, above: tuple[int, ...]) -> None:
        edge = tuple(node.text.tokens[node.start : node.start + node.length])
        for size in range(1, len(edge) + 1):
            if node.count_at(size) == 0:  # a text that was here has been forgotten
                return
            found[above + edge[:size]] = node.count_at(size)
        children = node.children or {}
        if node is not tree.root:
            assert node.best is max(
                children.values(), key=lambda child: (child.count, child is node.best), default=None
            )
        for token, child in children.items():
            assert child.parent is node and child.text.tokens[child.start] == token
            visit(child, above + edge)

    visit(tree.root, ())
    return found


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_the_texts(seed: int) -> None:
    """Several texts grow side by side, as those of a batch; some end, and the oldest ended ones are forgotten."""
    rng = random.Random(seed)
    depth, vocab = rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 2, 3, 5])
    tree, growing, ended = SuffixTree(depth), [Text()], []
    for _ in range(rng.randint(5, 40)):
        what = rng.random()
        if what < 0.1 or not growing:
            growing.append(Text())
        elif what < 0.17:
            ended.append(growing.pop(rng.randrange(len(growing))))
            tree.end(ended[-1])
        elif what < 0.25 and ended:
            tree.forget(ended.pop(0))
        else:
            tree.extend(rng.choice(growing), [rng.randrange(vocab) for _ in range(rng.randint(1, 4))])
        assert held(tree) == strings([text.tokens for text in growing + ended], depth)
    for text in growing:
        tree.end(text)
    for text in growing + ended:
        tree.forget(text)
    assert not tree.root.children


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 9))
def test_strings_are_found_and_others_are_not(tokens: list[int], depth: int) -> None:
    tree, text = SuffixTree(depth), Text()
    tree.extend(text, tokens)
    known = strings([tokens], depth)
    for string, count in known.items():
        point = tree.find([*string])
        assert point is not None and point[0].count_at(point[1]) == count
        for other in ([*string, 3], [3, *string], [*string[:-1], 3]):
            assert tree.find(other) is None
    # Every suffix that occurs earlier, too, and may still grow, has a cursor; and only these.
    repeated = [size for size in range(1, depth) if known[tuple(tokens[-size:])] > 1 and size <= len(tokens)]
    assert [len(tokens) - cursor.start for cursor in text.cursors] == repeated[::-1]


def nodes_of(tree: SuffixTree) -> int:
    waiting, count = [tree.root], 0
    while waiting:
        node = waiting.pop()
        count += 1
        waiting += (node.children or {}).values()
    return count


@pytest.mark.parametrize("vocab", [1, 3, 10**6])
def test_memory_is_bounded_by_the_tokens_whatever_the_depth(vocab: int) -> None:
    rng = random.Random(0)
    block = [rng.randrange(vocab) for _ in range(600)]
    for depth in (4, 100):
        tree, text = SuffixTree(depth), Text()
        tree.extend(text, [*block, *block])  # copied text: a trie without compressed edges has depth nodes per token
        assert nodes_of(tree) <= 2 * len(text.tokens) + 1
        assert len(text.open) <= 2 * depth and len(text.cursors) < depth


def test_forgetting_gives_the_memory_back() -> None:
    rng = random.Random(1)
    tree, ended = SuffixTree(10), []
    sizes = []
    for _ in range(60):
        text = Text()
        tree.extend(text, [rng.randrange(4) for _ in range(30)])
        tree.end(text)
        ended.append(text)
        if len(ended) > 5:
            tree.forget(ended.pop(0))
            sizes.append(nodes_of(tree))
    assert max(sizes) <= 2 * 5 * 30 + 1
