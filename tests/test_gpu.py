"""What only a GPU can show: run with ``make test ARGS="-m gpu"`` on a machine that has one."""

import warnings

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec import Engine, SamplingParams, Target
from specdec.checks.reference import reference_decode
from specdec.engine import recording as recording_module
from specdec.target.loading import load
from tests.components import DRAFTERS, READS_NODES, VERIFIERS, fitting, skip_unfit, tried
from tests.models import tiny_model
from tests.test_lossless import SAMPLING, prompts
from verifiers.rejection import RejectionVerifier

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 2, 3, 1, 2], [7], [9, 8] * 10]


@pytest.fixture
def model():
    return tiny_model().cuda()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_the_reference(model, drafter: str) -> None:
    made = DRAFTERS[drafter](model)
    engine = Engine(Target(model), made, fitting(made), max_batch_size=2, max_length=64)
    sampling = SamplingParams(max_new_tokens=20)
    outputs = [list(output.token_ids) for output in engine.generate(PROMPTS, sampling)]
    assert outputs == [reference_decode(model, prompt, sampling) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_synchronization_per_round(model, drafter: str | None, temperature: float) -> None:
    if drafter in READS_NODES:
        pytest.skip(
            "its host needs what the target said of the nodes, or what a model wrote, besides what was accepted"
        )
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


@pytest.mark.parametrize(("drafter", "verifier"), [(d, v) for v in VERIFIERS for d in DRAFTERS if tried(d, v)])
def test_rounds_replayed_from_graphs_give_the_same_tokens(model, drafter: str, verifier: str, monkeypatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    made, rule = DRAFTERS[drafter](model), VERIFIERS[verifier]()
    skip_unfit(made, rule)
    outputs = []
    for recording in ("rounds", "off"):
        with Engine(Target(model), made, rule, max_batch_size=3, max_length=96, recording=recording) as engine:
            outputs.append([each.token_ids for _ in range(3) for each in engine.generate(prompts(), SAMPLING)])
            if recording == "rounds":
                assert engine._rounds.recorder.recordings.replays > 20
                assert not engine._rounds.recorder.recordings._refused
    assert outputs[0] == outputs[1]


def test_layers_on_the_gpu_and_in_the_memory_of_the_host(tmp_path) -> None:
    """Offloaded layers run on the GPU, too; their weights travel there in every forward."""
    tiny_model().save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    device_map |= {f"model.layers.{layer}": 0 if layer % 2 else "cpu" for layer in range(4)}
    spread = load(str(tmp_path), device_map=device_map).model
    target = Target(spread)
    assert target.device == torch.device("cuda", 0)
    engine = Engine(target, NGramDrafter(4), RejectionVerifier(), max_batch_size=2, max_length=64)
    sampling = SamplingParams(max_new_tokens=20)
    outputs = [list(output.token_ids) for output in engine.generate(PROMPTS, sampling)]
    whole = tiny_model().cuda()
    assert outputs == [reference_decode(whole, prompt, sampling) for prompt in PROMPTS]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("drafter", ["medusa", "model_tree_iid"])
def test_layers_on_two_gpus(drafter: str, tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    device_map |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    spread = load(str(tmp_path), device_map=device_map).model
    whole = tiny_model().cuda()
    made = DRAFTERS[drafter](whole)
    engine = Engine(Target(spread), made, fitting(made), max_batch_size=2, max_length=64)
    assert {tensor.device.index for tensor in engine.runner.cache.tensors} == {0, 1}
    sampling = SamplingParams(max_new_tokens=20)
    outputs = [list(output.token_ids) for output in engine.generate(PROMPTS, sampling)]
    assert outputs == [reference_decode(whole, prompt, sampling) for prompt in PROMPTS]
