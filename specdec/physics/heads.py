"""The shapes of heads that draft on a target's hidden states: what they cost follows from the target's sizes.

A head runs the target's own output layer, or one of its own over fewer tokens. Where it is the target's, its weights
are read by the head's forwards, and take no memory of their own.
"""

from dataclasses import replace

from specdec.physics.shape import Layer, Mlp, ModelShape

DRAFT_VOCAB, EAGLE3_LAYERS = 32_000, 3
"""Tokens that EAGLE-3's public heads draft, and how many of the target's hidden states they read."""


def eagle3(
    target: ModelShape, *, layers: int = 1, layer: Layer | None = None, draft_vocab: int | None = None
) -> ModelShape:
    """Return the shape of an EAGLE-3 head: a layer over embedding and state side by side, and a small output layer.

    Args:
        layers: Its decoder layers, of which all but the first are ordinary ones (P-EAGLE has some).
        layer: What they are like; None for the target's.
        draft_vocab: Tokens that it drafts; None for ``DRAFT_VOCAB``, or all of the target's if these are fewer.
    """
    layer, vocab = layer or like(target), min(draft_vocab or DRAFT_VOCAB, target.vocab)
    first, attention = layer, layer.attention
    if attention is not None:  # queries, keys and values of an input that is twice as wide as the residual stream
        output = attention.heads * attention.prefill_value_dim * target.hidden
        first = replace(layer, attention=replace(attention, weights=2 * attention.weights - output))
    stack, states = (first, *(layer,) * (layers - 1)), EAGLE3_LAYERS * target.hidden**2
    return replace(_shape("eagle3", target, stack, other=states, output=target.hidden * vocab), vocab=vocab)


def eagle(target: ModelShape, *, layer: Layer | None = None) -> ModelShape:
    """Return the shape of an EAGLE-1 or EAGLE-2 head: two inputs merged, one layer, the target's output layer."""
    return _shape("eagle", target, (layer or like(target),), other=2 * target.hidden**2)


def mtp(target: ModelShape) -> ModelShape:
    """Return the shape of an MTP module: two inputs merged, a layer like the target's last, the target's output."""
    return _shape("mtp", target, (target.layers[-1],), other=2 * target.hidden**2)


def block(
    target: ModelShape,
    *,
    layers: int = 5,
    layer: Layer | None = None,
    hidden_layers: int | None = None,
    markov_rank: int = 0,
    selector_rank: int = 0,
    gru: tuple[int, int] = (0, 0),
    refiner: tuple[int, int] = (0, 0),
    convolution: tuple[int, int] = (0, 1),
) -> ModelShape:
    """Return the shape of a block drafter: a few layers over places and hidden states, the target's output layer.

    Args:
        layer: What its layers are like; None for layers like the target's.
        hidden_layers: How many of the target's hidden states it reads; None for as many as it has layers.
        markov_rank: Of the matrices that add to a place's logits what follows from the token before it (DSpark): a row
            of one is looked up, and multiplied with the other.
        selector_rank: Of the tables of candidates (DFlash 2), of which a few rows are looked up.
        gru: Width of a recurrent network down the tokens, and rank of what it adds to the logits (Domino).
        refiner: Width of a refiner, and how much wider its MLP is (xPress); one of its tables is looked up.
        convolution: Taps of the convolutions around every sublayer, and channels of a group (DFlash 2).
    """
    count, hidden, vocab = layers if hidden_layers is None else hidden_layers, target.hidden, target.vocab
    (state, rank), (width, ratio), (taps, channels) = gru, refiner, convolution
    recurrent = 3 * state * (hidden + state) + rank * (hidden + state + vocab)
    refined = width * (2 * hidden + vocab) + (3 + 3 * ratio) * width**2
    convolved = 2 * layers * 2 * taps * hidden * (1 + hidden // channels)
    other = count * hidden**2 + markov_rank * vocab + selector_rank * hidden + recurrent + refined + convolved
    shape = _shape("block", target, (layer or like(target),) * layers, other=other)
    return replace(shape, table_weights=(markov_rank + 2 * selector_rank + width) * vocab)


def medusa(target: ModelShape, *, heads: int = 4, layers: int = 1) -> ModelShape:
    """Return the shape of Medusa's heads, one per drafted token: square matrices, and an output layer of its own."""
    output = heads * target.hidden * target.vocab
    return _shape("medusa", target, (), other=heads * layers * target.hidden**2, output=output)


def like(target: ModelShape) -> Layer:
    """Return a layer like the target's, with full attention and a dense MLP as wide as what a token uses there."""
    layer = next((each for each in target.layers if each.attention is not None), None)
    attention = None if layer is None or layer.attention is None else replace(layer.attention, window=None)
    return Layer(attention=attention, mlp=Mlp(weights=target.layers[0].mlp.active))


def _shape(
    kind: str, target: ModelShape, layers: tuple[Layer, ...], *, other: int, output: int | None = None
) -> ModelShape:
    """Return the shape of a head; ``output`` None borrows the target's output layer."""
    borrowed, weights = output is None, target.output_weights if output is None else output
    sizes = {"table_weights": 0, "output_weights": weights, "other_weights": other}
    return replace(target, kind=kind, layers=layers, tied=borrowed, borrowed=borrowed, **sizes)
