"""Drafts from a corpus: the most frequent continuations of the sequence's last tokens there, as a tree.

REST (He et al. 2023, arXiv 2311.08252; github.com/FasterDecoding/REST).
"""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from drafters.corpus import Corpus
from specdec import DraftSampling, Sizes, Target
from specdec.arguments import whole
from specdec.drafting.lookup import Draft, LookUpSession, RatedDrafter, nodes_of_draft


class RestDrafter(RatedDrafter):
    """Drafts what has followed the sequence's last tokens in a corpus most often.

    The longest end of the sequence that occurs in the corpus is its *match*, of ``min_match`` to ``max_match`` tokens.
    All that follows it there, up to ``max_depth`` tokens and to the end of the document, is merged into a tree; every
    node has the number of places at which the path to it follows. The nodes of the largest numbers are drafted, of
    equals the shorter paths, then those of smaller tokens. Their shares of all places add up to how many tokens would
    be accepted on average if the text went on as the corpus does (``Draft.score``).

    Args:
        corpus: A file that ``python examples/corpus.py`` wrote, or a ``Corpus``.
        hits: Places whose continuations are read, at most; of more, those at equal distances in the suffix array. The
            authors' code takes the first ones, which begin with the smallest tokens.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])
    is_chain = False

    def __init__(
        self,
        corpus: str | Path | Corpus,
        *,
        max_nodes: int = 64,
        max_depth: int = 10,
        max_match: int = 16,
        min_match: int = 2,
        hits: int = 5000,
    ):
        self.max_nodes = nodes_of_draft("max_nodes", max_nodes)
        self.max_depth = whole("max_depth", max_depth, least=1)
        self.min_match = whole("min_match", min_match, least=1, few="give at least 1, the root alone")
        self.max_match = whole("max_match", max_match)
        if self.max_match < self.min_match:
            raise ValueError(f"max_match={max_match} is below min_match={min_match}: give at least as much")
        self.hits = whole("hits", hits, least=1)
        self.corpus = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)

    def bind(self, target: Target, sizes: Sizes) -> "RestSession":
        self.corpus.check(target)
        return RestSession(self, sizes)


class RestSession(LookUpSession):
    """Looks up in the corpus; there is nothing to keep of a request but its last draft."""

    def __init__(self, drafter: RestDrafter, sizes: Sizes):
        super().__init__(drafter, sizes)
        self._drafter = drafter

    def draft(self, slot: int, sequence: np.ndarray, depth: int) -> Draft:
        drafter, corpus = self._drafter, self._drafter.corpus
        match = corpus.longest(sequence, drafter.max_match)
        if match.length < drafter.min_match:
            return Draft()
        draft = most_frequent(corpus.continuations(match, drafter.hits, depth), drafter.max_nodes)
        draft.match = match.length
        return draft


def most_frequent(rows: Int[np.ndarray, "hit depth"], most: int) -> Draft:
    """Returns the tree of the most frequent beginnings of some rows, and their shares added up as its score.

    The rows ``1 2``, ``1 3`` and ``1 3`` have the beginnings ``1`` (three times), ``1 3`` (twice) and ``1 2`` (once).
    They stand in ascending order, with -1 where nothing follows.
    """
    hits, depths = rows.shape
    new = np.ones((hits, depths), dtype=bool)
    new[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    group = np.cumsum(new, axis=0) - 1  # the number of a row's beginning among those of one length
    depth, first = np.nonzero(new.T)  # by depth, then by token
    count = np.diff(np.append(np.flatnonzero(new.T), hits * depths))
    real = rows[first, depth] >= 0
    depth, first, count = depth[real], first[real], count[real]
    draft, taken = Draft(), {}
    for node in np.argsort(-count, kind="stable").tolist():
        level, row = int(depth[node]), int(first[node])
        above = taken.get((level - 1, int(group[row, level - 1]))) if level else -1
        if above is None:
            continue
        taken[level, int(group[row, level])] = len(draft.tokens)
        draft.tokens.append(int(rows[row, level]))
        draft.parents.append(above)
        draft.score += int(count[node]) / hits
        if len(draft.tokens) == most:
            break
    return draft
