"""SAM decoding: drafts copied from behind the longest end of the sequence that occurred before, here or in a corpus.

Hu et al. 2024 (arXiv 2411.10666; github.com/hyx1999/SAM-Decoding).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from drafters.corpus import Corpus
from specdec import DraftSampling, SamplingParams, Sizes, Target
from specdec.arguments import number, whole
from specdec.drafting.lookup import Draft, LookUpSession, RatedDrafter, nodes_of_draft


class SuffixAutomaton:
    """The smallest automaton that accepts all ends of a text. A token costs a few steps, whatever the text's length.

    A state stands for the strings that end at the same places. State 0 is the empty string's.

    Attributes:
        following: For every state the states that tokens lead to.
        link: For every state that of its longest string that ends elsewhere, too; -1 for state 0.
        length: The number of tokens of the state's longest string.
        ends: The number of tokens up to where its strings ended first.
        state: The state of the longest end of the text that has occurred before; ``match`` is its number of tokens.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.ends = [-1], [0], [0]
        self.state = self.match = 0
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text's end."""
        for token in tokens:
            self.state, self.match = self.after(token)  # before the token is added, or it would find itself
            self._add(token)

    def after(self, token: int) -> tuple[int, int]:
        """Returns the state and the length of the longest end of the text and this token that has occurred."""
        state, match = self.state, self.match
        while state and token not in self.following[state]:
            state = self.link[state]
            match = self.length[state]
        found = self.following[state].get(token)
        return (0, 0) if found is None else (found, match + 1)

    def climbed(self, state: int, wanted: int) -> int:
        """Returns the first of a state and its links behind which so many tokens stand, or else the last of them."""
        while state and self.link[state] > 0 and len(self.tokens) - self.ends[state] < wanted:
            state = self.link[state]
        return state

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        new = self._state({}, len(self.tokens), len(self.tokens))
        state = self._last
        while state >= 0 and token not in self.following[state]:
            self.following[state][token] = new
            state = self.link[state]
        self._last = new
        if state < 0:
            self.link[new] = 0
            return
        found = self.following[state][token]
        if self.length[found] == self.length[state] + 1:
            self.link[new] = found
            return
        # The shorter strings of the state that was found end here, too, and the longer ones do not: two states.
        shorter = self._state(dict(self.following[found]), self.length[state] + 1, self.ends[found])
        self.link[shorter] = self.link[found]
        self.link[found] = self.link[new] = shorter
        while state >= 0 and self.following[state].get(token) == found:
            self.following[state][token] = shorter
            state = self.link[state]

    def _state(self, following: dict[int, int], length: int, ends: int) -> int:
        self.following.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.ends.append(ends)
        return len(self.link) - 1


class SamDrafter(RatedDrafter):
    """Drafts what followed the longest end of the sequence (its *match*) where it stood first.

    It is looked for in the request's own text by a suffix automaton, and in a corpus, if there is one, by its suffix
    array. A match in the corpus counts ``corpus_bias`` tokens less; of equals the request's own is taken. Nothing is
    drafted behind a match of fewer than ``threshold`` tokens: that is the place of another drafter (``ChoiceDrafter``).
    The match's length is how many tokens are expected to be accepted.

    With a ``factor``, a draft has ``factor · match`` tokens; without one, ``max_draft_tokens``. Where fewer follow in
    the request's text, because it has just begun to repeat itself, a shorter end of the sequence takes the match's
    place that was there earlier, except with a ``factor``.

    Args:
        corpus: A file that ``python examples/corpus.py`` wrote, or a ``Corpus``; None for the request's text alone.
        factor: Tokens of a draft per token of the match; None for no such limit.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(
        self,
        corpus: str | Path | Corpus | None = None,
        *,
        max_draft_tokens: int = 39,
        threshold: int = 5,
        corpus_bias: int = 5,
        factor: float | None = None,
    ):
        self.max_draft_tokens = nodes_of_draft("max_draft_tokens", max_draft_tokens)
        self.threshold = whole("threshold", threshold, least=1, few="give at least 1, the root alone")
        self.corpus_bias = whole("corpus_bias", corpus_bias, least=0)
        remedy = "give a number above 0, or None"
        self.factor = None if factor is None else number("factor", factor, remedy, lambda n: 0 < n < float("inf"))
        self.corpus = Corpus.open(corpus) if isinstance(corpus, (str, Path)) else corpus
        self.max_nodes = self.max_depth = self.max_draft_tokens
        self.is_chain = True

    def bind(self, target: Target, sizes: Sizes) -> "SamSession":
        if self.corpus is not None:
            self.corpus.check(target)
        return SamSession(self, sizes)


class SamSession(LookUpSession):
    """The automata of the running requests of one engine."""

    def __init__(self, drafter: SamDrafter, sizes: Sizes):
        super().__init__(drafter, sizes)
        self._drafter = drafter
        self._automata = [SuffixAutomaton() for _ in range(sizes.max_batch_size)]

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        super().admit(slot, prompt_ids, sampling)
        self._automata[slot] = SuffixAutomaton()

    def release(self, slot: int) -> None:
        self._automata[slot] = SuffixAutomaton()

    def read(self, slot: int, sequence: np.ndarray) -> None:
        """Add what is new before the root; a draft follows the root without adding it."""
        automaton = self._automata[slot]
        automaton.extend(sequence[len(automaton.tokens) : -1].tolist())

    def draft(self, slot: int, sequence: np.ndarray, depth: int) -> Draft:
        drafter, automaton, corpus = self._drafter, self._automata[slot], self._drafter.corpus
        state, own = automaton.after(int(sequence[-1]))
        found = None if corpus is None else corpus.longest(sequence)
        there = 0 if found is None else found.length - drafter.corpus_bias
        match = max(own, there)
        if match < drafter.threshold:
            return Draft()
        most = drafter.max_draft_tokens
        if drafter.factor is not None:
            most = min(most, int(match * drafter.factor))
        if own >= there:
            if drafter.factor is None:
                state = automaton.climbed(state, drafter.max_draft_tokens + 1)  # the root counts, as with the authors
            begin = automaton.ends[state]
            tokens = sequence[begin : begin + min(most, depth)].tolist()
        else:
            assert corpus is not None and found is not None, "there is a match in it"
            tokens = [token for token in corpus.first(found, min(most, depth)) if token >= 0]
        return Draft.path(tokens, score=float(min(match, len(tokens))), match=match)
