"""LoRA adapters: merged into a target's weights, or chosen by every request of a batch."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec import Engine, Paging, SamplingParams, Target
from specdec.execution.forwards import ReplayExecutor
from specdec.target import adapters, loading
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model
from tests.reference import reference_decode
from tests.verifiers.cases import complete

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("untried"),
    # peft asks transformers for something that transformers will rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

VOCAB = 24
CHOSEN = ["few", "many", None, "many", "few", None]
PROMPTS = [[random.Random(i).randrange(VOCAB) for _ in range(2 + 3 * i)] for i in range(6)]


def save_adapter(folder: Path, *, seed: int, layers: list[str], vocab: int = VOCAB, **options: object) -> str:
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=layers, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(tiny_model(vocab_size=vocab, layers=2), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    patterns, many = {"alpha_pattern": {"q_proj": 3}, "use_rslora": True}, ("q", "k", "v", "o", "up", "gate")
    return {
        "few": save_adapter(root / "few", seed=1, layers=["q_proj", "down_proj"], **patterns),
        "many": save_adapter(root / "many", seed=2, layers=[f"{each}_proj" for each in many]),
    }


def base() -> PreTrainedModel:
    return tiny_model(vocab_size=VOCAB, layers=2)


def merged(folder: str) -> PreTrainedModel:
    """The model with an adapter merged by peft itself."""
    return peft.PeftModel.from_pretrained(base(), folder).merge_and_unload()


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("model_tree_iid", {}),
        ("eagle3_expansion", {"recording": "rounds"}),
        complete("medusa", {"prefill_chunk": 4, "optimize": False}, strong=False),
        complete("model_chain_iid", {"cache": Paging(page_size=4, pages=24, reserve=0.0)}, strong=False),
    ],
)
def test_requests_of_a_batch_follow_the_adapters_that_they_choose(folders, drafter, options) -> None:
    made, sampling = DRAFTERS[drafter](base()), SamplingParams(max_new_tokens=12)
    engine = Engine(Target(base(), adapters=folders), made, fitting(made), max_batch_size=3, max_length=48, **options)
    engine.warm_up()  # captured forwards choose anew at every replay
    outputs = engine.generate(PROMPTS, [replace(sampling, adapter=name) for name in CHOSEN])
    assert not isinstance(engine.runner.executor, ReplayExecutor) or engine.runner.executor.recordings.replays > 0
    models = {name: base() if name is None else merged(folders[name]) for name in set(CHOSEN)}
    for output, name in zip(outputs, CHOSEN, strict=True):
        by_model = {each: reference_decode(models[each], list(output.prompt_ids), sampling) for each in models}
        assert [each for each, tokens in by_model.items() if tokens == list(output.token_ids)] == [name]


def test_one_adapter_is_merged_into_the_weights(folders: dict[str, str], tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    model = adapters.merge(AutoModelForCausalLM.from_pretrained(tmp_path), folders["many"])
    ours = dict(model.named_parameters())
    for name, parameter in merged(folders["many"]).named_parameters():
        torch.testing.assert_close(ours[name], parameter)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_what_is_no_adapter_of_the_target_is_refused(folders: dict[str, str], tmp_path, monkeypatch) -> None:
    def refused(message: str, **named: str) -> None:
        model = base()
        with pytest.raises(ValueError, match=message):
            Target(model, adapters=named)
        assert not any(isinstance(module, adapters.AdaptedLinear) for module in model.modules())

    other = save_adapter(tmp_path / "other", seed=1, layers=["lm_head"], vocab=VOCAB + 8)
    refused(rf"of another base .* is \[32, 3\], and this model has a layer of 32 to {VOCAB} there", other=other)
    for named, layer, dora in (("", "q_proj", True), ("lm_head.*", "lm_head", False), ("", "embed_tokens", False)):
        folder = save_adapter(tmp_path / f"only {layer}", seed=1, layers=[layer], use_dora=dora)
        refused(f"{named} no request can choose: merge it", only=folder)
    half = Path(save_adapter(tmp_path / "half", seed=1, layers=["q_proj"])) / "adapter_model.safetensors"
    tensors = load_file(half)
    gone = sorted(tensors)[-1]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, half)
    refused(f"half' is incomplete: the tensor {gone} is missing", half=str(half.parent))
    model = base()
    monkeypatch.setattr(loading, "_read", None)  # before the model is loaded
    model.save_pretrained(tmp_path / "model")
    for given in ({"adapter": "nowhere"}, {"adapters": {"some": "nowhere"}}):
        with pytest.raises(ValueError, match="no adapter at 'nowhere'"):
            Target.from_pretrained(str(tmp_path / "model"), **given)
    for target, name, has in ((Target(base(), adapters=folders), "x", "'few', 'many'"), (Target(model), "few", "none")):
        with pytest.raises(ValueError, match=f"the target has {has}"):
            Engine(target).generate([[1]], SamplingParams(adapter=name))
    with pytest.raises(ValueError, match="share no beginnings"):
        Engine(Target(model, adapters=folders), cache=Paging(page_size=4, shared=True))
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    refused(r"pip install 'specdec-research\[peft\]'", few=folders["few"])
