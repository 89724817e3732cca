"""What a head's files, and its target's, say about layers and logits is followed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafters import BlockHead, MedusaHeads
from drafters.heads.block_files import load_block, save_block
from drafters.heads.bound import output_of
from drafters.heads.eagle import Eagle3Head, EagleHead
from drafters.heads.eagle_files import load_eagle, save_eagle
from drafters.heads.files import ServedFor
from drafters.heads.mtp import MTPHead
from drafters.heads.training import Borrowed, take_output
from specdec import ModelRunner, Target
from specdec.quantization import quantize
from tests.components import medusa_heads
from tests.models import COMMON, tiny_model

SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}, "gemma2": {"final_logit_softcapping": 5.0},
    "falcon_h1": {"lm_head_multiplier": 0.5}, "recurrent_gemma": {"logits_soft_cap": 3.0},
    "hyperclovax": {"logits_scaling": 8.0},  # multiplies
}  # fmt: skip


def scaled(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, **COMMON | {"num_hidden_layers": 8}, **SCALED[kind])
    return AutoModelForCausalLM.from_config(config).float().eval()


HEADS = {
    "EAGLE": EagleHead.for_target,
    "EAGLE-3": lambda model: Eagle3Head.for_target(model, owns_output=False),
    "MTP": MTPHead.for_target,
    "block": lambda model: BlockHead.for_target(model, layers=1, block_size=4),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALED)
def test_a_borrowed_output_layer_scales_and_caps_as_the_targets_code_does(kind: str) -> None:
    model, given = scaled(kind), list[torch.Tensor]()
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: given.append(args[0]))
    logits = model(torch.tensor([[5, 9, 3, 60]])).logits
    for name, made in HEADS.items():
        if name == "MTP" and kind not in ("granite", "gemma2"):
            continue  # of whose layers there are no such modules
        bound = made(model).bound(model)
        found = bound.logits_of(given[0]) if isinstance(bound, BlockHead) else bound.lm_head(given[0])
        torch.testing.assert_close(found, logits, msg=name)


@torch.no_grad()
def test_a_head_whose_own_files_say_more_of_its_logits_follows_them(tmp_path: Path) -> None:
    """A drafter that scales by itself is not scaled twice; one that was trained on plain logits goes on with them."""
    model, hidden = scaled("gemma2"), torch.randn(3, 32)
    head = BlockHead.for_target(model, layers=1, block_size=4)
    head.config.final_logit_softcapping = 2.0
    save_block(head, tmp_path / "block")
    found = load_block(tmp_path / "block").bound(model).logits_of(hidden)
    torch.testing.assert_close(found, 2 * (model.get_output_embeddings()(hidden) / 2).tanh())
    model = scaled("granite")
    save_eagle(EagleHead.for_target(model), tmp_path)
    for training, scale in ((None, 1 / 8), ({"steps": 3}, 1.0), ({"steps": 3, "scaled_output": True}, 1 / 8)):
        if training is not None:
            (tmp_path / "training.json").write_text(json.dumps(training))
        found = load_eagle(tmp_path).bound(model).lm_head(hidden)
        torch.testing.assert_close(found, model.get_output_embeddings()(hidden) * scale)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["granite", "hyperclovax"])
def test_medusa_heads_without_output_layers_have_the_targets_with_its_scale(kind: str) -> None:
    model, hidden = scaled(kind), torch.randn(3, 32)
    heads, new = MedusaHeads(num_heads=2, num_layers=1, hidden_size=32, vocab_size=0), medusa_heads(model)
    for parameter in heads.parameters():
        parameter.zero_()
    new.begin_as(output_of(model))
    for made in (heads.completed(output_of(model)), new):
        torch.testing.assert_close(made.output(1)(hidden), output_of(model)(hidden))


def changed(folder: Path, **keys: Any) -> None:
    """Change keys of a ``config.json``, or of the part of it that describes layers."""
    whole = json.loads((folder / "config.json").read_text())
    part = whole.get("transformer_layer_config", whole)
    part.pop("rope_theta", None)
    part |= keys
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("layout", ["EAGLE", "native", "speculators"])
def test_windows_of_layers_are_followed_and_a_bare_window_is_not(layout: str, tmp_path: Path) -> None:
    model = tiny_model(layers=8)
    head = EagleHead.for_target(model) if layout == "EAGLE" else Eagle3Head.for_target(model)
    served = {"served": ServedFor(target="x")} if layout == "speculators" else {}
    save_eagle(head, tmp_path, layout="native" if layout == "EAGLE" else layout, **served)
    ids, features = torch.arange(30)[None], torch.randn(1, 30, head.feature_width)
    places = torch.arange(30)
    near = (places[:, None] >= places) & (places[:, None] - places < 8)
    mask = torch.zeros(30, 30).masked_fill(~near, -1e30)[None, None]
    for kinds, window in ((["sliding_attention"], 8), (["full_attention"], None), (None, None)):
        changed(tmp_path, sliding_window=8, layer_types=kinds)
        bound = load_eagle(tmp_path).bound(model)
        with torch.no_grad():
            whole = bound(ids, features=features).logits
            seen = bound(ids, features=features, attention_mask=mask).logits
        assert torch.allclose(whole, seen, atol=1e-4) == (window is not None)
        runner = ModelRunner(bound, max_batch_size=1, max_length=30)
        assert {reach.window for reach in runner.facts.distinct_reaches} == {window}
    changed(tmp_path, layer_types=["sliding_attention"], sliding_window=None)
    with pytest.raises(ValueError, match="sliding_window"):
        load_eagle(tmp_path)


NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE-3", "block"])
def test_rotary_embeddings_are_those_of_the_layers_kind(kind: str, tmp_path: Path) -> None:
    save, load = (save_block, load_block) if kind == "block" else (save_eagle, load_eagle)
    save(HEADS[kind](tiny_model(layers=8)), tmp_path, layout="native")
    for rope, theta in ((NESTED, 1e6), ({"rope_theta": 5e5, "rope_type": "default"}, 5e5)):
        changed(tmp_path, rope_parameters=rope)
        assert load(tmp_path).config.rope_parameters["rope_theta"] == theta
    if kind == "EAGLE-3":
        changed(tmp_path, rope_parameters=NESTED, layer_types=[*NESTED])
        with pytest.raises(ValueError, match="rotary embeddings of their own"):
            load(tmp_path)


def test_heads_begin_as_a_quantized_output_layer_and_borrow_it() -> None:
    model = tiny_model(layers=8).requires_grad_(False)
    quantize(model, "int4", check=False)
    output: Any = model.get_output_embeddings()
    head = Eagle3Head.for_target(model)
    take_output(head, Target(model))
    torch.testing.assert_close(head.lm_head.weight.data, output.dequantized())
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(Borrowed(output_of(model))(hidden), output(hidden))
