"""Lookahead decoding: n-grams that the target writes in parallel, verified where their first token is the root.

Fu et al. 2024 (arXiv 2402.02057; github.com/hao-ai-lab/LookaheadDecoding).
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int

from specdec import Batch, Drafter, DraftSampling, DraftTree, Outcome, SamplingParams, Session, Sizes, Target
from specdec.arguments import flag, whole
from specdec.drafting.lookup import Draft, trees
from specdec.shape import MOST_NODES


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target has written beside the text, in the same forwards that verify them.

    Beside its text a request keeps a *window* of guesses: ``ngram - 1`` rows and ``window`` columns. Row 0 continues
    the text after the root, which is its column 0; the token in row r + 1 is what the target said after that in row r
    of the same column. Every round the target is asked about the whole window, and says a new row, so that a column
    with its new token is an n-gram of the target's. It goes to the request's pool, under its first token; then the
    window moves on by a row and a column. N-grams that begin with the root are drafted, merged into a tree.

    The window is a tree, too: row 0 is a chain behind the root, and a token of row r + 1 a child of the one in row r.
    Its nodes are never accepted (they are not valid). A window begins with tokens of the prompt, in an order that looks
    random, and fills up in the first ``ngram - 2`` rounds. Where the output ends too soon for it, it is left out.

    The pool remembers ``guesses`` n-grams with the same first token; ``from_prompt`` puts the text's there, too.
    """

    runs = "nothing"
    laws = frozenset([DraftSampling.DETERMINISTIC])
    is_chain = False
    adapts = True

    def __init__(self, *, ngram: int = 5, window: int = 7, guesses: int = 7, from_prompt: bool = True):
        self.ngram = whole("ngram", ngram, least=3, few="give at least 3: the root, a token of the window, a new one")
        self.window = whole("window", window, least=2)
        self.guesses = whole("guesses", guesses, least=1)
        self.from_prompt = flag("from_prompt", from_prompt)
        self.max_depth = self.window + self.ngram - 3  # the window's; an n-gram is no deeper than its last row
        self.max_depth = max(self.max_depth, self.ngram - 1)
        filled = range(self.ngram - 1)
        widest = max(self.columns(rows) - 1 + rows * self.columns(rows) for rows in filled)
        self.max_nodes = widest + (self.ngram - 1) * self.guesses
        if self.max_nodes > MOST_NODES:
            raise ValueError(
                f"ngram={ngram}, window={window} and guesses={guesses} make trees of {self.max_nodes:,} nodes, and a "
                f"tree may have at most {MOST_NODES:,}: lower one of them"
            )

    def bind(self, target: Target, sizes: Sizes) -> "LookaheadSession":
        return LookaheadSession(self, sizes)

    def columns(self, rows: int) -> int:
        """The columns of a window with so many rows behind row 0."""
        return self.window + self.ngram - 2 - rows


class LookaheadSession(Session):
    """The windows and pools of the running requests of one engine."""

    reads_host = True
    lookback = 0
    top_tokens = 1

    def __init__(self, drafter: LookaheadDrafter, sizes: Sizes):
        self._drafter = drafter
        self._requests: list[_Request | None] = [None] * sizes.max_batch_size

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._requests[slot] = _Request(self._drafter, prompt_ids)

    def release(self, slot: int) -> None:
        self._requests[slot] = None

    def observe(self, outcome: Outcome) -> None:
        host, top = outcome.host, outcome.top_tokens
        if host is None or top is None:
            return
        said = top[..., 0].cpu().numpy()
        for row, slot in enumerate(host.slots.tolist()):
            request = self._requests[slot]
            if request is not None and host.counts[row]:
                request.move_on(said[row])

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree:
        host = batch.on_host
        drafts, valid = [Draft()] * len(batch), [0] * len(batch)
        for row in np.flatnonzero(host.drafting & (host.max_depth > 0)).tolist():
            request = self._requests[int(host.slots[row])]
            if request is not None:
                sequence, room = host.tokens[row, : host.lengths[row] + 1], int(host.max_depth[row])
                drafts[row], valid[row] = request.nodes(sequence, room)
        if not any(draft.tokens for draft in drafts):
            return DraftTree.root_only(batch.roots)
        roots = host.tokens[np.arange(len(batch)), host.lengths]
        return trees(roots, drafts, batch.device, valid)


class _Request:
    """The window and the pool of a running request.

    Attributes:
        rows: The window: row 0 from its column 1 on, and those behind it, from column 0 on.
        pool: For every first token the n-grams' other tokens; the newest last.
        root: The root of the last round.
        asked: The nodes of the last row, in the last round's tree; none if the window was left out.
        read: The number of tokens of the sequence whose n-grams are in the pool.
    """

    def __init__(self, drafter: LookaheadDrafter, prompt: Sequence[int]):
        self._drafter = drafter
        chosen = np.random.default_rng(0).integers(0, len(prompt), drafter.columns(0) - 1)
        self.rows: list[list[int]] = [[int(prompt[place]) for place in chosen]]
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}
        self.root, self.asked, self.read = 0, range(0), 0

    def nodes(self, sequence: Int[np.ndarray, " position"], room: int) -> tuple[Draft, int]:
        """Return the nodes that follow a sequence, and how many are drafts, at most ``room`` deep; then the window."""
        if self._drafter.from_prompt:
            self._read(sequence)
        self.root = int(sequence[-1])
        tree = Draft.merged(rest[:room] for rest in reversed(self.pool.get(self.root, {})))
        valid, self.asked = len(tree.tokens), range(0)
        columns = self._drafter.columns(len(self.rows) - 1)
        if columns + len(self.rows) - 2 <= room:  # or else the engine would take out the deeper nodes
            above = [-1]
            for token in self.rows[0]:
                above.append(tree.add(token, above[-1]))
            last = above[1:]
            for row in self.rows[1:]:
                last = above = [tree.add(token, parent) for token, parent in zip(row, above, strict=True)]
            self.asked = range(1 + last[0], 2 + last[-1])  # the root is node 0
        return tree, valid

    def move_on(self, said: Int[np.ndarray, " node"]) -> None:
        """Take note of what the target said after every node of the last round's tree."""
        if not self.asked:
            return
        new, first = said[self.asked.start : self.asked.stop].tolist(), len(self.rows) == 1
        if len(self.rows) < self._drafter.ngram - 1:
            # What is said after column j + 1 stands under column j of the moved window.
            self.rows = [*(row[1:] for row in self.rows), new if first else new[1:]]
        else:
            columns = zip([self.root, *self.rows[0]], *self.rows[1:], new, strict=True)
            for token, *rest in columns:
                self._keep(token, tuple(rest))
            self.rows = [self.rows[1][1:], *self.rows[2:], new]
        self.asked = range(0)

    def _read(self, sequence: Int[np.ndarray, " position"]) -> None:
        begin = max(self.read - self._drafter.ngram + 1, 0)
        tokens = sequence[begin:].tolist()
        for start in range(len(tokens) - self._drafter.ngram + 1):
            first, *rest = tokens[start : start + self._drafter.ngram]
            self._keep(first, tuple(rest))
        self.read = len(sequence)

    def _keep(self, token: int, rest: tuple[int, ...]) -> None:
        """Put an n-gram into the pool as its newest, and forget the oldest with the same first token."""
        kept = self.pool.setdefault(token, {})
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self._drafter.guesses:
            del kept[next(iter(kept))]
