"""OpenVINO GenAI as another engine, without OpenVINO: what its worker is told, and how it finds wrong draws."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from experiments.contenders import workers
from experiments.contenders.peers import OpenVinoCpu
from specdec.target.target import Target


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's module, which finds those beside it as in its own environment."""
    monkeypatch.syspath_prepend(str(Path(workers.__file__).parent))
    return importlib.import_module("openvino_worker")


def test_the_worker_is_told_what_drafts_and_gets_weights_in_float32(saved: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(str(saved / "target"), dtype="bfloat16")
    small, draft = str(saved / "drafter"), str(tmp_path / "draft")
    for made, told in (
        (OpenVinoCpu(patched=True), {"draft": None, "ngram": 0}),
        (OpenVinoCpu(method="ngram"), {"draft": None, "ngram": 4}),
        (OpenVinoCpu(method="model", draft=small), {"draft": draft, "ngram": 0}),
        (OpenVinoCpu(method="model", draft=small, patched=True), {"draft": draft, "ngram": 1}),
    ):
        made.target = target
        assert made.prepared(tmp_path) == {"precision": "BF16"} | told and not made.tells_tokens
    for folder in (tmp_path, tmp_path / "draft"):
        assert {str(each.dtype) for each in load_file(folder / "model.safetensors").values()} == {"torch.float32"}
    made = OpenVinoCpu()
    made.target = Target.from_pretrained(str(saved / "target"), dtype="float64")
    with pytest.raises(ValueError, match="measured in float32, bfloat16, float16, and the target is in float64"):
        made.prepared(tmp_path)
    with pytest.raises(ValueError, match="OpenVINO GenAI is measured with plain, ngram, model"):
        OpenVinoCpu(method="eagle3")


@pytest.mark.parametrize("wrong", [False, True])
def test_draws_close_to_temperature_0_that_are_not_the_likeliest_tokens_are_wrong(worker: Any, wrong: bool) -> None:
    asked = []

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        length, ((first, *_),) = request["max_new_tokens"], request["prompts"]
        drafted = wrong and request["sampling"]["temperature"] > 0 and first == 5
        return {"rows": [{"token_ids": [first] * (length - 1) + [7 if drafted else 3], "rounds": []}]}

    said = worker.wrong_draws(decode, "2026.4")
    assert said.startswith("OpenVINO GenAI 2026.4 keeps drafted tokens by another rule") if wrong else said == ""
    assert len({each["prompts"][0][0] for each in asked}) == (6 if wrong else 8)


def test_only_llamas_with_plain_rotations_are_written_anew(worker: Any) -> None:
    llama = {"model_type": "llama", "rope_parameters": {"rope_type": "default"}, "attention_bias": False}
    assert worker.head_width(llama | {"head_dim": 5}) == 5
    assert worker.head_width(llama | {"hidden_size": 12, "num_attention_heads": 3}) == 4
    for other in ({"model_type": "qwen3"}, {"rope_parameters": {"rope_type": "llama3"}}, {"attention_bias": True}):
        with pytest.raises(ValueError, match="only Llama models with plain rotary embeddings and without biases"):
            worker.head_width(llama | other)
