"""A model on a device, and its forwards there."""

from dataclasses import dataclass, replace

from experiments.bench.chapter.models import HALF
from specdec.physics.bounds import Roof, Work
from specdec.physics.capacity import kv_bytes_per_position, weight_bytes
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.speculation import critical_context, intensity_of_many_rows
from specdec.physics.work import prefill_work, step_work


@dataclass(frozen=True)
class Forward:
    """A forward on a device: what it must do, and the least time of that.

    Attributes:
        work: Bytes and operations.
        roof: The device.
        tokens: Tokens that it computes, over all rows.
    """

    work: Work
    roof: Roof
    tokens: float

    @property
    def bytes(self) -> float:
        """What it must move."""
        return self.work.bytes

    @property
    def flops(self) -> float:
        """What it must compute."""
        return self.work.flops

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.work.intensity

    @property
    def seconds(self) -> float:
        """The least time."""
        return self.roof.least_seconds(self.work)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def flops_rate(self) -> float:
        """Operations per second."""
        return self.flops / self.seconds

    @property
    def bound(self) -> str:
        """What limits it."""
        return "memory" if self.intensity < self.roof.ridge else "compute"

    @property
    def over_ridge(self) -> float:
        """Its operations per byte over those of the ridge."""
        return self.intensity / self.roof.ridge


@dataclass(frozen=True)
class Example:
    """A model on a device.

    Without a context, a forward is its products with weights alone, as it is worked out by hand.
    """

    shape: ModelShape
    roof: Roof
    precision: Precision = HALF

    def decode(self, rows: int = 1, context: float = 0, drafted: int = 0) -> Forward:
        """A step of plain decoding, or one that verifies a draft."""
        work = step_work(self.shape, self.precision, batch=rows, context=context, drafted=drafted)
        return Forward(work.total if context else work.linear, self.roof, rows * (drafted + 1))

    def prefill(self, tokens: int) -> Forward:
        """The products with weights of a prompt."""
        return Forward(prefill_work(self.shape, self.precision, tokens=tokens).linear, self.roof, tokens)

    def prefill_attention(self, tokens: int) -> float:
        """The operations of a prompt's attention."""
        return prefill_work(self.shape, self.precision, tokens=tokens).attention_flops

    def stored(self, *, weights: float) -> "Example":
        """The same with so many bytes per weight; products are computed as before."""
        return replace(self, precision=replace(self.precision, weights=weights, output=weights))

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.shape.layers)

    @property
    def weight_bytes(self) -> float:
        """Bytes of its weights."""
        return weight_bytes(self.shape, self.precision)

    @property
    def kv(self) -> float:
        """Bytes that its cache keeps per position."""
        return kv_bytes_per_position(self.shape, self.precision)

    @property
    def pair_flops(self) -> float:
        """Operations of attention per token and position of context."""
        return self.shape.pair_flops

    @property
    def equal_context(self) -> float:
        """The context where attention costs as many operations as the products with weights."""
        return self.decode().flops / self.pair_flops

    def critical(self, drafted: int) -> float | None:
        """The context from which a step is bound by memory at any number of rows."""
        return critical_context(
            flops=self.decode().flops,
            pair_flops=self.pair_flops,
            kv_bytes=self.kv,
            ridge=self.roof.ridge,
            drafted=drafted,
        )

    def many_rows(self, context: float) -> float:
        """The operations per byte that no number of rows exceeds."""
        return intensity_of_many_rows(
            flops=self.decode().flops, pair_flops=self.pair_flops, kv_bytes=self.kv, context=context
        )

    @property
    def attention_intensity(self) -> float:
        """Operations per byte of attention, per query token."""
        return self.pair_flops / self.kv
