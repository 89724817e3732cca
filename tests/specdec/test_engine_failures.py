"""What goes wrong in an engine ends the requests that it concerns, and leaves the engine usable."""

import random
import re
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from drafters import ModelDrafter, NGramDrafter
from specdec import Batch, DraftSampling, DraftTree, Engine, Paging, SamplingParams, StatelessDrafter, Target
from specdec.memory import free_memory
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.sessions import Wrapped, Wrapping
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB = 64
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
PACKED = Paging(page_size=4, pages=40, shared=True, reserve=0.2)
CPU_SHORTAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_SHORTAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.85 GiB memory in use."
)


class Gapped(Wrapped):
    """Another, invalid node stands in front of each chain that was drafted."""

    def propose(self, batch: Batch) -> DraftTree:
        tokens = self.inner.propose(batch).tokens
        tokens = torch.cat([tokens[:, :1], torch.zeros_like(tokens[:, :1]), tokens[:, 1:]], 1)
        parents = torch.tensor([-1, 0, 0, 2])[: tokens.shape[1]].expand(len(tokens), -1)
        return DraftTree.build(tokens, parents, valid=torch.arange(tokens.shape[1]).expand_as(parents) != 1)


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


def test_a_chain_behind_an_invalid_node_is_committed_and_more_nodes_than_announced_are_refused(target, wanted) -> None:
    drafter = Wrapping(ModelDrafter(target.model, 2), Gapped)
    drafter.max_nodes = 3
    outputs = Engine(target, drafter, RejectionVerifier(), max_batch_size=3, max_length=64).generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == wanted
    assert all((len(o.steps), o.mean_acceptance_length) == (4, 3) for o in outputs), "all drafts are accepted"
    drafter.max_nodes = 1  # says nothing of most of its nodes
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=3, max_length=64)
    with pytest.raises(ValueError, match=r"Gapped .*max_nodes=1"):
        engine.generate(PROMPTS, SAMPLING)
    forgets = type("Forgets", (Wrapped,), {"propose": lambda self, batch: None})  # the return is missing
    engine = Engine(target, Wrapping(drafter, forgets), RejectionVerifier(), max_length=64)
    with pytest.raises(ValueError, match=r"Forgets.propose\(…\) is None: give DraftTree.root_only"):
        engine.generate(PROMPTS, SAMPLING)


def test_an_engine_that_was_made_in_inference_mode_decodes_outside_of_it(target, wanted) -> None:
    with torch.inference_mode():
        drafter = ModelDrafter(perturbed(target.model, 0.1), [2, 1])
        engine = Engine(target, drafter, RejectionVerifier(), max_length=64)
        assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_an_aborted_request_is_complete_with_a_reason(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=1, max_length=64)
    engine.on_round = lambda seen: engine.abort(2)  # it waits, and never gets a step
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == [*wanted[:2], ()]
    assert outputs[2].finish_reason == "error" and outputs[2].steps == () and outputs[2].tokens_per_second is None
    assert "aborted" in str(outputs[2].error)
    engine.on_round = None
    engine.abort(engine.submit([1, 2], SAMPLING))  # before its first step
    assert engine.unfinished == 0 and engine.step() == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA_SHORTAGE), r"on cuda:0: 2\.50 GiB asked for, 1\.25 GiB free"),
        (RuntimeError(CPU_SHORTAGE), r"on cpu: 8\.00 GiB asked for"),
    ],
)
@pytest.mark.parametrize("forward", [1, 2], ids=["prefill", "round"])
def test_out_of_memory_ends_what_runs_and_keeps_the_rest(target, wanted, error, said, forward, monkeypatch) -> None:
    """The first request has finished, the second runs, and the third waits."""
    engine = Engine(target, NGramDrafter(3), RejectionVerifier(), max_length=64, recording="off")
    runs = broken = 0

    def short(run: Any, given: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == broken:
            raise error
        return run(given)

    for name in ("run", "run_together"):
        monkeypatch.setattr(engine.runner, name, partial(short, getattr(engine.runner, name)))
    engine.generate(PROMPTS[:1], SAMPLING)
    broken = 2 * runs + forward
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert [output.token_ids for output in outputs[::2]] == wanted[::2]
    assert re.search(f"{said}.*max_batch_size=1, prefill_chunk=512, max_length=64", outputs[1].error or "")
    assert [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)] == wanted, "as good as new"


def test_out_of_memory_ends_a_process_that_shares_its_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of a forward that needs this one: they must not wait for it."""
    engine = Engine(target, max_length=64)
    monkeypatch.setattr(engine.runner.agreement, "shared", True)
    monkeypatch.setattr(engine.runner, "run_together", Mock(side_effect=torch.OutOfMemoryError(CUDA_SHORTAGE)))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("place", ["specdec.target.facts._trial", "specdec.cache.storage.zeros_by_head"])
def test_out_of_memory_while_an_engine_is_built_is_one_sentence(target, place, monkeypatch) -> None:
    monkeypatch.setattr(place, Mock(side_effect=RuntimeError(CPU_SHORTAGE)))
    with pytest.raises(ValueError, match=r"out of memory on .*max_batch_size=2 or max_length=64"):
        Engine(target, max_batch_size=2, max_length=64)


def test_an_engine_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position takes 4 layers x 2 x 2 heads x 8 numbers x 4 bytes = 512 in each of the two models."""
    place, target = "specdec.cache.layout.free_memory", Target(tiny_model(vocab_size=VOCAB))
    alone = [1 << 40, 1 << 20]
    for drafter, free, wanted in (
        (None, alone, r"64 positions x 512 bytes.* max_batch_size=32 .* max_length=32 with"),
        (
            ModelDrafter(tiny_model(vocab_size=VOCAB), shape=3),
            [1 << 40, 64 * 67 * 512, 1 << 40, 0],
            "67 positions x 1024 bytes.* max_batch_size=31 .* max_length=30 ",
        ),
    ):
        monkeypatch.setattr(place, Mock(side_effect=free))
        with pytest.raises(ValueError, match=wanted):
            Engine(target, drafter, RejectionVerifier(), max_batch_size=64, max_length=64)
    for slots, length in ((32, 64), (64, 32)):
        monkeypatch.setattr(place, Mock(side_effect=alone))
        Engine(target, max_batch_size=slots, max_length=length)


def test_memory_that_torch_keeps_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cache of an engine would not fit in the place of the one before."""
    for name, found in (("mem_get_info", (10, 100)), ("memory_reserved", 70), ("memory_allocated", 30)):
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=found))
    assert free_memory(torch.device("cuda")) == 50


class Poisoned(StatelessDrafter):
    """Drafts a token that makes NaN of all that sees it, in some rounds of some requests, and otherwise one guess."""

    max_nodes = max_depth = 1
    is_chain = True
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, bad: int, share: int):
        self.bad, self.share = bad, share

    def propose(self, batch: Batch) -> DraftTree:
        poisoned = ((batch.keys ^ (batch.rounds * 0x9E3779B1)) * 0x2545F491 >> 24) % self.share == 0
        token = torch.where(poisoned, self.bad, (batch.roots * 5 + 3) % self.bad)
        parents = torch.tensor([[-1, 0]], device=batch.device).expand(len(batch), -1)
        return DraftTree.build(torch.stack([batch.roots, token], 1), parents, max_depth=1, max_children=1)


@pytest.mark.parametrize(
    ("kind", "options", "paging"),
    [
        ("poisoned", {"recording": "rounds"}, Paging(shared=True)),
        ("model_tree_without_replacement", {"kv_cache": "int8"}, PACKED),
        complete("ngram", {"attention": "dense"}, None, strong=False),
        complete("poisoned", {"kv_cache": "fp8"}, PACKED, strong=False),
    ],
)
def test_what_was_not_finite_ends_its_request_and_nothing_else(kind: str, options: Any, paging: Paging | None) -> None:
    """It comes of drafts and of prompts; slots, pages and beginnings that others share are clean behind it."""
    model, rng, bad = tiny_model(vocab_size=VOCAB, layers=2), random.Random(1), VOCAB - 1
    drafter = Poisoned(bad, 9) if kind == "poisoned" else DRAFTERS[kind](model)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[bad] = weight[0]  # never said: ties go to the lower id
    prompts = [[rng.randrange(9) for _ in range(rng.choice([1, 2, 5, 17]))] for _ in range(24)]
    prompts += [[1, 2, bad, 3], [*range(38), bad]]
    sampling = [SamplingParams(max_new_tokens=14, seed=1, stream=number) for number in range(len(prompts) - 1)]
    sampling.append(SamplingParams(max_new_tokens=1))
    options = {"max_length": 40, **options}
    plain = Engine(Target(model), **options).generate(prompts, sampling)
    assert not any(bad in output.token_ids for output in plain)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    parts = Target(model), drafter, RejectionVerifier()
    alone = [Engine(*parts, **options).generate([p], s)[0] for p, s in zip(prompts, sampling, strict=True)]
    engine = Engine(*parts, max_batch_size=3, cache=paging, **options)
    for outputs in (engine.generate(prompts, sampling) for _ in range(2)):
        for output, single, whole in zip(outputs, alone, plain, strict=True):
            assert (output.token_ids, output.finish_reason) == (single.token_ids, single.finish_reason)
            fine = output.finish_reason == "length"
            assert output.token_ids == whole.token_ids[: None if fine else len(output.token_ids)]
        assert {output.finish_reason for output in outputs} == {"error", "length"}
        assert all("not finite in round 0" in str(output.error) for output in outputs[-2:])
