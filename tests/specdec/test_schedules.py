"""Plans at random, which other tests play (``tests/test_random_programs.py``), and those of the policies: who waits."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import Paging, SamplingParams, Scheduler, Step
from specdec.cache.pages import Pool
from specdec.engine import scheduler
from specdec.engine.running import RunningRequests
from specdec.engine.scheduler import FirstCome, PrefillFirst, TokenBudget, View, Work
from specdec.engine.turns import Turns
from specdec.requests import Request
from tests.specdec.host_engine import VOCAB, HostEngine, alone


@dataclass
class Drawn(Scheduler):
    """Plans at random: any chunks, any rows, any depth, and running requests give up their slots."""

    rng: np.random.Generator
    turns: int = 0
    preempted: int = 0

    def plan(self, view: View) -> Work:
        self.turns += 1
        rng, most = self.rng, view.prefill_chunk
        if self.turns > 300:  # it has played long enough: lead to an end
            return FirstCome().plan(view)
        preempt = [request for request in view.running if rng.random() < 0.15]
        self.preempted += len(preempt)
        staying = [request for request in view.running if request not in preempt]
        waiting = [request for request in view.waiting if rng.random() < 0.7][: view.free_slots]
        prefill = [(each, int(rng.integers(0, min(most, each.to_prefill) + 1))) for each in [*staying, *waiting]]
        decode = [request for request in [*staying, *waiting] if rng.random() < 0.6]
        depth = None if rng.random() < 0.5 else int(rng.integers(0, 4))
        return Work(preempt=preempt, prefill=prefill, decode=decode, depth=depth)


def count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a request that is preempted begins to count its rounds anew."""
    enter = RunningRequests.enter

    def forgetful(requests: RunningRequests, request: Any, **options: Any) -> None:
        request.rounds = 0
        enter(requests, request, **options)

    monkeypatch.setattr(RunningRequests, "enter", forgetful)


class SameDepth(Drawn):
    """Plans at random, and lets drafts be as deep as they are."""

    def plan(self, view: View) -> Work:
        return replace(super().plan(view), depth=None)


POLICIES: dict[str, Callable[[], Scheduler]] = {
    "first come": FirstCome,
    "prefill first": PrefillFirst,
    "budget": partial(TokenBudget, 16, least=3),
    "trimmed": partial(TokenBudget, 9, least=2, trims=True),
    "priority": partial(scheduler.Priority, 16, least=3, ageing=20.0),
    "shortest": partial(scheduler.ShortestRemaining, 16, least=3, preempts=True, ageing=1.0),
    "deadline": partial(scheduler.Deadline, 16, least=3, patience=50.0),
    "tiers": partial(scheduler.Tiers, 16, least=3, batch_rows=1, patience=80.0),
}
IN_ORDER = ("first come", "prefill first", "budget", "trimmed")
"""Policies that admit requests in the order in which they came."""
MOST, DEPTH, TURNS = 40, 3, 2000
MANY = int(os.environ.get("SPECDEC_WORKLOADS", 400))


@dataclass(frozen=True)
class Workload:
    policy: str
    paging: Paging
    slots: int
    chunk: int
    ahead: bool
    asked: tuple[tuple[int, int], ...]
    aborted: tuple[tuple[int, int], ...]

    def request(self, number: int) -> tuple[list[int], SamplingParams]:
        """The prompt, one of two families, and what is asked for."""
        rng = np.random.default_rng(self.asked[number][1])
        family = np.random.default_rng(int(rng.integers(2))).integers(1, VOCAB, 12).tolist()
        prompt = family[: int(rng.integers(1, 13))] + rng.integers(1, VOCAB, int(rng.integers(0, 6))).tolist()
        return prompt, SamplingParams(
            max_new_tokens=int(rng.integers(1, MOST - len(prompt) + 1)),
            temperature=float(rng.integers(2)) * (self.policy != "trimmed"),
            stream=number,
            priority=int(rng.integers(-1, 3)),
            deadline=[None, 5.0, 40.0][int(rng.integers(3))],
        )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    size = draw(st.sampled_from((None, 1, 2, 4)))
    memory = {
        "page_size": size,
        "pages": None if size is None else -(-MOST // size) + draw(st.integers(0, 8)),
        "reserve": draw(st.sampled_from((0.0, 0.0, 0.5, 1.0))),
        "shared": draw(st.booleans()),
        "swap": draw(st.sampled_from((0, 100, 2**20))),
    }
    return Workload(
        draw(st.sampled_from(list(POLICIES))),
        Paging(**memory),
        draw(st.integers(1, 4)),
        draw(st.sampled_from((1, 4, 64))),
        draw(st.booleans()),
        tuple(sorted(draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10**6)), min_size=2, max_size=14)))),
        tuple(draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 13)), max_size=2))),
    )


class Played:
    """Plays a workload, and lists what is wrong with any turn, and with the outputs."""

    def __init__(self, work: Workload, policy: Scheduler | None = None):
        self.work, self.found = work, list[str]()
        self.policy = POLICIES[work.policy]() if policy is None else policy
        self.engine = HostEngine(
            self.policy, work.paging, slots=work.slots, max_length=MOST, prefill_chunk=work.chunk, depth=DEPTH,
            alone=work.ahead,
        )  # fmt: skip
        self.engine.on_turn = self.planned
        self.steps: dict[int, list[Step]] = {}
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.gone, self.admitted = set[int](), dict[int, float]()
        due, dropped = list(enumerate(work.asked)), set(work.aborted)
        for turn in range(TURNS):
            while due and due[0][1][0] <= turn:
                number, (came, _) = due.pop(0)
                prompt, sampling = work.request(number)
                identity = self.engine.submit(prompt, sampling, arrived=float(came), speculate=number % 5 > 0)
                self.asked[identity], self.steps[identity] = (prompt, sampling), []
            for identity in {identity for when, identity in dropped if when == turn and identity in self.asked}:
                self.engine.abort(identity)
                self.gone.add(identity)
            if not due and not self.engine.unfinished:
                break
            for step in self.engine.step():
                self.steps[step.request].append(step)
                if step.finish_reason is not None:
                    self.check(step.finish_reason == "stop" or step.finish_reason == "length", "an error")
                    self.gone.add(step.request)
                self.check(self.kept(step), "first moments are not kept")
            self.conserved()
            if self.found:
                break
        self.check(not self.engine.unfinished or bool(self.found), "requests do not end")
        self.outputs()

    def check(self, right: bool, text: str) -> None:
        if not right:
            self.found.append(text)

    def kept(self, step: Step) -> bool:
        told, admitted = step.timestamps, step.visible - step.elapsed
        same = abs(self.admitted.setdefault(step.request, admitted) - admitted) < 1e-6
        return same and (told is None or told.arrived == self.work.asked[step.request][0])

    def planned(self, view: View, work: Work) -> None:
        waiting, running = [each.id for each in view.waiting], [each.id for each in view.running]
        chunks, leave = [each.id for each, _ in work.prefill], [each.id for each in work.preempt]
        decode, new = [each.id for each in work.decode], [each.id for each, _ in work.prefill if each.slot < 0]
        for listed in (chunks, decode, leave):
            self.check(len(set(listed)) == len(listed), "a request is planned twice")
        self.check(not set(leave) & {*chunks, *decode}, "who gives way takes part")
        self.check(set(leave) <= set(running) and set(new) <= set(waiting), "requests are planned in another state")
        self.check(len(running) - len(leave) + len(new) <= self.work.slots, "more rows than slots")
        leads = bool(decode or new) or any(count for _, count in work.prefill)
        self.check(leads or not (running or waiting), "an empty plan")
        if self.work.policy in IN_ORDER:
            self.check(new == sorted(waiting)[: len(new)] and waiting == sorted(waiting), "admitted out of order")
        ready = {each.id for each in view.running if not each.to_prefill} - set(leave)
        if self.work.policy == "prefill first":
            self.check(not decode or not any(count for _, count in work.prefill), "rounds before prompts")
        elif self.work.policy in ("first come", "budget"):
            self.check(ready <= set(decode), "prompts before rounds")
        if isinstance(self.policy, TokenBudget):
            rows = {each.id: view.tokens(each, work.depth) for each in work.decode}
            tokens = sum(rows.values()) + sum(min(count, each.to_prefill) for each, count in work.prefill)
            most = max(self.policy.budget, self.policy.least + (max(rows.values()) if len(rows) == 1 else 0))
            self.check(tokens <= most, f"{tokens} tokens of {most}")

    def conserved(self) -> None:
        engine, pool = self.engine, self.engine._running.pages
        running = [each for each in engine._slots.by_slot if each is not None]
        for request in running:
            self.check(engine._slots.by_slot[request.slot] is request, "a slot of another")
        states = [*engine._waiting, *(each.id for each in running), *self.gone]
        self.check(sorted(states) == sorted(self.asked), "not every request is in one state")
        if isinstance(pool, Pool):
            tables = Counter(page for row in pool._rows for page in row.pages)
            self.check(tables == Counter(dict(enumerate(pool._users))), "references are miscounted")
            self.check(set(pool._free) == {page for page in range(len(pool._users)) if not tables[page]}, "pages lost")
            for request in running:
                own = pool._rows[request.slot].pages
                self.check(len(set(own)) == len(own) == request.pages, "a request's pages")

    def outputs(self) -> None:
        """Compare with each request by itself; what was aborted has a beginning."""
        for identity, (prompt, sampling) in self.asked.items():
            tokens = tuple(token for step in self.steps[identity] for token in step.token_ids)
            depth = DEPTH if identity % 5 else 0
            expected = alone(prompt, replace(sampling, seed=sampling.seed or 0), depth)
            ended = any(step.finish_reason for step in self.steps[identity])
            self.check(tokens == (expected if ended else expected[: len(tokens)]), f"request {identity}: {tokens}")
            rounds = [step.round for step in self.steps[identity]]
            self.check(rounds == list(range(len(rounds))), "rounds are not counted on")
            self.check(ended or identity in self.gone or bool(self.found), f"request {identity} was lost")


NET = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, report_multiple_bugs=False)


@pytest.mark.parametrize("count", [150, pytest.param(MANY, marks=pytest.mark.full)])
def test_invariants_under_random_workloads(count: int) -> None:
    totals = Counter[str]()

    @given(workloads())
    @settings(NET, max_examples=count)
    def search(work: Workload) -> None:
        played = Played(work)
        assert played.found == []
        totals.update({name: value > 0 for name, value in vars(played.engine.page_counts).items()})

    search()
    assert all(totals[name] > count / 50 for name in ("preempted", "recomputed", "swapped_in", "reused")), totals


BUSY = Workload(
    "priority", Paging(page_size=2, pages=24, reserve=0.0, shared=True), 3, 64, False,
    tuple((turn, 7 * turn + 1) for turn in range(10)), (),
)  # fmt: skip

PLANS: dict[str, Callable[[Scheduler, View], Work]] = {
    "dropped": lambda inner, view: changed(inner.plan(view), lambda each: [each] * (each[0].id != 3)),
    "twice": lambda inner, view: changed(inner.plan(view), lambda each: [each] * (1 + (each[0].slot < 0))),
    "out of order": lambda inner, view: FirstCome().plan(replace(view, waiting=view.waiting[::-1])),
    "prompts first": lambda inner, view: PrefillFirst().plan(view),
    "too much": lambda inner, view: TokenBudget(99).plan(view),
}
"""Mutants: a request is never admitted, new ones twice, the last one first, before rounds, and beyond the budget."""


def changed(work: Work, change: Callable[[Any], list[Any]]) -> Work:
    return replace(work, prefill=[each for chunk in work.prefill for each in change(chunk)])


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: pages that others use are free when one of their requests leaves."""
    leave = Pool.leave

    def careless(pool: Pool, slot: int) -> None:
        shared = [page for page in pool._rows[slot].pages if pool._users[page] > 1]
        leave(pool, slot)
        pool._free.update(dict.fromkeys(shared))

    monkeypatch.setattr(Pool, "leave", careless)


@pytest.mark.parametrize("mutant", [*PLANS, count_anew, free_twice])
def test_mistakes_of_schedules_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = replace(BUSY, policy="budget") if mutant in PLANS else BUSY
    assert Played(work).found == []
    policy = POLICIES[work.policy]()
    if mutant in PLANS:
        monkeypatch.setattr(policy, "plan", partial(PLANS[mutant], POLICIES["budget"]()))
    else:
        mutant(monkeypatch)
    try:
        found = Played(work, policy).found
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        found = [repr(error)]
    assert found != []


def turns_until_the_end(policy: Scheduler, turns: int = 300) -> float:
    """Turns of a second until a long, unimportant request ends beside more short, urgent ones than can be served."""
    engine = HostEngine(policy, Paging(), slots=2, max_length=MOST, prefill_chunk=64, depth=0)
    urgent = SamplingParams(max_new_tokens=3, stop_token_ids=(), ignore_eos=True, deadline=2.0)
    last = SamplingParams(max_new_tokens=12, ignore_eos=True, priority=2)
    number = -1
    for turn in range(turns):
        for _ in range(2):
            engine.submit([1 + turn % 15], urgent, arrived=float(turn))
        if turn == 0:
            number = engine.submit([5, 6, 7], last, arrived=0.0)
        if any(step.request == number and step.finish_reason is not None for step in engine.step()):
            return turn
    return float("inf")


WAITS: dict[str, Callable[[float], Scheduler]] = {
    "priority": lambda bound: scheduler.Priority(16, least=3, ageing=bound / 4),
    "shortest": lambda bound: scheduler.ShortestRemaining(16, least=3, preempts=True, ageing=bound / 20),
    "deadline": lambda bound: scheduler.Deadline(16, least=3, patience=bound),
    "tiers": lambda bound: scheduler.Tiers(16, least=3, patience=bound),
}


@pytest.mark.parametrize("name", [*WAITS, "first come", "prefill first", "budget"])
def test_nobody_starves_unless_told_to(name: str) -> None:
    """Whoever waits is overtaken by arrivals of ``bound`` seconds at most; without a bound, by all that ever come."""
    if name not in WAITS:  # without ranks
        assert turns_until_the_end(POLICIES[name]()) <= 3 + 3 + 12
        return
    bound = 20
    overtaking = 2 * bound * 3 / 2  # two a second, for three turns each, on two slots
    assert 10 < turns_until_the_end(WAITS[name](bound)) <= overtaking + 3 + 12
    assert turns_until_the_end(WAITS[name](float("inf"))) == float("inf")


def overlapping(policy: Scheduler, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], dict[int, int]]:
    """Of every round whether it begins before the one before is read while others wait; and each request's last turn.

    Five requests share two slots of an engine that may be a round late; the one that comes last is more urgent.
    """
    engine = HostEngine(policy, Paging(), slots=2, max_length=MOST, prefill_chunk=64, depth=0, alone=True)
    early, ended, launch = list[bool](), dict[int, int](), Turns._launch

    def noted(turns: Turns, *given: Any, ahead: int = 0, **more: Any) -> Any:
        early.append(ahead > 0 and bool(turns.waiting))
        return launch(turns, *given, ahead=ahead, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Turns, "_launch", noted)
        for turn in range(200):
            for number in range({0: 4, 3: 1}.get(turn, 0)):
                params = SamplingParams(max_new_tokens=10, ignore_eos=True, priority=0 if turn else 5)
                engine.submit([1 + number], params, arrived=float(turn))
            ended |= {step.request: turn for step in engine.step() if step.finish_reason is not None}
    assert not engine.unfinished
    return early, ended


def test_rounds_overlap_while_requests_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those whose end the host knows, whose slots are given away, and for those that give way."""
    early, ended = overlapping(FirstCome(), monkeypatch)
    assert list(ended) == [0, 1, 2, 3, 4] and max(ended.values()) < len(early) + 3
    assert len(early) == 30 and sum(early) >= 14, "two groups of ten rounds play while others wait"
    _, ranked = overlapping(scheduler.Priority(16, least=3), monkeypatch)
    assert ranked[4] <= 3 + 10 + 1, "who outranks the running requests does not wait for their end"
    monkeypatch.setattr(Turns, "_same_again", lambda *given: True)  # mutant: the scheduler is not asked
    _, careless = overlapping(scheduler.Priority(16, least=3), monkeypatch)
    assert careless[4] > 3 + 10 + 1


def request(length: int, *, pages: int = 0, waiting: bool = False, **options: Any) -> Request:
    made = Request(length, [1] * length, SamplingParams(max_new_tokens=20, **options), True, frozenset())
    if not waiting:
        made.slot, made.to_prefill, made.pages = length, 0, pages
    return made


def test_a_view_counts_what_a_round_verifies_and_what_leaving_frees() -> None:
    one, other = request(9, pages=5), request(6, pages=5)
    options = {"free_slots": 1, "prefill_chunk": 8, "max_depth": 4, "page_size": 4, "free_pages": 0}
    chain = View(waiting=(), running=(one, other), **options)
    tree = replace(chain, max_nodes=14)
    assert [chain.tokens(one), chain.tokens(one, 2)] == [5, 3]
    assert [tree.tokens(one), tree.tokens(one, 2), tree.tokens(one, 0)] == [15, 15, 1]
    one.speculate = False
    assert [chain.tokens(one), chain.positions(one)] == [1, 9 + 2]
    shared = replace(chain, shared=lambda each: 2 if each is one else 0)
    assert [shared.freed(one), shared.freed(other)] == [3, 5]


def test_as_many_give_way_as_others_lack_pages() -> None:
    running = [request(13, pages=5), request(18, pages=5), request(30, pages=6)]
    options = {"free_slots": 0, "prefill_chunk": 8, "max_depth": 4, "page_size": 4, "free_pages": 1, "reserve": 0.0}
    view = View(waiting=(), running=running, **options)
    # They need 1, 2 and 4 pages more, of which 1 is free; the last one has 6. With 4 of them shared it is not enough.
    for policy in (TokenBudget(64), FirstCome(), scheduler.Priority(64)):
        assert policy.plan(view).preempt == running[2:]
        assert policy.plan(replace(view, shared=lambda each: 5)).preempt == running[:0:-1]


def test_a_waiting_request_takes_a_place_only_where_its_prompt_begins() -> None:
    running = [request(12), request(15)]
    urgent, other = request(6, waiting=True, priority=-1), request(7, waiting=True, priority=-2)
    view = View(waiting=[urgent, other], running=running, free_slots=0, prefill_chunk=64, max_depth=0)
    both, first = scheduler.Priority(16, least=3).plan(view), scheduler.Priority(5, least=3).plan(view)
    assert [each.id for each, _ in both.prefill] == [7, 6] and [each.id for each in both.preempt] == [15, 12]
    assert [each.id for each, _ in first.prefill] == [7] and [each.id for each in first.preempt] == [15]
