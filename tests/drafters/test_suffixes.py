"""Look-ups by suffixes: a corpus (REST, SAM decoding) and suffix trees against sorting, scanning and counting."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import RestDrafter, SamDrafter
from drafters.corpus import Corpus, tokenizer_hash
from drafters.rest import most_frequent
from drafters.suffix import SuffixDrafter, SuffixSession
from drafters.suffix_tree import Node, SuffixTree, Text
from specdec import Batch, Drafter, DraftSampling, DraftTree, SamplingParams, Sizes, Target
from specdec.drafting.lookup import RatedDrafter
from tests.experiments.conftest import byte_tokenizer
from tests.forwards import outcome_of, slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

TARGET = Target(tiny_model(vocab_size=8, layers=1))


def begun(drafter: RatedDrafter, sequence: list[int]) -> Any:
    """A session with one request."""
    session = drafter.bind(TARGET, Sizes(max_batch_size=1, max_length=200))
    session.admit(0, sequence, SamplingParams())
    return session


Documents = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


def places(tokens: list[int], string: list[int]) -> list[int]:
    """Where a string begins, by scanning."""
    return [at for at in range(len(tokens)) if tokens[at : at + len(string)] == string]


@settings(max_examples=60, deadline=None)
@given(Documents, st.lists(st.integers(0, 3), min_size=1, max_size=10), st.sampled_from([None, 1, 3]))
def test_the_longest_match_and_what_follows_are_those_of_a_scan(documents, text, most) -> None:
    corpus = Corpus.of(documents)
    tokens = corpus.tokens.tolist()
    assert tokens == [each for document in documents for each in [*document, -1]]
    match = corpus.longest(np.array(text), most)
    lengths = [m for m in range(1, min(most or 99, len(text)) + 1) if places(tokens, text[len(text) - m :])]
    assert match.length == max(lengths, default=0)
    if not lengths:
        return
    found = places(tokens, text[len(text) - match.length :])
    assert sorted(corpus.suffixes[match.begin : match.end].tolist()) == found
    rests = []
    for place in found:  # up to the end of the document
        rest = tokens[place + match.length :]
        rest = rest[: rest.index(-1)] if -1 in rest else rest
        rests.append((rest + [-1] * 4)[:4])
    assert corpus.continuations(match, 99, 4).tolist() == sorted(rests)
    assert corpus.first(match, 4) == rests[0]
    few = corpus.continuations(match, 2, 4).tolist()
    assert few == (sorted(rests) if len(rests) <= 2 else [sorted(rests)[0], sorted(rests)[len(rests) // 2]])


def test_eos_is_drafted_and_what_is_behind_it_is_not() -> None:
    corpus = Corpus.of([[5, 6], [5, 7]], separator=9)
    match = corpus.longest(np.array([5]))
    assert corpus.continuations(match, 9, 3).tolist() == [[6, 9, -1], [7, 9, -1]]


def test_a_file_is_mapped_and_equal(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    made = Corpus.of([[1, 2, 3], [2, 3]], tokenizer=tokenizer)
    made.save(tmp_path / "deep" / "a.corpus")
    read = Corpus.open(tmp_path / "deep" / "a.corpus")
    assert np.array_equal(read.tokens, made.tokens) and np.array_equal(read.suffixes, made.suffixes)
    assert read.separator == made.separator and read.notes == made.notes
    assert read.notes["hash"] == tokenizer_hash(tokenizer) and not read.tokens.flags.writeable
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.corpus"]


@pytest.mark.parametrize("kind", [RestDrafter, SamDrafter])
def test_a_corpus_of_another_tokenizer_is_refused(kind: type[Drafter], tmp_path: Path) -> None:
    sizes, target = Sizes(max_batch_size=1, max_length=16), Target(tiny_model(vocab_size=300), byte_tokenizer())
    other = byte_tokenizer()
    other.add_tokens(["another"])
    Corpus.of([[1, 2]], tokenizer=other).save(tmp_path / "a.corpus")
    with pytest.raises(ValueError, match=r"a\.corpus has the tokens of another tokenizer .* python examples"):
        kind(tmp_path / "a.corpus").bind(target, sizes)
    kind(Corpus.of([[1, 2]], tokenizer=byte_tokenizer())).bind(target, sizes)
    kind(Corpus.of([[1, 2]])).bind(target, sizes)  # nobody knows whose
    with pytest.raises(ValueError, match=r"has token 300, and the target .* has 300 tokens"):
        kind(Corpus.of([[1, 300]])).bind(target, sizes)


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no such file; make one with python examples"):
        Corpus.open(tmp_path / "a.corpus")
    for content in (b"some text that is long enough", (2).to_bytes(8, "little") + b"{}"):
        (tmp_path / "b.corpus").write_bytes(content)
        with pytest.raises(ValueError, match="this is no whole corpus of tokens"):
            Corpus.open(tmp_path / "b.corpus")
    Corpus.of([[random.randrange(9) for _ in range(99)]]).save(tmp_path / "c.corpus")
    (tmp_path / "c.corpus").write_bytes((tmp_path / "c.corpus").read_bytes()[:-4])
    with pytest.raises(ValueError, match="this is no whole corpus of tokens"):
        Corpus.open(tmp_path / "c.corpus")
    with pytest.raises(ValueError, match="has 0 tokens"):
        Corpus.of([[]])
    for wrong in ([0.5], [-3]):
        with shapes_unchecked(), pytest.raises(ValueError, match="is no list of token ids"):
            Corpus.of([wrong])


Branch = tuple[int, ...]


def paths_of(tokens: list[int], parents: list[int]) -> list[Branch]:
    """The path to every node."""
    found: list[Branch] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def counted(rests: list[list[int]], most: int) -> tuple[list[Branch], float]:
    """The most frequent beginnings one by one, with the mean number of them that a rest has."""
    counts = Counter(tuple(rest[:size]) for rest in rests for size in range(1, len(rest) + 1))
    chosen: list[Branch] = []
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


def rest_drafts(corpus: Corpus, sequence: list[int], depth: int = 100, **options: int) -> tuple[DraftTree, float]:
    session = begun(RestDrafter(corpus, **options), sequence)
    slots = slots_of([sequence], max_depth=depth)
    with shapes_unchecked():
        return session.propose(slots), float(session.rate(slots)[0])


CORPUS = Corpus.of([[1, 2, 3, 4], [1, 2, 3, 5], [7, 1, 2, 6]])


def test_a_draft_follows_the_longest_match() -> None:
    tree, rate = rest_drafts(CORPUS, [0, 1, 2])
    # 1 2 stands at three places: 3 follows twice, then 4 and 5; 6 follows once.
    valid = tree.valid[0]
    paths = paths_of(tree.tokens[0, 1:].tolist(), (tree.parents[0, 1:] - 1).tolist())
    assert paths == [(3,), (6,), (3, 4), (3, 5)] and valid.all()
    assert rate == pytest.approx(2 / 3 + 3 * 1 / 3)
    assert tree.only_law is DraftSampling.DETERMINISTIC and tree.draft_probs is None
    assert rest_drafts(CORPUS, [7, 1, 2])[0].tokens.tolist() == [[2, 6]]  # a longer match has but one place
    # The shortest match and the longest, and the room for a tree.
    assert rest_drafts(CORPUS, [0, 2])[0].width == 1
    assert rest_drafts(CORPUS, [0, 2], min_match=1)[0].width == 5
    assert rest_drafts(CORPUS, [7, 1, 2], max_match=2)[0].width == 5
    assert rest_drafts(CORPUS, [0, 1, 2], depth=1)[0].tokens.tolist() == [[2, 3, 6]]
    assert rest_drafts(CORPUS, [0, 1, 2], max_nodes=2)[0].tokens.tolist() == [[2, 3, 6]]
    with pytest.raises(ValueError, match="max_match=1 is below min_match=2"):
        RestDrafter(CORPUS, max_match=1)


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def occurred(before: list[int], sequence: list[int]) -> int:
    """The length of a sequence's longest end that occurs in a text."""
    return max((m for m in range(1, len(sequence) + 1) if places(before, sequence[-m:])), default=0)


def sam_drafts(sequence: list[int], corpus: list[int], drafter: SamDrafter) -> list[int]:
    """The draft, by the words of the docstring; the corpus is one document."""
    before = sequence[:-1]
    own, there = occurred(before, sequence), occurred(corpus, sequence)
    match = max(own, there - drafter.corpus_bias)
    if match < drafter.threshold:
        return []
    most = drafter.max_draft_tokens
    if drafter.factor is not None:
        most = min(most, int(match * drafter.factor))
    if there - drafter.corpus_bias > own:
        begin = places(corpus, sequence[-there:])[0] + there
        return corpus[begin : begin + most]
    begin = places(before, sequence[-own:])[0] + own
    while drafter.factor is None and len(before) - begin < drafter.max_draft_tokens + 1:
        # The longest shorter end that was there earlier, too.
        shorter = [m for m in range(1, own) if places(before, sequence[-m:])[0] + m < begin]
        if not shorter:
            break
        own = max(shorter)
        begin = places(before, sequence[-own:])[0] + own
    return sequence[begin : begin + most]


@settings(max_examples=80, deadline=None)
@given(TEXT, TEXT, st.sampled_from([None, 1.0, 2.5]), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_drafts_are_those_that_scanning_finds(sequence, corpus, factor, threshold, bias, most) -> None:
    drafter = SamDrafter(
        Corpus.of([corpus]), factor=factor, threshold=threshold, corpus_bias=bias, max_draft_tokens=most
    )
    session = begun(drafter, sequence)
    with shapes_unchecked():
        for length in sorted({(len(sequence) + 1) // 2, len(sequence)}):  # the automaton goes on from round to round
            slots = slots_of([sequence[:length]])
            tree = session.propose(slots)
            wanted = sam_drafts(sequence[:length], corpus, drafter)
            assert tree.tokens[0, 1:][tree.valid[0, 1:]].tolist() == wanted
    match = max(occurred(sequence[:-1], sequence), occurred(corpus, sequence) - bias)
    assert session.rate(slots)[0] == (min(match, len(wanted)) if wanted else 0)


# Suffix trees

Strings = Counter[tuple[int, ...]]
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


def strings(texts: Iterable[Sequence[int]], depth: int) -> Strings:
    """How often each string occurs."""
    found: Strings = Counter()
    for tokens in texts:
        for start in range(len(tokens)):
            for stop in range(start + 1, min(start + depth, len(tokens)) + 1):
                found[tuple(tokens[start:stop])] += 1
    return found


def held(tree: SuffixTree, lines: Lines) -> Strings:
    """A tree's own account of itself; checks that its parts fit each other, and that siblings stand in line."""
    found, nodes = Counter[tuple[int, ...]](), 0

    def visit(node: Node, above: tuple[int, ...]) -> None:
        nonlocal nodes
        nodes += 1
        edge = tuple(node.text.tokens[node.start : node.start + node.length])
        for size in range(1, len(edge) + 1):
            found[above + edge[:size]] = node.count_at(size)
        children = node.children or {}
        if len(children) > 1:
            order, child = [], node.best
            while child is not None:
                order.append(child.text.tokens[child.start])
                child = child.after
            assert order == [token for token, _ in lines[above + edge]]
        for token, child in children.items():
            assert child.parent is node and child.text.tokens[child.start] == token
            visit(child, above + edge)

    visit(tree.root, ())
    assert nodes <= 2 * tree.tokens + 1, "memory is bounded by the tokens, whatever the depth"
    return found


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_the_texts(seed: int) -> None:
    """Several texts grow side by side, as those of a batch, and some end."""
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
        assert held(tree, lines) == strings([text.tokens for text in growing + ended], depth)
    assert tree.tokens == sum(len(text.tokens) for text in growing + ended)


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
    """Where a string ends."""
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


def test_running_requests_share_too() -> None:
    drafter = bound(slots=2, shared=True)
    tree, _ = drafted(drafter, [[5, 1, 2], [0, 1, 2, 3, 4]])
    assert path_of(tree, 0) == [3, 4]  # whichever row comes first


def test_the_oldest_outputs_are_forgotten() -> None:
    drafter = bound(shared=True, shared_tokens=12)  # six in each of two trees
    for number in range(5):
        drafted(drafter, [[7, number, number + 1, number + 2]])
        drafter.release(0)
    assert [tree.tokens for tree in drafter._shared] == [3, 6]
    assert path_of(drafted(drafter, [[7, 0, 1]])[0]) == []
    assert path_of(drafted(drafter, [[7, 2, 3]])[0]) == [4]
    assert path_of(drafted(drafter, [[7, 4, 5]])[0]) == [6]
