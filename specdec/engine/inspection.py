"""``Engine(check=True)``: looks at every drafted tree and every law of the rule, and names the first mistake."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdec.batch import Batch
from specdec.engine.round import Mode
from specdec.interfaces import Drafter, Laws, Verifier
from specdec.requests import Request
from specdec.tree import DraftTree
from specdec.wellformed import describe, distribution_flaw, flaws


def inspected(mode: Mode, drafter: Drafter, by_slot: Sequence[Request | None]) -> Mode:
    """Returns a mode whose drafts and laws are looked at; ``by_slot`` is the request in every slot."""
    rule = _InspectedRule(drafter, mode.verifier, by_slot)
    return replace(mode, verifier=rule, check=rule.look)


class _InspectedRule(Verifier):
    """A rule whose laws are looked at. The class has no ``samplings``, so no message names it as a remedy."""

    def __init__(self, drafter: Drafter, rule: Verifier, by_slot: Sequence[Request | None]):
        self._drafter, self._rule, self._by_slot = drafter, rule, by_slot
        self.exactness, self.samplings = rule.exactness, rule.samplings
        self._batch: Batch | None = None

    def look(self, tree: DraftTree, batch: Batch) -> None:
        """Refuse a tree that is not what the drafter announced."""
        self._batch = batch
        for flaw in flaws(tree, self._drafter, batch, leaf_probs=self._rule.needs_leaf_probs):
            raise self._error(self._drafter, flaw.row, flaw.node, flaw.what)

    def laws(self, tree: DraftTree, target_probs: Float[Tensor, "batch node vocab"]) -> Laws:
        laws = self._rule.laws(tree, target_probs)
        known = torch.isfinite(target_probs).all(-1).all(-1)  # elsewhere the engine ends the request by itself
        self._shape("stop", laws.stop, "[batch, node]", tree.tokens)
        beside = known[:, None] & ~tree.valid & (laws.stop != 0)
        if beside.any():
            row, node = beside.nonzero()[0].tolist()
            what = f"stop gives it the probability {float(laws.stop[row, node]):.3g}, and it is not valid: give 0"
            raise self._error(self._rule, row, node, what)
        self._refuse("stop", laws.stop, known)

        def after(stop_nodes: Int[Tensor, " batch"]) -> Float[Tensor, "batch vocab"]:
            law = laws.after(stop_nodes)
            self._shape("after", law, "[batch, vocab]", target_probs[:, 0])
            self._refuse("after", law, known, stop_nodes)
            return law

        return Laws(laws.stop, after)

    def _shape(self, name: str, law: Tensor, axes: str, like: Tensor) -> None:
        if law.shape != like.shape:
            what = f"{name} has the shape {list(law.shape)}: give {axes}, here {list(like.shape)}"
            raise self._error(self._rule, None, None, what)

    def _refuse(self, name: str, law: Tensor, known: Bool[Tensor, " batch"], stop: Tensor | None = None) -> None:
        """Refuse ``known`` rows that are no distributions."""
        wrong = known & (distribution_flaw(law) > 0)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            node = None if stop is None else int(stop[row])
            raise self._error(self._rule, row, node, f"{name} {describe(law[row])}")

    def _error(self, who: Drafter | Verifier, row: int | None, node: int | None, what: str) -> ValueError:
        """Returns an error that names request, round and node, as far as there are any."""
        assert self._batch is not None
        places = []
        if row is not None:
            request = self._by_slot[int(self._batch.on_host.slots[row])]
            number = "unknown" if request is None else request.id
            places += [f"request {number}", f"round {int(self._batch.rounds[row])}"]
        if node is not None:
            places.append(f"node {node}")
        place = f" ({', '.join(places)})" if places else ""
        return ValueError(f"{type(who).__name__}{place}: {what}")
