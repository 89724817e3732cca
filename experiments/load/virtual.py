"""An engine in virtual time: scheduler, policy and pages of a real one, and calibrated seconds for its work.

What a turn does is decided by the same code that decides it for an engine. How many tokens a round accepts comes from
the trace of a run (``experiments.run trace=true``), and how long it takes from costs.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments.load.arrivals import Times
from experiments.load.driver import Entrance, Overload
from experiments.load.run import DONE, DROPPED, REQUESTS, TURNS, UNFINISHED, LoadRun, typed
from experiments.load.texts import Asked
from experiments.tracing.trace import read_trace
from specdec.arguments import flag, whole
from specdec.cache.pages import PageCounts, Paging, pages_for
from specdec.drafting.policies.lengths import LengthPolicy
from specdec.engine.scheduler import FirstCome, Scheduler, View, Work
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.costs import StepSize
from specdec.physics.rounds import LLAMA_8B_H100, AffineRounds
from specdec.requests import Request

Costs = AffineRounds | CalibratedRounds
"""Seconds of an engine's work."""
PUBLISHED: Mapping[str, Costs] = {"llama_8b_h100": LLAMA_8B_H100}
"""Costs by name that nobody has to measure."""
Rows = Int[np.ndarray, " batch"]


class Virtual:
    """The settings of virtual time.

    Args:
        costs: A file of ``plan costs=fit``, or a name of ``PUBLISHED``; or one for each method, by name.
        traces: The folder of a run with ``trace=true``; or one for each method, by name.
        seeds: How many times it is played, with other arrivals, lengths and acceptances. All make one result.
        mixed: Whether pieces of prompts share a forward with the round, as in vLLM.
        workers: Processes that play side by side.

    Raises:
        ValueError: Costs or traces are missing, or a number is no count.
    """

    def __init__(self, costs: Any = None, traces: Any = None, *, seeds: int = 1, mixed: bool = False, workers: int = 1):
        if not costs:
            raise ValueError(
                f"clock=virtual needs to know how long rounds take: give clock.costs=FILE of plan costs=fit, "
                f"or {' or '.join(PUBLISHED)}"
            )
        if not traces:
            raise ValueError(
                "clock=virtual needs to know what is accepted: give clock.traces=FOLDER of experiments.run trace=true"
            )
        self.costs, self.traces, self.mixed = costs, traces, flag("clock.mixed", mixed)
        self.seeds, self.workers = whole("clock.seeds", seeds, least=1), whole("clock.workers", workers, least=1)

    def costs_of(self, method: str) -> Costs:
        """Return the costs of a method's rounds. Raises ValueError: there are none, or their file cannot be read."""
        given = _own(self.costs, method, "costs")
        return PUBLISHED[given] if given in PUBLISHED else CalibratedRounds.load(given)

    def accepted_of(self, method: str) -> "Accepted":
        """Return what a method's rounds accept. Raises ValueError: there is no trace of it."""
        return Accepted.read(Path(_own(self.traces, method, "traces")), method)


def _own(given: Any, method: str, name: str) -> str:
    if not isinstance(given, Mapping):
        return str(given)
    if method not in given:
        raise ValueError(f"clock.{name} has {', '.join(map(str, given))}, and not {method}: give it, too")
    return str(given[method])


# ---------------------------------------------------------------- what is accepted


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What a drafter's rounds accept at every position of some outputs, all one behind the other.

    Rounds of shorter drafts begin where none began in the trace. There a draft is what was left of the recorded one: it
    is accepted as far, and ends where that one was rejected. Behind a draft that was accepted whole, the next token is
    right as often as the deepest ones were, and then it goes on as the next round did.

    Attributes:
        lengths: The tokens of every output.
        able: How many tokens of the deepest draft from there would be accepted.
        proposed: How deep that draft is.
        nodes: How many nodes it has down to every depth: as many as it is deep, in a chain.
    """

    lengths: Int[np.ndarray, " output"]
    able: Int[np.ndarray, " position"]
    proposed: Int[np.ndarray, " position"]
    nodes: Int[np.ndarray, "position depth"]

    @property
    def depth(self) -> int:
        """The deepest drafts."""
        return self.nodes.shape[1]

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
        lengths = []
        for output in outputs:
            made, following = [], 0
            for accepted, levels in reversed(output):
                able = np.arange(accepted, -1, -1)
                if levels and accepted == len(levels) and rng.random() < right:
                    able[1:] += 1 + following
                following = accepted
                nodes = np.zeros(deepest, dtype=np.int64)
                nodes[: len(levels)] = np.cumsum(levels)
                made.append((able, np.full(len(able), len(levels)), np.tile(nodes, (len(able), 1))))
            parts += reversed(made)
            lengths.append(sum(len(able) for able, _, _ in made))
        able, proposed, nodes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return cls(lengths=np.array(lengths), able=np.minimum(able, proposed), proposed=proposed, nodes=nodes)

    @classmethod
    def read(cls, folder: Path, method: str) -> "Accepted":
        """Return that of a method in a run's trace, or of its only one.

        Raises:
            ValueError: There is no trace, none of this method among several, or it is of several temperatures.
        """
        found: dict[tuple[str, float], dict[tuple[Any, ...], dict[int, tuple[int, list[int]]]]] = {}
        for shard in read_trace(folder, tables=False):
            for row, key in enumerate(shard.keys):
                levels = np.bincount(shard.depths(row), minlength=1)[1:].tolist()
                rounds = found.setdefault((key.method, key.temperature), {})
                rounds.setdefault((key.prompt, key.turn, key.sample), {})[key.round] = key.accepted, levels
        methods = {name for name, _ in found}
        wanted = [place for place in found if place[0] == method or methods == {place[0]}]
        if len(wanted) != 1:
            given = ", ".join(f"{name} at T={temperature:g}" for name, temperature in found)
            raise ValueError(f"the trace in {folder} has {given}, and not {method} at one temperature: give another")
        outputs = found[wanted[0]].values()
        return cls.of(
            [[rounds[number] for number in range(len(rounds))] for rounds in outputs if len(rounds) > max(rounds)]
        )


class _Drafts:
    """The drafts of requests: request i is accepted as output i is, from the front again where outputs are fewer."""

    def __init__(
        self, accepted: Accepted, outputs: Int[np.ndarray, " request"], policy: LengthPolicy | None, seed: int
    ):
        self._accepted, self.policy = accepted, copy.copy(policy)
        self.most_nodes = int(accepted.nodes.max(initial=0))
        order = (
            np.random.default_rng(seed).permutation(len(accepted.lengths)) if seed else np.arange(len(accepted.lengths))
        )
        place = order[np.arange(len(outputs)) % len(order)]
        # Where an output is longer than its trace, it goes on from the front, and leaves out the end, where drafts
        # were cut because the output was about to end.
        lengths = accepted.lengths[place]
        self._around = np.where(outputs > lengths, np.maximum(lengths - accepted.depth, 1), np.maximum(lengths, 1))
        self._begin = (accepted.lengths.cumsum() - accepted.lengths)[place]

    def round(self, rows: Rows, slots: Rows, lengths: Rows, output: Rows, most: Rows) -> tuple[Rows, Rows, Rows]:
        """Return how deep the drafts of a round are, how many nodes they have, and how many tokens are accepted.

        Args:
            rows: The numbers of the requests.
            lengths: The tokens in their caches.
            output: The tokens of their outputs so far.
            most: How deep the drafts may be.
        """
        place = self._begin[rows] + output % self._around[rows]
        able = self._accepted.able[place]
        if self.policy is not None:
            if self.policy.foresees is not None:
                self.policy.foresee(slots, np.minimum(able, most))
            most = np.minimum(self.policy.depths(slots, lengths), most)
        proposed = np.minimum(most, self._accepted.proposed[place])
        accepted = np.minimum(able, proposed)
        if self.policy is not None:
            self.policy.note(slots, proposed, accepted)
        return proposed, np.where(proposed > 0, self._accepted.nodes[place, proposed - 1], 0), accepted


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, kw_only=True)
class VirtualEngine:
    """An engine as a value: everything that decides what it does and how long that takes.

    Attributes:
        prefill_chunk: Tokens of a prompt per turn, at most.
        scheduler: Plans its turns; None for first come, first served.
        accepted: What is accepted; None for plain decoding.
        policy: How deep drafts are; None for as deep as the trace's.
        mixed: Whether pieces of prompts share a forward with the round, as in vLLM; then the weights are read once.

    Raises:
        ValueError: The costs do not reach as deep as drafts do, or something cannot be had in virtual time.
    """

    costs: Costs
    slots: int
    max_length: int
    prefill_chunk: int = 512
    paging: Paging = field(default_factory=Paging)
    scheduler: Scheduler | None = None
    accepted: Accepted | None = None
    policy: LengthPolicy | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.paging.swap:
            raise ValueError(
                f"engine.cache.swap={self.paging.swap}: the seconds of swapping are not calibrated, so virtual time "
                f"knows preemption by recomputation alone: give 0"
            )
        self.costs.check_depth(self.depth)

    @property
    def depth(self) -> int:
        """The deepest drafts."""
        return 0 if self.accepted is None else self.accepted.depth

    def play(
        self,
        asked: Sequence[Asked],
        times: Times,
        *,
        loop: str,
        users: int = 0,
        overload: Overload | None = None,
        seed: int = 0,
        method: str = "",
        rate: float = 0.0,
    ) -> LoadRun:
        """Return what happens to requests that arrive at these times.

        Args:
            asked: The requests. Their tokens matter where beginnings are shared alone.
            times: See ``Entrance``, like loop and users.
            seed: Which output's acceptance a request has; 0: that of its own number.
        """
        entrance = Entrance(asked, times, loop, users, overload or Overload())
        return _Play(self, asked, entrance, seed).run(method, rate)


class _Play:
    """One play. Requests are numbered as they are asked; what changes in every round stands in arrays over them."""

    def __init__(self, engine: VirtualEngine, asked: Sequence[Asked], entrance: Entrance, seed: int):
        self.engine, self.asked, self.entrance = engine, asked, entrance
        count, slots = len(asked), engine.slots
        self.scheduler = (FirstCome() if engine.scheduler is None else engine.scheduler).bind()
        self.paging = engine.paging.filled_in(slots=slots, max_length=engine.max_length)
        self.pages = pages_for(self.paging, slots)
        table = typed({"request": np.arange(count)}, REQUESTS)
        self.found = {name: table[name].to_numpy(copy=True) for name in REQUESTS}
        self.found["outcome"][:] = UNFINISHED
        for name in ("klass", "user", "priority", "prompt_tokens"):
            self.found[name][:] = [getattr(each.planned, name) for each in asked]
        self.prompt, self.output = self.found["prompt_tokens"], self.found["output_tokens"]
        self.left = np.array([each.planned.output_tokens for each in asked], dtype=np.int64)
        self.slot = np.full(count, -1)
        self.drafts = None if engine.accepted is None else _Drafts(engine.accepted, self.left, engine.policy, seed)
        self.policy = None if self.drafts is None else self.drafts.policy
        if self.policy is not None:
            self.policy.bind(max_batch_size=slots, max_depth=engine.depth)
        self.now = 0.0
        self.requests: dict[int, Request] = {}  # those that wait or run
        self.waiting: dict[int, Request] = {}
        self.prefilling = 0  # running requests whose prompt is not in the cache
        self.rows = np.zeros(0, dtype=np.int64)  # numbers of the requests that can take part in a round, ascending
        self.free = list(range(slots - 1, -1, -1))
        self.fresh: list[int] = []  # in rows, without a token
        self.turns: list[tuple[Any, ...]] = []
        self.queried = 0

    def run(self, method: str, rate: float) -> LoadRun:
        due = self.entrance.due
        while due or self.requests:
            self._arrive()
            if self.requests:
                self._turn()
            elif due:
                self.now = max(self.now, due[0][0])
        return self._result(method, rate)

    def _arrive(self) -> None:
        for number, arrived, outcome, _ in self.entrance.arrivals(lambda: self.now):
            self.found["arrived"][number] = arrived
            if outcome:
                self._end(number, outcome)
                continue
            self.found["submitted"][number] = self.now
            prompt, speculate = range(int(self.prompt[number])), self.drafts is not None
            request = Request(number, prompt, self.asked[number].sampling, speculate, frozenset(), arrived=arrived)
            self.requests[number] = self.waiting[number] = request
        for number in self.entrance.impatient(self.now):
            request = self.requests.pop(number)
            if self.waiting.pop(number, None) is None:
                self._leave(request)
            self._end(number, DROPPED)

    def _end(self, number: int, outcome: str) -> None:
        self.found["outcome"][number], self.found["finished"][number] = outcome, self.now
        self.entrance.ended(number, self.now)

    def _turn(self) -> None:
        begin, depth, rows = self.now, self.engine.depth, self.rows
        seconds, prefill_tokens, preempted = 0.0, 0, 0
        if self.waiting or self.prefilling or not self._have_room():
            view, work = self._plan()
            preempted = len(work.preempt)
            for request in work.preempt:
                self._preempt(request)
            seconds, prefill_tokens = self._prefill(view, work)
            depth = depth if work.depth is None else min(depth, work.depth)
            ready = [each for each in work.decode if each.slot >= 0 and not each.to_prefill]
            rows = np.array(sorted(each.id for each in ready if self._grow(each, view)), dtype=np.int64)
        inside, waiting = len(self.requests), len(self.waiting)
        round_seconds, nodes, deepest, committed = self._round(rows, depth)
        if seconds and not round_seconds:
            seconds += self.engine.costs.outside
        elif seconds and self.engine.mixed:  # the weights are read once
            seconds -= self.engine.costs.prefill_seconds(StepSize(tokens=0, positions=0, pairs=0))
        self.now = begin + seconds + round_seconds
        self._settle(rows)
        free = -1 if self.pages.free is None else self.pages.free
        self.turns.append(
            (begin, self.now - begin, prefill_tokens, len(rows), nodes, deepest, committed,
             inside - waiting, waiting, free, preempted)
        )  # fmt: skip

    # ---------------------------------------------------------------- what the scheduler plans

    def _plan(self) -> tuple[View, Work]:
        running = [self.requests[number] for number in sorted(self.requests.keys() - self.waiting.keys())]
        for request in running:
            request.output_ids = range(self.output[request.id])  # pyright: ignore[reportAttributeAccessIssue]
        view = View(
            now=self.now,
            waiting=list(self.waiting.values()),
            running=running,
            free_slots=len(self.free),
            free_pages=self.pages.free,
            page_size=self.pages.page_size,
            reserve=self.paging.reserve,
            prefill_chunk=self.engine.prefill_chunk,
            max_depth=self.engine.depth,
            max_nodes=None if self.drafts is None else self.drafts.most_nodes,
            shared=lambda request: self.pages.own(request.slot) // self.pages.page_size,
        )
        return view, self.scheduler.plan(view)

    def _have_room(self) -> bool:
        """Return whether all rows have pages for this round and another one."""
        if self.pages.free is None or self.paging.reserve >= 1:
            return True
        ahead = np.minimum(2 * (1 + self.engine.depth), self.left[self.rows])
        held = np.array([self.requests[number].pages for number in self.rows.tolist()]) * self.pages.page_size
        return bool((held >= self.prompt[self.rows] + self.output[self.rows] + ahead).all())

    def _grow(self, request: Request, view: View) -> bool:
        if view.pages_needed(request):
            pages = self.pages.grow(request.slot, view.positions(request))
            request.pages = len(pages) or request.pages
            return bool(pages)
        return True

    def _enter(self, request: Request, view: View) -> bool:
        positions, drafted = view.positions(request), self.drafts is not None
        try:
            placement = self.pages.enter(
                self._tokens(request), sorted(self.free), positions=positions, drafted=drafted, again=0
            )
        except ValueError:  # no room after all: it goes on waiting
            return False
        number = request.id
        self.free.remove(placement.slot)
        request.slot, request.pages = placement.slot, len(placement.pages)
        request.prefilled, request.to_prefill = placement.reused, request.length - 1 - placement.reused
        self.slot[number] = placement.slot
        if request.preemptions:
            self.found["preempted_seconds"][number] += self.now - request.preempted_at
        else:
            self.found["admitted"][number] = self.now
            self.found["reused_tokens"][number], request.admitted = placement.reused, self.now
            self.queried += (request.length - 1) * self.paging.shared
        if self.policy is not None:
            self.policy.admit(placement.slot)
        del self.waiting[number]
        self.prefilling += 1
        return True

    def _tokens(self, request: Request) -> Sequence[int]:
        """Return a request's tokens where they matter; those of outputs are like no others."""
        if not self.paging.shared:
            return range(request.length)
        number, output = request.id, int(self.output[request.id])
        own = -1 - number * self.engine.max_length
        return np.concatenate([np.asarray(self.asked[number].prompt_ids), own - np.arange(output)])  # pyright: ignore

    def _prefill(self, view: View, work: Work) -> tuple[float, int]:
        """Prefill pieces of prompts; returns the seconds, and the number of tokens."""
        pieces: list[tuple[Request, int]] = []
        for request, tokens in work.prefill:
            if request.slot < 0 and not self._enter(request, view):
                continue
            pieces.append((request, min(tokens, request.to_prefill)))
        sizes = [count for _, count in pieces if count]
        seconds = 0.0
        if sizes:
            counts = np.array([max(sizes)] * len(sizes) if self.engine.costs.padded else sizes)
            before = np.array([request.prefilled for request, count in pieces if count])
            size = StepSize(
                tokens=int(counts.sum()),
                positions=float(before.sum()),
                pairs=float((counts * (before + (counts + 1) / 2)).sum()),
            )
            seconds = self.engine.costs.prefill_seconds(size)
            if self.drafts is not None:
                seconds *= 1 + self.engine.costs.follows
        for request, count in pieces:
            again = min(count, max(request.computed - request.prefilled, 0))
            self.found["recomputed_tokens"][request.id] += again
            request.prefilled += count
            request.to_prefill -= count
            if not request.to_prefill:
                self._start(request, seconds)
        return seconds, sum(sizes)

    def _start(self, request: Request, seconds: float) -> None:
        number = request.id
        self.prefilling -= 1
        if np.isnan(self.found["prefilled"][number]):
            self.found["prefilled"][number] = self.now + seconds
        if not self.output[number]:
            self.fresh.append(number)
        self.rows = np.insert(self.rows, np.searchsorted(self.rows, number), number)
        self._hold(request)

    def _hold(self, request: Request) -> None:
        if self.paging.shared:
            tokens = np.asarray(self._tokens(request))[: request.prefilled]
            self.pages.hold(request.slot, tokens, drafted=self.drafts is not None)

    def _preempt(self, request: Request) -> None:
        self.found["preemptions"][request.id] += 1
        done = int(self.prompt[request.id] + self.output[request.id]) - 1
        request.computed = max(request.computed, request.prefilled if request.to_prefill else done)
        request.preemptions, request.preempted_at = request.preemptions + 1, self.now
        self._leave(request)
        request.restart()
        self.waiting[request.id] = request
        self.waiting = dict(sorted(self.waiting.items()))

    def _leave(self, request: Request) -> None:
        if request.to_prefill:
            self.prefilling -= 1
        else:
            self.rows = self.rows[self.rows != request.id]
            if request.id in self.fresh:
                self.fresh.remove(request.id)
        request.prefilled = int(self.prompt[request.id] + self.output[request.id]) - 1 - request.to_prefill
        self._hold(request)
        self.pages.leave(request.slot)
        self.free.append(request.slot)
        self.slot[request.id] = -1

    # ---------------------------------------------------------------- a round

    def _round(self, rows: Rows, depth: int) -> tuple[float, int, int, int]:
        """Play a round; returns its seconds, the drafted nodes, the deepest draft, and the committed tokens."""
        if not len(rows):
            return 0.0, 0, 0, 0
        left = self.left[rows]
        lengths = self.prompt[rows] + self.output[rows] - 1
        drafted = deepest = 0
        accepted: Any = 0
        if self.drafts is not None:
            most = np.minimum(left - 1, depth)
            proposed, nodes, accepted = self.drafts.round(rows, self.slot[rows], lengths, self.output[rows], most)
            drafted, deepest = int(nodes.sum()), int(proposed.max())
            for name, values in (("drafted", proposed), ("nodes", nodes), ("accepted", accepted)):
                self.found[name][rows] += values
        emitted = np.minimum(accepted + 1, left)
        size = {"drafted": np.array([drafted]), "deepest": np.array([deepest])}
        seconds = float(self.engine.costs.ragged(len(rows), float(lengths.sum()), **size)[0])
        seconds += self.engine.costs.scattered * (len(rows) - 1)
        self.found["rounds"][rows] += 1
        self.output[rows] += emitted
        self.left[rows] = left - emitted
        return seconds, drafted, deepest, int(emitted.sum())

    def _settle(self, rows: Rows) -> None:
        """Note at the end of a turn what has become visible in it."""
        if self.fresh:
            seen = [number for number in self.fresh if self.output[number]]
            self.found["first_token"][seen] = self.now
            self.fresh = [number for number in self.fresh if not self.output[number]]
            for number in seen:
                self.entrance.silent.pop(number, None)
        for number in rows[self.left[rows] == 0].tolist():
            self._leave(self.requests.pop(number))
            self._end(number, DONE)

    def _result(self, method: str, rate: float) -> LoadRun:
        came = np.flatnonzero(~np.isnan(self.found["arrived"]))
        table = {name: values[came] for name, values in self.found.items()}
        totals = PageCounts(
            queried=self.queried,
            reused=int(self.found["reused_tokens"].sum()),
            recomputed=int(self.found["recomputed_tokens"].sum()),
            preempted=int(self.found["preemptions"].sum()),
        )
        done = self.found["finished"][self.found["outcome"] == DONE]
        return LoadRun(
            method=method,
            rate=rate,
            loop=self.entrance.loop,
            seconds=float(done.max()) if len(done) else self.now,
            requests=typed(table, REQUESTS),
            turns=typed(dict(zip(TURNS, zip(*self.turns, strict=True), strict=True)), TURNS),
            totals=totals,
            facts={
                "complete": True,
                "planned": len(self.asked),
                "slots": self.engine.slots,
                "pages": self.paging.pages,
                "policy": None if self.policy is None else type(self.policy).__name__,
                "virtual": True,
            },
        )
