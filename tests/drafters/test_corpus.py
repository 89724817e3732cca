"""Corpora: the suffix array and its look-ups against sorting and scanning; what is refused; one file, written whole."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import RestDrafter, SamDrafter
from drafters.corpus import Corpus, suffix_array, tokenizer_hash
from specdec import Drafter, Sizes, Target
from tests.experiments.conftest import byte_tokenizer
from tests.models import tiny_model
from tests.shapes import shapes_unchecked

Documents = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=40))
def test_a_suffix_array_is_sorted(tokens: list[int]) -> None:
    assert suffix_array(np.array(tokens)).tolist() == sorted(range(len(tokens)), key=lambda at: tokens[at:])


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
    for content in (b"", b"some text that is long enough", (2).to_bytes(8, "little") + b"{}", b"\0" * 16):
        (tmp_path / "b.corpus").write_bytes(content)
        with pytest.raises(ValueError, match="this is no whole corpus of tokens"):
            Corpus.open(tmp_path / "b.corpus")
    Corpus.of([[random.randrange(9) for _ in range(99)]]).save(tmp_path / "c.corpus")
    (tmp_path / "c.corpus").write_bytes((tmp_path / "c.corpus").read_bytes()[:-4])
    with pytest.raises(ValueError, match="this is no whole corpus of tokens"):
        Corpus.open(tmp_path / "c.corpus")
    with pytest.raises(ValueError, match="has 0 tokens"):
        Corpus.of([[]])
    for wrong in ([0.5], [-3], [[1]], [2**31]):
        with shapes_unchecked(), pytest.raises(ValueError, match="is no list of token ids"):
            Corpus.of([wrong])
