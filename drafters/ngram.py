"""Prompt lookup: drafts copied from where the sequence's last tokens occurred before.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding) and LLMA (Yang et al. 2023, arXiv 2304.04487), with
several continuations merged into a tree.
"""

import numpy as np
import torch
from jaxtyping import Bool, Int

from specdec.interfaces import Drafter
from specdec.slots import Slots
from specdec.target import Target
from specdec.tree import DraftTree
from specdec.types import DraftSampling


class NGramDrafter(Drafter):
    """Copies what followed earlier occurrences of the sequence's last tokens.

    A *match* is an earlier position at which the last ``n`` tokens of the sequence (prompt and output, root
    included) end too, with ``n`` from ``max_ngram`` down to ``min_ngram``; it may overlap them. Matches of more
    tokens come first, then more recent ones. What follows a match is its continuation, which ends at
    ``max_draft_tokens`` or with the sequence. The best match's continuation is the first branch; the best one that
    is not covered by the branches so far (that is, the beginning of one of them) is the next, up to ``branches``.
    Where a continuation ends with the sequence and others begin with it, the longest of these (the best among
    equals) takes its place, so that text in a loop is not drafted one period at a time. Branches share the nodes of
    their common beginnings; siblings stand in the order of the branches. A row without a match proposes nothing.

    For every ``n``, only the ``max_draft_tokens + 8`` most recent matches are looked at: this bounds the work on
    text with thousands of matches, and cannot change which one is the best.

    All work is on the host, in numpy, over all rows at once: one dense comparison with each row's last token, then
    only the positions that it found.

    Args:
        max_draft_tokens: Length of a branch at most.
        branches: How many at most; 1 makes chains.
        max_ngram: Tokens that a match compares at most.
        min_ngram: Tokens that a match needs at least.

    Raises:
        ValueError: An argument is below 1, or ``min_ngram`` above ``max_ngram``.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, max_draft_tokens: int = 8, *, branches: int = 2, max_ngram: int = 4, min_ngram: int = 1):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens={max_draft_tokens}: give at least 1")
        if branches < 1:
            raise ValueError(f"branches={branches}: give at least 1, which drafts chains")
        if min_ngram < 1:
            raise ValueError(f"min_ngram={min_ngram}: give at least 1, the root alone")
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram={max_ngram} is below min_ngram={min_ngram}: give at least as much")
        self.max_draft_tokens, self.branches = max_draft_tokens, branches
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.max_nodes = max_draft_tokens * branches
        self.max_depth = max_draft_tokens
        self.is_chain = branches == 1
        self.considered = max_draft_tokens + 8

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """Fits every target, and keeps no state: the sequences are in the slots."""

    def propose(self, slots: Slots) -> DraftTree:
        """Look up every drafting row."""
        depth = np.where(slots.host_drafting, slots.host_max_depth, 0)
        branches = self._branches(slots.host_tokens, slots.host_lengths, depth)
        if branches is None:
            return DraftTree.root_only(slots.roots)
        return _merge(branches, slots.host_tokens[np.arange(len(slots)), slots.host_lengths], slots.roots.device)

    def _branches(
        self, tokens: Int[np.ndarray, "batch position"], lengths: Int[np.ndarray, " batch"], depth: Int[np.ndarray, " batch"]
    ) -> Int[np.ndarray, "batch branch depth"] | None:
        """Each row's branches, -1 padded in both directions; None if no row has any.

        Args:
            tokens: The sequences.
            lengths: Index of each row's last token.
            depth: Tokens that each row may draft; 0 for rows that shall not.
        """
        found = self._matches(tokens, np.where(depth > 0, lengths, 0))
        if found is None:
            return None
        ends, known = found
        steps = np.arange(min(int(depth.max()), self.max_draft_tokens))
        # A continuation's tokens: up to the row's end, and as deep as the row may draft.
        room = np.minimum((lengths[:, None] - ends) * known, depth[:, None])
        first = np.arange(len(tokens))[:, None] * tokens.shape[1] + ends + 1
        inside = steps < room[..., None]
        continuations = np.where(inside, tokens.reshape(-1).take(first[..., None] + steps, mode="clip"), -1)
        return self._choose(continuations, np.minimum(room, len(steps)))

    def _matches(
        self, tokens: Int[np.ndarray, "batch position"], lengths: Int[np.ndarray, " batch"]
    ) -> tuple[Int[np.ndarray, "batch match"], Bool[np.ndarray, "batch match"]] | None:
        """Positions at which matches end, the best first, and which entries of the table are real.

        A match of n tokens stands in the table n - min_ngram + 1 times: also as one of fewer tokens.
        """
        batch, stride = tokens.shape
        flat = tokens.reshape(-1)
        begin = np.arange(batch) * stride
        last = begin + lengths
        hits = np.flatnonzero(tokens[:, : lengths.max()] == flat[last][:, None])
        raise NotImplementedError
