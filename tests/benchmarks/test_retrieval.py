"""Teacher-forced replay: what is accepted, counted by hand, and that the lines of a file are read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.retrieval import bound, read, replayed
from benchmarks.suffix import Tree, Trie, text_of
from drafters.ngram import NGramDrafter
from drafters.suffix import SuffixDrafter
from tests.shapes import shapes_unchecked


@pytest.fixture(autouse=True)
def _without_a_target() -> Iterator[None]:
    """The drafters are bound to none, because they ask for nothing of it."""
    with shapes_unchecked():
        yield


@pytest.mark.parametrize("drafter", [NGramDrafter(max_draft_tokens=3, branches=1), SuffixDrafter(3)])
def test_rounds_are_those_of_a_target_that_answers_so(drafter) -> None:
    bound(drafter, 40)
    # 1 2 3 4 5 came before: after 1, the target's own token, three tokens are copied and 5 is the bonus token.
    assert replayed(drafter, [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5], 10) == [0, 3]
    # The last token is left to the target.
    assert replayed(drafter, [1, 2, 3, 4, 5, 1], [2, 3], 10) == [1]
    assert replayed(drafter, [1], [2, 3, 4], 10) == [0, 0, 0]


def test_shared_answers_help_the_next_one() -> None:
    drafter = SuffixDrafter(4, shared=True)
    bound(drafter, 40)
    assert replayed(drafter, [9], [1, 2, 3, 4], 10) == [0, 0, 0, 0]
    assert replayed(drafter, [8], [1, 2, 3, 4], 10) == [0, 2]


def test_lines_without_an_answer_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b"], "category": "x", "reference": ["c", "", "d"]},
        {"prompt": "e", "answer": "f"},
        {"turns": ["g"]},
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = [(each.category, each.prompt, each.answer) for each in read(tmp_path / "some.jsonl")]
    assert found == [("x", "a", "c\nd"), ("some", "e", "f")]


def test_both_structures_count_alike() -> None:
    tokens = text_of(400, lambda text: [ord(letter) for letter in text])
    assert tokens[:200] == tokens[200:]
    tree, trie = Tree(5), Trie(5)
    tree.extend(tokens)
    trie.extend(tokens)
    for start in range(0, 395, 7):
        string, node = tokens[start : start + 5], 0
        for size, token in enumerate(string, 1):
            node = trie.nodes[node, token]
            place = tree.tree.find(string[:size])
            assert place is not None and place[0].count_at(place[1]) == trie.counts[node]
