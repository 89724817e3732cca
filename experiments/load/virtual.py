"""An engine in virtual time: scheduler, policy and pages of a real one, and calibrated seconds for its work.

What a turn does is decided by the same code that decides it for an engine. How many tokens a round accepts comes from
the trace of a run (``experiments.run trace=true``), and how long it takes from costs.
"""

import copy
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.load.arrivals import Times
from experiments.load.driver import Driver, Rows
from experiments.load.run import DONE, LoadRun
from experiments.load.workloads import Asked
from experiments.tracing.trace import read_trace
from specdec.cache.pages import PageCounts, Paging
from specdec.drafting.policies.lengths import LengthPolicy
from specdec.engine.scheduler import FirstCome, Scheduler, View
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import StepSize
from specdec.physics.rounds import LLAMA_8B_H100, AffineRounds
from specdec.requests import Request

Costs = AffineRounds | CalibratedRounds
"""Seconds of an engine's work."""
PUBLISHED: dict[str | None, Costs] = {"llama_8b_h100": LLAMA_8B_H100}
"""Costs by name that nobody has to measure."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Acceptance of a drafter's rounds at every position of some outputs, all one behind the other.

    Rounds of shorter drafts begin where none began in the trace. There a draft is what was left of the recorded one: it
    is accepted as far, and ends where that one was rejected. Behind a draft that was accepted whole, the next token is
    right as often as the deepest ones were, and then it goes on as the next round did.
    """

    lengths: Int[np.ndarray, " output"]  # the tokens of every output
    able: Int[np.ndarray, " position"]  # how many tokens of the deepest draft from there would be accepted
    proposed: Int[np.ndarray, " position"]  # how deep that draft is
    nodes: Int[np.ndarray, "position depth"]  # how many nodes it has down to every depth: in a chain, as many

    @classmethod
    def of(cls, outputs: Sequence[Sequence[tuple[int, Sequence[int]]]], seed: int = 0) -> "Accepted":
        """Return it by rounds in their order: how many tokens were accepted, and the drafted nodes of every depth."""
        rounds = [(accepted, len(levels)) for output in outputs for accepted, levels in output if levels]
        if not rounds:
            raise ValueError("the trace has no round with a draft: trace a method that drafts")
        deepest = max(depth for _, depth in rounds)
        whole_drafts = sum(accepted == depth for accepted, depth in rounds)
        right = whole_drafts / max(sum(accepted >= depth - 1 for accepted, depth in rounds), 1)
        rng = np.random.default_rng(seed)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for output in outputs:
            for (accepted, levels), (following, _) in zip(output, [*output[1:], (0, [])], strict=True):
                able = np.arange(accepted, -1, -1)
                if levels and accepted == len(levels) and rng.random() < right:
                    able[1:] += 1 + following
                nodes = np.pad(np.cumsum(levels, dtype=np.int64), (0, deepest - len(levels)))
                parts.append((able, np.full(len(able), len(levels)), np.tile(nodes, (len(able), 1))))
        able, proposed, nodes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        lengths = np.array([sum(accepted + 1 for accepted, _ in output) for output in outputs])
        return cls(lengths=lengths, able=np.minimum(able, proposed), proposed=proposed, nodes=nodes)

    @classmethod
    def read(cls, folder: Path, method: str) -> "Accepted":
        """Return that of a method in a run's trace, or of its only one.

        Raises:
            ValueError: There is no trace, none of this method among several, or it is of several temperatures.
        """
        traced: dict[tuple[str, float], dict[tuple[Any, ...], dict[int, tuple[int, list[int]]]]] = {}
        for one in chain.from_iterable(read_trace(folder, tables=False)):
            key, levels = one.key, np.bincount(one.depths, minlength=1)[1:].tolist()
            rounds = traced.setdefault((key.method, key.temperature), {})
            rounds.setdefault((key.prompt, key.turn, key.sample), {})[key.round] = key.accepted, levels
        methods = {name for name, _ in traced}
        wanted = [rounds for (name, _), rounds in traced.items() if name == method or methods == {name}]
        if len(wanted) != 1:
            names = ", ".join(f"{name} at T={temperature:g}" for name, temperature in traced)
            raise ValueError(f"the trace in {folder} has {names}, and not {method} at one temperature: give another")
        outputs = [rounds for rounds in wanted[0].values() if len(rounds) > max(rounds)]
        return cls.of([[rounds[number] for number in range(len(rounds))] for rounds in outputs])


@dataclass(frozen=True)
class Virtual:
    """The settings of virtual time.

    Args:
        costs: A file of ``plan costs=fit``, or a name of ``PUBLISHED``.
        traces: The folder of a run with ``trace=true`` of all methods.
    """

    costs: str | None = None
    traces: str | None = None

    def __post_init__(self) -> None:
        if not self.costs or not self.traces:
            raise ValueError(
                "clock=virtual needs to know how long rounds take and what they accept: give clock.costs=FILE of plan "
                "costs=fit, or llama_8b_h100, and clock.traces=FOLDER of experiments.run trace=true"
            )

    def read_costs(self) -> Costs:
        """Return the costs of rounds. Raises ValueError: their file cannot be read."""
        return PUBLISHED.get(self.costs) or CalibratedRounds.load(str(self.costs))


@dataclass(frozen=True, kw_only=True)
class VirtualEngine:
    """An engine as a value: everything that decides what it does and how long that takes.

    Pieces of prompts share their pass over the weights with the round by costs that have some ``joined`` seconds: as in
    vLLM, and as this project's engine does on a CPU. On a GPU they have one of their own.

    Raises:
        ValueError: The costs do not reach as deep as drafts do, or something cannot be had in virtual time.
    """

    costs: Costs
    slots: int
    max_length: int
    prefill_chunk: int = 512
    paging: Paging = field(default_factory=Paging)
    scheduler: Scheduler = field(default_factory=FirstCome)
    accepted: Accepted | None = None  # None for plain decoding
    policy: LengthPolicy | None = None  # how deep drafts are; None for as deep as the trace's

    def __post_init__(self) -> None:
        if self.paging.swap or self.paging.shared:
            raise ValueError(
                f"engine.cache.swap={self.paging.swap}, shared={self.paging.shared}: in virtual time requests share "
                f"no beginnings, and are preempted by recomputation alone: give 0 and false"
            )
        self.costs.check_depth(self.depth)

    @property
    def depth(self) -> int:
        """The deepest drafts."""
        return 0 if self.accepted is None else self.accepted.nodes.shape[1]

    def play(
        self, asked: Sequence[Asked], times: Times, *, method: str = "virtual", rate: float = 1.0, **arrivals: Any
    ) -> LoadRun:
        """Play requests, whose tokens do not matter, until all have ended; ``arrivals`` are options of ``Driver``."""
        play = _Play(self)
        driver = Driver(play, asked, times, **arrivals)
        driver.run()
        facts = {"slots": self.slots, "pages": play.paging.pages, "policy": play.policy and type(play.policy).__name__}
        return driver.result(method=method, rate=rate, **facts)


class _Play:
    """One play, of requests by their numbers; what changes in every round stands in arrays over all of them."""

    totals = PageCounts()  # nothing is swapped or reused

    def __init__(self, engine: VirtualEngine):
        self.engine, self.scheduler = engine, engine.scheduler
        self.paging = engine.paging.filled_in(slots=engine.slots, max_length=engine.max_length)
        self.policy = None if engine.accepted is None else copy.copy(engine.policy)
        if self.policy is not None:
            self.policy.bind(max_batch_size=engine.slots, max_depth=engine.depth)
        self.at = 0.0
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.free_slots = list(range(engine.slots))  # a heap
        self.free_pages = self.paging.pages or 0

    def begin(self, driver: Driver) -> None:
        self.driver, self.columns = driver, driver.columns
        self.prompt, self.output = self.columns["prompt_tokens"], self.columns["output_tokens"]
        self.left = np.array([one.planned.output_tokens for one in driver.asked], dtype=np.int64)
        if (accepted := self.engine.accepted) is not None:
            # Request i is accepted as output i is, from the front again where outputs are fewer. Where an output is
            # longer than its trace, it goes on from the front, and leaves out the end, where drafts were cut because
            # the output was about to end.
            place = np.arange(len(self.left)) % len(accepted.lengths)
            lengths = accepted.lengths[place]
            shorter = np.maximum(lengths - accepted.nodes.shape[1], 1)
            self.around = np.where(self.left > lengths, shorter, np.maximum(lengths, 1))
            self.first = (accepted.lengths.cumsum() - accepted.lengths)[place]

    def now(self) -> float:
        return self.at

    def wait(self, until: float) -> None:
        self.at = max(self.at, until)

    def close(self) -> None: ...

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, number: int, arrived: float) -> None:
        prompt, sampling = range(int(self.prompt[number])), self.driver.asked[number].sampling
        drafts = self.engine.accepted is not None
        self.waiting[number] = Request(number, prompt, sampling, drafts, frozenset(), arrived=arrived)

    def abort(self, number: int) -> None:
        if self.waiting.pop(number, None) is None:
            self._leave(self.running[number])

    def turn(self) -> tuple[Any, ...]:
        begin, depth, costs = self.at, self.engine.depth, self.engine.costs
        seconds, prefilled = 0.0, 0
        ready = [request for request in self.running.values() if not request.to_prefill]
        if self.waiting or len(ready) < len(self.running) or not self._have_room(ready):
            view = self._view()
            work = self.scheduler.plan(view)
            for request in work.preempt:
                self._preempt(request)
            for request, _ in work.prefill:
                self._enter(request, view)
            pieces = [(request, count) for request, count in work.prefill if request.slot >= 0]
            seconds, prefilled = self._prefill(pieces)
            depth = depth if work.depth is None else min(depth, work.depth)
            able = [request for request in work.decode if request.slot >= 0 and not request.to_prefill]
            ready = [request for request in able if self._grow(request, view)]
        running, waiting, rows = len(self.running), len(self.waiting), _numbers(ready)
        if ready:
            played, tokens, counts = self._round(rows, np.array([request.slot for request in ready]), depth)
            seconds -= costs.joined if prefilled else 0.0  # the weights are read once
            self.at += seconds + played
            self.driver.round(rows, self.at, tokens, **counts)
        elif seconds:
            self.at += seconds + costs.outside
        for number in rows[self.left[rows] == 0].tolist():
            self._leave(self.running[number])
            self.driver.end(number, DONE, self.at)
        return begin, self.at - begin, prefilled, len(rows), running, waiting

    def _round(self, rows: Rows, slots: Rows, depth: int) -> tuple[float, Rows, dict[str, Rows]]:
        """Return the seconds of a round, the tokens that each row gets, and other columns."""
        left, output, costs = self.left[rows], self.output[rows], self.engine.costs
        lengths = self.prompt[rows] + output - 1
        counts: dict[str, Rows] = dict.fromkeys(("drafted", "nodes", "accepted"), np.zeros_like(rows))
        if (drafts := self.engine.accepted) is not None:
            place, policy = self.first[rows] + output % self.around[rows], self.policy
            able, most = drafts.able[place], np.minimum(left - 1, depth)
            if policy is not None and policy.foresees:
                policy.foresee(slots, np.minimum(able, most))
            most = most if policy is None else np.minimum(policy.depths(slots, lengths), most)
            proposed = np.minimum(most, drafts.proposed[place])
            nodes = np.where(proposed > 0, drafts.nodes[place, proposed - 1], 0)
            counts = {"drafted": proposed, "nodes": nodes, "accepted": np.minimum(able, proposed)}
            if policy is not None:
                policy.note(slots, proposed, counts["accepted"])
        tokens = np.minimum(counts["accepted"] + 1, left)
        self.left[rows] = left - tokens
        size = {"drafted": counts["nodes"].sum(keepdims=True), "deepest": counts["drafted"].max(keepdims=True)}
        seconds = float(costs.ragged(len(rows), float(lengths.sum()), **size)[0])
        return seconds, tokens, counts

    def _view(self) -> View:
        running = [self.running[number] for number in sorted(self.running)]
        for request in running:
            request.output_ids = range(self.output[request.id])  # pyright: ignore[reportAttributeAccessIssue]
        return View(
            now=self.at,
            waiting=list(self.waiting.values()),
            running=running,
            free_slots=len(self.free_slots),
            free_pages=None if self.paging.pages is None else self.free_pages,
            page_size=self.paging.page_size or self.engine.max_length,
            reserve=self.paging.reserve,
            prefill_chunk=self.engine.prefill_chunk,
            max_depth=self.engine.depth,
            max_nodes=None if self.engine.accepted is None else int(self.engine.accepted.nodes.max()),
        )

    def _have_room(self, ready: Sequence[Request]) -> bool:
        """Return whether requests have pages for this round and another one."""
        rows, held = _numbers(ready), np.array([request.pages for request in ready])
        ahead = np.minimum(2 * (1 + self.engine.depth), self.left[rows])
        size = self.paging.page_size
        return size is None or bool((held * size >= self.prompt[rows] + self.output[rows] + ahead).all())

    def _grow(self, request: Request, view: View) -> bool:
        """Give a request the pages that it needs; returns whether there were enough."""
        needed = view.pages_needed(request)
        if needed > self.free_pages:
            return False
        self.free_pages, request.pages = self.free_pages - needed, request.pages + needed
        return True

    def _enter(self, request: Request, view: View) -> None:
        """Give a request that waits a slot and pages, if there are some for it."""
        number = request.id
        if request.slot < 0 and self.free_slots and self._grow(request, view):
            request.slot = heapq.heappop(self.free_slots)
            if not request.preemptions:
                self.columns["admitted"][number] = request.admitted = self.at
            if self.policy is not None:
                self.policy.admit(request.slot)
            self.running[number] = self.waiting.pop(number)

    def _prefill(self, pieces: Sequence[tuple[Request, int]]) -> tuple[float, int]:
        """Prefill at most so many tokens of requests; returns the seconds and the tokens."""
        counted = [(request, min(count, request.to_prefill)) for request, count in pieces if request.to_prefill]
        if not counted:
            return 0.0, 0
        sizes = np.array([count for _, count in counted])
        before = np.array([request.prefilled for request, _ in counted])
        apart = self.engine.costs.padded and not self.engine.costs.joined  # as on a GPU
        counts = np.full_like(sizes, sizes.max()) if apart else sizes
        pairs = float((counts * (before + (counts + 1) / 2)).sum())
        size = StepSize(tokens=int(counts.sum()), positions=float(before.sum()), pairs=pairs)
        for request, count in counted:
            again = min(count, max(request.computed - request.prefilled, 0))
            self.columns["recomputed_tokens"][request.id] += again
            request.prefilled += count
            request.to_prefill -= count
        return self.engine.costs.prefill_seconds(size), int(sizes.sum())

    def _preempt(self, request: Request) -> None:
        self.columns["preemptions"][request.id] += 1
        done = int(self.prompt[request.id] + self.output[request.id]) - 1
        request.computed = max(request.computed, request.prefilled if request.to_prefill else done)
        request.preemptions += 1
        self._leave(request)
        request.restart()
        self.waiting = dict(sorted({**self.waiting, request.id: request}.items()))

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        self.free_pages += request.pages
        heapq.heappush(self.free_slots, request.slot)


def _numbers(requests: Sequence[Request]) -> Rows:
    return np.array([request.id for request in requests], dtype=np.int64)
