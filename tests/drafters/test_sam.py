"""SAM decoding: automata against scanning, drafts against the words of the drafter's docstring."""

from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import SamDrafter
from drafters.corpus import Corpus
from drafters.sam import SuffixAutomaton
from tests.drafters.lookups import begun
from tests.drafters.test_corpus import places
from tests.forwards import slots_of
from tests.shapes import shapes_unchecked

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def occurred(before: list[int], sequence: list[int]) -> int:
    """The length of a sequence's longest end that occurs in a text."""
    return max((m for m in range(1, len(sequence) + 1) if places(before, sequence[-m:])), default=0)


@settings(max_examples=60, deadline=None)
@given(TEXT, st.integers(0, 3))
def test_an_automaton_finds_what_occurred_and_where_it_ended_first(text: list[int], token: int) -> None:
    automaton = SuffixAutomaton()
    for read, each in enumerate(text):
        automaton.extend([each])
        assert automaton.match == occurred(text[:read], text[: read + 1])
    assert len(automaton.link) <= 2 * len(text) + 1
    state, match = automaton.after(token)
    assert match == occurred(text, [*text, token])
    if match:
        string = [*text, token][-match:]
        assert automaton.ends[state] == places(text, string)[0] + match
        assert match <= automaton.length[state]


def reference(sequence: list[int], corpus: list[int], drafter: SamDrafter) -> list[int]:
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
            wanted = reference(sequence[:length], corpus, drafter)
            assert tree.tokens[0, 1:][tree.valid[0, 1:]].tolist() == wanted
    match = max(occurred(sequence[:-1], sequence), occurred(corpus, sequence) - bias)
    assert session.rate(slots)[0] == (min(match, len(wanted)) if wanted else 0)
