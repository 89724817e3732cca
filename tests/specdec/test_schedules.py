"""Outputs do not depend on who prefills, who decodes and who gives way in which turn: token for token."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specdec.engine import running
from specdec.engine.engine import Engine
from specdec.engine.scheduler import FirstCome, PrefillFirst, Scheduler, TokenBudget, View, Work
from specdec.interfaces import Drafter
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import DRAFTERS
from tests.models import tiny_model
from verifiers import RejectionVerifier

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4], [3, 3, 3], [5, 6, 5, 6, 5]]
SAMPLING = [
    SamplingParams(max_new_tokens=9, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(max_new_tokens=7, temperature=0.7, seed=2, ignore_eos=True),
    SamplingParams(max_new_tokens=10, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=11, temperature=1.3, top_k=5, seed=3, ignore_eos=True),
]
KINDS: dict[str, str | None] = {
    "plain": None,
    "chain": "model_chain_iid",
    "tree": "model_tree_without_replacement",
    "look-up": "ngram",
    "feature heads": "eagle3_chain_iid",
}


@dataclass
class Drawn(Scheduler):
    """Plans at random: any chunks, any rows, any depth, and running requests give up their slots."""

    rng: np.random.Generator
    turns: int = 0
    preempted: int = 0
    seen: list[View] = field(default_factory=list)

    def plan(self, view: View) -> Work:
        self.turns += 1
        rng, most = self.rng, view.prefill_chunk
        if self.turns > 300:  # it has played long enough: lead to an end
            return FirstCome().plan(view)
        preempt = [request for request in view.running if rng.random() < 0.15]
        self.preempted += len(preempt)
        staying = [request for request in view.running if request not in preempt]
        waiting = [request for request in view.waiting if rng.random() < 0.7][: view.free_slots]
        prefill = [
            (request, int(rng.integers(0, min(most, request.to_prefill) + 1))) for request in [*staying, *waiting]
        ]
        decode = [request for request in [*staying, *waiting] if rng.random() < 0.6]
        depth = None if rng.random() < 0.5 else int(rng.integers(0, 4))
        return Work(preempt=preempt, prefill=prefill, decode=decode, depth=depth)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=24))


def drafter_of(kind: str, target: Target) -> Drafter | None:
    name = KINDS[kind]
    return None if name is None else DRAFTERS[name](target.model)


def decoded(target: Target, kind: str, scheduler: Scheduler | None = None, **options: Any) -> list[tuple[int, ...]]:
    options = {"max_batch_size": 3, "max_length": 48, "prefill_chunk": 5, **options}
    engine = Engine(target, drafter_of(kind, target), RejectionVerifier(), scheduler=scheduler, **options)
    return [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)]


@pytest.fixture(scope="module")
def alone(target: Target) -> dict[str, list[tuple[int, ...]]]:
    """Every request by itself, its prompt in one piece."""
    options = {"max_batch_size": 1, "prefill_chunk": 512, "recording": "off"}
    return {kind: decoded(target, kind, **options) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 4))
@example(seed=0, slots=2)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_outputs_are_those_of_requests_alone(target, alone, kind: str, seed: int, slots: int) -> None:
    # A lower depth is another draft, and at a temperature another draft may be another output of the same law.
    scheduler = Drawn(np.random.default_rng(seed))
    found = decoded(target, kind, scheduler, max_batch_size=slots)
    for sampling, one, other in zip(SAMPLING, found, alone[kind], strict=True):
        if sampling.greedy or kind == "plain":
            assert one == other


class SameDepth(Drawn):
    """Plans at random, and lets drafts be as deep as they are."""

    def plan(self, view: View) -> Work:
        work = super().plan(view)
        return Work(preempt=work.preempt, prefill=work.prefill, decode=work.decode)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recording", ["off", "rounds"])
def test_sampled_outputs_are_too(target, alone, kind: str, recording: str) -> None:
    preempted = 0
    for seed in range(3):
        scheduler = SameDepth(np.random.default_rng(seed))
        assert decoded(target, kind, scheduler, recording=recording) == alone[kind]
        preempted += scheduler.preempted
    assert preempted > 5


def test_a_round_counter_that_begins_anew_is_noticed(target, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a request that is preempted draws the numbers of its first rounds again."""
    enter = running.RunningRequests.enter

    def forgetful(requests: running.RunningRequests, request: Any) -> None:
        rounds, request.rounds = request.rounds, 0
        enter(requests, request)
        request.rounds = rounds

    monkeypatch.setattr(running.RunningRequests, "enter", forgetful)
    assert decoded(target, "plain", SameDepth(np.random.default_rng(0))) != alone["plain"]


@pytest.mark.parametrize(
    "policy", [FirstCome(), PrefillFirst(), TokenBudget(8, least=3)], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("kind", ["plain", "tree", "feature heads"])
def test_policies_change_no_output(target, alone, policy: Scheduler, kind: str) -> None:
    assert decoded(target, kind, policy) == alone[kind]


def planned(target: Target, policy: Scheduler) -> list[tuple[list[int], list[int], int]]:
    """Of every turn of a call: the requests that could decode, those that did, and the tokens that were prefilled."""
    seen: list[tuple[list[int], list[int], int]] = []

    class Listens(Scheduler):
        def plan(self, view: View) -> Work:
            work = policy.plan(view)
            ready, chosen = [request.id for request in view.decoding], [request.id for request in work.decode]
            seen.append((ready, chosen, sum(tokens for _, tokens in work.prefill)))
            return work

    decoded(target, "plain", Listens())
    return seen


def test_a_budget_bounds_every_turn(target: Target) -> None:
    for ready, chosen, tokens in planned(target, TokenBudget(6, least=2)):
        assert tokens <= max(6 - len(ready), 2)
        assert set(ready) <= set(chosen), "rounds come first"


def test_prompts_come_before_rounds(target: Target) -> None:
    seen = planned(target, PrefillFirst())
    assert all(not chosen for _, chosen, tokens in seen if tokens)
    assert any(chosen for _, chosen, _ in seen)
