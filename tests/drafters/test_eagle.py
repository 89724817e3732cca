"""EAGLE: public layouts load, heads come back as they were, what fits a target, and what binding changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters import EagleDrafter, MedusaDrafter
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.eagle_files import layers_of, load_eagle, save_eagle
from drafters.peagle import PEagleHead
from specdec import Engine, ModelRunner, SamplingParams, Sizes, Target
from tests.components import eagle_head, medusa_heads, wide
from tests.drafters.folders import assert_same, logits, renamed, rewritten
from tests.models import tiny_model
from verifiers import TargetWalkVerifier

VOCAB = 64
SIZES = Sizes(max_batch_size=1, max_length=32)
IDS = [token for token in range(VOCAB) if token % 3]


def eagle3(model, **options: Any) -> Eagle3Head:
    given = {"hidden_layers": (0, 2, 3), "draft_ids": IDS} | options
    return wide(Eagle3Head.for_target(model, **given), 1.5)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=VOCAB)


def speculators(folder: Path, kind: str = "eagle3", **more: Any) -> Path:
    file = folder / "config.json"
    layer = json.loads(file.read_text())
    rewritten(folder, lambda tensors: renamed(tensors, "midlayer.", "layers.0."))
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    own = ("draft_vocab_size", "norm_before_residual", "norm_output", "target_hidden_size", "mask_token_id")
    config = {key: layer.pop(key) for key in own if key in layer}
    config["eagle_aux_hidden_state_layer_ids"] = layer.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    config |= {
        "speculators_model_type": kind,
        "transformer_layer_config": {key: value for key, value in layer.items() if key != "pard_token"},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "a/b"}},
    }
    file.write_text(json.dumps(config | more))
    return folder


def parallel(model: PreTrainedModel, layers: tuple[int, ...] = (0, 1, 1)) -> PEagleHead:
    given = {"layers": 2, "mask_token_id": 50, "owns_embeddings": True, "draft_ids": range(0, VOCAB, 2)}
    return PEagleHead.for_target(model, hidden_layers=layers, **given).eval()


def of_qwen3(model: PreTrainedModel) -> Eagle3Head:
    """Norms of queries and keys, the whole vocabulary, and embeddings."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    return wide(Eagle3Head(config, hidden_layers=(0, 1, 2, 3, 4), captured=5, owns_embeddings=True), 1.5)


def as_deepspec(folder: Path) -> None:
    """Names behind a prefix, outputs of layers as ids, and the sizes of the whole target."""
    layers = {"target_layer_ids": [-1, 0, 1, 2, 3], "num_hidden_layers": 36, "eagle_config": None}
    rewritten(folder, lambda tensors: renamed(tensors, "midlayer.", "layers.0."))
    rewritten(folder, lambda tensors: renamed(tensors, "", "model."), **layers, rope_parameters=None, rope_theta=777.0)


def shuffled(tensors: dict[str, torch.Tensor]) -> None:
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(IDS)[order] - torch.arange(len(IDS))


WRONG = {"num_hidden_layers": 40, "intermediate_size": 11, "num_key_value_heads": 9, "draft_vocab_size": 5}
FOLDERS: dict[str, tuple[Callable[..., EagleHead | Eagle3Head], Callable[[Path], object] | None]] = {
    "eagle": (eagle_head, None),
    "eagle3": (eagle3, None),
    "eagle3.1": (lambda model: eagle3(model, norm_each=True, feeds_normed=True, norm_before_residual=True), None),
    "eagle3, two layers": (lambda model: eagle3(model, layers=2), None),
    "eagle3, five states": (lambda model: eagle3(model, hidden_layers=(0, 1, 2, 3, -1)), None),
    "speculators": (lambda model: eagle3(model, norm_before_residual=True), speculators),
    "DeepSpec": (of_qwen3, as_deepspec),
    # As published files state the target's sizes: tensors win over the configuration.
    "the target's sizes": (eagle3, lambda folder: rewritten(folder, **WRONG)),
    "columns in any order": (eagle3, lambda folder: rewritten(folder, shuffled)),
    "marks alone": (eagle3, lambda folder: rewritten(folder, lambda tensors: tensors.pop("d2t"))),
    "P-EAGLE": (parallel, None),
    "speculators' P-EAGLE": (parallel, lambda folder: speculators(folder, "peagle")),
    "vLLM's parallel drafting": (parallel, lambda folder: rewritten(folder, mask_token_id=None)),
}
"""A head, and what makes of our folder another one."""
TURNING = {"speculators": "llama", "DeepSpec": "qwen3"}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_head_comes_back_as_it_was(model, name: str, tmp_path: Path) -> None:
    make, change = FOLDERS[name]
    if name in TURNING:  # rotary embeddings that no default has
        model = tiny_model(TURNING[name], vocab_size=VOCAB)
        model.config.rope_parameters["rope_theta"] = 777.0
    head = make(model)
    save_eagle(head, tmp_path, notes={"target": "some/target"})
    assert json.loads((tmp_path / "specdec.json").read_text())["target"] == "some/target"
    if change is not None:
        change(tmp_path)
    again = load_eagle(tmp_path, kind=PEagleHead if isinstance(head, PEagleHead) else Eagle3Head)
    assert_same(again, head)
    for part in ("hidden_layers", "fed_back", "norm_before_residual", "mask_token_id"):
        assert getattr(again, part, None) == getattr(head, part, None), part
    torch.testing.assert_close(logits(again, model), logits(head, model), rtol=0, atol=1e-5 * (name == "DeepSpec"))


def test_the_usual_tree_is_no_deeper_than_trained_and_small_without_a_gpu(model, tmp_path: Path, monkeypatch) -> None:
    head = eagle3(model)
    for gpu, trained, depth, nodes in ((True, 4, 4, 59), (True, 12, 8, 59), (False, None, 3, 3), (False, 2, 2, 2)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda gpu=gpu: gpu)
        head.tokens = trained
        save_eagle(head, tmp_path)
        drafter = EagleDrafter.from_pretrained(tmp_path)
        assert (drafter.max_depth, drafter.max_nodes, drafter.is_chain) == (depth, nodes, not gpu)


def test_layer_numbers_mean_what_their_key_says(model) -> None:
    named = "eagle_aux_hidden_state_layer_ids"
    assert layers_of({"eagle_config": {named: [2, 16, 29]}}, {}) == (2, 16, 29)
    assert layers_of({"eagle_config": {named: [1, 15, 28]}}, {}) == (2, 16, 29)
    assert layers_of({"speculators_model_type": "eagle3", named: [1, 15, 28]}, {}) == (1, 15, 28)
    assert layers_of({"target_layer_ids": [-1, 15, 28]}, {}) == (0, 16, 29)
    assert layers_of({"target_layer_ids": [-1, 15, 28]}, {"hidden_layers": [1, 2, 3]}) == (1, 2, 3)
    assert layers_of({"eagle_config": {}}, {}) is None
    head = eagle3(model)
    head.hidden_layers = None
    bound = EagleDrafter(head, 2).bind(Target(tiny_model(layers=8)), SIZES)
    assert bound.hidden_layers == (2, 4, 5), "those that are usual"


def test_embeddings_that_are_not_finite_are_the_targets(model, tmp_path: Path) -> None:
    head = eagle3(model, owns_embeddings=True)
    save_eagle(head, tmp_path)
    assert load_eagle(tmp_path).model.embed_tokens is not None
    assert load_eagle(tmp_path, embeddings="target").model.embed_tokens is None
    rewritten(tmp_path, lambda tensors: tensors["embed_tokens.weight"].fill_(float("nan")))
    again = load_eagle(tmp_path)
    assert again.model.embed_tokens is None
    assert again.bound(model).get_input_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match=r"embeddings='own' and .* has none that are finite: give 'target'"):
        load_eagle(tmp_path, embeddings="own")


def test_eagle1_without_a_bias_and_with_biases_of_attention(model, tmp_path: Path) -> None:
    save_eagle(EagleHead.for_target(model, fusion_bias=False), tmp_path)
    biases = {f"layers.0.self_attn.{part}_proj.bias": rows for part, rows in (("q", 32), ("k", 16), ("v", 16))}
    rewritten(tmp_path, lambda tensors: tensors.update({name: torch.ones(rows) for name, rows in biases.items()}))
    found = {name for name, _ in load_eagle(tmp_path).named_parameters() if name.endswith("bias")}
    assert found == {f"model.{name}" for name in biases}


def test_binding_leaves_a_head_as_it_is(model) -> None:
    """It may be in training, and a second target may want it in another dtype."""
    for head, kind in ((eagle3(model), EagleDrafter), (medusa_heads(model), MedusaDrafter)):
        head.double().train()
        before = {name: (parameter, parameter.detach().clone()) for name, parameter in head.named_parameters()}
        for parameter, _ in before.values():
            parameter.grad = torch.ones_like(parameter)
        session: Any = kind(head, 2).bind(Target(model), SIZES)
        bound = dict(getattr(session.models[0], "model", session.models[0]).named_parameters())
        assert all(module.training for module in head.modules())
        for name, now in head.named_parameters():
            was, value = before[name]
            assert now is was and now.requires_grad and now.grad is not None and torch.equal(now, value)
            assert bound[name].dtype is torch.float32 and bound[name].grad is None and not bound[name].requires_grad


def test_a_head_drafts_in_fewer_bits_and_the_output_is_the_targets() -> None:
    """An output layer that it borrows is quantized for the head alone, and the head that was given stays as it is."""
    model = tiny_model("llama", vocab_size=VOCAB, scale=2.0)
    head = wide(EagleHead.for_target(model), 1.5)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with Engine(Target(model), max_length=64) as engine:
        wanted = engine.generate([[1, 2, 3, 4]], sampling)[0].token_ids
    sizes = {}
    for quantization in (None, "int4"):
        drafter = EagleDrafter(head, 3, quantization=quantization)
        with Engine(Target(model), drafter, TargetWalkVerifier(), max_length=64) as engine:
            assert engine.generate([[1, 2, 3, 4]], sampling)[0].token_ids == wanted
            (runner,) = [each for each in engine.session.models if isinstance(each, ModelRunner)]  # type: ignore[union-attr]
            sizes[quantization] = runner.weights_read().bytes
    assert sizes["int4"] < 0.6 * sizes[None]  # norms and a bias stay in 32 bits
    assert type(model.lm_head) is torch.nn.Linear and head.lm_head is None
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())


def test_positions_beyond_those_of_the_training_texts(model) -> None:
    """Published heads state 2048 positions and are used far beyond them."""
    head = eagle3(model)
    head.config.max_position_embeddings = 8
    with Engine(Target(model), EagleDrafter(head, 2), TargetWalkVerifier(), max_length=40) as engine:
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=30))[0].token_ids) == 30
    scaled = eagle3(model)
    scaled.config.max_position_embeddings = 8
    scaled.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"the head Eagle3Head: max_length=40 is beyond the 8"):
        Engine(Target(model), EagleDrafter(scaled, 2), TargetWalkVerifier(), max_length=40)
