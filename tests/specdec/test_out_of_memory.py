"""Memory runs out: what ends, what goes on, and what is said."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from drafters import ModelDrafter, NGramDrafter
from specdec.engine.engine import Engine
from specdec.target.target import Target
from tests.models import tiny_model
from tests.specdec.gapped import PROMPTS, SAMPLING, VOCAB
from tests.verifiers.cases import complete
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


def raising(error: Exception) -> Any:
    return Mock(side_effect=error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA_SHORTAGE), r"on cuda:0: 2\.50 GiB asked for, 1\.25 GiB free"),
        (RuntimeError(CPU_SHORTAGE), r"on cpu: 8\.00 GiB asked for"),
        complete(MemoryError(), "on cpu: more asked for", strong=False),
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
    assert re.search(f"{said}.*max_batch_size=1, prefill_chunk=512, max_length=64", done[1].error or "")
    # The engine is as good as new.
    assert [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_out_of_memory_ends_a_process_that_shares_its_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of a forward that needs this one: they must not wait for it."""
    engine = Engine(target, max_length=64)
    monkeypatch.setattr(engine.runner.agreement, "shared", True)
    monkeypatch.setattr(engine.runner, "run", raising(torch.OutOfMemoryError(CUDA_SHORTAGE)))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_SHORTAGE), RuntimeError(CPU_SHORTAGE)])
@pytest.mark.parametrize("place", ["specdec.target.facts._trial", "specdec.cache.slot_cache._by_head"])
def test_out_of_memory_while_an_engine_is_built_is_one_sentence(
    target: Target, error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, raising(error))
    with pytest.raises(ValueError, match=r"out of memory on .*max_batch_size=2 or max_length=64"):
        Engine(target, max_batch_size=2, max_length=64)


@pytest.mark.parametrize("drafted", [False, True])
def test_an_engine_says_what_would_fit(target: Target, drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position takes 4 layers x 2 x 2 heads x 8 numbers x 4 bytes = 512 in each of the two models.

    Each cache finds so many bytes free: that of the target's trial, its own, the drafter's two. The target's cache was
    allocated before; less of it makes room for the drafter's.
    """
    free, wanted = [1 << 40, 1 << 20], r"64 positions x 512 bytes.* max_batch_size=32 .* max_length=32 with"
    drafter = None
    if drafted:
        free, wanted = (
            [1 << 40, 64 * 67 * 512, 1 << 40, 0],
            "67 positions x 1024 bytes.* max_batch_size=32 .* max_length=30 ",
        )
        drafter = ModelDrafter(tiny_model(vocab_size=VOCAB), shape=3)
    place = "specdec.cache.slot_cache.free_memory"
    monkeypatch.setattr(place, Mock(side_effect=free))
    with pytest.raises(ValueError, match=wanted):
        Engine(target, drafter, RejectionVerifier(), max_batch_size=64, max_length=64)
    for slots, length in () if drafted else ((32, 64), (64, 32)):
        monkeypatch.setattr(place, Mock(side_effect=free))
        Engine(target, max_batch_size=slots, max_length=length)
