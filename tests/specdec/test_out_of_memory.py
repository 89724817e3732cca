"""Memory runs out: what ends, what goes on, and what is said."""

import re
from typing import Any

import pytest
import torch

from drafters import ModelDrafter, NGramDrafter
from specdec.engine.engine import Engine
from specdec.target.target import Target
from tests.models import tiny_model
from tests.specdec.gapped import PROMPTS, SAMPLING, VOCAB
from verifiers import RejectionVerifier

CUDA_SHORTAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.85 GiB memory in use."
)
CPU_SHORTAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


def failing(error: Exception) -> Any:
    def fail(*args: object) -> None:
        raise error

    return fail


@pytest.mark.full
def test_after_a_shortage_no_memory_is_kept_for_recordings(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.rounds.RECORD_AFTER", 2)
    engine = Engine(target, max_length=64, recording="rounds")
    engine.generate(PROMPTS, SAMPLING)
    assert len(engine._rounds.recordings)
    run, fails = engine.runner.run, [True]

    def short(batch: Any) -> Any:
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError(CUDA_SHORTAGE)
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", short)
    reasons = [done.finish_reason for done in engine.generate(PROMPTS, SAMPLING)]
    assert reasons == ["error", "length", "length"]
    assert len(engine._rounds.recordings) == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA_SHORTAGE), r"out of memory on cuda:0: 2\.50 GiB asked for, 1\.25 GiB free"),
        pytest.param(
            RuntimeError(CPU_SHORTAGE),
            r"out of memory on cpu: 8\.00 GiB asked for, [\d.,]+ [GM]iB free",
            marks=pytest.mark.full,
        ),
        pytest.param(
            MemoryError(), r"out of memory on cpu: more asked for, [\d.,]+ [GM]iB free", marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.parametrize("forward", [1, 2], ids=["prefill", "round"])
def test_out_of_memory_ends_what_runs_and_keeps_the_rest(
    target: Target,
    wanted: list[tuple[int, ...]],
    error: Exception,
    said: str,
    forward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request has finished, the second runs, and the third waits."""
    engine = Engine(target, NGramDrafter(3), RejectionVerifier(), max_length=64)
    run, left = engine.runner.run, [0]

    def short(batch: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", short)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done = {}
    for step in engine.stream(PROMPTS, SAMPLING):
        tokens[step.request] += step.token_ids
        if step.finish_reason is not None:
            done[step.request] = step
            if step.request == 0:
                left[0] = forward
    assert [step.finish_reason for step in done.values()] == ["length", "error", "length"]
    assert [tuple(tokens[request]) for request in (0, 2)] == [wanted[0], wanted[2]]
    lower = r"lower max_batch_size=1, prefill_chunk=512, max_length=64, the draft tree's \d+ nodes"
    assert re.fullmatch(f"{said}; {lower}", done[1].error or "")
    # The engine is as good as new.
    assert [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_out_of_memory_ends_a_process_that_shares_its_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of a forward that needs this one: they must not wait for it."""
    engine = Engine(target, max_length=64)
    monkeypatch.setattr(engine.runner.agreement, "shared", True)
    monkeypatch.setattr(engine.runner, "run", failing(torch.OutOfMemoryError(CUDA_SHORTAGE)))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_SHORTAGE), RuntimeError(CPU_SHORTAGE)])
@pytest.mark.parametrize("place", ["specdec.target.facts._trial", "specdec.cache.slot_cache._by_head"])
def test_out_of_memory_while_an_engine_is_built_is_one_sentence(
    target: Target, error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, failing(error))
    said = (
        r"out of memory on .* asked for, .* free; lower max_batch_size=2 or max_length=64, or load the model in fewer"
    )
    with pytest.raises(ValueError, match=said):
        Engine(target, max_batch_size=2, max_length=64)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """Lets each cache in turn find so many bytes free: that of the trial of the target, its own, the drafter's two."""
    left = iter(free)
    monkeypatch.setattr("specdec.cache.slot_cache.free_memory", lambda place: next(left))


def test_an_engine_says_what_would_fit(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position takes 4 layers x 2 x 2 heads x 8 numbers x 4 bytes = 512: 64 of them in a slot are 32 KiB."""
    short_of_memory(monkeypatch, 1 << 40, 1 << 20)
    said = (
        r"the KV cache needs 2 MiB \(64 slots x 64 positions x 512 bytes\), but cpu has 1 MiB free: give at most "
        r"max_batch_size=32 with max_length=64 or max_length=32 with max_batch_size=64$"
    )
    with pytest.raises(ValueError, match=said):
        Engine(target, max_batch_size=64, max_length=64)
    for sizes in ((32, 64), (64, 32)):
        short_of_memory(monkeypatch, 1 << 40, 1 << 20)
        Engine(target, max_batch_size=sizes[0], max_length=sizes[1])


def test_an_engine_says_what_would_fit_beside_its_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's cache was allocated before; less of it makes room for the drafter's."""
    drafter = ModelDrafter(tiny_model(vocab_size=VOCAB), shape=3)
    own = 64 * (64 + 3) * 512
    short_of_memory(monkeypatch, 1 << 40, own, 1 << 40, 0)
    said = (
        r"the KV caches of target and drafter need 4 MiB \(64 slots x 67 positions x 1024 bytes\), but cpu has 2 MiB "
        r"free: give at most max_batch_size=32 with max_length=64 or max_length=30 with max_batch_size=64$"
    )
    with pytest.raises(ValueError, match=said):
        Engine(target, drafter, RejectionVerifier(), max_batch_size=64, max_length=64)
