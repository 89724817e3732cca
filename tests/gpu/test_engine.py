"""Engines on a GPU: waits of the host, graphs and their memory, warm-ups, and layers on several devices."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdec.forward as forward_module
from experiments.bench.gpu import random_target
from experiments.measuring.forwards import Forward, as_graph, fill, forward_batch
from specdec import Engine, ModelRunner, SamplingParams, Target
from specdec.engine import recording as recording_module
from specdec.target.loading import load
from tests.components import DRAFTERS, EVERYWHERE, READS_NODES, VERIFIERS, fitting, skip_unfit, tried
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.test_lossless import SAMPLING, prompts
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]


@pytest.fixture
def model():
    return tiny_model().cuda()


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_synchronization_per_round(model, drafter: str | None, temperature: float) -> None:
    if drafter in READS_NODES:
        pytest.skip("its host needs more of a round than what was accepted")
    made = DRAFTERS[drafter](model) if drafter else None
    engine = Engine(Target(model), made, fitting(made) if made else None, max_batch_size=2, max_length=64)
    for prompt in PROMPTS[::2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=30, temperature=temperature))
    for _ in range(3):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronizing = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(synchronizing) <= 1, synchronizing


def test_stages_are_timed_by_events(model) -> None:
    engine = Engine(Target(model), DRAFTERS["ngram"](model), RejectionVerifier(), max_length=64, timing=True)
    steps = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=20))[0].steps
    assert sum(step.seconds.get("verify", 0.0) for step in steps) > 0


NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("places", "drafter"),
    [
        (["cpu", 0, "cpu", 0], "ngram"),
        pytest.param([0, 0, 1, 1], "medusa", marks=NEEDS_TWO),
        pytest.param([0, 0, 1, 1], "model_tree_iid", marks=NEEDS_TWO),
    ],
)
def test_layers_on_two_devices(places: list[int | str], drafter: str, tmp_path: Path) -> None:
    """It decodes what a model on one GPU decodes. Offloaded layers run on the GPU, too: their weights travel there."""
    whole, sampling = tiny_model().cuda(), SamplingParams(max_new_tokens=20)
    tiny_model().save_pretrained(tmp_path)
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": places[-1], "lm_head": places[-1]}
    device_map = ends | {f"model.layers.{n}": place for n, place in enumerate(places)}
    made = DRAFTERS[drafter](whole)
    target = Target(load(str(tmp_path), device_map=device_map).model)
    engine = Engine(target, made, fitting(made), max_batch_size=2, max_length=64)
    outputs = [list(output.token_ids) for output in engine.generate(PROMPTS, sampling)]
    assert outputs == [reference_decode(whole, prompt, sampling) for prompt in PROMPTS]
    assert engine.target.device == torch.device("cuda", 0)
    assert places[-1] == 0 or {tensor.device.index for tensor in engine.runner.cache.tensors} == {0, 1}


def test_graphs_take_a_bounded_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 1)
    monkeypatch.setattr(recording_module, "MOST_RECORDINGS", 8)
    model = tiny_model().cuda()
    made = DRAFTERS["model_tree_iid"](model)
    engine = Engine(Target(model), made, RejectionVerifier(), max_batch_size=3, max_length=96)
    sizes = []
    for _ in range(4):
        engine.generate(prompts(), SAMPLING)
        sizes.append(torch.cuda.memory_reserved())
    assert len(engine._rounds.recorder.recordings.kept) <= 8
    assert sizes[-1] <= sizes[1] + 2**26  # what is dropped is used again


@pytest.fixture
def several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_module, "_LEAST_KEYS", 64)


def engine_of(model, drafter: str | None, recording: str = "auto") -> Engine:
    made = None if drafter is None else DRAFTERS[drafter](model)
    rule = None if made is None else fitting(made)
    return Engine(Target(model), made, rule, max_batch_size=12, max_length=192, recording=recording)


@pytest.mark.usefixtures("several_sizes")
@pytest.mark.parametrize(("drafter", "verifier"), [(d, v) for v in VERIFIERS for d in DRAFTERS if tried(d, v)])
def test_recorded_rounds_give_the_same_tokens(model, drafter: str, verifier: str, monkeypatch) -> None:
    """Greedy and sampled in one batch, through several sizes of attention and back; plainly, and drafted thrice."""
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    made, rule = DRAFTERS[drafter](model), VERIFIERS[verifier]()
    skip_unfit(made, rule)
    lengths, tokens = ((50, 50, 115, 115, 170, 10), 48) if verifier == EVERYWHERE else ((62, 10), 16)
    given = [[(7 * (place % 23) + 3 * row + place // 97) % 11 for place in range(n)] for row, n in enumerate(lengths)]
    sampled = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=0, temperature=0.8, top_p=0.9)
    sampling = [replace(sampled, temperature=0.8 * (row % 2), stream=row) for row in range(len(given))]
    expected: dict[bool, list[tuple[int, ...]]] = {}
    for recording, passes in {"off": (False, True), "rounds": (False, True, True, True)}.items():
        with Engine(Target(model), made, rule, max_batch_size=2, max_length=234, recording=recording) as engine:
            for speculate in passes:
                before = engine.recording_counts
                outputs = [done.token_ids for done in engine.generate(given, sampling, speculate=speculate)]
                assert outputs == expected.setdefault(speculate, outputs), "graphs overwrite each other"
            after = engine.recording_counts
    assert not after.refused, after.refused
    assert (after.replayed - before.replayed) / (after.rounds - before.rounds) >= 0.8, "rounds do not come again"


@pytest.mark.usefixtures("several_sizes")
@pytest.mark.parametrize("drafter", [None, "model_chain_iid", "eagle3_chain_iid", "medusa", "ngram"])
def test_rounds_of_a_warm_engine_are_replayed(drafter: str | None) -> None:
    """Whatever the number of rows, and in every size of attention."""
    model = tiny_model().cuda()
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    kinds = (greedy, replace(greedy, temperature=1.0))
    with engine_of(model, drafter) as engine:
        engine.warm_up(sampling=kinds)
        before = engine.recording_counts
        assert not before.refused, before.refused
        reserved = torch.cuda.memory_reserved()
        for sampling in kinds:
            for rows, length in ((12, 20), (7, 100), (3, 160), (1, 20)):
                given = [[1 + row + place % 40 for place in range(length)] for row in range(rows)]
                engine.generate(given, sampling)
        after = engine.recording_counts
        assert not after.refused and after.replayed / after.rounds >= 0.98
        assert after.stages == before.stages and torch.cuda.memory_reserved() < reserved + 2**27


def test_a_stage_that_makes_the_host_wait_is_told_by_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """It is refused by name before a capture could break off, and captures that come later succeed."""
    with engine_of(tiny_model().cuda(), None) as engine:
        rounds, verify = engine._rounds, engine.runner.run
        engine.runner.run = lambda *given: (torch.ones(1, device="cuda").item(), verify(*given))[1]  # type: ignore[method-assign, assignment]
        engine.generate([[1, 2, 3]] * 2, SamplingParams(max_new_tokens=30, ignore_eos=True))
        counts = engine.recording_counts
        assert list(counts.refused) == ["verify"] and "makes the host wait" in counts.refused["verify"][0]
        assert len(caplog.records) == 1 and {key[0] for key in rounds.recorder.recordings.kept} == {"judge", "commit"}  # type: ignore[union-attr]


CUDA = torch.device("cuda")


@pytest.mark.parametrize("nodes", [1, 16])
def test_a_replayed_step_is_the_step(nodes: int) -> None:
    target = random_target("tiny", CUDA, torch.float32)
    runner = ModelRunner(target.model, max_batch_size=2, max_length=64, max_nodes=nodes)
    fill(runner)
    batch = forward_batch(Forward(batch=2, queries=nodes, context=64), runner.vocab_size, CUDA)
    expected = runner.run(batch).scores.clone()
    graph = as_graph(runner, replace(batch, key_bound=None))
    assert graph is not None
    replayed = graph()
    torch.cuda.synchronize()
    torch.testing.assert_close(replayed.scores, expected, atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]
