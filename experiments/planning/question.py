"""What a plan asks."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.planning.drafting import Planned
from experiments.planning.measured import ChainCosts
from specdec.physics.bounds import Roof
from specdec.physics.devices import Device
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.speculation import Acceptance


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned.

    Attributes:
        name: The target's name.
        shape: Its shape.
        precision: Bytes of its numbers.
        formats: Its formats in words.
        device: Where it is to run.
        roof: What that does at best, in the type that the target computes in.
        measured: Whether the roof is a measured one.
        batches: Rows.
        context: Positions per row: the length of a slot, and what a step reads.
        output: How many of them are output; the others are the prompt.
        drafter: What drafts; None without speculation.
        acceptance: How often drafted tokens are accepted.
        longest: The longest draft to consider.
        usable: Bytes of the device's memory that may be used.
        prefill_chunk: Prompt tokens per forward, at most.
        page: Positions per page of a paged cache.
        overhead: Seconds per forward that are not in the roof.
        price: Price of the device per hour; None if it is not asked for.
        costs: What rounds were measured to cost on the device; None to plan with the least times.
    """

    name: str
    shape: ModelShape
    precision: Precision
    formats: str
    device: Device
    roof: Roof
    measured: bool
    batches: Sequence[int]
    context: int
    output: int
    drafter: Planned | None
    acceptance: Acceptance
    longest: int
    usable: float
    prefill_chunk: int
    page: int
    overhead: float
    price: float | None
    costs: ChainCosts | None = None

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.context - self.output
