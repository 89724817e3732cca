"""Medusa, Hydra, Hydra++ and ReDrafter: the public layouts, drafts from the last hidden state, and the training."""

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
from drafters.heads.last_state import LastStateDrafter
from drafters.hydra import NAMES, HydraDrafter, HydraHeads, TrainedHydra
from drafters.medusa import MedusaDrafter, MedusaHeads, TrainedMedusa
from drafters.redrafter import ReDrafter, TrainedRecurrent
from specdec import DraftSampling, Engine, SamplingParams, Sizes, Target
from specdec.drafting.builders import BeamSearchTree
from specdec.drafting.scored import ScoredSession
from tests.components import hydra_heads, recurrent_head
from tests.drafters import pairs
from tests.drafters.agreeing import PROMPTS, agreements, compared
from tests.drafters.folders import assert_same
from tests.forwards import drafted, node_paths, outcome_of, slots_of
from tests.models import tiny_model
from verifiers import RejectionVerifier

HIDDEN, VOCAB = 32, 64


def begun(target: Target, drafter: LastStateDrafter, hidden: Tensor, counts: list[int]) -> ScoredSession:
    """A session that was told of committed tokens, with these hidden states."""
    session = drafter.bind(target, Sizes(max_batch_size=len(hidden), max_length=50))
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    session.observe(outcome_of(tokens, counts, hidden_states={-1: hidden}))
    return session


Law = Callable[[Tensor, list[int]], Tensor]
"""From the target's last states of a sequence, and a path from the root on, to what may follow it."""


def matching(target: Target, drafter: LastStateDrafter, law: Law, *, shift: int = 0) -> list[bool]:
    """Whether q is a law at every node of every round, for other tokens with a ``shift``."""

    def after(known: list[int], path: list[int]) -> Tensor:
        states = target.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        return law(states, [(token + shift) % VOCAB for token in path])

    return [same for _, same in agreements(target, drafter, after, prompts=PROMPTS[:3])[0]]


# Medusa


def random_heads(num_heads: int = 3, *, vocab_size: int = VOCAB, **settings: Any) -> MedusaHeads:
    heads = MedusaHeads(
        num_heads=num_heads, hidden_size=HIDDEN, vocab_size=vocab_size, base_model="some/base", **settings
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval()


def distinct(num_layers: int = 2, **settings: Any) -> MedusaHeads:
    """Heads whose blocks differ."""
    return random_heads(num_layers=num_layers, shared=False, **settings)


Written = dict[str, Tensor]


def as_native(heads: MedusaHeads, prefix: str = "") -> Written:
    return {prefix + name.removeprefix("heads."): tensor.clone() for name, tensor in heads.state_dict().items()}


def written(heads: MedusaHeads, block: str, output: str) -> Written:
    """Tensors by the names that two patterns say."""
    made: Written = {}
    for name, tensor in heads.state_dict().items():
        _, head, layer, *rest = name.split(".")
        pattern = block if rest[0] == "linear" else output
        made[pattern.format(head=head, layer=layer, part=rest[-1])] = tensor.clone()
    return made


def as_tensorrt(heads: MedusaHeads) -> Written:
    begin = "medusa_heads.{head}."
    made = written(heads, begin + "medusa_layers.{layer}.linear.{part}", begin + "lm_head.weight")
    return made | {"transformer.vocab_embedding.weight": torch.zeros(VOCAB, HIDDEN)}


def as_vllm(heads: MedusaHeads, prefix: str = "") -> Written:
    return written(heads, prefix + "blocks.{head}.layers.{layer}.{part}", prefix + "lm_heads.{head}.weight")


def in_shards(tensors: Written, folder: Path) -> None:
    """Two files and their index, with the target's tensors among them."""
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(4, 4)} | tensors
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OURS = ((5, 1), (2, 0))
"""Heads and blocks of each in our own layout."""


@pytest.mark.parametrize(
    ("heads", "write"),
    [
        (distinct(), lambda heads, to: save_file(as_native(heads), to / "medusa_lm_head.safetensors")),
        (random_heads(), lambda heads, to: in_shards(as_native(heads, "medusa_heads."), to)),  # modelopt
        (random_heads(), lambda heads, to: in_shards(as_native(heads, "medusa_head."), to)),  # trained as a whole
        (distinct(), lambda heads, to: save_file(as_tensorrt(heads), to / "rank0.safetensors")),
        (distinct(), lambda heads, to: save_file(as_vllm(heads), to / "model.safetensors")),
        (distinct(bias=False), lambda heads, to: save_file(as_vllm(heads, "medusa_heads."), to / "model.safetensors")),
        (random_heads(2, num_layers=2), lambda heads, to: heads.save_pretrained(to, layout="vllm")),
        *((random_heads(count, num_layers=layers), MedusaHeads.save_pretrained) for count, layers in OURS),
    ],
    ids=[
        "distinct", "modelopt", "whole", "tensorrt-llm", "vllm", "vllm with a prefix", "our vllm",
        *(f"our own, {count} of {layers}" for count, layers in OURS),
    ],
)  # fmt: skip
@torch.no_grad()
def test_every_layout_gives_the_heads_that_were_written(
    heads: MedusaHeads, write: Callable[[MedusaHeads, Path], object], tmp_path: Path
) -> None:
    write(heads, tmp_path)
    loaded, hidden = MedusaHeads.from_pretrained(tmp_path), torch.randn(4, HIDDEN)
    assert torch.equal(loaded(hidden), heads(hidden)) and torch.equal(loaded(hidden, 1), heads(hidden)[:1])
    sizes = ("num_heads", "num_layers", "hidden_size", "vocab_size")
    assert all(getattr(loaded, name) == getattr(heads, name) for name in sizes)
    for head in loaded.heads:  # the paper's formula, with a block that layers may share
        wanted = hidden
        for block in list(head)[:-1]:
            bias = block.linear.bias if heads.bias else 0
            wanted = wanted + torch.nn.functional.silu(wanted @ block.linear.weight.T + bias)
        assert not loaded.shared or len({id(block) for block in list(head)[:-1]}) <= 1
        torch.testing.assert_close(head(hidden), wanted @ head[-1].weight.T)
    assert loaded.shared == (heads.shared or heads.num_layers < 2) and loaded.bias == heads.bias


NATIVE = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "some/base"}
VLLM = {
    "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 2,
    "medusa_fc_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "file", "named", "settings"),
    [("native", "medusa_lm_head", as_native, NATIVE), ("vllm", "model", as_vllm, VLLM)],
)
def test_layouts_are_written_with_their_names_and_settings(
    layout: str, file: str, named: Callable[[MedusaHeads], Written], settings: dict[str, Any], tmp_path: Path
) -> None:
    heads = random_heads(2, num_layers=2)
    heads.save_pretrained(tmp_path, layout=layout)
    stored, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / f"{file}.safetensors")
    wanted = named(heads)
    assert tensors.keys() == wanted.keys() and all(tensors[name].shape == wanted[name].shape for name in wanted)
    assert stored == {"hidden_size": HIDDEN, "vocab_size": VOCAB} | settings
    assert layout != "native" or MedusaHeads.from_pretrained(tmp_path).base_model == "some/base"


@torch.no_grad()
@pytest.mark.parametrize("rows", ["those of the map", "all"])
def test_a_reduced_vocabulary_drafts_its_tokens_alone(target: Target, rows: str, tmp_path: Path) -> None:
    heads, chosen = distinct(1), torch.tensor([40, 3, 17, 60, 9])
    tensors = as_vllm(heads) | {"token_map": chosen}
    if rows != "all":
        tensors |= {name: each[chosen].clone() for name, each in tensors.items() if name.startswith("lm_heads.")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "truncated_vocab_size": 5}))
    drafter = MedusaDrafter.from_pretrained(tmp_path, shape=2, sampling="iid")

    def law(states: Tensor, path: list[int]) -> Tensor:
        columns = heads.heads[len(path) - 1](states[-1])[chosen].softmax(-1)
        return torch.zeros(VOCAB).scatter_(0, chosen, columns)

    found = matching(target, drafter, law)
    assert all(found) and len(found) > 20
    drafter.heads.save_pretrained(tmp_path / "again", layout="vllm")
    again = MedusaHeads.from_pretrained(tmp_path / "again")
    assert again.draft_ids.tolist() == sorted(chosen.tolist())
    hidden = torch.randn(3, HIDDEN)
    torch.testing.assert_close(again(hidden), drafter.heads(hidden))
    with pytest.raises(ValueError, match="give layout='vllm'"):
        drafter.heads.save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match="heads have 61 tokens and the target small has 48"):
        drafter.bind(Target(tiny_model(vocab_size=48), name="small"), Sizes(max_batch_size=1, max_length=32))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["version 2", "lm_head", "lm_heads.0"])
def test_one_output_layer_serves_all_heads(target: Target, layout: str, tmp_path: Path) -> None:
    """The target's, in version 2; stored once where vLLM's ``original_lm_head`` says so."""
    weight = target.model.get_output_embeddings().weight
    heads = random_heads(num_layers=2)
    for head in heads.heads:
        head[-1].weight.copy_(weight)
    if layout == "version 2":
        tensors = {name: tensor for name, tensor in as_native(heads).items() if "linear" in name}
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"version": "2"}))
    else:
        tensors = {name: tensor for name, tensor in as_vllm(heads).items() if not name.startswith("lm_heads.")}
        save_file(tensors | {f"{layout}.weight": weight.clone()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"original_lm_head": True}))
    drafter = MedusaDrafter.from_pretrained(tmp_path, shape=[2, 2], sampling="without_replacement")
    assert drafter.heads.vocab_size == (0 if layout == "version 2" else VOCAB)
    found = matching(target, drafter, lambda states, path: heads.heads[len(path) - 1](states[-1]).softmax(-1))
    assert all(found) and len(found) > 30
    assert not target.model.get_output_embeddings().weight.grad and heads.heads[0][-1].weight.requires_grad
    if layout == "version 2":
        drafter.heads.save_pretrained(tmp_path / "again")
        assert set(load_file(tmp_path / "again" / "medusa_lm_head.safetensors")) == set(tensors)
        assert json.loads((tmp_path / "again" / "config.json").read_text())["version"] == "2"
        trained = TrainedMedusa(name=str(tmp_path), depths=3)
        trained.begin(target, None)
        trained.head.heads[0][-1].weight.add_(1.0)
        assert torch.equal(target.model.get_output_embeddings().weight, weight), "training leaves the target alone"
        with pytest.raises(ValueError, match="which is quantized here"):
            drafter.heads.completed(torch.nn.Identity())


def test_the_caller_s_heads_stay_as_they_are(target: Target) -> None:
    """They may be in training, and a second target may want them in another dtype."""
    heads = random_heads().double().train()
    heads(torch.randn(1, HIDDEN).double()).sum().backward()
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in heads.parameters()]
    session = begun(target, MedusaDrafter(heads, (2, 2)), torch.randn(3, 1, HIDDEN), [1, 1, 1])
    assert drafted(session, slots_of([[0, 1]] * 3, vocab_size=VOCAB, max_length=50)).width > 1
    assert heads.training and all(module.training for module in heads.modules())
    for now, (parameter, value, gradient) in zip(heads.parameters(), before, strict=True):
        assert now is parameter and now.requires_grad and now.grad is gradient is not None
        assert now.dtype is torch.float64 and torch.equal(now, value)
    assert all(p.grad is None and not p.requires_grad for p in session.models[0].parameters())


# Hydra and Hydra++


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
