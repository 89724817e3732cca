"""EAGLE's heads and MTP modules: pairs of a state and a token, in all the ways in which they may be meant."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.feature import FeatureDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.heads.mtp import MTPHead
from experiments.inspecting.alternatives import (
    other_columns,
    other_ends,
    other_layers,
    other_norms,
    other_ropes,
    other_states,
)
from experiments.inspecting.text import Text
from experiments.inspecting.wiring import Family, Mistake, Variation, Wiring, twin, weight
from experiments.training.heads.feature import unrolled
from experiments.training.heads.unrolled import ATTENTION, register
from specdec.target.target import Target

_DEPTHS = {EagleHead: 5, Eagle3Head: 7, MTPHead: 3}
"""How deep such heads are usually asked to draft."""


class FeatureFamily(Family):
    """A head that reads pairs.

    Args:
        drafter: Bound to the target.
        target: The target.
    """

    def __init__(self, drafter: FeatureDrafter, target: Target):
        self.target = target
        self.loaded = drafter.fitted(target)
        self.depths = _DEPTHS.get(type(self.loaded), 5)
        register()
        bound = twin(self.loaded.bound(target.model))
        bound.config._attn_implementation = ATTENTION
        self.wiring = Wiring(head=bound, layers=tuple(drafter.hidden_layers), columns=bound.draft_ids)

    @torch.no_grad()
    def logits(self, wiring: Wiring, text: Text) -> Iterator[Tensor]:
        """See ``Family.logits``."""
        head, before = wiring.head, text.before
        states = [text.states[layer] for layer in wiring.layers]
        if wiring.change is not None:
            states = [wiring.change(state) for state in states]
        features = head.fuse(states).to(head.dtype)
        embeddings = head.get_input_embeddings()
        rows = embeddings.weight.shape[0]
        batch = replace(text.batch, tokens=_moved(text.batch.tokens, wiring.tokens - 1))
        steps = unrolled(head, lambda ids: embeddings(ids.clamp(max=rows - 1)), features, batch, text.depths)
        for normed in steps:
            yield head.lm_head(normed.flatten(0, 1)[before])

    def variations(self, wiring: Wiring) -> Iterator[Variation]:
        """See ``Family.variations``."""
        yield from self._of_kind(wiring)
        yield from _other_pairs(wiring)
        yield from other_norms(wiring, self.target, wiring.head.model)
        yield from other_columns(wiring, self.target)
        own = self.loaded.model.embed_tokens
        yield from other_ends(
            wiring,
            self.target,
            embeddings="leave embed_tokens out of its files"
            if isinstance(self.loaded, MTPHead)
            else "give drafter.embeddings=target",
            tied=None if own is None else self.wiring.head.get_input_embeddings().weight,
        )
        if not isinstance(self.loaded, MTPHead):  # which turns as the target does
            yield from other_ropes(wiring, self.target, lambda head: head.model)
        missing = isinstance(self.loaded, Eagle3Head) and not (self.loaded.norm_joined or self.loaded.norm_each)
        normed = "the norms of its captured states (fc_norm.*, or input_norm) are missing: add them to its files"
        yield from other_states(wiring, normed=normed if missing else "")

    def _of_kind(self, wiring: Wiring) -> Iterator[Variation]:
        if isinstance(self.loaded, Eagle3Head):
            yield from other_layers(wiring, self.target)
            yield from _eagle3(wiring)
        elif isinstance(self.loaded, MTPHead):
            yield from _mtp(wiring, self.loaded, self.target)
        else:
            yield from _eagle1(wiring, self.target)


def _eagle3(wiring: Wiring) -> Iterator[Variation]:
    """Yields the switches of EAGLE-3 that its tensors do not tell, and its two halves the other way round."""
    head = wiring.head
    before = not head.model.layers[0].norm_before_residual
    found = twin(head)
    found.model.layers[0].norm_before_residual = before
    yield Variation(
        f"the residual stream begins {'normed' if before else 'un-normed'}",
        Mistake.NORM,
        f"write 'norm_before_residual: {str(before).lower()}' into its config.json (and specdec.json)",
        replace(wiring, head=found),
    )
    normed = head.fed_back == head.config.num_hidden_layers
    found = twin(head)
    found.fed_back = head.config.num_hidden_layers + normed
    yield Variation(
        f"its output is fed back {'normed' if normed else 'un-normed'}",
        Mistake.NORM,
        f"write 'norm_output: {str(normed).lower()}' into its config.json (and specdec.json)",
        replace(wiring, head=found),
    )
    if not isinstance(head.model.fusion.norm, nn.Identity):
        found = twin(head)
        found.model.fusion.norm = nn.Identity()
        yield Variation(
            "captured states as they are",
            Mistake.NORM,
            "it was trained without the norms of captured states that its files hold: remove fc_norm.* or input_norm",
            replace(wiring, head=found),
        )
    found = twin(head)
    for name in ("q_proj", "k_proj", "v_proj"):
        module = getattr(found.model.layers[0].self_attn, name)
        module.weight = weight(module.weight.roll(module.in_features // 2, dims=1))
    yield Variation(
        "the hidden state before the embedding",
        Mistake.HALVES,
        "it joins the hidden state before the embedding: swap the two halves of the columns of its first layer's "
        "q_proj, k_proj and v_proj",
        replace(wiring, head=found),
    )
    found = twin(head)
    layer = found.model.layers[0]
    if not torch.equal(layer.input_layernorm.weight, layer.hidden_norm.weight):
        layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm
        yield Variation(
            "input_layernorm and hidden_norm exchanged",
            Mistake.NORM,
            "exchange input_layernorm.weight and hidden_norm.weight of its first layer",
            replace(wiring, head=found),
        )


def _eagle1(wiring: Wiring, target: Target) -> Iterator[Variation]:
    """Yields other states for EAGLE-1, and its two halves the other way round."""
    count = target.num_layers or 0
    others = [
        (count, Mistake.NORM, "it reads the last state before the final norm, which this drafter cannot: train it on"),
        (count - 1, Mistake.LAYERS, "it reads the input of the last layer, which this drafter cannot: train it on"),
    ]
    for layer, mistake, remedy in others:
        name = "the last state before the final norm" if layer == count else f"hidden state {layer}"
        if layer >= 0:
            yield Variation(name, mistake, f"{remedy} the last one after it", replace(wiring, layers=(layer,)))
    found = twin(wiring.head)
    joined = found.model.fc
    joined.weight = weight(joined.weight.roll(joined.in_features // 2, dims=1))
    yield Variation(
        "the hidden state before the embedding",
        Mistake.HALVES,
        "it joins the hidden state before the embedding: swap the two halves of the columns of fc.weight",
        replace(wiring, head=found),
    )


def _mtp(wiring: Wiring, loaded: MTPHead, target: Target) -> Iterator[Variation]:
    """Yields the conventions of MTP modules: which state, which order, and what is fed back."""
    head = wiring.head
    other = copy.copy(loaded)
    other.before_norm = not head.before_norm
    found = twin(head)
    found.before_norm = other.before_norm
    found.model.fusion = other.bound(target.model).model.fusion
    where = "before" if other.before_norm else "after"
    yield Variation(
        f"the last state {where} the final norm",
        Mistake.NORM,
        f"give drafter.hidden_state={where}_norm",
        replace(wiring, head=found),
    )
    found = twin(head)
    found.model.hidden_first = not head.model.hidden_first
    first, second = ("hidden state", "embedding") if found.model.hidden_first else ("embedding", "hidden state")
    yield Variation(
        f"the {first} before the {second}",
        Mistake.HALVES,
        f"it joins the {first} before the {second}, unlike the family whose names it uses: swap the two halves of the "
        f"columns of its projection (eh_proj, fc or input_proj)",
        replace(wiring, head=found),
    )
    found = twin(head)
    found.fed_back = 3 - head.fed_back
    yield Variation(
        f"its output is fed back {'before' if found.fed_back == 1 else 'after'} its norm",
        Mistake.NORM,
        "it was trained on its own output before its norm; here it is fed back after it: draft one token, or train it "
        "further",
        replace(wiring, head=found),
    )
    if not torch.equal(head.model.enorm.weight, head.model.hnorm.weight):
        found = twin(head)
        found.model.enorm, found.model.hnorm = head.model.hnorm, head.model.enorm
        yield Variation(
            "the norms of embedding and hidden state exchanged",
            Mistake.NORM,
            "exchange the weights of the two norms in front of its projection",
            replace(wiring, head=found),
        )
    count = target.num_layers or 0
    if count > 1:
        yield Variation(
            f"hidden state {count - 1}",
            Mistake.LAYERS,
            "it reads the input of the target's last layer, which this drafter cannot: train it on the last state",
            replace(wiring, layers=(count - 1,)),
        )


def _other_pairs(wiring: Wiring) -> Iterator[Variation]:
    """Yields pairs whose token, or whose label, stands elsewhere."""
    train = "no setting mends this: train it on pairs of the state at t and token t + 1, which predict token t + 2"
    kinds: dict[tuple[int, int], str] = {
        (0, 0): "pairs of the state at t and token t",
        (0, -1): "pairs of the state at t and token t, which predict token t + 1",
        (2, 0): "pairs of the state at t and token t + 2",
        (2, 1): "pairs of the state at t and token t + 2, which predict token t + 3",
        (1, -1): "what it predicts is the token that it has read",
        (1, 1): "what it predicts is one token further on",
    }
    for (tokens, labels), name in kinds.items():
        if (tokens, labels) != (wiring.tokens, wiring.labels):
            yield Variation(name, Mistake.SHIFT, train, replace(wiring, tokens=tokens, labels=labels))


def _moved(tokens: Tensor, ahead: int) -> Tensor:
    """Returns tokens that stand further on by ``ahead``; at the ends the last or the first one is repeated."""
    if ahead == 0:
        return tokens
    index: Any = torch.arange(tokens.shape[1], device=tokens.device) + ahead
    return tokens[:, index.clamp(0, tokens.shape[1] - 1)]
