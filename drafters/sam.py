"""SAM decoding: drafts copied from behind the longest end of the sequence that occurred before, here or in a corpus.

Hu et al. 2024 (arXiv 2411.10666; github.com/hyx1999/SAM-Decoding).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafters.corpus import Corpus
from drafters.rest import most_frequent
from drafters.suffix_automaton import SuffixAutomaton
from specdec.arguments import flag, number, whole
from specdec.drafting.lookup import Draft, LookUpSession, RatedDrafter
from specdec.interfaces import Sizes
from specdec.requests import SamplingParams
from specdec.shape import MOST_NODES
from specdec.target.target import Target
from specdec.types import DraftSampling

_PER_DEPTH = 8
_HITS = 5000


class SamDrafter(RatedDrafter):
    """Drafts what followed the longest end of the sequence (its *match*) where it stood first.

    It is looked for in the request's own text by a suffix automaton, and in a corpus, if there is one, by its suffix
    array, which finds what a static automaton would. A match in the corpus counts ``corpus_bias`` tokens less. The
    longer match is taken, of equals the request's own. Nothing is drafted behind a match of fewer than ``threshold``
    tokens: that is the place of another drafter, in a ``ChoiceDrafter`` or a ``MergedDrafter``. The match's length is
    how many tokens are expected to be accepted.

    With a ``factor``, a draft has ``factor · match`` tokens; without one, ``max_draft_tokens``. Where fewer follow in
    the request's text, because it has just begun to repeat itself, a shorter end of the sequence takes the match's
    place that was there earlier, except with a ``factor``.

    With ``corpus_tree``, the corpus gives the most frequent nodes of all that follows the match there, at most 8 of a
    depth. This with ``factor=4, max_draft_tokens=59, threshold=1`` is the authors' variant without another drafter.

    All work is on the host. A token costs a request's automaton a few steps, a draft some bisections in the corpus.

    Args:
        corpus: A file that ``python examples/corpus.py`` wrote, or a ``Corpus``; None for the request's text alone.
        max_draft_tokens: Tokens of a draft at most.
        threshold: Tokens of the shortest match that is drafted behind.
        corpus_bias: So many tokens longer must a match in the corpus be to count the same.
        factor: Tokens of a draft per token of the match; None for no such limit.
        corpus_tree: Whether the corpus gives trees instead of what stands first.

    Raises:
        ValueError: There is no such corpus, or an argument is of the wrong type or out of its range.
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
        corpus_tree: bool = False,
    ):
        self.max_draft_tokens = whole("max_draft_tokens", max_draft_tokens, least=1)
        if self.max_draft_tokens > MOST_NODES:
            raise ValueError(f"max_draft_tokens={max_draft_tokens}: a tree may have at most {MOST_NODES:,} nodes")
        self.threshold = whole("threshold", threshold, least=1, few="give at least 1, the root alone")
        self.corpus_bias = whole("corpus_bias", corpus_bias, least=0)
        self.factor = None if factor is None else number("factor", factor)
        if self.factor is not None and not 0 < self.factor < float("inf"):
            raise ValueError(f"factor={factor}: give a number above 0, or None")
        self.corpus_tree = flag("corpus_tree", corpus_tree)
        if self.corpus_tree and corpus is None:
            raise ValueError("corpus_tree=True is about a corpus, and corpus=None: give one, or leave corpus_tree out")
        self.corpus = Corpus.open(corpus) if isinstance(corpus, (str, Path)) else corpus
        self.max_nodes = self.max_depth = self.max_draft_tokens
        self.is_chain = not self.corpus_tree

    def bind(self, target: Target, sizes: Sizes) -> "SamSession":
        """Begin without any text. Raises ValueError: the corpus has the tokens of another tokenizer."""
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
        """Returns what follows the longer match."""
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
            if drafter.corpus_tree and most:
                draft = most_frequent(corpus.continuations(found, _HITS, min(most, depth)), most, _PER_DEPTH)
                draft.match, draft.score = match, float(min(match, depth))
                return draft
            tokens = [token for token in corpus.first(found, min(most, depth)) if token >= 0]
        return Draft.path(tokens, score=float(min(match, len(tokens))), match=match)
