"""What only a GPU can show: run with ``make test ARGS="-m gpu"`` on a machine that has one."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from drafters.ngram import NGramDrafter
from specdec import Drafter, Engine, SamplingParams, Target
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


def spread(folder: Path, ends: int, layers: list[int | str]) -> PreTrainedModel:
    """A model whose layers are where they are told to be, and whose norm and output layer on the GPU ``ends``."""
    tiny_model().save_pretrained(folder)
    device_map = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": ends, "lm_head": ends}
    return load(
        str(folder), device_map=device_map | {f"model.layers.{n}": place for n, place in enumerate(layers)}
    ).model


def check_spread(model: PreTrainedModel, made: Drafter) -> Engine:
    """Assert that it decodes what a model on one GPU decodes."""
    engine = Engine(Target(model), made, fitting(made), max_batch_size=2, max_length=64)
    sampling, whole = SamplingParams(max_new_tokens=20), tiny_model().cuda()
    outputs = [list(output.token_ids) for output in engine.generate(PROMPTS, sampling)]
    assert outputs == [reference_decode(whole, prompt, sampling) for prompt in PROMPTS]
    return engine


def test_layers_on_the_gpu_and_in_the_memory_of_the_host(tmp_path: Path) -> None:
    """Offloaded layers run on the GPU, too; their weights travel there in every forward."""
    engine = check_spread(spread(tmp_path, 0, ["cpu", 0, "cpu", 0]), NGramDrafter(4))
    assert engine.target.device == torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("drafter", ["medusa", "model_tree_iid"])
def test_layers_on_two_gpus(drafter: str, tmp_path: Path) -> None:
    engine = check_spread(spread(tmp_path, 1, [0, 0, 1, 1]), DRAFTERS[drafter](tiny_model().cuda()))
    assert {tensor.device.index for tensor in engine.runner.cache.tensors} == {0, 1}
