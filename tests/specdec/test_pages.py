"""Shared beginnings, pages and swapping change no output, and pages are conserved."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Engine, ForwardBatch, ModelRunner, Paging, SamplingParams, Scheduler, Target
from specdec.cache import pages as pool_module
from specdec.cache.pages import keys_of
from specdec.engine.scheduler import View, Work
from specdec.engine.scheduler.base import entering
from tests.components import DRAFTERS
from tests.models import tiny_model
from tests.specdec.test_schedules import SameDepth
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

HEADS = "eagle3_chain_iid"
TARGET = Target(tiny_model("llama", vocab_size=24, layers=2))
RNG = np.random.default_rng(0)
FAMILIES = [RNG.integers(1, 24, length).tolist() for length in (13, 7)]
PROMPTS = [FAMILIES[index % 2] + RNG.integers(1, 24, 1 + index % 5).tolist() for index in range(5)] + [FAMILIES[0][:9]]
"""Two families with beginnings in common; the last one is a beginning itself."""
SAMPLING = [
    SamplingParams(max_new_tokens=6 + index, temperature=index % 3 * 0.6, seed=index, ignore_eos=True)
    for index in range(len(PROMPTS))
]


def engine_of(drafter: str | None, target: Target = TARGET, **options: Any) -> Engine:
    options = {"max_length": 64, "prefill_chunk": 5, "max_batch_size": 3, **options}
    made = None if drafter is None else DRAFTERS[drafter](TARGET.model)
    return Engine(target, made, RejectionVerifier(), **options)


def outputs(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("paging", [Paging(shared=True), Paging(page_size=4, shared=True)], ids=["rows", "pages"])
def test_a_hit_saves_the_prefill_of_target_and_drafter(paging: Paging, monkeypatch) -> None:
    engine = engine_of(HEADS, cache=paging)
    counts, run = Counter[int](), ModelRunner.run

    def counting(runner: ModelRunner, batch: ForwardBatch, *rest: Any) -> Any:
        if batch.wants.logits == 0:
            counts[id(runner)] += batch.nodes
        return run(runner, batch, *rest)

    monkeypatch.setattr(ModelRunner, "run", counting)
    prompt = np.random.default_rng(1).integers(1, 24, 40).tolist()
    for _ in range(2):
        before = counts.copy()
        engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert len(before) == 2
    assert all(counts[runner] <= 1.5 * once for runner, once in before.items())


@pytest.mark.parametrize(("kind", "size"), [("llama", 4), complete("gemma3", None, strong=False)])
def test_changed_weights_are_not_shared(kind: str, size: int | None) -> None:
    """Not even by a request that runs while they change. The Gemma's windows are shared like whole rows."""
    target = Target(tiny_model(kind, vocab_size=24, layers=2))
    engine = engine_of(None, target, cache=Paging(page_size=size, shared=True))
    assert outputs(engine) == outputs(engine_of(None, target, max_batch_size=1))
    engine.submit(PROMPTS[0], SAMPLING[0])
    engine.step()
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(-1)
        target.model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    engine.weights_changed()
    while engine.unfinished:
        engine.step()
    assert outputs(engine) == outputs(engine_of(None, target))


class Fitting(SameDepth):
    """Random plans that admit no request for which there are no pages."""

    def plan(self, view: View) -> Work:
        work = super().plan(view)
        fits = {id(each) for each in (*view.running, *entering(view, view.waiting, view.running))}
        return Work(
            preempt=work.preempt,
            prefill=[(each, count) for each, count in work.prefill if id(each) in fits],
            decode=[each for each in work.decode if id(each) in fits],
        )


def conversations(engine: Engine) -> list[tuple[int, ...]]:
    sampling = [SamplingParams(max_new_tokens=9, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(6)]
    answers = [each.token_ids for each in engine.generate(PROMPTS, sampling)]
    turns = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return [each.token_ids for each in engine.generate(turns, sampling)]


def test_answers_are_shared_with_the_next_turn() -> None:
    engine = engine_of(HEADS, max_batch_size=8, cache=Paging(page_size=2, shared=True))
    assert conversations(engine) == conversations(engine_of(HEADS, max_batch_size=1))
    most = sum(map(len, PROMPTS)) + 6 * 9
    assert engine.page_counts.reused > 0.6 * most


def test_a_key_without_its_past_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a page is found by its own tokens, whatever stands before them."""

    def forgetful(tokens: np.ndarray, size: int, before: bytes, *, ahead: bool) -> Iterator[bytes]:
        for end in range(size, len(tokens) + 1, size):
            yield from keys_of(tokens[end - size : end], size, b"", ahead=False)

    monkeypatch.setattr(pool_module, "keys_of", forgetful)
    found = outputs(engine_of(None, cache=Paging(page_size=1, shared=True)))
    assert found != outputs(engine_of(None, max_batch_size=1))


def test_pairs_of_other_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a head's pair is found by its first token, whatever stands behind it."""
    monkeypatch.setattr(pool_module, "keys_of", lambda *args, ahead: keys_of(*args, ahead=False))
    engine = engine_of(HEADS, max_batch_size=8, cache=Paging(page_size=1, shared=True))
    found = [conversations(engine) for _ in range(3)]
    monkeypatch.undo()
    assert found != [conversations(engine_of(HEADS, max_batch_size=1))] * 3


def test_wrong_pages_and_a_policy_that_admits_too_much_are_refused() -> None:
    for paging, named in (({"page_size": 0}, "page_size"), ({"page_size": 4, "pages": 3}, "pages=3")):
        with pytest.raises(ValueError, match=named):
            Engine(TARGET, max_length=64, cache=Paging(**paging))

    class Admits(Scheduler):
        def plan(self, view: View) -> Work:
            work = [(each, 5) for each in view.waiting[: view.free_slots]]  # whether there are pages or not
            return Work(prefill=work, decode=[each for each, _ in work])

    engine = engine_of(None, cache=Paging(page_size=4, pages=16), scheduler=Admits())
    for _ in range(3):
        engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=20, ignore_eos=True))
    with pytest.raises(ValueError, match="pages"):
        engine.step()
    assert engine.unfinished == 2, "those without pages are not lost"
