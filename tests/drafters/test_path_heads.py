"""Heads that read the path above a node, Hydra and ReDrafter: their laws token by token, layouts and training."""

import json
from collections.abc import Callable
from functools import partial
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


def prefixed(model: PreTrainedModel, num_layers: int) -> HydraHeads:
    heads = hydra_heads(model, num_layers=num_layers, prefix=True)
    for name, parameter in heads.prefix.named_parameters():  # type: ignore[union-attr]
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return heads


HEADS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "hydra": partial(hydra_heads, num_layers=2),
    "hydra++": partial(prefixed, num_layers=2),
    "redrafter": recurrent_head,
    "without a network": partial(recurrent_head, rnn=False),
    "with an exit": partial(recurrent_head, exit_size=48),
    "without layers": partial(recurrent_head, num_layers=0),
}
RECURRENT = list(HEADS)[2:]


def hydra_logits(weights: dict[str, Tensor], state: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
    """The paper's formula for the children of a path from the root on."""
    head, output = len(path) - 1, f"hydra_lm_head.{len(path) - 1}."
    x = torch.cat([state, *(embeddings[token] for token in path)])
    names = sorted({name.rsplit(".", 2)[0] for name in weights if name.startswith(f"hydra_mlp.{head}.")})
    for name in dict.fromkeys(name.removesuffix(".res_connection").removesuffix(".linear") for name in names):
        z = x @ weights[f"{name}.linear.weight"].T + weights[f"{name}.linear.bias"]
        if f"{name}.res_connection.weight" in weights:
            x = x @ weights[f"{name}.res_connection.weight"].T + weights[f"{name}.res_connection.bias"]
        x = x + z * torch.sigmoid(z)
    output += "1." if f"{output}1.weight" in weights else ""  # behind a dropout
    return x @ weights[f"{output}weight"].T + weights[f"{output}bias"]


def recurrent_logits(weights: dict[str, Tensor], hidden: Tensor, embeddings: Tensor, path: list[int]) -> Tensor:
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


def through_prefix(heads: HydraHeads, states: Tensor) -> Tensor:
    weights = pairs.under(named(heads.state_dict(), NAMES), "prefix_embeding_layer.")
    layer, config = pairs.under(weights, "layers.0."), heads.prefix.config  # type: ignore[union-attr]
    norm = partial(pairs.norm, eps=config.rms_norm_eps)
    normed = norm(states, layer["input_layernorm.weight"])
    x = states + pairs.attention(normed, pairs.under(layer, "self_attn."), config)
    x = x + pairs.mlp(norm(x, layer["post_attention_layernorm.weight"]), pairs.under(layer, "mlp."))
    return norm(x, weights["norm.weight"])


def law_of(head: Any, model: PreTrainedModel, read: Callable[[Tensor], Tensor] | None = None) -> Law:
    """A head's law; ``read`` is what it makes of the states of a sequence, by default what it should."""
    weights, slowly, embeddings = head.state_dict(), recurrent_logits, model.get_input_embeddings().weight
    if isinstance(head, HydraHeads):
        weights, slowly = named(weights, NAMES), hydra_logits
        read = partial(through_prefix, head) if read is None and head.prefix is not None else read

    def law(states: Tensor, path: list[int]) -> Tensor:
        return slowly(weights, (states if read is None else read(states))[-1], embeddings, path).softmax(-1)

    return law


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_every_node_has_the_law_of_its_own_path(target: Target, name: str) -> None:
    """And, with prefix attention, of what a dense forward over all states makes of them."""
    head = HEADS[name](target.model)

    def agreeing(tree: Any, read: Callable[[Tensor], Tensor] | None = None, shift: int = 0) -> list[bool]:
        kind = HydraDrafter if isinstance(head, HydraHeads) else ReDrafter
        drafter = kind(head, tree, sampling="without_replacement")
        assert drafter.laws == {DraftSampling.WITHOUT_REPLACEMENT}
        return matching(target, drafter, law_of(head, target.model, read), shift=shift)

    found = agreeing([3, 2, 1])
    assert all(found) and len(found) > 40
    # The mutants: other tokens above a node; plain Hydra's states; and a layer that sees the last state alone.
    assert sum(agreeing(2, shift=1)) < len(found) / 10
    if name == "hydra++":
        for wrong in (lambda states: states, lambda states: through_prefix(head, states[-1:])):
            assert sum(agreeing(2, wrong)) < len(found) / 10


@torch.no_grad()
@pytest.mark.parametrize("name", ["hydra", "hydra++", "redrafter"])
def test_it_is_trained_as_it_is_served(target: Target, name: str) -> None:
    """Over packed documents, which do not see each other."""
    prefix = {"prefix_attention": True, "dropout": 0.2} if name == "hydra++" else {}
    head: Any = TrainedRecurrent(depths=3) if name == "redrafter" else TrainedHydra(depths=3, num_layers=2, **prefix)
    head.begin(target, None)
    head.head.load_state_dict(HEADS[name](target.model).state_dict())
    law = law_of(head.head, target.model)
    assert compared(head.eval(), lambda states, tokens: law(states, tokens).log()) > 20


def beams(law: Law, states: Tensor, root: int, width: int, depth: int) -> set[tuple[int, ...]]:
    """The beginnings of all beams of a search among nine tokens, one beam after another."""
    found = [((root,), 0.0)]
    for _ in range(depth):
        offers = []
        for path, worth in found:
            chance = law(states, list(path))
            kept = chance.where(chance >= chance.topk(9).values[-1], 0.0)
            logs = (kept / kept.sum()).log()
            offers += [((*path, token), worth + float(logs[token])) for token in range(VOCAB)]
        found = sorted(offers, key=lambda offer: -offer[1])[:width]
    return {path[1:end] for path, _ in found for end in range(2, len(path) + 1)}


@torch.no_grad()
def test_the_tree_is_what_a_beam_search_ends_with(target: Target) -> None:
    """Every row ends where it has room; common beginnings of beams stand once."""
    head, depths, counts = recurrent_head(target.model), (4, 2, 3), (4, 2, 1)
    law = law_of(head, target.model)
    hidden = torch.randn(3, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    session = begun(target, ReDrafter(head, BeamSearchTree(5, 4, among=9)), hidden, [*counts])
    sizes = set()
    for temperature in (0.0, 1.0):
        batch = slots_of(
            [[0, 5], [0, 6], [0, 7]], vocab_size=VOCAB, max_length=50, max_depth=depths,
            params=[SamplingParams(temperature=temperature)] * 3,
        )  # fmt: skip
        tree = drafted(session, batch)
        assert tree.draft_probs is None and (tree.law == int(DraftSampling.DETERMINISTIC)).all()
        for row, (count, depth) in enumerate(zip(counts, depths, strict=True)):
            paths = [tuple(path[1:]) for path in node_paths(tree, row).values()]
            wanted = beams(law, hidden[row, :count], 5 + row, 5, depth)
            assert len(set(paths)) == len(paths), "siblings are distinct"
            assert set(paths) - {()} == wanted
            assert wanted != beams(law, hidden[row, :count], 5 + row, 4, depth), "the mutant: other beams"
            sizes.add(len(wanted))
    assert len(sizes) > 1


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_a_hydra_checkpoint_comes_back_as_it_was(target: Target, prefix: bool, tmp_path: Path) -> None:
    """With the tensors that published files hold besides; and without sizes, which are the target's then."""
    heads = (prefixed if prefix else hydra_heads)(target.model, num_layers=3)
    heads.save_pretrained(tmp_path)
    file, config = tmp_path / "hydra_lm_head.safetensors", tmp_path / "config.json"
    tensors, stored = load_file(file), json.loads(config.read_text())
    last = ("1.5", "2.1") if prefix else ("1.2", "2")
    assert tensors[f"hydra_mlp.1.{int(prefix)}.res_connection.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert {f"hydra_mlp.{last[0]}.linear.bias", f"hydra_lm_head.{last[1]}.bias"} <= set(tensors)
    tensors["input_embed_fn.weight"] = torch.zeros(VOCAB, HIDDEN)
    if prefix:
        assert "prefix_embeding_layer.norm.weight" in tensors
        assert stored["hydra_head_arch"] == "prefix-mlp" and stored["num_attention_heads"] == 4
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = 1e4 ** -(torch.arange(4) / 4)
    save_file(tensors, file)
    seen: list[list[object]] = []
    for keys in (stored.keys(), [key for key in stored if not prefix or "hydra" in key or key == "grounded_heads"]):
        config.write_text(json.dumps({key: stored[key] for key in keys}))
        again = HydraDrafter.from_pretrained(tmp_path, shape=[2, 2, 1])
        assert again.heads.num_layers == 3
        assert_same(again.heads, heads)
        seen.append([])
        with Engine(target, again, RejectionVerifier(), max_length=40) as engine:
            engine.on_round = lambda round: seen[-1].append(round.tree.tokens.tolist())
            engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=12))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_checkpoint_comes_back_as_it_was(target: Target, name: str, tmp_path: Path) -> None:
    head = HEADS[name](target.model)
    head.save_pretrained(tmp_path)
    tensors, stored = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert set(tensors) == {
        *(f"lm_head.{i}.linear.{part}" for i in range(head.num_layers) for part in ("weight", "bias")),
        f"lm_head.{head.num_layers}.weight",
        *(("rnn_u.weight", "rnn_u.bias", "rnn_w.weight") if head.rnn else ()),
        *(("input_proj.weight", "input_proj.bias") if name == "with an exit" else ()),
    }
    assert stored["model_type"] == "recurrent_drafting_drafter"
    assert stored["exit_dim"] == (48 if name == "with an exit" else 64)
    (tmp_path / "config.json").write_text(json.dumps({"num_draft_layers": 7, "rnn": not head.rnn}))
    again = ReDrafter.from_pretrained(tmp_path)
    assert again.max_nodes == 40 and again.max_depth == 4
    assert_same(again.heads, head)
