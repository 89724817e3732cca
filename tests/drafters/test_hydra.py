"""Hydra's and Hydra++'s heads: what is drafted from which states and path, the public layouts, and the training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafters.heads.assemble import named
from drafters.hydra import NAMES, HydraDrafter, HydraHeads, TrainedHydra
from specdec import Engine, SamplingParams, Sizes, Target
from tests.components import hydra_heads
from tests.drafters import pairs
from tests.drafters.agreeing import agreements, compared
from tests.models import tiny_model
from verifiers import RejectionVerifier

HIDDEN, VOCAB = 32, 64


def law(weights: dict[str, Tensor], state: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
    """The paper's formula for the children of a path from the root on, with weights by their public names."""
    head, output = len(path) - 1, f"hydra_lm_head.{len(path) - 1}."
    x = torch.cat([state, *(embeddings[token] for token in path)])
    names = sorted({name.rsplit(".", 2)[0] for name in weights if name.startswith(f"hydra_mlp.{head}.")})
    for name in dict.fromkeys(name.removesuffix(".res_connection").removesuffix(".linear") for name in names):
        z = x @ weights[f"{name}.linear.weight"].T + weights[f"{name}.linear.bias"]
        if f"{name}.res_connection.weight" in weights:
            x = x @ weights[f"{name}.res_connection.weight"].T + weights[f"{name}.res_connection.bias"]
        x = x + z * torch.sigmoid(z)
    output += "1." if f"{output}1.weight" in weights else ""  # behind a dropout
    return (x @ weights[f"{output}weight"].T + weights[f"{output}bias"]).softmax(-1)


def prefixed(model: PreTrainedModel, num_layers: int = 1) -> HydraHeads:
    """Heads whose prefix attention changes the states."""
    heads = hydra_heads(model, num_layers=num_layers, prefix=True)
    for name, parameter in heads.prefix.named_parameters():  # type: ignore[union-attr]
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return heads


def prefix_slowly(weights: dict[str, Tensor], config: object, states: Tensor) -> Tensor:
    """The layer over all states of a sequence, with weights by their public names."""
    weights = pairs.under(weights, "prefix_embeding_layer.")
    layer, eps, x = pairs.under(weights, "layers.0."), config.rms_norm_eps, states  # type: ignore[attr-defined]
    x = x + pairs.attention(
        pairs.norm(x, layer["input_layernorm.weight"], eps), pairs.under(layer, "self_attn."), config
    )
    x = x + pairs.mlp(pairs.norm(x, layer["post_attention_layernorm.weight"], eps), pairs.under(layer, "mlp."))
    return pairs.norm(x, weights["norm.weight"], eps)


Read = Callable[[Tensor], Tensor]
"""From the target's last states of a sequence to what heads read, position by position."""


def matching(target: Target, heads: HydraHeads, read: Read, tree: Any, *, shift: int = 0) -> list[bool]:
    """Whether q is the paper's formula at every node of every round, for other tokens with a ``shift``."""
    weights, embeddings = named(heads.state_dict(), NAMES), target.model.get_input_embeddings().weight

    def after(known: list[int], path: list[int]) -> Tensor:
        states = target.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        return law(weights, read(states)[-1], embeddings, [(token + shift) % VOCAB for token in path])

    found, _ = agreements(target, HydraDrafter(heads, tree, sampling="without_replacement"), after)
    return [same for _, same in found]


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_every_node_is_scored_from_its_own_path(target: Target, prefix: bool) -> None:
    """And, with prefix attention, from what a dense forward over all states makes of them."""
    heads = prefixed(target.model, num_layers=2) if prefix else hydra_heads(target.model, num_layers=2)
    weights = named(heads.state_dict(), NAMES)

    def through(states: Tensor) -> Tensor:
        return prefix_slowly(weights, heads.prefix.config, states) if prefix else states

    found = matching(target, heads, through, [3, 2, 1])
    assert all(found) and len(found) > 40
    # The mutants: other tokens above a node; plain Hydra's states; and a layer that sees the last state alone.
    assert sum(matching(target, heads, through, 2, shift=1)) < len(found) / 10
    for wrong in (lambda states: states, lambda states: through(states[-1:])) if prefix else ():
        assert sum(matching(target, heads, wrong, 2)) < len(found) / 10


def written(heads: HydraHeads, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of a checkpoint, and its tensors, with those that published files hold besides."""
    heads.save_pretrained(folder)
    file = folder / "hydra_lm_head.safetensors"
    tensors = load_file(file)
    return file, tensors | {"input_embed_fn.weight": torch.zeros(VOCAB, HIDDEN)}


def test_a_checkpoint_comes_back_as_it_was(target: Target, tmp_path: Path) -> None:
    heads = hydra_heads(target.model, num_layers=3)
    file, tensors = written(heads, tmp_path)
    assert tensors["hydra_mlp.1.0.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert "hydra_mlp.1.2.linear.bias" in tensors and "hydra_lm_head.2.bias" in tensors
    save_file(tensors, file)
    assert_same(HydraDrafter.from_pretrained(tmp_path).heads, heads)


def assert_same(found: HydraHeads, wanted: HydraHeads) -> None:
    assert found.num_layers == 3
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@torch.no_grad()
def test_a_prefixed_checkpoint_comes_back_as_it_was(target: Target, tmp_path: Path) -> None:
    """Also with the tensors that published files hold besides, and without sizes: they are the target's then."""
    heads = prefixed(target.model, num_layers=3)
    (file, tensors), config = written(heads, tmp_path), tmp_path / "config.json"
    stored = json.loads(config.read_text())
    assert tensors["hydra_mlp.1.1.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert {"hydra_mlp.1.5.linear.bias", "hydra_lm_head.2.1.bias", "prefix_embeding_layer.norm.weight"} <= set(tensors)
    assert stored["hydra_head_arch"] == "prefix-mlp" and stored["num_attention_heads"] == 4
    tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    turns = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[turns] = 1e4 ** -(torch.arange(4) / 4)
    save_file(tensors, file)
    public = {key: value for key, value in stored.items() if "hydra" in key or key == "grounded_heads"}
    drafts = []
    for said in (stored, public):
        config.write_text(json.dumps(said))
        again = HydraDrafter.from_pretrained(tmp_path, shape=[2, 2, 1])
        assert_same(again.heads, heads)
        with Engine(target, again, RejectionVerifier(), max_length=40) as engine:
            seen: list[object] = []
            engine.on_round = lambda round, seen=seen: seen.append(round.tree.tokens.tolist())
            engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=12))
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    tensors[turns] = 5e3 ** -(torch.arange(4) / 4)
    save_file(tensors, file)
    own: Any = HydraDrafter.from_pretrained(tmp_path).heads.prefix
    assert own.stated_for(target).config.rope_parameters["rope_theta"] == pytest.approx(5e3)
    wider = Target(tiny_model("qwen3", vocab_size=VOCAB), name="other")
    with pytest.raises(ValueError, match=r"q_proj has 32 channels and the configuration of other calls for 64"):
        HydraDrafter.from_pretrained(tmp_path).bind(wider, Sizes(max_batch_size=1, max_length=32))


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_it_is_trained_as_it_is_served(target: Target, prefix: bool) -> None:
    """Over packed documents, which do not see each other."""
    head = TrainedHydra(depths=3, num_layers=2, prefix_attention=prefix, dropout=0.2 * prefix)
    head.begin(target, None)
    made = prefixed(target.model, num_layers=2) if prefix else hydra_heads(target.model, num_layers=2)
    head.head.load_state_dict(made.state_dict())
    weights, embeddings = named(head.head.state_dict(), NAMES), target.model.get_input_embeddings().weight

    def logarithms(states: Tensor, tokens: list[int]) -> Tensor:
        read = prefix_slowly(weights, head.head.prefix.config, states) if prefix else states
        return law(weights, read[-1], embeddings, tokens).log()

    assert compared(head.eval(), logarithms) > 20
