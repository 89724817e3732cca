"""Suffix trees against counting."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.suffix import SuffixDrafter, SuffixSession
from drafters.suffix_tree import Node, SuffixTree, Text
from specdec import Batch, DraftSampling, DraftTree, SamplingParams, Sizes
from tests.drafters.test_corpus import TARGET, places
from tests.forwards import outcome_of, slots_of
from tests.shapes import shapes_unchecked

Lines = dict[tuple[int, ...], list[list[int]]]
"""Per string, what has followed it: tokens and their counts, in order."""


def come(lines: Lines, tokens: Sequence[int], depth: int) -> None:
    """Count the last token of a text once more, behind every string that it follows."""
    for start in range(max(0, len(tokens) - depth), len(tokens)):
        line = lines.setdefault(tuple(tokens[start:-1]), [])
        at = next((place for place, (token, _) in enumerate(line) if token == tokens[-1]), None)
        if at is None:
            line.append([tokens[-1], 1])
        elif at == 0 or line[at - 1][1] > line[at][1] + 1:
            line[at][1] += 1
        else:
            equal = line[at - 1][1]
            token, count = line.pop(at)
            line.insert([each for _, each in line].index(equal), [token, count + 1])


def size(node: Node) -> int:
    return 1 + sum(map(size, (node.children or {}).values()))


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_the_texts(seed: int) -> None:
    """Several texts grow side by side, as those of a batch, and some end. Memory is bounded, whatever the depth."""
    rng = random.Random(seed)
    depth, vocab = rng.choice([1, 2, 3, 8, 100]), rng.choice([1, 2, 3, 5])
    tree, growing, ended, lines = SuffixTree(depth), [Text()], [], {}
    for _ in range(rng.randint(5, 40)):
        what = rng.random()
        if what < 0.1 or not growing:
            growing.append(Text())
        elif what < 0.17:
            ended.append(growing.pop(rng.randrange(len(growing))))
            tree.end(ended[-1])
        else:
            text = rng.choice(growing)
            for _ in range(rng.randint(1, 4)):
                tree.extend(text, [rng.randrange(vocab)])
                come(lines, text.tokens, depth)
        texts = [text.tokens for text in growing + ended]
        starts = [tokens[start : start + depth] for tokens in texts for start in range(len(tokens))]
        counts = Counter(tuple(string[:stop]) for string in starts for stop in range(1, len(string) + 1))
        for string, count in counts.items():
            node, offset = tree.find([*string])
            assert node.count_at(offset) == count
            followed = tree.branch((node, offset), vocab, 0.0, 1).tokens  # the most frequent first
            assert followed == [token for token, _ in lines.get(string, [])]
        assert tree.root.children.keys() == {string[0] for string in counts}
        assert size(tree.root) <= 2 * tree.tokens + 1 and tree.tokens == sum(map(len, texts))


def bound(slots: int = 1, **options: object) -> SuffixSession:
    return SuffixDrafter(**{"factor": 1.0, **options}).bind(TARGET, Sizes(max_batch_size=slots, max_length=200))


def drafted(drafter: SuffixSession, sequences: list[list[int]], **options: object) -> tuple[DraftTree, Batch]:
    for slot, sequence in enumerate(sequences):
        drafter.admit(slot, sequence[:1], SamplingParams())
    slots = slots_of(sequences, **options)
    with shapes_unchecked():
        return drafter.propose(slots), slots


def path_of(tree: DraftTree, row: int = 0) -> list[int]:
    return tree.tokens[row, 1:][tree.valid[row, 1:]].tolist()


def occurrences(sequence: list[int], string: list[int]) -> list[int]:
    return [begin + len(string) for begin in places(sequence, string)]


def best_path(sequence: list[int], session: SuffixSession, deepest: int) -> tuple[list[int], float]:
    """The best path, by the words of the drafter's docstring, with its score."""
    drafter = session._drafter
    best: tuple[float, int, list[int]] = (0.0, 0, [])
    for match in range(1, min(drafter.tree_depth, len(sequence) + 1)):
        string, drawn, probability, score = sequence[-match:], [], 1.0, 0.0
        if len(occurrences(sequence, string)) < 2:
            break
        while len(drawn) < min(int(match * drafter.factor + drafter.offset), drafter.max_draft_tokens, deepest):
            if len(string) == drafter.tree_depth:
                break
            ends = occurrences(sequence, string)
            follows = [sequence[end] for end in ends if end < len(sequence)]
            if not follows:
                break
            lines: Lines = {}
            for end in range(1, len(sequence) + 1):
                come(lines, sequence[:end], drafter.tree_depth)
            token = lines[tuple(string)][0][0]  # the most frequent, and of equals the first in line
            probability *= follows.count(token) / len(ends)
            if probability < drafter.min_probability * (1 - 1e-6):
                break
            score += probability
            drawn.append(token)
            string = [*string, token]
        if drawn:
            best = max(best, (score, match, drawn), key=lambda each: each[:2])
    return best[2], best[0]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(2, 9),
    st.sampled_from([0.05, 0.3, 0.5]),
    st.sampled_from([(1.0, 0.0), (2.0, 1.0), (0.5, 2.0)]),
    st.integers(1, 9),
)
def test_paths_are_those_that_counting_finds(sequence, depth, least, budget, deepest) -> None:
    factor, offset = budget
    drafter = bound(tree_depth=depth, min_probability=least, factor=factor, offset=offset, max_draft_tokens=6)
    tree, slots = drafted(drafter, [sequence], max_depth=deepest)
    wanted, score = best_path(sequence, drafter, deepest)
    assert path_of(tree) == wanted
    assert drafter.rate(slots)[0] == pytest.approx(score)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=4, max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_trees_hold_the_most_probable_paths(sequence, most, deepest) -> None:
    """A tree is the best set of nodes, among the continuations of every match, that the budget allows."""
    drafter = bound(mode="tree", tree_depth=7, factor=2.0, min_probability=0.05, max_draft_tokens=most)
    tree, slots = drafted(drafter, [sequence], max_depth=deepest)
    scores = [0.0]
    for match in range(1, min(7, len(sequence) + 1)):
        context, reach = sequence[-match:], {(): 1.0}
        if len(occurrences(sequence, context)) < 2:
            break
        found: list[float] = []
        while reach:  # every path that is probable enough
            longer = {}
            for path, probability in reach.items():
                string = [*context, *path]
                ends = occurrences(sequence, string)
                if len(string) == 7 or len(path) == deepest:
                    continue
                for token in range(3):
                    share = sum(end < len(sequence) and sequence[end] == token for end in ends) / len(ends)
                    if share and probability * share >= 0.05 * (1 - 1e-6):
                        longer[*path, token] = probability * share
            found += longer.values()
            reach = longer
        scores.append(sum(sorted(found)[-min(most, 2 * match) :]))
    assert drafter.rate(slots)[0] == pytest.approx(max(scores))
    assert int(tree.valid.sum()) - 1 <= most and tree.max_depth <= deepest
    parents = zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.valid[0].tolist(), strict=True)
    siblings = [(parent, token) for parent, token, valid in parents if valid]
    assert len(set(siblings)) == len(siblings)
    assert tree.only_law is DraftSampling.DETERMINISTIC and tree.draft_probs is None


def test_outputs_are_shared_and_prompts_are_not() -> None:
    drafter = bound(slots=2, shared=True)
    drafter.admit(0, [7, 1, 2, 3, 7, 5], SamplingParams())
    slots = slots_of([[7, 1, 2, 3, 7, 5, 6, 4]])
    with shapes_unchecked():
        drafter.propose(slots)  # the output so far is 6 4; both stand in the trees before the round
        # The root and two accepted tokens; 7 is padding.
        drafter.observe(outcome_of([[4, 3, 2]], [3], starts=[7], path=[[1, 1]], emitted=[[3, 2, 1, 7]]))
    drafter.release(0)
    assert path_of(drafted(drafter, [[1]])[0]) == []  # 1 has been followed by nothing but in the prompt
    tree, slots = drafted(drafter, [[0, 6, 4]])
    assert path_of(tree) == [3, 2]  # the match has two tokens
    assert drafter.rate(slots)[0] == pytest.approx(1 / 2 + 1 / 2)  # 6 4 came twice, this time included
    tree, _ = drafted(bound(slots=2, shared=True), [[5, 1, 2], [0, 1, 2, 3, 4]])
    assert path_of(tree, 0) == [3, 4]  # running requests share, too, whichever row comes first


def test_the_oldest_outputs_are_forgotten() -> None:
    drafter = bound(shared=True, shared_tokens=12)  # six in each of two trees
    for number in range(5):
        drafted(drafter, [[7, number, number + 1, number + 2]])
        drafter.release(0)
    assert [tree.tokens for tree in drafter._shared] == [3, 6]
    assert path_of(drafted(drafter, [[7, 0, 1]])[0]) == []
    assert path_of(drafted(drafter, [[7, 2, 3]])[0]) == [4]
    assert path_of(drafted(drafter, [[7, 4, 5]])[0]) == [6]
