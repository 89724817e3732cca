"""Medusa heads, in the ways in which they may be meant."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from drafters.medusa import MedusaDrafter
from drafters.medusa_heads import MedusaHeads
from experiments.inspecting.alternatives import other_states
from experiments.inspecting.text import Text
from experiments.inspecting.wiring import Family, Mistake, Variation, Wiring, twin
from specdec.inflate import signal_width
from specdec.target.target import Target


class MedusaFamily(Family):
    """Heads on the target's last state, one for each depth.

    Args:
        drafter: Bound to the target.
        target: The target.
    """

    def __init__(self, drafter: MedusaDrafter, target: Target):
        self.target = target
        heads: MedusaHeads = drafter.heads
        width = target.model.config.get_text_config(decoder=True).hidden_size
        if heads.hidden_size == signal_width(target.model) < width:
            heads = heads.widened(width)
        self.heads = twin(heads).to(device=target.device, dtype=drafter.dtype or target.dtype)
        self.depths = heads.num_heads
        self.wiring = Wiring(head=self.heads, layers=(-1,))

    @torch.no_grad()
    def logits(self, wiring: Wiring, text: Text) -> Iterator[Tensor]:
        """See ``Family.logits``."""
        state = text.states[wiring.layers[0]]
        state = state if wiring.change is None else wiring.change(state)
        hidden = state.flatten(0, 1)[text.before].to(next(wiring.head.parameters()).dtype)
        for head in wiring.head.heads[: text.depths]:
            yield head(hidden)

    def variations(self, wiring: Wiring) -> Iterator[Variation]:
        """See ``Family.variations``."""
        count = self.target.num_layers or 0
        yield Variation(
            "the last state before the final norm",
            Mistake.NORM,
            "they read the last state before the final norm, which this drafter cannot: train them on the one after it",
            replace(wiring, layers=(count,)),
        )
        if count > 1:
            yield Variation(
                f"hidden state {count - 1}",
                Mistake.LAYERS,
                "they read the input of the last layer, which this drafter cannot: train them on the last state",
                replace(wiring, layers=(count - 1,)),
            )
        for labels, name, remedy in (
            (
                -1,
                "head 0 predicts what the target itself does",
                "leave out the first head and count the others from 0; or they were hardly trained, since heads begin "
                "as the target's own output layer",
            ),
            (1, "head 0 predicts one token further on", "the first head is missing: add it to the files"),
        ):
            if labels != wiring.labels:
                yield Variation(name, Mistake.SHIFT, remedy, replace(wiring, labels=labels))
        yield from other_states(wiring)
