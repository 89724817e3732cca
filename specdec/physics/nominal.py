"""Models as texts count them: "70 billion parameters", all of them read by every token."""

from specdec.physics.shape import Attention, Layer, ModelShape


def nominal(parameters: int, *, layers: int, heads: int, kv_heads: int, head_dim: int = 128) -> ModelShape:
    """Returns the shape of a model of exactly so many parameters, all in its layers.

    It has no table and no output layer, so that a forward reads every parameter once. That is how round numbers are
    worked out by hand; ``ModelShape.of`` counts what a real model reads.

    Args:
        parameters: Their number, a multiple of ``layers``.
        layers: Decoder layers.
        heads: Query heads of a layer.
        kv_heads: Heads of its keys and values.
        head_dim: Numbers in a head.

    Raises:
        ValueError: The parameters cannot be given out equally.
    """
    each, rest = divmod(parameters, layers)
    if rest:
        raise ValueError(f"{parameters:,} parameters are no multiple of {layers} layers")
    attention = Attention.grouped(weights=each, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return ModelShape(
        kind="nominal", hidden=0, vocab=0, layers=(Layer(attention=attention),) * layers, table_weights=0,
        output_weights=0,
    )  # fmt: skip
