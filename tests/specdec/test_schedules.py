"""Plans at random, which other tests play (``tests/test_random_programs.py``), and what the project's policies plan."""

from dataclasses import dataclass, field

import numpy as np

from specdec.engine.engine import Engine
from specdec.engine.scheduler import FirstCome, PrefillFirst, Scheduler, TokenBudget, View, Work
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.models import tiny_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [4], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4], [3, 3, 3], [5, 6, 5, 6, 5]]
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


class SameDepth(Drawn):
    """Plans at random, and lets drafts be as deep as they are."""

    def plan(self, view: View) -> Work:
        work = super().plan(view)
        return Work(preempt=work.preempt, prefill=work.prefill, decode=work.decode)


def planned(policy: Scheduler) -> list[tuple[list[int], list[int], int]]:
    """Of every turn of a call: the requests that could decode, those that did, and the tokens that were prefilled."""
    seen: list[tuple[list[int], list[int], int]] = []

    class Listens(Scheduler):
        def plan(self, view: View) -> Work:
            work = policy.plan(view)
            ready = [request.id for request in view.running if not request.to_prefill]
            chosen = [request.id for request in work.decode]
            seen.append((ready, chosen, sum(tokens for _, tokens in work.prefill)))
            return work

    options = {"max_batch_size": 3, "max_length": 48, "prefill_chunk": 5, "scheduler": Listens()}
    engine = Engine(Target(tiny_model(vocab_size=24, layers=1)), **options)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=9, ignore_eos=True))
    return seen


def test_a_budget_bounds_every_turn() -> None:
    for ready, chosen, tokens in planned(TokenBudget(6, least=2)):
        assert tokens <= max(6 - len(ready), 2)
        assert set(ready) <= set(chosen), "rounds come first"


def test_prompts_come_before_rounds() -> None:
    seen = planned(PrefillFirst())
    assert all(not chosen for _, chosen, tokens in seen if tokens)
    assert any(chosen for _, chosen, _ in seen)
