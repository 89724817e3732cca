"""``Engine(check=True)``: looks at every drafted tree and every law of the rule, and names the first mistake."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.round import Mode
from specdec.interfaces import Drafter, Laws, Session, Verifier
from specdec.requests import Request
from specdec.tree import DraftTree
from specdec.wellformed import describe, distribution_flaw, flaws


class Inspector:
    """Looks at the rounds of one engine.

    Args:
        drafter: What it announced is compared with what its session proposes.
        request_in: The request that runs in a slot.
    """

    def __init__(
        self, drafter: Drafter, session: Session, verifier: Verifier, request_in: Callable[[int], Request | None]
    ):
        self._drafter, self._session, self._verifier = drafter, session, verifier
        self._request_in = request_in
        self._slots: Batch | None = None

    def mode(self) -> Mode:
        """Returns speculative decoding whose drafts and laws are looked at."""
        mode = Mode.speculative(self._drafter, self._session, self._verifier, check=self._look)
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
            request = self._request_in(int(self._slots.on_host.slots[row]))
            number = "unknown" if request is None else request.id
            parts += [f"request {number}", f"round {int(self._slots.rounds[row])}"]
        if node is not None:
            parts.append(f"node {node}")
        return f" ({', '.join(parts)})" if parts else ""


class _InspectedRule(Verifier):
    """A rule whose laws are looked at. The class has no ``samplings``, so no message names it as a remedy."""

    def __init__(self, rule: Verifier, inspector: Inspector):
        self._rule, self._inspector = rule, inspector
        self.exactness, self.samplings = rule.exactness, rule.samplings

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        laws = self._rule.laws(tree, target_probs)
        self._shape("stop", laws.stop, "[batch, node]", list(tree.tokens.shape))
        known = torch.isfinite(target_probs).all(-1).all(-1)
        beside = known[:, None] & ~tree.valid & (laws.stop != 0)
        if beside.any():
            row, node = beside.nonzero()[0].tolist()
            what = f"stop gives it the probability {float(laws.stop[row, node]):.3g}, and it is not valid: give 0"
            raise self._inspector.law(row, node, what)
        self._refuse("stop", laws.stop, known)

        def after(stop_nodes: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
            law = laws.after(stop_nodes)
            self._shape("after", law, "[batch, vocab]", [target_probs.shape[0], target_probs.shape[2]])
            self._refuse("after", law, known, stop_nodes)
            return law

        return Laws(laws.stop, after)

    def _shape(self, name: str, law: Tensor, axes: str, wanted: list[int]) -> None:
        if list(law.shape) != wanted:
            what = f"{name} has the shape {list(law.shape)}: give {axes}, here {wanted}"
            raise self._inspector.law(None, None, what)

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
