"""Sessions whose methods a test changes."""

from collections.abc import Callable
from typing import Any

from specdec import Drafter, Session, Sizes, Target


def _passed_on(name: str) -> Any:
    return lambda session, *given: getattr(session.inner, name)(*given)


class Wrapped(Session):
    """Passes everything on to another session."""

    def __init__(self, inner: Session):
        self.inner = inner
        self.reads_host, self.models = inner.reads_host, inner.models
        self.hidden_layers, self.top_tokens = inner.hidden_layers, inner.top_tokens
        self.caches, self.lookback = inner.caches, inner.lookback

    admit, observe, prepare, propose, trimmed, held, release = (
        _passed_on(name) for name in ("admit", "observe", "prepare", "propose", "trimmed", "held", "release")
    )


class Wrapping(Drafter):
    session: Wrapped

    def __init__(self, drafter: Drafter, wrap: Callable[[Session], Wrapped]):
        self.drafter, self._wrap = drafter, wrap
        self.max_nodes, self.max_depth, self.laws = drafter.max_nodes, drafter.max_depth, drafter.laws
        self.is_chain, self.is_paths = drafter.is_chain, drafter.is_paths
        self.has_leaf_probs, self.adapts = drafter.has_leaf_probs, drafter.adapts

    def bind(self, target: Target, sizes: Sizes) -> Session:
        self.session = self._wrap(self.drafter.bind(target, sizes))
        return self.session
