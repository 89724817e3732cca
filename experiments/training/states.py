"""Runs the frozen target over a batch, for the hidden states that a head reads."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafters.heads.trained_on import facts_of
from drafters.heads.training import TargetStates, TextBatch, additive, masks_suffice
from specdec.target.target import Target

_CLOSE = 2e-2
"""How far logits may be from the model's own, in units of their spread: rounding in bfloat16, not another formula."""


class FrozenTarget:
    """A target whose states heads are trained on. Nothing is kept from batch to batch.

    Args:
        target: The model; its weights get no gradient.
        layers: The states that are wanted, besides the last one.

    Attributes:
        noted: Its name and ``facts_of`` it, for the file beside a head's weights.

    Raises:
        ValueError: A layer is none of the model's, or its logits cannot be computed from its last state.
    """

    def __init__(self, target: Target, layers: Sequence[int] = ()):
        self.model = target.model.eval().requires_grad_(False)
        count = target.num_layers
        for layer in layers:
            if count is not None and not -1 <= layer < count:
                raise ValueError(
                    f"the head reads the state before layer {layer} and the target {target.name} has layers 0 to "
                    f"{count - 1}: give layers of this target (-1 for its last state)"
                )
        self.layers = tuple(layers)
        self.noted = {"target": target.name, "target_facts": facts_of(self.model)}
        self.windows = _windows(self.model.config)
        self.output = _output_layer(target)
        self.packs = masks_suffice(self.model, lambda batch: self._masked(batch)[-1])

    @torch.no_grad()
    def __call__(self, batch: TextBatch, numbers: Sequence[int] | None = None) -> TargetStates:
        """The states at every position of a batch, whatever the numbers of its rows."""
        with torch.autocast(batch.tokens.device.type, enabled=False):
            return TargetStates(self._hidden(batch), self.output)

    def _hidden(self, batch: TextBatch) -> dict[int, Float[Tensor, "row position hidden"]]:
        if not batch.packed or self.packs:
            return self._masked(batch)
        apart, places = batch.apart()
        return {layer: found.flatten(0, 1)[places] for layer, found in self._masked(apart).items()}

    def _masked(self, batch: TextBatch) -> dict[int, Float[Tensor, "row position hidden"]]:
        mask: Any = None  # one document per row, from its beginning: the model's own causal mask is right
        if batch.packed:
            dtype = self.model.dtype
            by_window = {window: additive(batch.visible(window), dtype) for window in set(self.windows.values())}
            # One for all is not given to layers without attention.
            mask = {kind: by_window[window] for kind, window in self.windows.items()}
            if len(by_window) == 1:
                (mask,) = by_window.values()
        output = self.model.base_model(
            input_ids=batch.tokens,
            attention_mask=mask,
            position_ids=batch.positions,
            output_hidden_states=any(layer >= 0 for layer in self.layers),
            use_cache=False,
        )
        found = {layer: output.hidden_states[layer] for layer in self.layers if layer >= 0}
        return {**found, -1: output.last_hidden_state}


def _windows(config: Any) -> dict[str, int | None]:
    """The sliding window of every kind of layer that the model has; None for full attention."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return {"all": window}


class _OutputLayer:
    """From a target's normalized last state to its logits, with the scale or softcap that some models apply."""

    def __init__(self, layer: Any, text: Any):
        divisor = getattr(text, "logits_scaling", None)
        self.layer, self.scale = layer, getattr(text, "logit_scale", None) or (1 / divisor if divisor else 1.0)
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)

    def __call__(self, hidden: Float[Tensor, "*place hidden"]) -> Float[Tensor, "*place vocab"]:
        """Logits in float32."""
        logits = self.layer(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def _output_layer(target: Target) -> _OutputLayer:
    """The way from the last state to the logits, after a trial with a few tokens."""
    layer = target.model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"the target {target.name} has no output layer: nothing can be trained for it")
    output = _OutputLayer(layer, target.model.config.get_text_config(decoder=True))
    ids: Int[Tensor, "row position"] = torch.arange(4, device=target.device)[None] % target.vocab_size
    with torch.no_grad():
        wanted = target.model(input_ids=ids, use_cache=False).logits.float()
        found = output(target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(found, wanted, atol=_CLOSE * float(wanted.std()) + 1e-6, rtol=0):
        raise ValueError(
            f"the logits of the target {target.name} are not its output layer applied to its last state: models that "
            f"change them in another way cannot be trained for yet"
        )
    return output
