"""A plan: a question, and the answers to it."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from experiments.planning.drafting import Planned
from experiments.results.origin import Figures
from specdec.drafting.costs import check_conditions
from specdec.physics import speculation as gain
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.capacity import Served, kv_bytes_per_position
from specdec.physics.devices import Device, row_of
from specdec.physics.precision import Precision
from specdec.physics.rounds import RoofRounds, RoundCost
from specdec.physics.shape import ModelShape
from specdec.physics.work import Roof, StepWork, prompts_work, step_work

Made = TypeVar("Made")
CONTEXTS = tuple(2**power for power in range(6, 18))
"""Contexts at which drafts may break even, as far as the model goes."""
OUTSIDE = "outside what was measured"
"""Stands where costs say nothing."""


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
    acceptance: gain.Acceptance
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
        model = None if asked.drafter is None else asked.drafter.model
        sizes = {"shape": asked.shape, "precision": asked.precision, "overhead": asked.overhead}
        return RoofRounds(**sizes, roof=asked.roof, drafter=model)

    @cached_property
    def served(self) -> Served:
        asked, drafter = self.asked, self.asked.drafter
        sizes = {} if drafter is None else {"drafting": drafter.memory_of(self.longest), "drafted": self.longest}
        sizes["packed"] = asked.costs is not None and asked.costs.conditions.executor == "ReplayExecutor"  # on a CPU
        return Served(shape=asked.shape, precision=asked.precision, prefill_chunk=asked.prefill_chunk, **sizes)

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
        asked, found = self.asked, []
        for batch in asked.batches:
            memory = self.served.memory(rows=batch, length=asked.context)
            longest = min(self.served.longest(asked.usable, rows=batch), asked.shape.max_length or math.inf)
            fits = {"total": memory.total, "fits": memory.total <= asked.usable, "longest": longest}
            found.append(Figures(batch=batch, **asdict(memory), **fits))
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
                tokens = gain.chain_tokens(asked.acceptance, drafted)
                work = step_work(asked.shape, asked.precision, **at)
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
        Of each: ``prefill_seconds`` of its prompt (None outside of what was measured), seconds ``per_token`` of output,
        ``seconds`` of all of it, output ``tokens_per_second`` over all rows while they decode, and the ``price`` of a
        million of them, prefill included; None without a price.
        """
        return [self._request(batch, speculate=speculate) for batch in self.asked.batches]

    def _request(self, batch: int, *, speculate: bool) -> Figures | None:
        asked = self.asked
        prefill, halfway = self._prefill_seconds(batch), asked.prompt + asked.output / 2
        best = self._best(batch, halfway) if speculate else gain.BestLength(0, 1.0)
        plain = _known(self.cost.verify, batch=batch, drafted=0, context=halfway)
        if best is None or plain is None:
            return None
        each = (plain + self.cost.outside) / best.speedup
        joined = asked.costs.joined if asked.costs else 0.0  # the last piece goes with the first round
        seconds = None if prefill is None else gain.latency(prefill - joined + each, each, asked.output)
        rate = seconds and batch * asked.output / seconds
        return Figures(
            batch=batch,
            prefill_seconds=prefill,
            per_token=each,
            seconds=seconds,
            tokens_per_second=batch / each,
            price=gain.price_per_million(asked.price, rate) if asked.price and rate else None,
        )

    @property
    def most(self) -> int:
        """The largest batch at which ``break_even`` tries drafts."""
        return 1 << 14 if self.asked.costs is None else self.asked.costs.box.batch[1]

    @cached_property
    def break_even(self) -> dict[int, int | None]:
        """The largest batch at which ``fixed`` drafted tokens pay, by contexts that are known; None for every batch."""
        found, limit, asked = {}, self.asked.shape.max_length, self.asked
        for context in [each for each in CONTEXTS if limit is None or each <= limit] or [limit or 1]:
            with suppress(ValueError):  # outside of what was measured
                found[context] = gain.break_even_batch(
                    self.cost, asked.acceptance, drafted=self.fixed, context=context, most=self.most
                )
        return found

    def critical_context(self, drafted: int) -> float | None:
        """The context from which a step is bound by memory at every batch; None if there is none."""
        asked = self.asked
        return gain.critical_context(asked.shape, asked.precision, ridge=asked.roof.ridge, drafted=drafted)

    def _best(self, batch: int, context: float) -> gain.BestLength | None:
        if self.asked.costs is None:
            return self._least_best(batch, context)
        at = {"batch": batch, "context": context}
        known = _known(self.cost.verify, **at, drafted=0) is not None
        return _known(gain.best_length, self.cost, self.asked.acceptance, **at, longest=self.longest) if known else None

    def _least_best(self, batch: int, context: float) -> gain.BestLength:
        return gain.best_length(self.bound, self.asked.acceptance, batch=batch, context=context, longest=self.longest)

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
        at = {"batch": batch, "drafted": best.drafted, "context": context}
        verify, draft = cost.verify(**at), cost.draft(**at)
        tokens = gain.chain_tokens(self.asked.acceptance, best.drafted)
        rate = batch * tokens / (verify + draft + cost.outside)
        found = {"tokens": tokens, "draft_seconds": draft, "verify_seconds": verify, "tokens_per_second": rate}
        return Figures(batch=batch, best=best, efficiency=gain.target_efficiency(cost, **at), **found)

    def _prefill(self, batch: int) -> StepWork:
        asked = self.asked
        return prompts_work(asked.shape, asked.precision, [asked.prompt] * batch, asked.prefill_chunk)

    def _phase(self, kind: str, what: str, batch: int, work: StepWork, tokens: float, predicted: Any) -> Figures:
        roof, sums = self.asked.roof, {name: getattr(work.total, name) for name in ("bytes", "flops", "intensity")}
        times = {"seconds": work.by_parts(roof) + self.asked.overhead, "predicted_seconds": predicted}
        made = Figures(kind=kind, what=what, batch=batch, tokens=tokens, bound=work.bound(roof))
        return made | asdict(work) | sums | times


def _known(call: Callable[..., Made], *given: Any, **sizes: Any) -> Made | None:
    try:
        return call(*given, **sizes)
    except ValueError:
        return None


def longest_chain(costs: CalibratedRounds) -> int:
    """Return the longest chain whose costs are known; 0 if those of no drafts are."""
    return min(costs.box.drafted[1], costs.deepest)


def device_of(costs: CalibratedRounds, devices: Mapping[str, Device], *, memory: float) -> Device:
    """Return the device that costs were measured on: its row of the table, or what its file (or ``memory``) says."""
    name, peaks = costs.conditions.device, costs.peaks
    size = peaks.get("memory", memory)
    row = next((device for device in devices.values() if device.title == name), None) or row_of(name, size, devices)
    if row is not None:
        return row
    if not peaks:
        raise ValueError(f"the costs were measured on {name}, of which their file has no peaks: give device=NAME")
    return Device(
        name=name,
        title=name,
        memory=size,
        bandwidth=max(peaks["copy"], peaks["read"]),
        flops={costs.conditions.dtype: peaks["flops"]},
        cache=peaks.get("cache_bytes", 0.0),
        source="measured by plan costs=fit",
    )


def check_file(
    costs: CalibratedRounds,
    path: str,
    *,
    device: Device,
    own: Device,
    model: str,
    shape: ModelShape,
    drafter: str | None,
    **formats: str | None,
) -> None:
    """Refuse costs of something else than what is planned; models of one shape cost alike."""
    there, work = replace(costs.conditions, device=own.title), costs.work
    kv = kv_bytes_per_position(shape, Precision.of(there.dtype, kv=there.kv_cache))
    flops = 2.0 * (shape.active_weights + shape.output_weights)
    # Of some types no work is known.
    same = not work or (work.get("token_flops") == flops and work.get("kv_bytes") in (0, kv))
    fingerprint = there.fingerprint if same else "of another shape"
    planned = {"device": device.title, "model": model, "fingerprint": fingerprint, "drafter": drafter, **formats}
    check_conditions(there, replace(there, **planned), path, drafter=drafter is not None)
