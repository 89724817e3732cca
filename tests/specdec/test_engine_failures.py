"""What goes wrong in an engine ends the requests that it concerns, and leaves the engine usable."""

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from drafters import ModelDrafter, NGramDrafter
from specdec import Batch, DraftSampling, DraftTree, Engine, Outcome, SamplingParams, StatelessDrafter, Target
from specdec.engine.text import Detokenizer
from specdec.memory import free_memory
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from tests.verifiers.cases import complete
from verifiers import RejectionVerifier

VOCAB = 64
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


class Gapped(StatelessDrafter):
    """Drafts a chain without siblings in which another, invalid node stands in front."""

    max_nodes, max_depth, is_chain = 3, 2, True
    reads_host = True
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, outputs: list[tuple[int, ...]]):
        self.outputs = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]

    def propose(self, batch: Batch) -> DraftTree:
        rows = []
        for row, length in enumerate(batch.on_host.lengths.tolist()):
            so_far = batch.on_host.tokens[row, : length + 1].tolist()
            whole = next(output for output in self.outputs if output[: length + 1] == so_far)
            rows.append([so_far[-1], 0, *[*whole, 0, 0][length + 1 : length + 3]])
        parents = torch.tensor([[-1, 0, 0, 2]]).expand(len(rows), -1)
        valid = torch.tensor([[True, False, True, True]]).expand(len(rows), -1)
        return DraftTree.build(torch.tensor(rows), parents, valid=valid, max_children=1)


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


class Fragile(NGramDrafter):
    """Fails once, in one of its methods."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def _fail(self, here: str) -> None:
        if here == self.where:
            self.where = ""
            raise RuntimeError(f"broken in {here}")

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._fail("admit")

    def observe(self, outcome: Outcome) -> None:
        self._fail("prefill" if outcome.path is None else "observe")

    def propose(self, batch: Batch) -> DraftTree:
        self._fail("propose")
        return super().propose(batch)


def assert_named(error: str, message: str, function: Callable[..., object]) -> None:
    """Assert that an error has this message, and names a line of this function of this file."""
    found = re.fullmatch(rf"{message} \(at (\S+):(\d+) in ([\w.]+)\)", error)
    assert found is not None, error
    file, line, name = found.groups()
    assert Path(file).resolve() == Path(__file__).resolve() and name.endswith(function.__code__.co_name)
    assert int(line) in {line for _, _, line in function.__code__.co_lines()}


@pytest.mark.parametrize("where", ["admit", "prefill", "propose", "observe"])
def test_an_error_of_the_drafter_is_shown_and_ends_what_ran(target, wanted, where) -> None:
    """Submitted requests that ran end with the error; one that waited goes on, and so does the engine."""
    engine = Engine(target, Fragile(where), RejectionVerifier(), max_batch_size=1, max_length=64)
    first, second = (engine.submit(prompt, SAMPLING) for prompt in PROMPTS[:2])
    with pytest.raises(RuntimeError, match=f"broken in {where}"):
        engine.step()
    assert engine.unfinished == 1
    steps = []
    while engine.unfinished:
        steps += engine.step()
    (ended,) = (step for step in steps if step.request == first)
    assert ended.finish_reason == "error"
    assert_named(ended.error, f"RuntimeError: broken in {where}", Fragile._fail)
    assert tuple(t for step in steps if step.request == second for t in step.token_ids) == wanted[1]
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_a_tokenizer_that_raises_ends_its_request_alone(wanted: list[tuple[int, ...]], monkeypatch) -> None:
    bad = wanted[0][4]
    assert bad not in wanted[1], "another token would show more"
    decode = Detokenizer._decode

    def raises(self: Detokenizer, token_ids: list[int]) -> str:
        if bad in token_ids:
            raise UnicodeError("no such piece")
        return decode(self, token_ids)

    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    target = Target(tiny_model(vocab_size=VOCAB, layers=2), PreTrainedTokenizerFast(tokenizer_object=words))
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=3, max_length=64)
    with monkeypatch.context() as broken:
        broken.setattr(Detokenizer, "_decode", raises)
        outputs = engine.generate(PROMPTS, SAMPLING)
    assert outputs[0].finish_reason == "error"
    assert_named(outputs[0].error, "the tokenizer failed: UnicodeError: no such piece", raises)
    assert outputs[0].token_ids == wanted[0][: len(outputs[0].token_ids)], "what was decoded before is kept"
    assert all(bad in tokens or done.token_ids == tokens for done, tokens in zip(outputs, wanted, strict=True))
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_an_observer_that_raises_and_a_release_that_does_too(target: Target, wanted: list[tuple[int, ...]]) -> None:
    class Both(NGramDrafter):
        def release(self, slot: int) -> None:
            if engine.on_round is not None:
                raise KeyError("release")

    def raises(seen: object) -> None:
        raise RuntimeError("the observer is broken")

    engine = Engine(target, Both(), RejectionVerifier(), max_batch_size=2, max_length=64)
    engine.on_round = raises
    with pytest.raises(RuntimeError, match="the observer is broken") as caught:
        engine.generate(PROMPTS, SAMPLING)
    assert any("on releasing request 0: KeyError" in note for note in caught.value.__notes__)
    engine.on_round = None
    assert engine.unfinished == 0
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_a_chain_behind_an_invalid_node_is_committed_and_more_nodes_than_announced_are_refused(target, wanted) -> None:
    engine = Engine(target, Gapped(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == wanted
    assert all(len(o.steps) == 4 for o in outputs), "the drafts are the outputs, so all are accepted"
    drafter = Gapped(wanted)
    drafter.max_nodes = 1  # says nothing of most of its nodes
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=3, max_length=64)
    with pytest.raises(ValueError, match=r"Gapped .*max_nodes=1"):
        engine.generate(PROMPTS, SAMPLING)


def test_a_drafter_serves_engines_at_once_and_in_inference_mode(target: Target, wanted: list[tuple[int, ...]]) -> None:
    drafter = ModelDrafter(perturbed(target.model, 0.1), 3)
    engines = [Engine(target, drafter, RejectionVerifier(), max_batch_size=size, max_length=64) for size in (1, 2, 3)]
    streams = zip(*zip_longest(*(engine.stream(PROMPTS, SAMPLING) for engine in engines)), strict=True)
    for stream in streams:
        steps = [step for step in stream if step is not None]
        assert [tuple(t for step in steps if step.request == i for t in step.token_ids) for i in range(3)] == wanted
    drafter = ModelDrafter(perturbed(target.model, 0.1), [2, 1])
    with torch.inference_mode():
        engine = Engine(target, drafter, RejectionVerifier(), max_length=64)
        inside = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in inside] == [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_an_aborted_request_is_complete_with_a_reason(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=1, max_length=64)
    engine.on_round = lambda seen: engine.abort(2)  # it waits, and never gets a step
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == [*wanted[:2], ()]
    assert outputs[2].finish_reason == "error" and outputs[2].steps == ()
    assert "aborted" in str(outputs[2].error)
    engine.on_round = None
    engine.abort(engine.submit([1, 2], SAMPLING))  # before its first step
    assert engine.unfinished == 0 and engine.step() == []


CUDA_SHORTAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 77.85 GiB memory in use."
)
CPU_SHORTAGE = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA_SHORTAGE), r"on cuda:0: 2\.50 GiB asked for, 1\.25 GiB free"),
        (RuntimeError(CPU_SHORTAGE), r"on cpu: 8\.00 GiB asked for"),
        complete(MemoryError(), "on cpu: more asked for", strong=False),
    ],
)
@pytest.mark.parametrize("forward", [1, 2], ids=["prefill", "round"])
def test_out_of_memory_ends_what_runs_and_keeps_the_rest(target, wanted, error, said, forward, monkeypatch) -> None:
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
            left[0] = forward if step.request == 0 else left[0]
    assert [step.finish_reason for step in done.values()] == ["length", "error", "length"]
    assert [tuple(tokens[request]) for request in (0, 2)] == [wanted[0], wanted[2]]
    assert re.search(f"{said}.*max_batch_size=1, prefill_chunk=512, max_length=64", done[1].error or "")
    # The engine is as good as new.
    assert [output.token_ids for output in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_out_of_memory_ends_a_process_that_shares_its_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of a forward that needs this one: they must not wait for it."""
    engine = Engine(target, max_length=64)
    monkeypatch.setattr(engine.runner.agreement, "shared", True)
    monkeypatch.setattr(engine.runner, "run", Mock(side_effect=torch.OutOfMemoryError(CUDA_SHORTAGE)))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_SHORTAGE), RuntimeError(CPU_SHORTAGE)])
@pytest.mark.parametrize("place", ["specdec.target.facts._trial", "specdec.cache.storage.zeros_by_head"])
def test_out_of_memory_while_an_engine_is_built_is_one_sentence(target, error, place, monkeypatch) -> None:
    monkeypatch.setattr(place, Mock(side_effect=error))
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


@pytest.mark.parametrize("kind", ["model_tree_without_replacement", complete("ngram", strong=False)])
def test_nan_logits_near_the_last_position_end_that_request_only(kind: str) -> None:
    """The row has no room for what a verdict without meaning would emit."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    bad, length = VOCAB - 1, 24
    prompts = [[*range(1, 23), bad], [1, 2, 1, 2, 1]]
    sampling = [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=8)]
    wanted = Engine(Target(model), max_length=length).generate(prompts[1:], sampling[1:])[0].token_ids
    assert bad not in wanted
    drafter = DRAFTERS[kind](model)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=length)
    failed, other = engine.generate(prompts, sampling)
    assert failed.finish_reason == "error" and "not finite in round 0" in str(failed.error)
    assert other.token_ids == wanted


@pytest.mark.parametrize(
    ("batch", "kv_cache"),
    [(2, "int8"), *(complete(*each, strong=False) for each in ((1, None), (2, None), (2, "fp8")))],
)
def test_nan_logits_end_that_request_only_and_go_with_it(batch: int, kv_cache: str | None) -> None:
    model, bad, options = tiny_model(vocab_size=VOCAB, layers=2), VOCAB - 1, {"max_length": 64, "kv_cache": kv_cache}
    drafter = ModelDrafter(perturbed(model, 0.1), [2, 1])
    wanted = [o.token_ids for o in Engine(Target(model), **options).generate(PROMPTS, SAMPLING)]
    assert not any(bad in tokens for tokens in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=batch, **options)
    outputs = engine.generate([PROMPTS[0], [1, 2, bad, 3], *PROMPTS[1:]], SAMPLING)
    failed = outputs.pop(1)
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    assert "not finite in round" in str(failed.error)
    assert [o.token_ids for o in outputs] == wanted
    # The slot that held NaN is clean again.
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
