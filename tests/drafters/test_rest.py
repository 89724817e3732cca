"""REST against counting by hand: which nodes, in which order, and what is expected of them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.corpus import Corpus
from drafters.rest import RestDrafter, most_frequent
from specdec import DraftSampling, DraftTree
from tests.drafters.lookups import begun
from tests.forwards import slots_of
from tests.shapes import shapes_unchecked

Path = tuple[int, ...]


def paths_of(tokens: list[int], parents: list[int]) -> list[Path]:
    """The path to every node."""
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def counted(rests: list[list[int]], most: int) -> tuple[list[Path], float]:
    """The most frequent beginnings one by one, with the mean number of them that a rest has."""
    counts = Counter(tuple(rest[:size]) for rest in rests for size in range(1, len(rest) + 1))
    chosen: list[Path] = []
    for path in sorted(counts, key=lambda path: (-counts[path], len(path), path)):
        if len(chosen) < most and (len(path) == 1 or path[:-1] in chosen):
            chosen.append(path)
    return chosen, sum(counts[path] for path in chosen) / len(rests)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=12), st.integers(1, 9))
def test_the_most_frequent_beginnings_are_those_that_counting_finds(rests, most) -> None:
    rows = np.array(sorted([*rest, *[-1] * (4 - len(rest))] for rest in rests))
    draft = most_frequent(rows, most)
    wanted, score = counted(rests, most)
    assert paths_of(draft.tokens, draft.parents) == wanted
    assert draft.score == pytest.approx(score)


def drafted(corpus: Corpus, sequence: list[int], depth: int = 100, **options: int) -> tuple[DraftTree, float]:
    session = begun(RestDrafter(corpus, **options), sequence)
    slots = slots_of([sequence], max_depth=depth)
    with shapes_unchecked():
        return session.propose(slots), float(session.rate(slots)[0])


CORPUS = [[1, 2, 3, 4], [1, 2, 3, 5], [7, 1, 2, 6]]


def test_a_draft_follows_the_longest_match() -> None:
    tree, rate = drafted(Corpus.of(CORPUS), [0, 1, 2])
    # 1 2 stands at three places: 3 follows twice, then 4 and 5; 6 follows once.
    valid = tree.valid[0]
    paths = paths_of(tree.tokens[0, 1:].tolist(), (tree.parents[0, 1:] - 1).tolist())
    assert paths == [(3,), (6,), (3, 4), (3, 5)] and valid.all()
    assert rate == pytest.approx(2 / 3 + 3 * 1 / 3)
    assert tree.only_law is DraftSampling.DETERMINISTIC and tree.draft_probs is None
    assert drafted(Corpus.of(CORPUS), [7, 1, 2])[0].tokens.tolist() == [[2, 6]]  # a longer match has but one place


def test_matches_have_a_shortest_and_a_longest_length() -> None:
    corpus = Corpus.of(CORPUS)
    assert drafted(corpus, [0, 2])[0].width == 1  # one token is too few
    assert drafted(corpus, [0, 2], min_match=1)[0].width == 5
    assert drafted(corpus, [7, 1, 2], max_match=2)[0].width == 5
    assert drafted(corpus, [0, 1, 2], depth=1)[0].tokens.tolist() == [[2, 3, 6]]
    assert drafted(corpus, [0, 1, 2], max_nodes=2)[0].tokens.tolist() == [[2, 3, 6]]
    with pytest.raises(ValueError, match="max_match=1 is below min_match=2"):
        RestDrafter(corpus, max_match=1)
