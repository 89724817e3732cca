"""Heads that read the path above a node, Hydra and ReDrafter: their laws token by token, layouts and training."""

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
from drafters.redrafter import ReDrafter, TrainedRecurrent
from specdec import DraftSampling, Engine, SamplingParams, Target
from specdec.drafting.builders import BeamSearchTree
from tests.components import hydra_heads, recurrent_head
from tests.drafters import pairs
from tests.drafters.agreeing import compared
from tests.drafters.folders import assert_same
from tests.drafters.test_last_state import HIDDEN, VOCAB, Law, begun, matching
from tests.forwards import drafted, node_paths, slots_of
from verifiers import RejectionVerifier


def hydra_law(weights: dict[str, Tensor], state: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
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


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_every_node_is_scored_from_its_own_path(target: Target, prefix: bool) -> None:
    """And, with prefix attention, from what a dense forward over all states makes of them."""
    heads = prefixed(target.model, num_layers=2) if prefix else hydra_heads(target.model, num_layers=2)
    weights, embeddings = named(heads.state_dict(), NAMES), target.model.get_input_embeddings().weight

    def through(states: Tensor) -> Tensor:
        return prefix_slowly(weights, heads.prefix.config, states) if prefix else states

    def agreeing(tree: Any, read: Callable[[Tensor], Tensor], shift: int = 0) -> list[bool]:
        drafter = HydraDrafter(heads, tree, sampling="without_replacement")
        law: Law = lambda states, path: hydra_law(weights, read(states)[-1], embeddings, path)  # noqa: E731
        return matching(target, drafter, law, shift=shift)

    found = agreeing([3, 2, 1], through)
    assert all(found) and len(found) > 40
    # The mutants: other tokens above a node; plain Hydra's states; and a layer that sees the last state alone.
    assert sum(agreeing(2, through, 1)) < len(found) / 10
    for wrong in (lambda states: states, lambda states: through(states[-1:])) if prefix else ():
        assert sum(agreeing(2, wrong)) < len(found) / 10


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_a_hydra_checkpoint_comes_back_as_it_was(target: Target, prefix: bool, tmp_path: Path) -> None:
    """With the tensors that published files hold besides; and without sizes, which are the target's then."""
    heads = prefixed(target.model, num_layers=3) if prefix else hydra_heads(target.model, num_layers=3)
    heads.save_pretrained(tmp_path)
    file, config = tmp_path / "hydra_lm_head.safetensors", tmp_path / "config.json"
    tensors, stored = load_file(file), json.loads(config.read_text())
    last = ("1.5", "2.1") if prefix else ("1.2", "2")
    assert tensors[f"hydra_mlp.1.{int(prefix)}.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert {f"hydra_mlp.{last[0]}.linear.bias", f"hydra_lm_head.{last[1]}.bias"} <= set(tensors)
    tensors["input_embed_fn.weight"] = torch.zeros(VOCAB, HIDDEN)
    turns = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
    if prefix:
        assert "prefix_embeding_layer.norm.weight" in tensors
        assert stored["hydra_head_arch"] == "prefix-mlp" and stored["num_attention_heads"] == 4
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
        tensors[turns] = 1e4 ** -(torch.arange(4) / 4)
    save_file(tensors, file)
    public = {key: value for key, value in stored.items() if "hydra" in key or key == "grounded_heads"}
    drafts = []
    for said in (stored, public) if prefix else (stored,):
        config.write_text(json.dumps(said))
        again = HydraDrafter.from_pretrained(tmp_path, shape=[2, 2, 1])
        assert again.heads.num_layers == 3
        assert_same(again.heads, heads)
        with Engine(target, again, RejectionVerifier(), max_length=40) as engine:
            seen: list[object] = []
            engine.on_round = lambda round, seen=seen: seen.append(round.tree.tokens.tolist())
            engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=12))
        drafts.append(seen)
    assert drafts[0] == drafts[-1]


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_is_trained_as_it_is_served(target: Target, prefix: bool) -> None:
    """Over packed documents, which do not see each other."""
    head = TrainedHydra(depths=3, num_layers=2, prefix_attention=prefix, dropout=0.2 * prefix)
    head.begin(target, None)
    made = prefixed(target.model, num_layers=2) if prefix else hydra_heads(target.model, num_layers=2)
    head.head.load_state_dict(made.state_dict())
    weights, embeddings = named(head.head.state_dict(), NAMES), target.model.get_input_embeddings().weight

    def logarithms(states: Tensor, tokens: list[int]) -> Tensor:
        read = prefix_slowly(weights, head.head.prefix.config, states) if prefix else states
        return hydra_law(weights, read[-1], embeddings, tokens).log()

    assert compared(head.eval(), logarithms) > 20


# ReDrafter

KINDS = [{}, {"rnn": False}, {"exit_size": 48}, {"num_layers": 0}]


def recurrent_law(weights: dict[str, Tensor], hidden: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
    """The logits of the children of a path from the root on, with weights by their public names."""
    state = torch.zeros(HIDDEN)
    for token in path:
        if "rnn_w.weight" in weights:
            z = embeddings[token] @ weights["rnn_w.weight"].T + state @ weights["rnn_u.weight"].T
            z = z + weights["rnn_u.bias"]
            state = z * torch.sigmoid(z)
        else:
            state = state + embeddings[token]
    x, layer = torch.cat([hidden, state]), 0
    if "input_proj.weight" in weights:
        x = x @ weights["input_proj.weight"].T + weights["input_proj.bias"]
    while f"lm_head.{layer}.linear.weight" in weights:
        z = x @ weights[f"lm_head.{layer}.linear.weight"].T + weights[f"lm_head.{layer}.linear.bias"]
        x, layer = x + z * torch.sigmoid(z), layer + 1
    return x @ weights[f"lm_head.{layer}.weight"].T


def beams(score: Callable[[list[int]], Tensor], root: int, width: int, depth: int, among: int) -> set[tuple[int, ...]]:
    """The beginnings of all beams of a search, one beam after another."""
    found = [((root,), 0.0)]
    for _ in range(depth):
        offers = []
        for path, worth in found:
            logits = score(list(path))
            kept = logits >= logits.topk(among).values[-1]
            logs = logits.where(kept, -torch.inf).log_softmax(-1)
            offers += [((*path, token), worth + float(logs[token])) for token in range(VOCAB)]
        found = sorted(offers, key=lambda offer: -offer[1])[:width]
    return {path[1:end] for path, _ in found for end in range(2, len(path) + 1)}


@torch.no_grad()
def test_the_tree_is_what_a_beam_search_ends_with(target: Target) -> None:
    """Every row ends where it has room; common beginnings of beams stand once."""
    head = recurrent_head(target.model)
    weights, embeddings = head.state_dict(), target.model.get_input_embeddings().weight
    hidden = torch.randn(3, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    session = begun(target, ReDrafter(head, BeamSearchTree(5, 4, among=9)), hidden, [4, 2, 1])
    sizes = set()
    for temperature in (0.0, 1.0):
        batch = slots_of(
            [[0, 5], [0, 6], [0, 7]], vocab_size=VOCAB, max_length=50, max_depth=[4, 2, 3],
            params=[SamplingParams(temperature=temperature)] * 3,
        )  # fmt: skip
        tree = drafted(session, batch)
        assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
        for row, (state, depth) in enumerate(zip((hidden[0, 3], hidden[1, 1], hidden[2, 0]), (4, 2, 3), strict=True)):
            paths = [tuple(path[1:]) for path in node_paths(tree, row).values()]

            def score(path: list[int], state: Tensor = state) -> Tensor:
                return recurrent_law(weights, state, embeddings, path)

            wanted = beams(score, 5 + row, 5, depth, 9)
            assert len(set(paths)) == len(paths), "siblings are distinct"
            assert set(paths) - {()} == wanted
            assert wanted != beams(score, 5 + row, 4, depth, 9), "the mutant: other beams"
            sizes.add(len(wanted))
    assert len(sizes) > 1


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_drawn_from_the_law_of_its_own_path(target: Target, kind: dict[str, object]) -> None:
    head = recurrent_head(target.model, **kind)
    weights, embeddings = head.state_dict(), target.model.get_input_embeddings().weight
    law: Law = lambda states, path: recurrent_law(weights, states[-1], embeddings, path).softmax(-1)  # noqa: E731
    drafter = ReDrafter(head, [2, 2, 1], sampling="without_replacement")
    assert drafter.laws == {DraftSampling.WITHOUT_REPLACEMENT}
    found = matching(target, drafter, law)
    assert all(found) and len(found) > 40
    assert sum(matching(target, drafter, law, shift=1)) < len(found) / 10, "the mutant: other tokens above a node"


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_as_it_was(target: Target, kind: dict[str, object], tmp_path: Path) -> None:
    head = recurrent_head(target.model, **kind)
    head.save_pretrained(tmp_path)
    tensors, stored = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layers = head.num_layers
    assert set(tensors) == {
        *(f"lm_head.{i}.linear.{part}" for i in range(layers) for part in ("weight", "bias")),
        f"lm_head.{layers}.weight",
        *(("rnn_u.weight", "rnn_u.bias", "rnn_w.weight") if head.rnn else ()),
        *(("input_proj.weight", "input_proj.bias") if "exit_size" in kind else ()),
    }
    assert stored["model_type"] == "recurrent_drafting_drafter" and stored["exit_dim"] == kind.get("exit_size", 64)
    (tmp_path / "config.json").write_text(json.dumps({"num_draft_layers": 7, "rnn": not head.rnn}))
    again = ReDrafter.from_pretrained(tmp_path)
    assert again.max_nodes == 40 and again.max_depth == 4
    assert_same(again.heads, head)


@torch.no_grad()
def test_it_is_trained_as_it_is_served(target: Target) -> None:
    head = TrainedRecurrent(depths=3)
    head.begin(target, None)
    head.head.load_state_dict(recurrent_head(target.model).state_dict())
    weights, embeddings = head.head.state_dict(), target.model.get_input_embeddings().weight
    law = lambda states, tokens: recurrent_law(weights, states[-1], embeddings, tokens).log_softmax(-1)  # noqa: E731
    assert compared(head, law) > 20
