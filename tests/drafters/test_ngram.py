"""Prompt lookup against an obvious reference in plain Python."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngram import NGramDrafter
from specdec.batch import Batch
from specdec.tree import DraftTree
from specdec.types import DraftSampling
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
    slots = slots_of(sequences, max_depth=max_depth, drafting=drafting)
    tree = drafter.propose(slots)
    wanted = [
        reference(sequence, drafter, depth) if wants else []
        for sequence, depth, wants in zip(sequences, max_depth, drafting, strict=True)
    ]
    assert [leaves(tree, row) for row in range(len(sequences))] == wanted
    well_formed(tree, drafter, slots)
    prefixes = [{tuple(b[:i]) for b in branches for i in range(1, len(b) + 1)} for branches in wanted]
    assert tree.width == 1 + max(len(p) for p in prefixes), "as few columns as the fullest row needs"
    assert tree.max_depth == max((len(b) for branches in wanted for b in branches), default=0)
    fanouts = [sum(p[:-1] == above for p in row) for row in prefixes for above in [(), *row]]
    assert tree.max_children == max(fanouts)


def well_formed(tree: DraftTree, drafter: NGramDrafter, batch: Batch) -> None:
    assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
    assert tree.width - 1 <= drafter.max_nodes and tree.max_depth <= drafter.max_depth
    assert torch.equal(tree.tokens[:, 0], batch.roots)
    assert (tree.parents[:, 0] == -1).all() and tree.valid[:, 0].all()
    assert (tree.parents[:, 1:] < torch.arange(1, tree.width)).all() and (tree.parents[:, 1:] >= 0).all()
    assert tree.valid.gather(1, tree.parents.clamp(min=0))[tree.valid].all(), "closed under ancestors"
    for row, parents in enumerate(tree.parents.tolist()):
        children = [
            (parents[node], int(tree.tokens[row, node])) for node in range(1, tree.width) if tree.valid[row, node]
        ]
        assert len(set(children)) == len(children), "siblings are distinct"
    if drafter.is_chain:
        assert tree.max_children <= 1


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


def test_agrees_with_the_reference_where_matches_are_many() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 2, 600 - 100 * row).tolist() for row in range(3)]
    sequences[1][-60:] = [1] * 60
    check(sequences, NGramDrafter(8, branches=3), [100] * 3, [True] * 3)


def branches_of(sequence: list[int], **arguments: int) -> list[list[int]]:
    drafter = NGramDrafter(**arguments)  # type: ignore[arg-type]
    slots = slots_of([sequence])
    tree = drafter.propose(slots)
    well_formed(tree, drafter, slots)
    return leaves(tree, 0)


def test_a_longer_match_goes_before_a_more_recent_one() -> None:
    #           1 2 3 -> 4 5 6                   3 -> 7 8 9
    sequence = [1, 2, 3, 4, 5, 6, 0, 0, 0, 3, 7, 8, 9, 0, 0, 1, 2, 3]
    assert branches_of(sequence, max_draft_tokens=3, branches=1) == [[4, 5, 6]]
    assert branches_of(sequence, max_draft_tokens=3) == [[4, 5, 6], [7, 8, 9]]
    assert branches_of(sequence, max_draft_tokens=3, max_ngram=1) == [[7, 8, 9], [4, 5, 6]]
    assert branches_of(sequence, max_draft_tokens=3, min_ngram=2) == [[4, 5, 6]]


def test_branches_share_their_common_beginning() -> None:
    sequence = [9, 5, 6, 7, 0, 9, 5, 8, 1, 0, 9, 2, 3, 4, 0, 9]
    slots = slots_of([sequence])
    tree = NGramDrafter(3, branches=3, max_ngram=1).propose(slots)
    assert tree.tokens.tolist() == [[9, 2, 3, 4, 5, 8, 1, 6, 7]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 0, 4, 5, 4, 7]]
    assert tree.max_children == 2 and tree.max_depth == 3


def test_a_continuation_ends_with_the_sequence() -> None:
    assert branches_of([4, 1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert branches_of([4, 4]) == [[4]]


def test_a_loop_is_drafted_to_the_full_depth() -> None:
    assert branches_of([7] * 20, max_draft_tokens=5) == [[7] * 5]
    assert branches_of([0, *[1, 2, 3] * 5], max_draft_tokens=8) == [[1, 2, 3, 1, 2, 3, 1, 2]]


def test_a_row_without_a_match_proposes_nothing() -> None:
    drafter = NGramDrafter(4)
    tree = drafter.propose(slots_of([[1, 2, 3], [5, 1, 5], [1]]))
    assert tree.valid.tolist() == [[True, False, False], [True, True, True], [True, False, False]]
    assert tree.tokens[1].tolist() == [5, 1, 5]


def test_a_batch_without_matches_is_a_plain_step() -> None:
    tree = NGramDrafter(4).propose(slots_of([[1, 2, 3], [1]]))
    assert tree.width == 1 and tree.max_depth == 0 and tree.max_children == 0
    assert tree.tokens.tolist() == [[3], [1]]


def test_rows_that_do_not_draft_are_left_out() -> None:
    sequence = [1, 2, 1, 2, 1]
    tree = NGramDrafter(4).propose(slots_of([sequence, sequence], drafting=[False, False]))
    assert tree.width == 1
    tree = NGramDrafter(4).propose(slots_of([sequence, sequence], max_depth=[0, 2]))
    assert [leaves(tree, row) for row in range(2)] == [[], [[2, 1]]]
