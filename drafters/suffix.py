"""Drafts from suffix trees with counts: what has most often followed the sequence's last tokens.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

from collections.abc import Sequence

import numpy as np

from drafters.suffix_tree import Point, SuffixTree, Text
from specdec import DraftSampling, Outcome, SamplingParams, Sizes, Target
from specdec.arguments import flag, number, whole
from specdec.drafting.lookup import Draft, LookUpSession, RatedDrafter, nodes_of_draft

MODES = ("path", "tree")


class SuffixDrafter(RatedDrafter):
    """Drafts what has most often followed the sequence's last tokens, in this request and, if wanted, in earlier ones.

    The *match* of m tokens is the sequence's last m tokens (prompt and output, root included). A suffix tree counts
    each string of up to ``tree_depth`` tokens; the match's own occurrence at the end counts, so that what has followed
    it once, and was all that has followed, has the probability 1/2. For every m a draft of at most
    ``factor · m + offset`` tokens begins at the match; a node has the probability count(child) / count(node) given its
    parent, and no path is less probable than ``min_probability``. The sum of the probabilities of all nodes' paths is
    the draft's score. The draft of the highest score is proposed; of equals that of the longer match, then that from
    the request's own tree.

    All work is on the host. A new token costs a request's tree a few steps, at most ``tree_depth``, and two nodes.

    Args:
        mode: ``"path"`` goes on with the most frequent token; ``"tree"`` takes the most probable nodes.
        tree_depth: Tokens of the longest string that is counted: a match and what follows it.
        factor: Tokens of a draft per token of the match. The authors' factor is 1, which drafts shorter, and surer.
        offset: Tokens of a draft besides.
        shared: Whether outputs of other requests, running ones included, are looked up, too; no prompts. It begins
            empty with every engine. A request's drafts, and at a temperature its output, then depend on what else has
            been decoded; the law of its output does not.
        shared_tokens: Tokens of outputs that are remembered, about; the older half of them is forgotten together.
    """

    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(
        self,
        max_draft_tokens: int = 16,
        *,
        mode: str = "path",
        tree_depth: int = 24,
        factor: float = 4.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        shared: bool = False,
        shared_tokens: int = 1_000_000,
    ):
        self.max_draft_tokens = nodes_of_draft("max_draft_tokens", max_draft_tokens)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: give path (a chain) or tree (the most probable nodes)")
        self.mode = mode
        few = "give at least 2, a token and what follows it"
        self.tree_depth = whole("tree_depth", tree_depth, least=2, few=few)
        self.factor, self.offset = number("factor", factor), number("offset", offset)
        if not 0 <= self.factor < float("inf") or not abs(self.offset) < float("inf"):
            raise ValueError(f"factor={factor} and offset={offset}: give finite numbers, and a factor of at least 0")
        if self.factor * (self.tree_depth - 1) + self.offset < 1:
            raise ValueError(
                f"factor={factor} and offset={offset} leave a match of {self.tree_depth - 1} tokens, the longest, less "
                f"than one token to draft: give more of either"
            )
        self.min_probability = number(
            "min_probability", min_probability, "give more than 0 and at most 1", lambda share: 0 < share <= 1
        )
        self.shared = self.adapts = flag("shared", shared)
        self.shared_tokens = whole("shared_tokens", shared_tokens, least=1)
        self.is_chain, longest = mode == "path", self.tree_depth - 1
        self.max_nodes = min(self.max_draft_tokens, int(longest * self.factor + self.offset))
        self.max_depth = min(self.max_nodes, longest)
        self.max_nodes = self.max_depth if self.is_chain else self.max_nodes

    def bind(self, target: Target, sizes: Sizes) -> "SuffixSession":
        return SuffixSession(self, sizes)


class _Request:
    """A running request's prompt and output in its own tree, and its output in the shared tree of its beginning."""

    def __init__(self, tree_depth: int, prompt_length: int, shared: SuffixTree):
        self.tree, self.text = SuffixTree(tree_depth), Text()
        self.prompt_length, self.shared, self.output = prompt_length, shared, Text()


class SuffixSession(LookUpSession):
    """The suffix trees of the running requests of one engine, and the shared ones."""

    def __init__(self, drafter: SuffixDrafter, sizes: Sizes):
        super().__init__(drafter, sizes)
        self._drafter = drafter
        self._requests: list[_Request | None] = [None] * sizes.max_batch_size
        self._shared = [SuffixTree(drafter.tree_depth)]  # the newer one first

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        super().admit(slot, prompt_ids, sampling)
        if 2 * self._shared[0].tokens >= self._drafter.shared_tokens:
            self._shared = [SuffixTree(self._drafter.tree_depth), self._shared[0]]
        self._requests[slot] = _Request(self._drafter.tree_depth, len(prompt_ids), self._shared[0])

    def release(self, slot: int) -> None:
        """Forget the request's tree; its output stays in the shared one."""
        request, self._requests[slot] = self._requests[slot], None
        if request is not None:
            request.shared.end(request.output)

    def observe(self, outcome: Outcome) -> None:
        """Add what a round has emitted to the shared tree: after the last round nothing is proposed any more."""
        host = outcome.host
        if not self._drafter.shared or host is None or host.emitted is None:
            return
        starts, counts = host.starts + 1, host.counts
        for row, slot in enumerate(host.slots.tolist()):
            request = self._requests[slot]
            if request is not None:
                known = request.prompt_length + len(request.output.tokens) - int(starts[row])
                emitted = host.emitted[row, max(known, 0) : counts[row]]
                request.shared.extend(request.output, emitted.tolist())

    def read(self, slot: int, sequence: np.ndarray) -> None:
        request = self._of(slot)
        request.tree.extend(request.text, sequence[len(request.text.tokens) :].tolist())
        if self._drafter.shared:
            begin = request.prompt_length + len(request.output.tokens)
            request.shared.extend(request.output, sequence[begin:].tolist())

    def draft(self, slot: int, sequence: np.ndarray, depth: int) -> Draft:
        request = self._of(slot)
        tokens, best = request.text.tokens, Draft()
        # All suffixes that occur earlier, too: the longest first. Only these have been followed by something.
        for cursor in request.text.cursors:
            point = cursor.node, cursor.node.length - cursor.left
            best = self._better(request.tree, point, len(tokens) - cursor.start, depth, best)
        for tree in self._shared if self._drafter.shared else ():
            points: list[Point] = []
            for match in range(1, min(self._drafter.tree_depth, len(tokens) + 1)):
                point = tree.find(tokens[-match:])
                if point is None:
                    break
                points.append(point)
            other = Draft()
            for match in range(len(points), 0, -1):
                other = self._better(tree, points[match - 1], match, depth, other)
            # Where scores are equal, the longer match wins, then the request's own.
            best = other if (other.score, other.match) > (best.score, best.match) else best
        return best

    def _of(self, slot: int) -> _Request:
        request = self._requests[slot]
        assert request is not None, "the engine admits a request before it drafts for it"
        return request

    def _better(self, tree: SuffixTree, point: Point, match: int, depth: int, best: Draft) -> Draft:
        """Returns the draft that follows a match, or the best one so far, of longer matches, if it is as good."""
        drafter = self._drafter
        most = min(drafter.max_draft_tokens, int(match * drafter.factor + drafter.offset))
        if most <= best.score:
            return best  # not even certain tokens would be more
        if drafter.is_chain:
            draft = tree.follow(point, min(most, depth), drafter.min_probability)
        else:
            draft = tree.branch(point, most, drafter.min_probability, depth)
        draft.match = match
        return draft if draft.score > best.score else best
