"""The router among replicas: balanced, faithful to what caches hold, and the same for the same requests."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.load.replicas import Replicas, Sizes
from experiments.load.router import Router
from specdec.cache.pages import Paging

BLOCK, MARGIN = 4, 40
LONGEST = 24 + 16
"""Tokens of the largest request below, prompt and output."""


def played(router: Router, replicas: int, words: list[tuple[int, int, int]]) -> list[int]:
    """Route requests of a few shared beginnings, of which some emit and end; return their replicas.

    A word is a beginning, a length, and how many of the requests before it have ended by then, in turns.
    """
    chosen: list[int] = []
    left: list[int] = []
    for request, (beginning, length, ends) in enumerate(words):
        for _ in range(min(ends, len(left))):
            done = left.pop(request % len(left))
            router.emitted(done, 1)
            router.ended(done)
        before = list(router.outstanding)
        prompt = [beginning] * min(length, 12) + [1000 + request] * max(length - 12, 0)
        chosen.append(router.route(request, prompt, 16))
        left.append(request)
        assert before[chosen[-1]] - min(before) <= MARGIN, "nobody is given more who has too much to do already"
        assert sum(router.outstanding) == sum(before) + length + 16
        assert min(router.outstanding) >= 0
        if all(each[2] == 0 for each in words[: request + 1]):
            assert max(router.outstanding) - min(router.outstanding) <= MARGIN + LONGEST
    for request in left:
        router.ended(request)
    assert router.outstanding == [0] * replicas
    return chosen


WORDS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(0, 3)), max_size=60)


@settings(max_examples=60)
@given(st.integers(1, 5), WORDS)
def test_replicas_are_balanced_and_choices_are_the_same_again(replicas: int, words: list[tuple[int, int, int]]) -> None:
    first = played(Router(replicas, block=BLOCK, margin=MARGIN), replicas, words)
    assert first == played(Router(replicas, block=BLOCK, margin=MARGIN), replicas, words)


def affinity(router: Router) -> None:
    """Requests of 25 tokens go where their beginning is, unless that replica has over 40 more to do."""
    system, other = list(range(100, 116)), list(range(200, 216))
    assert router.route(0, [*system, 0], 8) == 0
    assert router.route(1, [*other, 1], 8) == 1, "the other one has nothing to do"
    assert router.route(2, [*other[:4], 2, *other[5:], 2], 8) == 1, "a part of its beginning is there"
    assert router.route(3, [*other, 3], 8) == 1, "its beginning is there, and 25 more to do"
    assert router.route(4, [*other, 4], 8) == 0, "50 more are too much"
    router.ended(0)
    router.ended(1)
    assert router.route(5, [*other, 5], 8) == 0, "both have its beginning now, and here is less to do"


def chains(router: Router) -> None:
    """A block counts where all blocks before it are the same."""
    one, two, three = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    assert router.route(0, three, 34) == 0
    assert router.route(1, [*one, *three], 1) == 1
    assert router.route(2, [*three[:1], *one[1:], *two], 100) == 1
    assert router.route(3, [*one, *one], 1) == 0, "too much to do there"
    for request in (0, 2, 3):
        router.ended(request)
    assert router.route(4, [*one, *two], 1) == 0, "both have its first block alone, and here is less to do"


@pytest.mark.parametrize("scene", [affinity, chains])
def test_requests_follow_their_beginnings(scene: Callable[[Router], None]) -> None:
    scene(Router(2, block=BLOCK, margin=MARGIN))


class Everything(Router):
    """A mutant: it goes by beginnings, however much there is to do."""

    def __init__(self, replicas: int):
        super().__init__(replicas, block=BLOCK, margin=10**9)


class Unchained(Router):
    """A mutant: a block's name says nothing of the ones before it."""

    def _chain(self, prompt_ids):
        return (hash(tuple(prompt_ids[n : n + BLOCK])) for n in range(0, len(prompt_ids) - BLOCK + 1, BLOCK))


@pytest.mark.parametrize(
    "mutant",
    [
        lambda: affinity(Router(2, block=None, margin=MARGIN)),
        lambda: affinity(Router(2, block=BLOCK, margin=0)),
        lambda: chains(Unchained(2, block=BLOCK, margin=MARGIN)),
        lambda: affinity(Everything(2)),
        lambda: played(Everything(2), 2, [(0, 24, 0)] * 10),
    ],
)
def test_the_checks_reject_mutants(mutant: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        mutant()


def test_a_flood_of_one_beginning_starves_nobody() -> None:
    """Every replica works for it, and a request of another beginning goes where least is to do."""
    router = Router(3, block=BLOCK, margin=MARGIN)
    flood = [router.route(request, [7] * 20, 16) for request in range(30)]
    assert [flood.count(replica) for replica in range(3)] == [10, 10, 10]
    router.emitted(flood.index(2), 4)
    assert router.route(30, [8] * 20, 16) == 2


def test_what_is_remembered_is_what_a_cache_can_hold() -> None:
    def new(paging: Paging) -> Router:
        sizes = Sizes(max_batch_size=2, max_length=16, paging=paging, max_nodes=0, verifier=None)
        two: Any = [None, None]
        return Replicas(two, sizes, margin=10**6)._router

    def route(router: Router, *beginnings: int) -> list[int]:
        return [router.route(number, [each] * 8, 1) for number, each in enumerate(beginnings)]

    assert route(new(Paging(page_size=4, pages=8, shared=True)), 1, 1, 1, 2, 1) == [0, 0, 0, 1, 0]
    assert route(new(Paging(page_size=4, pages=4, shared=True)), 1, 2, 3, 4, 5, 1) == [0, 1, 0, 1, 0, 1], "forgotten"
    assert route(new(Paging(page_size=4)), 1, 1, 1, 1) == [0, 1, 0, 1], "nothing is shared"
