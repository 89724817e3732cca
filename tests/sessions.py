"""Sessions whose methods a test changes."""

from collections.abc import Callable, Hashable, Sequence

from specdec import Batch, Drafter, DraftTree, Outcome, SamplingParams, Session, Sizes, Target


class Wrapped(Session):
    """Passes everything on to another session."""

    def __init__(self, inner: Session):
        self.inner = inner
        self.reads_host, self.models = inner.reads_host, inner.models
        self.hidden_layers, self.top_tokens = inner.hidden_layers, inner.top_tokens
        self.caches, self.lookback = inner.caches, inner.lookback

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.inner.admit(slot, prompt_ids, sampling)

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)

    def prepare(self, batch: Batch) -> Hashable:
        return self.inner.prepare(batch)

    def propose(self, batch: Batch) -> DraftTree:
        return self.inner.propose(batch)

    def trimmed(self, tree: DraftTree) -> DraftTree:
        return self.inner.trimmed(tree)

    def held(self, slot: int, length: int) -> int:
        return self.inner.held(slot, length)

    def release(self, slot: int) -> None:
        self.inner.release(slot)


class Wrapping(Drafter):
    """A drafter whose sessions are wrapped.

    Attributes:
        session: The last one that was made.
    """

    session: Wrapped

    def __init__(self, drafter: Drafter, wrap: Callable[[Session], Wrapped]):
        self.drafter, self._wrap = drafter, wrap
        self.max_nodes, self.max_depth, self.laws = drafter.max_nodes, drafter.max_depth, drafter.laws
        self.is_chain, self.is_paths = drafter.is_chain, drafter.is_paths
        self.has_leaf_probs, self.adapts = drafter.has_leaf_probs, drafter.adapts

    def bind(self, target: Target, sizes: Sizes) -> Session:
        self.session = self._wrap(self.drafter.bind(target, sizes))
        return self.session
