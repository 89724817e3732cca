"""Hydra's and Hydra++'s heads: what is drafted from which states and path, the public layouts, and the training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from drafters.heads.assemble import named
from drafters.heads.prefix import PrefixAttention
from drafters.heads.training import Anchors, TargetStates, TextBatch
from drafters.hydra import NAMES, HydraDrafter, HydraHeads, TrainedHydra
from specdec.engine.engine import Engine
from specdec.interfaces import Round, Sizes
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import hydra_heads
from tests.drafters import pairs
from tests.forwards import drafted, inner_paths, outcome_of, slots_of
from tests.models import tiny_model
from tests.shapes import shapes_unchecked
from verifiers import RejectionVerifier

HIDDEN, VOCAB = 32, 64


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB))


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


@torch.no_grad()
def test_every_node_is_scored_from_its_own_path(target: Target) -> None:
    """The path's tokens count: with others above it, a node's law is another one."""
    heads = hydra_heads(target.model, num_layers=2)
    weights, embeddings = named(heads.state_dict(), NAMES), target.model.get_input_embeddings().weight
    drafter = HydraDrafter(heads, [3, 2, 2], sampling="without_replacement")
    session = drafter.bind(target, Sizes(max_batch_size=2, max_length=50))
    hidden = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    session.observe(outcome_of(torch.zeros(2, 4, dtype=torch.long), [4, 2], hidden_states={-1: hidden}))
    sampling = [SamplingParams(temperature=1.0)] * 2
    tree = drafted(session, slots_of([[0, 5], [0, 6]], vocab_size=VOCAB, max_length=50, params=sampling))
    assert tree.draft_probs is not None
    apart, compared = 0.0, 0
    for row, state in enumerate((hidden[0, 3], hidden[1, 1])):
        for node, path in inner_paths(tree, row).items():
            wanted = law(weights, state, embeddings, path)
            torch.testing.assert_close(tree.draft_probs[row, node], wanted, rtol=1e-4, atol=1e-5)
            others = [(token + 1) % VOCAB for token in path]
            apart = max(apart, float((law(weights, state, embeddings, others) - wanted).abs().sum()))
            compared += 1
    assert compared == 2 * (1 + 3 + 6) and apart > 0.1


def test_a_hydra_checkpoint_comes_back_as_it_was(target: Target, tmp_path: Path) -> None:
    heads = hydra_heads(target.model, num_layers=3)
    heads.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "hydra_lm_head.safetensors")
    assert tensors["hydra_mlp.1.0.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert "hydra_mlp.1.2.linear.bias" in tensors and "hydra_lm_head.2.bias" in tensors
    save_file(tensors | {"input_embed_fn.weight": torch.zeros(VOCAB, HIDDEN)}, tmp_path / "hydra_lm_head.safetensors")
    again = HydraDrafter.from_pretrained(tmp_path).heads
    assert again.num_layers == 3
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_training_predicts_what_the_drafter_does(target: Target) -> None:
    """The trained head's logits at a text's own tokens are the heads' over the same path."""
    head = TrainedHydra(depths=3, num_layers=2)
    head.begin(target, None)
    head.head.load_state_dict(hydra_heads(target.model, num_layers=2).state_dict())
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), torch.arange(9)[None])
    hidden = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
    anchors = Anchors.everywhere(batch, 3)
    found = head(batch, TargetStates({-1: hidden}, torch.nn.Identity()), anchors)
    embeddings = target.model.get_input_embeddings().weight
    for row, root in enumerate(anchors.index.tolist()):
        for depth in range(int(anchors.valid[row].sum())):
            joined = torch.cat([hidden[0, root - 1], *embeddings[tokens[0, root : root + depth + 1]]])
            mine = head.logits(found.states[depth][row : row + 1], tokens[0, root + depth][None], depth + 1)[0]
            torch.testing.assert_close(mine, head.head(joined, depth), rtol=1e-4, atol=1e-5)


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


def agreements(target: Target, heads: HydraHeads, weights: dict[str, Tensor], read: Read, tree: object) -> list[bool]:
    """Whether q is the paper's formula at every node of every round: ragged rows, refilled slots, prompts in chunks."""
    model, found = target.model, []
    embeddings = model.get_input_embeddings().weight

    def look(seen: Round) -> None:
        if seen.tree.draft_probs is None:
            return
        for row, request in enumerate(seen.requests):
            if request is None or not seen.tree.valid[row, 1:].any():
                continue
            known = [*request.prompt_ids, *request.output_ids]
            state = read(model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0])[-1]
            for node, path in inner_paths(seen.tree, row).items():
                wanted = law(weights, state, embeddings, path)
                found.append(torch.allclose(seen.tree.draft_probs[row, node], wanted, atol=2e-4, rtol=0))

    drafter = HydraDrafter(heads, tree, sampling="without_replacement")  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10)
    prompts = [[1, 2, 3, 1, 2, 5, 9, 4, 7], [5], [6, 2], [3, 3, 8, 1, 4, 20, 11]]
    with Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=48, prefill_chunk=4) as engine:
        engine.on_round = look
        with shapes_unchecked(), torch.inference_mode():
            engine.generate(prompts, sampling)
    return found


@torch.no_grad()
def test_prefix_attention_is_that_of_a_dense_forward_over_all_states(target: Target) -> None:
    heads = prefixed(target.model, num_layers=2)
    assert heads.prefix is not None
    weights, config = named(heads.state_dict(), NAMES), heads.prefix.config
    found = agreements(target, heads, weights, lambda states: prefix_slowly(weights, config, states), [2, 2])
    assert all(found) and len(found) > 40
    # The mutants: plain Hydra's states, and a layer that sees the last state alone.
    for wrong in (lambda states: states, lambda states: prefix_slowly(weights, config, states[-1:])):
        assert sum(agreements(target, heads, weights, wrong, 2)) < len(found) / 10


@torch.no_grad()
def test_a_prefixed_checkpoint_comes_back_as_it_was(target: Target, tmp_path: Path) -> None:
    """Also with the tensors that published files hold besides, and without sizes: they are the target's then."""
    heads = prefixed(target.model, num_layers=3)
    heads.save_pretrained(tmp_path)
    file, config = tmp_path / "hydra_lm_head.safetensors", tmp_path / "config.json"
    tensors, stored = load_file(file), json.loads(config.read_text())
    assert tensors["hydra_mlp.1.1.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert {"hydra_mlp.1.5.linear.bias", "hydra_lm_head.2.1.bias", "prefix_embeding_layer.norm.weight"} <= set(tensors)
    assert stored["hydra_head_arch"] == "prefix-mlp" and stored["num_attention_heads"] == 4
    for key in ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight"):
        tensors[key] = torch.zeros(VOCAB, HIDDEN)
    tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file)
    public = {key: value for key, value in stored.items() if "hydra" in key or key == "grounded_heads"}
    drafts = []
    for said in (stored, public):
        config.write_text(json.dumps(said))
        again = HydraDrafter.from_pretrained(tmp_path, shape=[2, 2, 1])
        assert again.heads.num_layers == 3
        for name, tensor in heads.state_dict().items():
            assert torch.equal(again.heads.state_dict()[name], tensor), name
        with Engine(target, again, RejectionVerifier(), max_length=40) as engine:
            seen: list[object] = []
            engine.on_round = lambda round, seen=seen: seen.append(round.tree.tokens.tolist())
            engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=12))
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    wider = Target(tiny_model("qwen3", vocab_size=VOCAB), name="other")
    with pytest.raises(ValueError, match=r"q_proj has 32 channels and the configuration of other calls for 64"):
        HydraDrafter.from_pretrained(tmp_path).bind(wider, Sizes(max_batch_size=1, max_length=32))


@torch.no_grad()
def test_prefix_attention_is_trained_as_it_is_served(target: Target) -> None:
    """Over packed documents, which do not see each other."""
    head = TrainedHydra(depths=3, prefix_attention=True, dropout=0.2)
    head.begin(target, None)
    head.head.load_state_dict(prefixed(target.model).state_dict())
    head.eval()
    tokens = torch.randint(VOCAB, (1, 14), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 8 + [1] * 6])
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), documents, positions)
    hidden = torch.randn(1, 14, HIDDEN, generator=torch.Generator().manual_seed(2))
    anchors = Anchors.everywhere(batch, 3)
    found = head(batch, TargetStates({-1: hidden}, torch.nn.Identity()), anchors)
    weights, embeddings = named(head.head.state_dict(), NAMES), target.model.get_input_embeddings().weight
    compared = 0
    for row, root in enumerate(anchors.index.tolist()):
        first = 0 if root < 8 else 8
        state = prefix_slowly(weights, head.head.prefix.config, hidden[0, first:root])[-1]
        for depth in range(int(anchors.valid[row].sum())):
            mine = head.logits(found.states[depth][row : row + 1], tokens[0, root + depth][None], depth + 1)[0]
            wanted = law(weights, state, embeddings, tokens[0, root : root + depth + 1].tolist())
            torch.testing.assert_close(mine.softmax(-1), wanted, rtol=1e-3, atol=1e-5)
            compared += 1
    assert compared > 20


def test_a_new_layer_changes_nothing_but_the_length(target: Target) -> None:
    states = torch.randn(1, 5, HIDDEN)
    made = PrefixAttention.for_target(target.model).model(inputs_embeds=states).last_hidden_state
    torch.testing.assert_close(torch.cosine_similarity(made, states, dim=-1), torch.ones(1, 5))
