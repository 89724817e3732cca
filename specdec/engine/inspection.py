"""``Engine(check=True)``: looks at every drafted tree and every law of the rule, and names the first mistake."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.round import Mode
from specdec.interfaces import Drafter, Verifier
from specdec.requests import Request
from specdec.tree import DraftTree
from specdec.wellformed import describe, distribution_flaw, flaws


class Inspector:
    """Looks at the rounds of one engine.

    Args:
        drafter: What it announced is compared with what it proposes.
        verifier: The acceptance rule.
        request_in: The request that runs in a slot.
    """

    def __init__(self, drafter: Drafter, verifier: Verifier, request_in: Callable[[int], Request | None]):
        self._drafter, self._verifier = drafter, verifier
        self._request_in = request_in
        self._slots: Batch | None = None

    def mode(self) -> Mode:
        """Returns speculative decoding whose drafts and laws are looked at."""
        mode = Mode.speculative(self._drafter, self._verifier, check=self._look)
        return replace(mode, verifier=_InspectedRule(self._verifier, self))

    def _look(self, tree: DraftTree, slots: Batch) -> None:
        self._slots = slots
        for flaw in flaws(tree, self._drafter, slots, leaf_probs=self._verifier.needs_leaf_probs):
            raise ValueError(f"{type(self._drafter).__name__}{self._place(flaw.row, flaw.node)}: {flaw.what}")

    def law(self, row: int | None, node: int | None, what: str) -> ValueError:
        """Returns the error that a law of the rule is wrong."""
        return ValueError(f"{type(self._verifier).__name__}{self._place(row, node)}: {what}")

    def _place(self, row: int | None, node: int | None) -> str:
        """Returns request, round and node in words that follow a name."""
        assert self._slots is not None
        parts = []
        if row is not None:
            request = self._request_in(int(self._slots.host_index[row]))
            number = "unknown" if request is None else request.id
            parts += [f"request {number}", f"round {int(self._slots.rounds[row])}"]
        if node is not None:
            parts.append(f"node {node}")
        return f" ({', '.join(parts)})" if parts else ""


class _InspectedRule(Verifier):
    """A rule whose laws are looked at. The class has no ``laws``, so no message names it as a remedy."""

    def __init__(self, rule: Verifier, inspector: Inspector):
        self._rule, self._inspector = rule, inspector
        self.exactness, self.laws = rule.exactness, rule.laws

    def stop_law(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Float[Tensor, "batch node"]:
        law = self._rule.stop_law(tree, target_probs)
        if tuple(law.shape) != tuple(tree.tokens.shape):
            shape, wanted = list(law.shape), list(tree.tokens.shape)
            raise self._inspector.law(None, None, f"stop_law has the shape {shape}: give [batch, node], here {wanted}")
        known = torch.isfinite(target_probs).all(-1).all(-1)
        beside = known[:, None] & ~tree.valid & (law != 0)
        if beside.any():
            row, node = beside.nonzero()[0].tolist()
            what = f"stop_law gives it the probability {float(law[row, node]):.3g}, and it is not valid: give 0"
            raise self._inspector.law(row, node, what)
        self._refuse("stop_law", law, known)
        return law

    def next_law(
        self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"], stop: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch vocab"]:
        law = self._rule.next_law(tree, target_probs, stop)
        wanted = [target_probs.shape[0], target_probs.shape[2]]
        if list(law.shape) != wanted:
            what = f"next_law has the shape {list(law.shape)}: give [batch, vocab], here {wanted}"
            raise self._inspector.law(None, None, what)
        self._refuse("next_law", law, torch.isfinite(target_probs).all(-1).all(-1), stop)
        return law

    def _refuse(
        self,
        name: str,
        law: Float[Tensor, "batch choice"],
        known: Bool[Tensor, " batch"],
        stop: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Refuse rows that are no distributions. Where p is not finite, the engine ends the request by itself."""
        wrong = known & (distribution_flaw(law) > 0)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise self._inspector.law(row, None if stop is None else int(stop[row]), f"{name} {describe(law[row])}")
