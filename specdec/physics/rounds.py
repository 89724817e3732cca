"""How long the parts of a round take: by published constants, by timed forwards, or by a device's roof."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from specdec.physics.costs import Sizes, StepCost, StepSize
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.physics.work import Roof, StepWork, step_work


@runtime_checkable
class RoundCost(Protocol):
    """Whatever can say how long the parts of a round take.

    ``drafted`` counts the drafted tokens of a row; a round without any is a step of plain decoding.
    """

    def verify(self, *, batch: int, drafted: int, context: float) -> float:
        """Return the seconds of the target's forward."""
        ...

    def draft(self, *, batch: int, drafted: int, context: float) -> float:
        """Return the seconds of drafting; 0 where nothing is drafted."""
        ...

    @property
    def outside(self) -> float:
        """Seconds of everything else in a round, whether or not it drafts."""
        ...


@dataclass(frozen=True, kw_only=True)
class AffineRounds:
    """Rounds by fitted constants, as a ``RoundCost`` and as ``RaggedCosts``, for drafts of up to ``deepest`` tokens."""

    padded = False  # every token costs, and none that is not there: rows are packed
    target: StepCost
    drafter: StepCost | None = None
    outside: float = 0.0
    deepest: int | None = None

    def verify(self, *, batch: int, drafted: int, context: float) -> float:
        return self.target.seconds(StepSize.of(rows=batch, queries=drafted + 1, context=context))

    def draft(self, *, batch: int, drafted: int, context: float) -> float:
        if self.drafter is None or not drafted:
            return 0.0
        return self.drafter.seconds(StepSize.of(rows=batch, queries=drafted, context=context))

    def check_depth(self, depth: int) -> None:
        if self.deepest is not None and depth > self.deepest:
            raise ValueError(
                f"the costs of rounds hold for drafts of up to {self.deepest} tokens, and drafts are {depth} deep: "
                f"give a drafter with max_draft_tokens={self.deepest} or fewer, or costs of plan costs=fit"
            )

    def prefill_seconds(self, size: StepSize) -> float:
        return self.target.seconds(size)

    @property
    def joined(self) -> float:
        """Seconds that a piece of a prompt saves as it shares its round's pass over the weights."""
        return self.prefill_seconds(StepSize.of(rows=0, queries=0, context=0))

    def ragged(self, rows: int, positions: float, *, drafted: Sizes, deepest: Shaped[np.ndarray, "*#size"]) -> Sizes:
        """Return the seconds of rounds whose rows have drafts of their own lengths; see ``RaggedCosts``."""
        context, per_row = positions / rows, drafted / rows
        seconds = self.target.seconds(StepSize.of(rows=rows, queries=per_row + 1, context=context)) + self.outside
        if self.drafter is None:
            return seconds
        drafting = self.drafter.seconds(StepSize.of(rows=rows, queries=per_row, context=context))
        return seconds + np.where(drafted > 0, drafting, 0.0)


LLAMA_8B_H100 = AffineRounds(
    target=StepCost.affine(fixed=5.88590713e-3, per_token=2.10103129e-5, per_position=3.92645679e-8),
    drafter=StepCost.affine(fixed=2.13526175e-3, per_token=8.41429603e-7, per_position=2.37768493e-9),
    outside=1.20683946e-3,
    deepest=8,
)
"""Llama-3.1-8B with an EAGLE head in vLLM on an H100, in 16 bits, all rows packed into one forward.

The constants were fitted to measured steps of batches of 1 to 64, and are published in the simulator of "Speculative
decoding: performance or illusion?" (arXiv 2601.11580; github.com/SpecDecode-Bench/simulator, predictor.py at 2fdccbd).
A prompt costs as many tokens of the same formula, without attention within it (7 % of its work at 4,096 tokens).
Drafting has no term for a level of the draft, so that more than 8 tokens would look too cheap. The simulator multiplies
the drafter's constant per token by the tokens of one row; here it is by those of all rows, which adds 0.4 ms to a round
of 128 rows with 4 tokens each.
"""


@dataclass(frozen=True, kw_only=True)
class TimedRounds:
    """Rounds whose verification was timed, and whose drafting takes a share of a plain step, as a ``RoundCost``.

    Between the ``nodes`` that were timed, times lie on lines; ``share`` is the time of a forward of the drafter over
    that of a plain step, and ``at_once`` whether one drafts all tokens.
    """

    nodes: Sequence[int]
    seconds: Mapping[int, Sequence[float]]
    share: float = 0.0
    at_once: bool = False
    outside = 0.0

    def verify(self, *, batch: int, drafted: int, context: float) -> float:
        return float(np.interp(drafted + 1, self.nodes, self.seconds[batch]))

    def draft(self, *, batch: int, drafted: int, context: float) -> float:
        forwards = min(drafted, 1) if self.at_once else drafted
        return forwards * self.share * self.verify(batch=batch, drafted=0, context=context)


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """The model that runs when tokens are drafted: ``at_once`` one forward drafts all of them, else one forward each.

    ``catches_up``: the same forward reads what became final, in as many places again (PARD, P-EAGLE).
    """

    shape: ModelShape
    precision: Precision
    at_once: bool = False
    catches_up: bool = False

    def work(self, *, batch: int, drafted: int, context: float) -> StepWork:
        if not drafted:
            return StepWork()
        if self.at_once:
            nodes = drafted * (1 + self.catches_up)
            return step_work(self.shape, self.precision, batch=batch, context=context, drafted=nodes - 1)
        # The middle one of the steps, whose context grows by a position each.
        middle = context + (drafted - 1) / 2
        return step_work(self.shape, self.precision, batch=batch, context=middle).times(drafted)


@dataclass(frozen=True, kw_only=True)
class RoofRounds:
    """Rounds in the least time that a device allows, from bytes and operations; ``overhead`` in seconds per forward."""

    shape: ModelShape
    precision: Precision
    roof: Roof
    drafter: DraftModel | None = None
    overhead: float = 0.0
    outside = 0.0

    def verify(self, *, batch: int, drafted: int, context: float) -> float:
        work = step_work(self.shape, self.precision, batch=batch, context=context, drafted=drafted)
        return work.by_parts(self.roof) + self.overhead

    def draft(self, *, batch: int, drafted: int, context: float) -> float:
        if self.drafter is None or not drafted:
            return 0.0
        forwards = 1 if self.drafter.at_once else drafted
        work = self.drafter.work(batch=batch, drafted=drafted, context=context)
        return work.by_parts(self.roof) + forwards * self.overhead


def round_seconds(cost: RoundCost, *, batch: int, drafted: int, context: float, **depth: Any) -> float:
    """Return the seconds of a whole round."""
    verify = cost.verify(batch=batch, drafted=drafted, context=context)
    return verify + cost.draft(batch=batch, drafted=drafted, context=context, **depth) + cost.outside
