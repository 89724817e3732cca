"""Plans of scheduling policies: who waits how long, who gives way, and rounds that overlap."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from specdec import Paging, SamplingParams, Scheduler
from specdec.engine.scheduler import Deadline, FirstCome, Priority, ShortestRemaining, Tiers, TokenBudget, View
from specdec.engine.turns import Turns
from specdec.requests import Request
from tests.specdec.host_engine import HostEngine
from tests.specdec.test_schedules import MOST, POLICIES


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
    "priority": lambda bound: Priority(16, least=3, ageing=bound / 4),
    "shortest": lambda bound: ShortestRemaining(16, least=3, preempts=True, ageing=bound / 20),
    "deadline": lambda bound: Deadline(16, least=3, patience=bound),
    "tiers": lambda bound: Tiers(16, least=3, patience=bound),
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
    _, ranked = overlapping(Priority(16, least=3), monkeypatch)
    assert ranked[4] <= 3 + 10 + 1, "who outranks the running requests does not wait for their end"
    monkeypatch.setattr(Turns, "_same_again", lambda *given: True)  # mutant: the scheduler is not asked
    _, careless = overlapping(Priority(16, least=3), monkeypatch)
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
    for policy in (TokenBudget(64), FirstCome(), Priority(64)):
        assert policy.plan(view).preempt == running[2:]
        assert policy.plan(replace(view, shared=lambda each: 5)).preempt == running[:0:-1]


def test_a_waiting_request_takes_a_place_only_where_its_prompt_begins() -> None:
    running = [request(12), request(15)]
    urgent, other = request(6, waiting=True, priority=-1), request(7, waiting=True, priority=-2)
    view = View(waiting=[urgent, other], running=running, free_slots=0, prefill_chunk=64, max_depth=0)
    both, first = Priority(16, least=3).plan(view), Priority(5, least=3).plan(view)
    assert [each.id for each, _ in both.prefill] == [7, 6] and [each.id for each in both.preempt] == [15, 12]
    assert [each.id for each, _ in first.prefill] == [7] and [each.id for each in first.preempt] == [15]


def test_bad_settings_are_one_sentence() -> None:
    for policy, name, value in (
        (partial(TokenBudget, 16), "least", 16),
        (Priority, "ageing", 0.0),
        (ShortestRemaining, "prompt_token", float("inf")),
        (Tiers, "batch_rows", -1),
    ):
        with pytest.raises(ValueError, match=rf"{name}={value}\b.*give"):
            policy(**{name: value})
