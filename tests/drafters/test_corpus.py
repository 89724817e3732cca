"""Look-ups in a corpus (REST, SAM decoding) against sorting and scanning."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import RestDrafter, SamDrafter
from drafters.corpus import Corpus, tokenizer_hash
from drafters.rest import most_frequent
from specdec import DraftSampling, DraftTree, SamplingParams, Session, Sizes, Target
from specdec.drafting.lookup import RatedDrafter
from tests.experiments.conftest import byte_tokenizer
from tests.forwards import slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

TARGET = Target(tiny_model(vocab_size=8, layers=1))


def begun(drafter: RatedDrafter, sequence: list[int]) -> Session:
    session = drafter.bind(TARGET, Sizes(max_batch_size=1, max_length=200))
    session.admit(0, sequence, SamplingParams())
    return session


Documents = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


def places(tokens: list[int], string: list[int]) -> list[int]:
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


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    sizes, target = Sizes(max_batch_size=1, max_length=16), Target(tiny_model(vocab_size=300), byte_tokenizer())
    other = byte_tokenizer()
    other.add_tokens(["another"])
    Corpus.of([[1, 2]], tokenizer=other).save(tmp_path / "a.corpus")
    for kind in (RestDrafter, SamDrafter):
        with pytest.raises(ValueError, match=r"a\.corpus has the tokens of another tokenizer .* python examples"):
            kind(tmp_path / "a.corpus").bind(target, sizes)
        kind(Corpus.of([[1, 2]], tokenizer=byte_tokenizer())).bind(target, sizes)
        kind(Corpus.of([[1, 2]])).bind(target, sizes)  # nobody knows whose
        with pytest.raises(ValueError, match=r"has token 300, and the target .* has 300 tokens"):
            kind(Corpus.of([[1, 300]])).bind(target, sizes)


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.corpus"
    with pytest.raises(ValueError, match=r"there is no such file; make one with python examples"):
        Corpus.open(file)
    Corpus.of([[random.randrange(9) for _ in range(99)]]).save(file)
    for content in (b"some text that is long enough", (2).to_bytes(8, "little") + b"{}", file.read_bytes()[:-4]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="this is no whole corpus of tokens"):
            Corpus.open(file)
    with pytest.raises(ValueError, match="has 0 tokens"):
        Corpus.of([[]])
    for wrong in ([0.5], [-3]):
        with shapes_unchecked(), pytest.raises(ValueError, match="is no list of token ids"):
            Corpus.of([wrong])


Branch = tuple[int, ...]


def paths_of(tokens: list[int], parents: list[int]) -> list[Branch]:
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
def test_drafts_are_those_that_scanning_finds(sequence, corpus, factor, least, bias, most) -> None:
    drafter = SamDrafter(Corpus.of([corpus]), factor=factor, threshold=least, corpus_bias=bias, max_draft_tokens=most)
    session = begun(drafter, sequence)
    with shapes_unchecked():
        for length in sorted({(len(sequence) + 1) // 2, len(sequence)}):  # the automaton goes on from round to round
            slots = slots_of([sequence[:length]])
            tree = session.propose(slots)
            wanted = sam_drafts(sequence[:length], corpus, drafter)
            assert tree.tokens[0, 1:][tree.valid[0, 1:]].tolist() == wanted
    match = max(occurred(sequence[:-1], sequence), occurred(corpus, sequence) - bias)
    assert session.rate(slots)[0] == (min(match, len(wanted)) if wanted else 0)
