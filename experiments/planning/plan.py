"""A plan: a question, and the answers to it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

from experiments.planning.drafting import Planned
from experiments.planning.measured import longest_chain
from experiments.results.origin import Figures
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.capacity import Served
from specdec.physics.devices import Device
from specdec.physics.precision import Precision
from specdec.physics.rounds import RoofRounds, RoundCost
from specdec.physics.shape import ModelShape
from specdec.physics.speculation import (
    Acceptance,
    BestLength,
    best_length,
    break_even_batch,
    chain_tokens,
    critical_context,
    latency,
    price_per_million,
    target_efficiency,
)
from specdec.physics.work import Roof, StepWork, prompts_work, step_work

Made = TypeVar("Made")
BATCHES = tuple(2**power for power in range(11))
"""Batches of the map."""
CONTEXTS = tuple(2**power for power in range(6, 18))
"""Contexts of the map, as far as the model goes."""
MOST = 1 << 14
"""The largest batch at which a draft is tried."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a plan.

    Attributes:
        roof: What the device does at best, in the type that the target computes in; whether it was ``measured``.
        context: Positions per row: the length of a slot, and what a step reads; ``output`` of them are output.
        usable: Bytes of the device's memory that may be used.
        overhead: Seconds per forward that are not in the roof.
        price: Price of the device per hour; None if it is not asked for.
        costs: The measured costs of rounds with chains on the device; None to plan with the least times.
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
    overhead: float
    price: float | None
    costs: CalibratedRounds | None = None

    @property
    def prompt(self) -> int:
        return self.context - self.output


@dataclass(frozen=True)
class Plan:
    """The answers to a question."""

    asked: Question

    @property
    def cost(self) -> RoundCost:
        """The costs of a round's parts: as they were measured, or the least."""
        return self.asked.costs or self.bound

    @cached_property
    def bound(self) -> RoundCost:
        """The least costs of a round's parts."""
        asked = self.asked
        return RoofRounds(
            shape=asked.shape,
            precision=asked.precision,
            roof=asked.roof,
            drafter=None if asked.drafter is None else asked.drafter.model,
            overhead=asked.overhead,
        )

    @cached_property
    def served(self) -> Served:
        asked, drafter = self.asked, self.asked.drafter
        return Served(
            shape=asked.shape,
            precision=asked.precision,
            drafting=() if drafter is None else drafter.memory_of(self.longest),
            drafted=0 if drafter is None else self.longest,
            prefill_chunk=asked.prefill_chunk,
            packed=asked.costs is not None and asked.costs.conditions.executor == "ReplayExecutor",  # a processor's
        )

    @property
    def longest(self) -> int:
        """The longest draft to consider, which the drafter may limit, and what was measured."""
        asked, drafter = self.asked, self.asked.drafter
        if drafter is None:
            return asked.longest
        measured = asked.longest if asked.costs is None else longest_chain(asked.costs)
        return min(asked.longest, drafter.longest or asked.longest, measured)

    @cached_property
    def fixed(self) -> int:
        """A draft length that does not change with the load: the best one for a single row, at least 1."""
        best = self._best(1, self.asked.context) or self._least_best(1, self.asked.context)
        return max(1, best.drafted)

    @cached_property
    def rooms(self) -> list[Figures]:
        """The memory of every batch, its total, whether it fits into the device, and how long so many slots can be."""
        usable, found = self.asked.usable, []
        for batch in self.asked.batches:
            memory = self.served.memory(rows=batch, length=self.asked.context)
            longest = min(self.served.longest(usable, rows=batch), self.asked.shape.max_length or math.inf)
            sizes = {**asdict(memory), "total": memory.total}
            found.append(Figures(batch=batch, **sizes, fits=memory.total <= usable, longest=longest))
        return found

    @property
    def most_rows(self) -> int:
        return self.served.most_rows(self.asked.usable, length=self.asked.context)

    @cached_property
    def phases(self) -> list[Figures]:
        """The prefill, and for every batch a plain step, a draft and its verification.

        Of each its ``kind`` (``prefill``, ``decode``, ``draft`` or ``verify``), ``what`` it does, in words, the rows of
        its ``batch``, bytes and operations by part and in all, the ``intensity``, what it is ``bound`` by, the least
        ``seconds``, part by part, and the ``tokens`` that it emits, over all rows. ``predicted_seconds`` are by
        measured costs; None without such, and outside of what was measured.
        """
        asked, model = self.asked, None if self.asked.drafter is None else self.asked.drafter.model
        chunks = "" if asked.prompt <= asked.prefill_chunk else f" by {asked.prefill_chunk:,}"
        predicted = self._prefill_seconds(1) if asked.costs is not None else None
        found = [self._phase("prefill", f"prefill {asked.prompt:,}{chunks}", 1, self._prefill(1), 0, predicted)]
        for batch, speculation in zip(asked.batches, self.speculations, strict=True):
            best = self._least_best(batch, asked.context) if speculation is None else speculation.best
            for drafted in (0, *([best.drafted] if asked.drafter is not None and best.drafted else [])):
                at = {"batch": batch, "context": asked.context, "drafted": drafted}
                if model is not None and drafted:
                    what = f"draft {drafted} tokens" if drafted > 1 else "draft a token"
                    predicted = None if asked.costs is None else _known(asked.costs.draft, **at)
                    found.append(self._phase("draft", what, batch, model.work(**at), 0, predicted))
                kind, what = "decode", "decode, one token"
                if drafted:
                    kind, what = "verify", f"verify {drafted} and the root"
                work, tokens = step_work(asked.shape, asked.precision, **at), chain_tokens(asked.acceptance, drafted)
                predicted = None if asked.costs is None else _known(asked.costs.verify, **at)
                found.append(self._phase(kind, what, batch, work, batch * tokens, predicted))
        return found

    @cached_property
    def speculations(self) -> list[Figures | None]:
        """The gain of speculation, by batch; None outside of what was measured.

        The ``best`` draft length, which is the fastest, with the ``tokens`` per round and row, seconds of a plain step
        over those of the verifying one (``efficiency``), ``draft_seconds`` and ``verify_seconds`` per round, and
        ``tokens_per_second`` over all rows.
        """
        return [self._speculation(batch) for batch in self.asked.batches]

    def requests(self, *, speculate: bool) -> list[Figures | None]:
        """What a request takes, by batch; None where that is outside of what was measured.

        The prompts of a batch are prefilled together, and all rows have the length that they have halfway.

        Returns:
            Of each: ``prefill_seconds`` of its prompt (None outside of what was measured), seconds ``per_token`` of
            output, ``seconds`` of all of it, the prefill's share of these, output ``tokens_per_second`` over all rows
            while they decode, and the ``price`` of a million of them, prefill included; None without a price.
        """
        return [self._request(batch, speculate=speculate) for batch in self.asked.batches]

    def _request(self, batch: int, *, speculate: bool) -> Figures | None:
        asked = self.asked
        prefill, halfway = self._prefill_seconds(batch), asked.prompt + asked.output / 2
        best = self._best(batch, halfway) if speculate else BestLength(0, 1.0)
        plain = _known(self.cost.verify, batch=batch, drafted=0, context=halfway)
        if best is None or plain is None:
            return None
        each = (plain + self.cost.outside) / best.speedup
        seconds = None if prefill is None else latency(prefill + each, each, asked.output)
        return Figures(
            batch=batch,
            prefill_seconds=prefill,
            per_token=each,
            seconds=seconds,
            prefill_share=prefill / seconds if prefill is not None and seconds else None,
            tokens_per_second=batch / each,
            price=price_per_million(asked.price, batch * asked.output / seconds) if asked.price and seconds else None,
        )

    @cached_property
    def map(self) -> Figures:
        """The best draft over batches and contexts.

        ``drafted`` tokens and their ``speedup`` by batch and context, None outside of what was measured.
        ``break_even_batch``, by context: the largest batch at which a draft of ``fixed`` tokens is no slower than plain
        decoding; None if it always pays, as far as is known; ``break_even_known``: whether anything is. ``most`` is
        the largest batch that it speaks of.
        """
        limit, batches = self.asked.shape.max_length, BATCHES
        contexts = tuple(each for each in CONTEXTS if limit is None or each <= limit) or (limit or 1,)
        if self.asked.costs is not None:  # a little beyond what is known, to show that it ends
            box = self.asked.costs.box
            batches = tuple(each for each in batches if each <= 2 * box.batch[1])
            contexts = tuple(each for each in contexts if box.context[0] / 2 < each <= 2 * box.context[1])
        best = [[self._best(batch, context) for context in contexts] for batch in batches]
        most = MOST if self.asked.costs is None else self.asked.costs.box.batch[1]
        even = [self._break_even(context, most) for context in contexts]
        return Figures(
            batches=batches,
            contexts=contexts,
            drafted=[[each and each.drafted for each in row] for row in best],
            speedup=[[each and each.speedup for each in row] for row in best],
            break_even_batch=[batch for _, batch in even],
            break_even_known=[known for known, _ in even],
            most=most,
        )

    def _break_even(self, context: int, most: int) -> tuple[bool, int | None]:
        """Return whether anything is known about a context, and the batch at which a fixed draft breaks even."""
        try:
            batch = break_even_batch(self.cost, self.asked.acceptance, drafted=self.fixed, context=context, most=most)
        except ValueError:
            return False, None
        return True, batch

    def critical_context(self, drafted: int) -> float | None:
        """The context from which a step is bound by memory at every batch; None if there is none."""
        return critical_context(self.asked.shape, self.asked.precision, ridge=self.asked.roof.ridge, drafted=drafted)

    def _best(self, batch: int, context: float) -> BestLength | None:
        if self.asked.costs is None:
            return self._least_best(batch, context)
        if _known(self.cost.verify, batch=batch, drafted=0, context=context) is None:
            return None
        sizes = {"batch": batch, "context": context, "longest": self.longest}
        return _known(best_length, self.cost, self.asked.acceptance, **sizes)

    def _least_best(self, batch: int, context: float) -> BestLength:
        return best_length(self.bound, self.asked.acceptance, batch=batch, context=context, longest=self.longest)

    def _prefill_seconds(self, batch: int) -> float | None:
        """Return the seconds of a batch's prompts; None outside of what was measured."""
        asked = self.asked
        if asked.costs is None:
            return self._prefill(batch).by_parts(asked.roof) + asked.overhead
        return _known(asked.costs.prompts_seconds, [asked.prompt] * batch, asked.prefill_chunk)

    def _speculation(self, batch: int) -> Figures | None:
        cost, context = self.cost, self.asked.context
        best = self._best(batch, context)
        if best is None:
            return None
        verify = cost.verify(batch=batch, drafted=best.drafted, context=context)
        draft = cost.draft(batch=batch, drafted=best.drafted, context=context)
        tokens = chain_tokens(self.asked.acceptance, best.drafted)
        return Figures(
            batch=batch,
            best=best,
            tokens=tokens,
            efficiency=target_efficiency(cost, batch=batch, drafted=best.drafted, context=context),
            draft_seconds=draft,
            verify_seconds=verify,
            tokens_per_second=batch * tokens / (verify + draft + cost.outside),
        )

    def _prefill(self, batch: int) -> StepWork:
        asked = self.asked
        return prompts_work(asked.shape, asked.precision, [asked.prompt] * batch, asked.prefill_chunk)

    def _phase(
        self, kind: str, what: str, batch: int, work: StepWork, tokens: float, predicted: float | None
    ) -> Figures:
        seconds = work.by_parts(self.asked.roof) + self.asked.overhead
        total = work.total
        return Figures(
            kind=kind,
            what=what,
            batch=batch,
            **asdict(work),
            bytes=total.bytes,
            flops=total.flops,
            intensity=total.intensity,
            bound=work.bound(self.asked.roof),
            seconds=seconds,
            predicted_seconds=predicted,
            tokens=tokens,
        )


def _known(call: Callable[..., Made], *given: Any, **sizes: Any) -> Made | None:
    try:
        return call(*given, **sizes)
    except ValueError:
        return None
