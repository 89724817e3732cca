"""An inflated model computes the same function: the logits and hidden states of the model that it was made of."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.inflate import describe, inflate, place_heads, resolve_shape
from specdec.llama_shapes import SHAPES, LlamaShape
from specdec.target.target import Target
from tests.models import tiny_model

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)
SMALL: dict[str, Any] = dict(zip(SIZES, (32, 2, 4, 2, 8, 40), strict=True)) | {
    "vocab_size": 48, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LARGER = LlamaShape(**dict(zip(SIZES, (96, 4, 12, 6, 8, 112), strict=True)))


def shape(**changes: int) -> LlamaShape:
    return LlamaShape(**{name: changes.get(name, getattr(LARGER, name)) for name in vars(LARGER)})


def small(*, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A Llama whose every weight matters: norms that are not 1, attention that looks around, biases that are not 0."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | changes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
        else:
            parameter.data.mul_(10.0 if "embed" in name else 6.0)
    return model


@torch.inference_mode()
def outputs(model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    found = model(tokens, output_hidden_states=True)
    return found.logits, found.hidden_states[-1]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SOURCES: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large epsilon": {"rms_norm_eps": 0.5},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": 4},
    "llama3 rope": {"rope_parameters": LLAMA3},
}
GOALS = {
    "larger": LARGER,
    "its own key-value heads": shape(num_key_value_heads=12),
    "wider groups": shape(num_attention_heads=24, num_key_value_heads=4),
    "four times as wide heads": shape(head_dim=32, num_key_value_heads=12),
    "the same but for layers": LlamaShape(**dict(zip(SIZES, (32, 3, 4, 4, 8, 40), strict=True))),
}


@pytest.mark.parametrize(
    ("source", "goal"), [*(("untied", goal) for goal in GOALS), *((source, "larger") for source in list(SOURCES)[1:])]
)
def test_same_logits(source: str, goal: str) -> None:
    model = small(**SOURCES[source])
    before = copy.deepcopy(model.state_dict())
    larger = inflate(model, GOALS[goal])
    for name, value in vars(GOALS[goal]).items():
        assert getattr(larger.config, name) == value
    assert larger.lm_head.weight.shape == (48, GOALS[goal].hidden_size)
    assert (larger.lm_head.weight is larger.model.embed_tokens.weight) == (source == "tied")
    logits, hidden = outputs(model)
    wide_logits, wide_hidden = outputs(larger)
    # Logits are of the order of 10; the sums only have other groupings.
    torch.testing.assert_close(wide_logits, logits, atol=2e-4, rtol=2e-5)
    torch.testing.assert_close(wide_hidden[..., :32], hidden, atol=2e-5, rtol=2e-5)
    assert not wide_hidden[..., 32:].any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the given model was changed"


@pytest.mark.parametrize("forgotten", ["norm", "epsilon", "scores", "frequencies", "heads"])
def test_every_compensation_is_needed(forgotten: str) -> None:
    """The mutants of the test above: without one of the compensations the logits are visibly others."""
    model = small(rms_norm_eps=0.05)
    goal = shape(head_dim=16, num_key_value_heads=12)
    larger = inflate(model, goal)
    if forgotten == "norm":
        larger.model.norm.weight.data.mul_(3**0.5)
    elif forgotten == "epsilon":
        for module in larger.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= 3
    elif forgotten == "scores":
        larger.model.layers[0].self_attn.q_proj.weight.data.div_(2**0.5)
    elif forgotten == "frequencies":
        larger.model.rotary_emb.inv_freq.copy_(larger.model.rotary_emb.inv_freq.roll(1))
    else:
        keys = larger.model.layers[0].self_attn.k_proj.weight.data
        keys.copy_(keys.roll(16, dims=0))
    assert (outputs(larger)[0] - outputs(model)[0]).abs().max() > 0.05


def test_named_shapes_are_llama_shapes() -> None:
    for name in SHAPES:
        goal = resolve_shape(name)
        assert resolve_shape(LlamaConfig(**vars(goal))) == goal == resolve_shape(vars(goal))
        assert place_heads(4, 2, goal.num_attention_heads, goal.num_key_value_heads) is not None
        assert describe(name) == name


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("7b", "110m, 1b, 8b"),
        ({"hidden_size": 64}, "exactly the numbers hidden_size, "),
        (shape(hidden_size=24), "hidden_size is 32, .* 24"),
        (shape(num_hidden_layers=1), "num_hidden_layers is 2, .* 1"),
        (shape(head_dim=12), "multiple of that width, not of 12"),
        (shape(num_key_value_heads=1), "give the shape more key-value heads"),
        (shape(num_key_value_heads=5), "divide num_attention_heads"),
    ],
)
def test_what_does_not_fit_is_refused(goal: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inflate(small(), goal)


def test_models_that_cannot_be_inflated_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen2"):
        inflate(tiny_model("qwen2"), LARGER)
    with pytest.raises(ValueError, match="give one of 110m"):  # before it is loaded
        Target.from_pretrained("/no/such/model", inflate="7b")
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 32}
    model = small(rope_parameters=rope)
    with pytest.raises(ValueError, match="yarn RoPE depends on the head's width"):
        inflate(model, shape(head_dim=16))
    torch.testing.assert_close(outputs(inflate(model, LARGER))[0], outputs(model)[0], atol=2e-4, rtol=2e-5)
