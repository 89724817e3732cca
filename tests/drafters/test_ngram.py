"""Prompt lookup against an obvious reference in plain Python."""

from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngram import NGramDrafter
from specdec.tree import DraftTree
from tests.forwards import slots_of


def reference(sequence: list[int], drafter: NGramDrafter, max_depth: int = 100) -> list[list[int]]:
    """A row's branches, by the words of the drafter's docstring."""
    depth = min(drafter.max_draft_tokens, max_depth)
    continuations = []
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        if n >= len(sequence):
            continue
        matches = [e for e in range(n - 1, len(sequence) - 1) if sequence[e - n + 1 : e + 1] == sequence[-n:]]
        for end in matches[::-1][: drafter.considered]:
            continuation = sequence[end + 1 : end + 1 + depth]
            if continuation and continuation not in continuations:
                continuations.append(continuation)
    branches: list[list[int]] = []
    for continuation in continuations:
        if len(branches) == drafter.branches:
            break
        if any(branch[: len(continuation)] == continuation for branch in branches):
            continue
        begun = [other for other in continuations if other[: len(continuation)] == continuation]
        branches.append(max(begun, key=len))  # the first of the longest
    return branches


def leaves(tree: DraftTree, row: int) -> list[list[int]]:
    """The branches of one row, in the order of their last nodes."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    nodes = [node for node in range(tree.width) if tree.valid[row, node]]
    paths: list[list[int]] = []
    for node in nodes:
        if node == 0 or node in (parents[other] for other in nodes):
            continue
        path: list[int] = []
        while node > 0:
            path.insert(0, tokens[node])
            node = parents[node]
        paths.append(path)
    return paths


def check(sequences: list[list[int]], drafter: NGramDrafter, max_depth: list[int], drafting: list[bool]) -> None:
    tree = drafter.propose(slots_of(sequences, max_depth=max_depth, drafting=drafting))
    wanted = [
        reference(sequence, drafter, depth) if wants else []
        for sequence, depth, wants in zip(sequences, max_depth, drafting, strict=True)
    ]
    assert [leaves(tree, row) for row in range(len(sequences))] == wanted
    prefixes = [{tuple(b[:i]) for b in branches for i in range(1, len(b) + 1)} for branches in wanted]
    assert tree.width == 1 + max(len(p) for p in prefixes), "as few columns as the fullest row needs"
    assert tree.max_depth == max((len(b) for branches in wanted for b in branches), default=0)
    fanouts = [sum(p[:-1] == above for p in row) for row in prefixes for above in [(), *row]]
    assert tree.max_children == max(fanouts)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_agrees_with_the_reference_on_ragged_batches(data: st.DataObject) -> None:
    draw = data.draw
    batch = draw(st.integers(1, 5))
    token = st.integers(0, draw(st.integers(0, 3)))
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=batch, max_size=batch))
    min_ngram = draw(st.integers(1, 3))
    drafter = NGramDrafter(
        draw(st.integers(1, 6)),
        branches=draw(st.integers(1, 4)),
        min_ngram=min_ngram,
        max_ngram=draw(st.integers(min_ngram, 5)),
    )
    max_depth = draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
    drafting = draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    check(sequences, drafter, max_depth, drafting)


def test_branches_share_their_common_beginning() -> None:
    sequence = [9, 5, 6, 7, 0, 9, 5, 8, 1, 0, 9, 2, 3, 4, 0, 9]
    slots = slots_of([sequence])
    tree = NGramDrafter(3, branches=3, max_ngram=1).propose(slots)
    assert tree.tokens.tolist() == [[9, 2, 3, 4, 5, 8, 1, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 0, 4, 5, 4, 7]]
    assert tree.max_children == 2 and tree.max_depth == 3
