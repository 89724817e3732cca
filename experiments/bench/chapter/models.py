"""The models, devices and chosen numbers of the chapter; a model on a device, and its forwards there."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import yaml

from specdec.physics.bounds import Roof, Work
from specdec.physics.capacity import kv_bytes_per_position, weight_bytes
from specdec.physics.devices import Device, read_devices
from specdec.physics.precision import Precision
from specdec.physics.reading import read_shape
from specdec.physics.shape import ModelShape, nominal
from specdec.physics.speculation import critical_context, intensity_of_many_rows
from specdec.physics.work import prefill_work, step_work

HERE = Path(__file__).parent
CONFIGS = yaml.safe_load((HERE / "models.yaml").read_text(encoding="utf-8"))
"""Configurations of public models, by name."""
GIVEN = SimpleNamespace(**yaml.safe_load((HERE / "given.yaml").read_text(encoding="utf-8")))
"""The numbers that are chosen (``given.yaml``)."""

SHAPES = {name: read_shape(config) for name, config in CONFIGS.items()}
LLAMA_70B, LLAMA_8B, DEEPSEEK_V3 = SHAPES["llama-3.1-70b"], SHAPES["llama-3.1-8b"], SHAPES["deepseek-v3"]
ONE_HEAD = read_shape(CONFIGS["llama-3.1-8b"] | {"num_key_value_heads": 1})

ROUND_70B = nominal(70_000_000_000, layers=80, heads=64, kv_heads=8)
ROUND_8B = nominal(8_000_000_000, layers=32, heads=32, kv_heads=8)
NAMED_8B = nominal(8_030_000_000, layers=32, heads=32, kv_heads=8)
ROUND_7B = nominal(7_000_000_000, layers=32, heads=32, kv_heads=32)
MISTRAL_7B = nominal(7_264_000_000, layers=32, heads=32, kv_heads=8)
ROUND_15B = nominal(15_000_000_000, layers=40, heads=40, kv_heads=8)

HALF = Precision()
"""Two bytes for every number, as in float16 and bfloat16."""
DEVICES = read_devices()
H100, A100 = DEVICES["h100"], DEVICES["a100-80gb"]
ROUND_A100 = Roof(bandwidth=round(A100.bandwidth, -11), flops=A100.flops["float16"])
"""An A100 with the round bandwidth that texts give it."""


def this_machine() -> Device:
    """Return the machine that ``machine.yaml`` describes."""
    (found,) = read_devices(HERE / "machine.yaml").values()
    return found


def forward(work: Work, roof: Roof, tokens: float) -> SimpleNamespace:
    """Return a forward on a device: its work, tokens over all rows, and what follows.

    ``bytes`` must be moved and ``flops`` computed; ``intensity`` has operations per byte, ``over_ridge`` the same over
    the ridge's, ``seconds`` the least time, ``rate`` tokens and ``flops_rate`` operations per second.
    """
    seconds = roof.least_seconds(work)
    return SimpleNamespace(
        work=work,
        roof=roof,
        bytes=work.bytes,
        flops=work.flops,
        intensity=work.intensity,
        over_ridge=work.intensity / roof.ridge,
        seconds=seconds,
        rate=tokens / seconds,
        flops_rate=work.flops / seconds,
    )


@dataclass(frozen=True)
class Example:
    """A model on a device.

    Without a context, a forward is its products with weights alone, as it is worked out by hand.
    """

    shape: ModelShape
    roof: Roof
    precision: Precision = HALF

    def decode(self, rows: int = 1, context: float = 0, drafted: int = 0) -> SimpleNamespace:
        """Return a step of plain decoding, or one that verifies a draft."""
        work = step_work(self.shape, self.precision, batch=rows, context=context, drafted=drafted)
        return forward(work.total if context else work.linear, self.roof, rows * (drafted + 1))

    def prefill(self, tokens: int) -> SimpleNamespace:
        """Return the products with weights of a prompt."""
        return forward(prefill_work(self.shape, self.precision, tokens=tokens).linear, self.roof, tokens)

    def prefill_attention(self, tokens: int) -> float:
        """Return the operations of a prompt's attention."""
        return prefill_work(self.shape, self.precision, tokens=tokens).attention_flops

    def stored(self, weights: float) -> "Example":
        """Return the same with so many bytes per weight; products are computed as before."""
        return replace(self, precision=replace(self.precision, weights=weights, output=weights))

    @property
    def layers(self) -> int:
        """The number of layers."""
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

    def critical(self, drafted: int) -> float | None:
        """Return the context from which a step is bound by memory at any number of rows."""
        given = {"flops": self.decode().flops, "pair_flops": self.pair_flops, "kv_bytes": self.kv}
        return critical_context(ridge=self.roof.ridge, drafted=drafted, **given)

    def many_rows(self, context: float) -> float:
        """Return the operations per byte that no number of rows exceeds."""
        given = {"flops": self.decode().flops, "pair_flops": self.pair_flops, "kv_bytes": self.kv}
        return intensity_of_many_rows(context=context, **given)
