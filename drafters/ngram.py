"""Prompt lookup: drafts copied from where the sequence's last tokens occurred before.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding) and LLMA (Yang et al. 2023, arXiv 2304.04487), with
several continuations merged into a tree.
"""

import numpy as np
from jaxtyping import Int

from specdec import Batch, DraftSampling, DraftTree, StatelessDrafter
from specdec.arguments import whole
from specdec.drafting.lookup import Draft, chains, trees
from specdec.shape import MOST_NODES


class NGramDrafter(StatelessDrafter):
    """Copies what followed earlier occurrences of the sequence's last tokens.

    A *match* is an earlier position at which the last ``n`` tokens of the sequence end too, with ``n`` from
    ``max_ngram`` down to ``min_ngram``; matches of more tokens come first, then more recent ones. What follows it is
    its continuation, which ends at ``max_draft_tokens`` or with the sequence. The best match's continuation is the
    first branch; the best one that is not the beginning of a branch so far is the next, up to ``branches``. Where a
    continuation ends with the sequence and others begin with it, the longest of these takes its place, so that text in
    a loop is not drafted one period at a time. Branches share the nodes of their common beginnings.

    For every ``n``, only the ``max_draft_tokens + 8`` most recent matches are looked at, which bounds the work.
    """

    runs = "nothing"
    laws = frozenset([DraftSampling.DETERMINISTIC])
    reads_host = True

    def __init__(self, max_draft_tokens: int = 8, *, branches: int = 2, max_ngram: int = 4, min_ngram: int = 1):
        max_draft_tokens = whole("max_draft_tokens", max_draft_tokens, least=1)
        branches = whole("branches", branches, least=1, few="give at least 1, which drafts chains")
        min_ngram = whole("min_ngram", min_ngram, least=1, few="give at least 1, the root alone")
        max_ngram = whole("max_ngram", max_ngram)
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram={max_ngram} is below min_ngram={min_ngram}: give at least as much")
        if max_draft_tokens * branches > MOST_NODES:
            said = f"max_draft_tokens={max_draft_tokens} in each of branches={branches} make a tree of"
            most = f"{max_draft_tokens * branches:,} nodes, and a tree may have at most {MOST_NODES:,}"
            raise ValueError(f"{said} {most}: lower either")
        self.max_draft_tokens, self.branches, self.is_chain = max_draft_tokens, branches, branches == 1
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.max_nodes, self.max_depth = max_draft_tokens * branches, max_draft_tokens
        self.considered = max_draft_tokens + 8

    def propose(self, batch: Batch) -> DraftTree:
        host = batch.on_host
        depth = np.minimum(np.where(host.drafting, host.max_depth, 0), self.max_depth)
        lengths = host.lengths
        branches = self._branches(host.tokens, lengths, depth) if depth.any() else None
        if branches is None:
            return DraftTree.root_only(batch.roots)
        roots = host.tokens[np.arange(len(lengths)), lengths]
        if self.is_chain:
            return chains(roots, branches[:, 0], batch.device)
        drafts = [Draft.merged(branch[branch >= 0].tolist() for branch in row) for row in branches]
        return trees(roots, drafts, batch.device)

    def _branches(
        self,
        tokens: Int[np.ndarray, "batch position"],
        lengths: Int[np.ndarray, " batch"],
        depth: Int[np.ndarray, " batch"],
    ) -> Int[np.ndarray, "batch branch depth"] | None:
        """Returns each row's branches, -1 padded; None if no row has any."""
        matches = self._matches(tokens, np.where(depth > 0, lengths, 0))
        if matches is None:
            return None
        ends, room = matches
        sizes = np.minimum(room, depth[:, None])
        if not sizes.any():
            return None
        steps = np.arange(depth.max())
        following = tokens.reshape(-1).take(ends[..., None] + (steps + 1), mode="clip")
        return self._choose(np.where(steps < sizes[..., None], following, -1), sizes)

    def _matches(
        self, tokens: Int[np.ndarray, "batch position"], lengths: Int[np.ndarray, " batch"]
    ) -> tuple[Int[np.ndarray, "batch match"], Int[np.ndarray, "batch match"]] | None:
        """Returns where each row's matches end in the flattened ``tokens``, the best first, and how many follow."""
        batch, stride = tokens.shape
        width = int(lengths.max())
        flat = tokens.reshape(-1)
        begin = np.arange(batch) * stride
        last = begin + lengths
        suffix = flat.take(last - np.arange(self.max_ngram)[:, None], mode="clip")
        # -1 is no token: rows without a sequence find nothing.
        hits = np.flatnonzero(tokens[:, :width] == np.where(lengths > 0, suffix[0], -1)[:, None])
        rows = hits // width
        ends = hits + rows * (stride - width)
        recent = np.arange(1, self.considered + 1)
        tables: list[np.ndarray] = []
        real: list[np.ndarray] = []
        for n in range(1, self.max_ngram + 1):
            if n > 1:
                # Matches that reach back across the beginning of a row are dropped below.
                same = flat.take(ends - (n - 1), mode="clip") == suffix[n - 1][rows]
                ends, rows = ends[same], rows[same]
            if not len(ends):
                break
            if n >= self.min_ngram:
                # In this sorted list, a row's matches lie between its first complete n-gram and its last token.
                index = ends.searchsorted(last)[:, None] - recent
                tables.insert(0, ends.take(index, mode="clip"))
                real.insert(0, index >= ends.searchsorted(begin + (n - 1))[:, None])
        if not tables:
            return None
        table = np.concatenate(tables, axis=1)
        return table, np.where(np.concatenate(real, axis=1), last[:, None] - table, 0)

    def _choose(
        self, continuations: Int[np.ndarray, "batch match depth"], sizes: Int[np.ndarray, "batch match"]
    ) -> Int[np.ndarray, "batch branch depth"]:
        """Returns the branches; a row that has fewer than another gets empty ones at the end."""
        rows = np.arange(len(sizes))
        longest = sizes.max(1)
        uncovered = sizes > 0
        branches: list[np.ndarray] = []
        while True:
            pick = uncovered.argmax(1)
            left = uncovered[rows, pick]
            if not left.any():
                break
            branch = np.where(left[:, None], continuations[rows, pick], -1)
            if (sizes[rows, pick] < longest)[left].any():
                begun = branch[:, None]
                extends = ((continuations == begun) | (begun < 0)).all(2) & left[:, None]
                pick = np.where(extends, sizes, 0).argmax(1)
                branch = np.where(left[:, None], continuations[rows, pick], -1)
            branches.append(branch)
            if len(branches) == self.branches:
                break
            uncovered &= ~((continuations == branch[:, None]) | (continuations < 0)).all(2)
        return np.stack(branches, 1)
