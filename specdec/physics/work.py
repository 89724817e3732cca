"""The bytes and the operations of a decoder's forwards, by what they are for, and the least time that they take.

A forward is a batch of rows with the same sizes. ``drafted`` counts the drafted nodes of a row, without the root: 0 is
plain decoding, so that a step has ``batch * (drafted + 1)`` tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from specdec.physics.precision import Precision
from specdec.physics.shape import Attention, ModelShape

Numbers = Any
"""A number, or an array with one for each of several forwards."""
TOLERANCE = 0.05
"""How much faster than the bound a time may be before it is suspect: the roof itself is measured, with noise."""
CACHES = 4
"""Work of fewer bytes than this many times the caches may find much of its data there."""


@dataclass(frozen=True)
class Work:
    """Bytes that must be moved between memory and processor, and operations (a multiplication is one)."""

    bytes: float
    flops: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Roof:
    """The bytes per second that a device moves at best, and the operations per second of its matrix products."""

    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """Operations per byte above which products, not memory, are the limit."""
        return self.flops / self.bandwidth

    def least_seconds(self, work: Work) -> float:
        """Return the time that nobody can beat: memory and products at their best, one behind the other's back."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Bytes and operations of a forward. Keys, values and states are read once for all queries of a row."""

    weight_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0
    activation_bytes: float = 0.0
    logit_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0

    @property
    def linear(self) -> Work:
        return Work(self.weight_bytes + self.activation_bytes + self.logit_bytes, self.linear_flops)

    @property
    def attention(self) -> Work:
        return Work(self.kv_read_bytes + self.kv_write_bytes, self.attention_flops)

    @property
    def total(self) -> Work:
        """All of it, as if it could overlap."""
        return self.linear + self.attention

    def by_parts(self, roof: Roof) -> float:
        """Return the least time if attention and the linear layers take turns, as they do in a model."""
        return roof.least_seconds(self.linear) + roof.least_seconds(self.attention)

    def bound(self, roof: Roof) -> str:
        return "memory" if self.total.intensity < roof.ridge else "compute"

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def times(self, count: float) -> "StepWork":
        return StepWork(**{f.name: getattr(self, f.name) * count for f in fields(self)})


def step_work(
    shape: ModelShape,
    precision: Precision,
    *,
    batch: Numbers,
    context: Numbers,
    drafted: Numbers = 0,
    depth: Numbers | None = None,
) -> StepWork:
    """Return the work of a decoding step, or of one that verifies drafts, behind so many positions in every row.

    Sizes may be arrays of several forwards, and so are the results. ``depth`` is that of the drafts; None for chains.
    """
    nodes = drafted + 1
    # A node sees the cache, itself and its ancestors, which are half the levels on average.
    visible = context + 1 + (drafted if depth is None else depth) / 2
    return _forward(
        shape,
        precision,
        batch=batch,
        queries=nodes,
        context=context,
        pairs=lambda attention: nodes * attention.seen(visible),
        logits=batch * nodes,
        prefill=False,
    )


def prefill_work(
    shape: ModelShape, precision: Precision, *, tokens: float, context: float = 0, batch: int = 1, logits: int = 1
) -> StepWork:
    """Return the work of a prompt's prefill, or of one chunk of it, behind ``context`` positions.

    Args:
        tokens: Tokens of the prompt, or of the chunk, per row.
        logits: Tokens per row whose logits are computed: the last one, or none.
    """
    return _forward(
        shape,
        precision,
        batch=batch,
        queries=tokens,
        context=context,
        pairs=lambda attention: _causal_pairs(tokens, context, attention),
        logits=batch * logits,
        prefill=True,
    )


def prompts_work(shape: ModelShape, precision: Precision, lengths: Sequence[int], chunk: int) -> StepWork:
    """Return the work of a batch's prompts without logits, chunk by chunk: every chunk reads the weights again."""
    work = StepWork()
    for start in range(0, max(lengths, default=0), chunk):
        pieces = Counter(min(chunk, length - start) for length in lengths if length > start)
        for tokens, rows in pieces.items():
            piece = prefill_work(shape, precision, tokens=tokens, context=start, batch=rows, logits=0)
            work += replace(piece, weight_bytes=0.0)
        work += StepWork(
            weight_bytes=float(weights_read(shape, precision, sum(tokens * rows for tokens, rows in pieces.items()), 0))
        )
    return work


def _forward(
    shape: ModelShape,
    precision: Precision,
    *,
    batch: Numbers,
    queries: Numbers,
    context: Numbers,
    pairs: Callable[[Attention], Numbers],
    logits: Numbers,
    prefill: bool,
) -> StepWork:
    tokens = batch * queries
    read: Numbers = 0.0
    written: Numbers = 0.0
    pair_flops: Numbers = 0.0
    for layer, count in shape.groups:
        for attention in layer.attending:
            per_position = precision.kept(attention)
            read += count * batch * per_position * attention.seen(context)
            written += count * tokens * per_position
            each = attention.prefill_pair_flops if prefill else attention.pair_flops
            pair_flops += count * batch * each * pairs(attention)
        if layer.recurrence is not None:
            state = count * batch * layer.recurrence.state * precision.activations
            read, written = read + state, written + state
            pair_flops += count * tokens * layer.recurrence.flops
    return StepWork(
        weight_bytes=weights_read(shape, precision, tokens, logits),
        kv_read_bytes=read,
        kv_write_bytes=written,
        activation_bytes=2 * tokens * shape.hidden * len(shape.layers) * precision.activations,
        logit_bytes=logits * shape.vocab * precision.logits,
        linear_flops=2.0 * (shape.active_weights * tokens + shape.output_weights * logits),
        attention_flops=pair_flops,
    )


def weights_read(shape: ModelShape, precision: Precision, tokens: Numbers, logits: Numbers) -> Any:
    """Return the bytes of weights that a forward of so many tokens reads; of experts, those that are chosen."""
    output = shape.output_weights * precision.output * np.minimum(logits, 1)
    rows = tokens * shape.hidden * precision.tables  # one row of the table per token
    experts = shape.experts_read(tokens) * precision.of_experts
    return shape.dense_weights * precision.weights + experts + output + rows


def _causal_pairs(tokens: float, context: float, attention: Attention) -> float:
    """Return how many pairs of a query and a position it sees there are in a causal prefill."""
    window = attention.window
    last = context + tokens
    if window is None or last <= window:
        return tokens * context + tokens * (tokens + 1) / 2
    growing = max(0.0, window - context)  # queries that still see everything
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window
