"""What goes wrong in an engine ends the requests that it concerns, shows its cause, and leaves the engine usable."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import specdec.engine.engine
from drafters import ModelDrafter, NGramDrafter
from specdec.engine.engine import Engine
from specdec.engine.text import Detokenizer
from specdec.interfaces import Drafter
from specdec.modeling.target import Target
from specdec.random import Purpose, uniforms
from specdec.requests import SamplingParams
from specdec.slots import Slots
from specdec.tree import DraftTree, TreeShape
from specdec.types import Committed, DraftSampling
from tests.components import DRAFTERS, perturbed
from tests.models import tiny_model
from verifiers import RejectionVerifier

VOCAB = 64
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


@pytest.fixture(scope="module")
def wanted(target: Target) -> list[tuple[int, ...]]:
    return [o.token_ids for o in Engine(target, max_length=64).generate(PROMPTS, SAMPLING)]


class Fragile(NGramDrafter):
    """Fails once in one of its methods."""

    def __init__(self, where: str, after: int = 0):
        super().__init__()
        self.where, self.left = where, after

    def _fail(self, here: str) -> None:
        if here == self.where:
            self.left -= 1
            if self.left < 0:
                self.where = ""
                raise RuntimeError(f"broken in {here}")

    def admit(self, slot: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._fail("admit")

    def observe(self, committed: Committed) -> None:
        self._fail("prefill" if committed.path is None else "observe")

    def propose(self, slots: Slots) -> DraftTree:
        self._fail("propose")
        return super().propose(slots)

    def release(self, slot: int) -> None:
        self._fail("release")


def assert_named(error: str | None, message: str, function: Callable[..., object]) -> None:
    """Assert that an error has this message, and names a line of this function of this file."""
    code = function.__code__
    found = re.fullmatch(rf"{message} \(at (?P<file>\S+):(?P<line>\d+) in (?P<function>[\w.]+)\)", error or "")
    assert found is not None, error
    assert Path(found["file"]).resolve() == Path(__file__).resolve()
    lines = {line for _, _, line in code.co_lines() if line is not None}
    assert int(found["line"]) in lines and found["function"].endswith(code.co_name)


@pytest.mark.parametrize("where", ["admit", "prefill", "propose", "observe"])
@pytest.mark.parametrize("after", [0, 1])
def test_an_error_of_the_drafter_is_shown_and_leaves_nothing_behind(
    target: Target, wanted: list[tuple[int, ...]], where: str, after: int
) -> None:
    """Device and host of later requests agree: they get their tokens."""
    engine = Engine(target, Fragile(where, after), RejectionVerifier(), max_batch_size=2, max_length=64)
    with pytest.raises(RuntimeError, match=f"broken in {where}"):
        engine.generate(PROMPTS, SAMPLING)
    assert engine.unfinished == 0
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


@pytest.mark.parametrize("where", ["admit", "propose", "observe"])
def test_submitted_requests_end_with_the_error(target: Target, wanted: list[tuple[int, ...]], where: str) -> None:
    """Those that ran end; one that waited goes on."""
    engine = Engine(target, Fragile(where), RejectionVerifier(), max_batch_size=1, max_length=64)
    first, second = (engine.submit(prompt, SAMPLING) for prompt in PROMPTS[:2])
    with pytest.raises(RuntimeError, match=f"broken in {where}"):
        engine.step()
    assert engine.unfinished == 1
    steps = []
    while engine.unfinished:
        steps += engine.step()
    ended = [step for step in steps if step.request == first]
    assert [step.finish_reason for step in ended] == ["error"]
    assert_named(ended[0].error, f"RuntimeError: broken in {where}", Fragile._fail)
    assert tuple(t for step in steps if step.request == second for t in step.token_ids) == wanted[1]


def test_an_error_on_release_does_not_hide_the_first(target: Target) -> None:
    class Both(Fragile):
        def release(self, slot: int) -> None:
            raise KeyError("release")

    engine = Engine(target, Both("observe"), RejectionVerifier(), max_length=64)
    with pytest.raises(RuntimeError, match="broken in observe") as caught:
        engine.generate(PROMPTS[:1], SAMPLING)
    assert any("on releasing request 0: KeyError" in note for note in caught.value.__notes__)
    assert engine.unfinished == 0


def test_an_observer_that_raises(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=2, max_length=64)

    def raises(seen: object) -> None:
        raise RuntimeError("the observer is broken")

    engine.on_round = raises
    with pytest.raises(RuntimeError, match="the observer is broken"):
        engine.generate(PROMPTS, SAMPLING)
    engine.on_round = None
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_tokenizer_that_raises_ends_its_request_alone(
    wanted: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = wanted[0][4]
    others = [i for i in (1, 2) if bad not in wanted[i]]
    assert others, "another token would show more"
    decode = Detokenizer._decode

    def raises(self: Detokenizer, token_ids: list[int]) -> str:
        if bad in token_ids:
            raise UnicodeError("no such piece")
        return decode(self, token_ids)

    target = Target(tiny_model(vocab_size=VOCAB), words())
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=3, max_length=64)
    with monkeypatch.context() as broken:
        broken.setattr(Detokenizer, "_decode", raises)
        outputs = engine.generate(PROMPTS, SAMPLING)
    assert outputs[0].finish_reason == "error"
    assert_named(outputs[0].error, "the tokenizer failed: UnicodeError: no such piece", raises)
    assert outputs[0].token_ids == wanted[0][: len(outputs[0].token_ids)], "what was decoded before is kept"
    for i in others:
        assert outputs[i].token_ids == wanted[i]
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


class Gapped(Drafter):
    """Drafts a chain without siblings in which another, invalid node stands in front."""

    max_nodes, max_depth, is_chain = 3, 2, True
    laws = frozenset([DraftSampling.DETERMINISTIC])

    def __init__(self, outputs: list[tuple[int, ...]]):
        self.outputs = [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """It knows the outputs already."""

    def propose(self, slots: Slots) -> DraftTree:
        rows = []
        for row, length in enumerate(slots.host_lengths.tolist()):
            so_far = slots.host_tokens[row, : length + 1].tolist()
            whole = next(output for output in self.outputs if output[: length + 1] == so_far)
            rows.append([so_far[-1], 0, *[*whole, 0, 0][length + 1 : length + 3]])
        parents = torch.tensor([[-1, 0, 0, 2]]).expand(len(rows), -1)
        valid = torch.tensor([[True, False, True, True]]).expand(len(rows), -1)
        return DraftTree.build(torch.tensor(rows), parents, valid=valid, max_children=1)


def test_a_chain_behind_an_invalid_node_is_committed(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, Gapped(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == wanted
    assert all(len(o.steps) == 4 for o in outputs), "the drafts are the outputs, so all are accepted"


class Reckless(Gapped):
    """Says nothing of most of its nodes."""

    max_nodes = 1


def test_more_nodes_than_announced_are_refused(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, Reckless(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
    with pytest.raises(ValueError, match="Reckless proposed 3 nodes and announced max_nodes=1"):
        engine.generate(PROMPTS, SAMPLING)


def test_a_drafter_in_two_engines_is_refused(target: Target, wanted: list[tuple[int, ...]]) -> None:
    drafter = ModelDrafter(perturbed(target.model, 0.1), 3)
    engine = Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64)
    with pytest.raises(ValueError, match=r"this ModelDrafter serves another engine.* make a drafter for each engine"):
        Engine(target, drafter, RejectionVerifier(), max_batch_size=1, max_length=32)
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
    engine.close()
    with pytest.raises(ValueError, match="this engine was closed"):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(ValueError, match="this engine was closed"):
        engine.submit(PROMPTS[0], SAMPLING)
    second = Engine(target, drafter, RejectionVerifier(), max_length=64)
    assert [o.token_ids for o in second.generate(PROMPTS, SAMPLING)] == wanted
    del second  # an engine that is gone holds nothing, without a call
    Engine(target, drafter, RejectionVerifier(), max_length=64)


@pytest.mark.parametrize("kind", ["ngram", "model_chain_iid", "model_tree_without_replacement", "medusa"])
def test_nan_logits_near_the_last_position_end_that_request_only(kind: str) -> None:
    """The row has no room for what a verdict without meaning would emit."""
    model = tiny_model(vocab_size=VOCAB)
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


class Poisoned(Gapped):
    """Drafts a bad token beside the right ones."""

    is_chain = False
    bad = VOCAB - 1

    def propose(self, slots: Slots) -> DraftTree:
        tree = super().propose(slots)
        tokens = tree.tokens.clone()
        tokens[:, 1] = self.bad
        return DraftTree.build(tokens, tree.parents, max_children=2)


def test_a_rejected_token_with_nan_logits_ends_nothing(wanted: list[tuple[int, ...]]) -> None:
    """Its keys spoil the whole tree through the masks: the row goes on from its root, without drafts for a round."""
    model = tiny_model(vocab_size=VOCAB)
    assert not any(Poisoned.bad in output for output in wanted)
    with torch.no_grad():
        model.get_input_embeddings().weight[Poisoned.bad] = float("nan")
    for sampling in (SAMPLING, SamplingParams(max_new_tokens=12, temperature=1e-3)):
        engine = Engine(Target(model), Poisoned(wanted), RejectionVerifier(), max_batch_size=3, max_length=64)
        outputs = engine.generate(PROMPTS, sampling)
        assert [o.token_ids for o in outputs] == wanted
        broken = [step for output in outputs for step in output.steps if step.error is not None]
        assert broken and all(step.token_ids == () and step.finish_reason is None for step in broken)
        assert all("not finite in round" in str(step.error) for step in broken)


def test_nan_in_the_drafters_cache_goes_with_its_request() -> None:
    model = tiny_model(vocab_size=VOCAB)
    draft = perturbed(model, 0.1)
    bad = VOCAB - 1
    with torch.no_grad():
        draft.get_input_embeddings().weight[bad] = float("nan")
    engine = Engine(Target(model), ModelDrafter(draft, 3), RejectionVerifier(), max_length=64)
    whole = engine.generate(PROMPTS, SAMPLING)
    engine.generate([[1, 2, bad, *range(3, 30)]], SamplingParams(max_new_tokens=4))
    again = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in again] == [o.token_ids for o in whole]
    assert [[s.accepted for s in o.steps] for o in again] == [[s.accepted for s in o.steps] for o in whole]
    assert all(o.finish_reason == "length" for o in again)


@pytest.mark.parametrize("sampling", ["iid", "without_replacement", "deterministic"])
def test_a_narrower_drafter_under_a_repetition_penalty(sampling: str) -> None:
    model = tiny_model(vocab_size=VOCAB, scale=2.0)
    draft = tiny_model(vocab_size=VOCAB - 16, scale=2.0)
    params = SamplingParams(max_new_tokens=20, repetition_penalty=1.5)
    prompts = [[1, VOCAB - 1, 2, VOCAB - 2], [3, 4]]
    wanted = [o.token_ids for o in Engine(Target(model), max_length=64).generate(prompts, params)]
    drafter = ModelDrafter(draft, [2, 1], sampling=sampling)
    for temperature in (0.0, 1.0):
        asked = SamplingParams(max_new_tokens=20, repetition_penalty=1.5, temperature=temperature)
        with Engine(Target(model), drafter, RejectionVerifier(), max_batch_size=2, max_length=64) as engine:
            outputs = engine.generate(prompts, asked)
        assert all(o.finish_reason == "length" for o in outputs)
        if temperature == 0:
            assert [o.token_ids for o in outputs] == wanted


def test_an_aborted_request_is_complete_with_a_reason(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=1, max_length=64)
    engine.on_round = lambda seen: engine.abort(2)  # it waits, and never gets a step
    outputs = engine.generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in outputs] == [*wanted[:2], ()]
    assert outputs[2].finish_reason == "error" and outputs[2].steps == ()
    assert outputs[2].error == "the request was aborted before it ended"


def test_aborting_before_the_first_step(target: Target) -> None:
    engine = Engine(target, max_length=64)
    engine.abort(engine.submit([1, 2], SAMPLING))
    assert engine.unfinished == 0 and engine.step() == []


@torch.inference_mode()
def built_in_inference_mode(target: Target) -> Engine:
    return Engine(target, ModelDrafter(perturbed(target.model, 0.1), [2, 1]), RejectionVerifier(), max_length=64)


def test_an_engine_built_in_inference_mode(target: Target, wanted: list[tuple[int, ...]]) -> None:
    engine = built_in_inference_mode(target)
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted
    with torch.inference_mode():
        assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


def test_closing_a_stream_looks_at_each_request_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(target, max_batch_size=2, max_length=64)
    removed: list[int] = []
    remove = engine._scheduler.remove
    monkeypatch.setattr(engine._scheduler, "remove", lambda ids: removed.append(len(ids)) or remove(ids))
    stream = engine.stream([[1, 2]] * 50, SAMPLING)
    next(stream)
    stream.close()
    assert removed == [50] and engine.unfinished == 0


def test_a_policy_of_admission(target: Target, wanted: list[tuple[int, ...]]) -> None:
    """Last come, first served: outputs are the same, the order is another."""

    class Stack(specdec.engine.engine.FirstComeFirstServed):
        def admit(self, free_slots: list[int]) -> Any:
            for slot in free_slots:
                if self._waiting:
                    yield slot, self._waiting.popitem()[1]

    engine = Engine(target, max_length=64, scheduler=Stack())
    ended = [step.request for step in engine.stream(PROMPTS, SAMPLING) if step.finish_reason]
    assert ended == [2, 1, 0]
    assert [o.token_ids for o in engine.generate(PROMPTS, SAMPLING)] == wanted


class Guessing(Drafter):
    """Drafts one token: always the bad one, or one drawn evenly from all."""

    max_nodes = max_depth = 1
    is_chain = True
    bad = 3

    def __init__(self, law: DraftSampling, vocab: int):
        self.laws, self.law, self.vocab = frozenset([law]), law, vocab

    def bind(self, target: Target, *, max_batch_size: int, max_length: int) -> None:
        """It fits everything."""

    def propose(self, slots: Slots) -> DraftTree:
        drafted = torch.full_like(slots.roots, self.bad)
        q = None
        if self.law is DraftSampling.IID:
            drafted = (uniforms(slots.keys, slots.rounds, Purpose.DRAFT, 1)[:, 0] * self.vocab).long()
            q = torch.full((len(slots), 2, self.vocab), 1 / self.vocab)
        tokens = torch.stack([slots.roots, drafted], dim=1)
        return DraftTree.from_shape(TreeShape.chain(1), tokens, sampling=self.law, draft_probs=q)


def first_tokens(law: DraftSampling) -> tuple[float, int]:
    """Chi-square p-value of the first tokens of sampled requests, and how many requests had none."""
    vocab, samples = 8, 4000
    model = tiny_model(vocab_size=vocab, scale=1.5)
    with torch.no_grad():
        p = model(torch.tensor([[1, 2]])).logits[0, -1].double().softmax(-1).numpy()
        model.get_input_embeddings().weight[Guessing.bad] = float("nan")
    engine = Engine(Target(model), Guessing(law, vocab), RejectionVerifier(), max_batch_size=500, max_length=16)
    outputs = engine.generate([[1, 2]], SamplingParams(max_new_tokens=2, temperature=1.0, n=samples, seed=5))
    firsts = [output.token_ids[0] for output in outputs if output.token_ids]
    counts = np.bincount(firsts, minlength=vocab)
    return float(scipy.stats.chisquare(counts, p / p.sum() * len(firsts)).pvalue), samples - len(firsts)


@pytest.mark.full
def test_going_on_without_a_chosen_draft_follows_the_target() -> None:
    """A correct engine fails this with another seed once in a million times."""
    p_value, ended = first_tokens(DraftSampling.DETERMINISTIC)
    assert p_value > 1e-6 and ended == 0


def test_going_on_without_a_drawn_draft_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: draws are forgotten, too. So such a request ends with an error instead."""
    assert first_tokens(DraftSampling.IID)[1] > 100
    monkeypatch.setattr(specdec.engine.engine, "repeatable", lambda played: played.read.proposed_nodes > 0)
    p_value, ended = first_tokens(DraftSampling.IID)
    assert p_value < 1e-6 and ended == 0


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


def failing(error: Exception) -> Any:
    def fail(*args: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_SHORTAGE), RuntimeError(CPU_SHORTAGE)])
@pytest.mark.parametrize("place", ["specdec.modeling.plan._trial", "specdec.cache.slot_cache._by_head"])
def test_out_of_memory_while_an_engine_is_built_is_one_sentence(
    target: Target, error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, failing(error))
    said = (
        r"out of memory on .* asked for, .* free; lower max_batch_size=2 or max_length=64, or load the model in fewer"
    )
    with pytest.raises(ValueError, match=said):
        Engine(target, max_batch_size=2, max_length=64)
