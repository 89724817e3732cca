"""The usual shapes of heads that draft on a target's hidden states: what they cost follows from the target's sizes.

A head runs the target's own output layer, or one of its own over fewer tokens. Where it is the target's, its weights
are read by the head's forwards, and take no memory of their own.
"""

from dataclasses import replace

from specdec.physics.shape import Layer, Mlp, ModelShape

DRAFT_VOCAB, EAGLE3_LAYERS = 32_000, 3
"""Tokens that EAGLE-3's public heads draft, and how many of the target's hidden states they read."""


def eagle(target: ModelShape, *, layers: int = 1) -> ModelShape:
    """An EAGLE-3 head: a layer over embedding and state side by side, and a small output layer.

    All ``layers`` but the first are ordinary ones (P-EAGLE has some).
    """
    layer, vocab = _like(target), min(DRAFT_VOCAB, target.vocab)
    first, attention = layer, layer.attention
    if attention is not None:  # queries, keys and values of an input that is twice as wide as the residual stream
        output = attention.heads * attention.prefill_value_dim * target.hidden
        first = replace(layer, attention=replace(attention, weights=2 * attention.weights - output))
    stack, states = (first, *(layer,) * (layers - 1)), EAGLE3_LAYERS * target.hidden**2
    return replace(_shape("eagle3", target, stack, other=states, output=target.hidden * vocab), vocab=vocab)


def mtp(target: ModelShape) -> ModelShape:
    """An MTP module: two inputs merged, a layer like the target's last, the target's output layer."""
    return _shape("mtp", target, (target.layers[-1],), other=2 * target.hidden**2)


def block(target: ModelShape, *, layers: int = 5) -> ModelShape:
    """A block drafter: a few layers over places and as many hidden states, the target's output layer."""
    return _shape("block", target, (_like(target),) * layers, other=layers * target.hidden**2)


def medusa(target: ModelShape, *, heads: int = 4) -> ModelShape:
    """Medusa's heads, one per drafted token: square matrices, and an output layer of its own."""
    output = heads * target.hidden * target.vocab
    return _shape("medusa", target, (), other=heads * target.hidden**2, output=output)


def _like(target: ModelShape) -> Layer:
    """A layer like the target's, with full attention and a dense MLP as wide as what a token uses there."""
    layer = next((each for each in target.layers if each.attention is not None), None)
    attention = None if layer is None or layer.attention is None else replace(layer.attention, window=None)
    return Layer(attention=attention, mlp=Mlp(weights=target.layers[0].mlp.active))


def _shape(
    kind: str, target: ModelShape, layers: tuple[Layer, ...], *, other: int, output: int | None = None
) -> ModelShape:
    """The shape of a head; ``output`` None borrows the target's output layer."""
    borrowed, weights = output is None, target.output_weights if output is None else output
    sizes = {"table_weights": 0, "output_weights": weights, "other_weights": other}
    return replace(target, kind=kind, layers=layers, tied=borrowed, borrowed=borrowed, **sizes)
