"""Medusa: the public layouts, drafts from the last hidden state, and reduced vocabularies."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.heads.last_state import LastStateDrafter
from drafters.medusa import MedusaDrafter, MedusaHeads, TrainedMedusa
from specdec import Sizes, Target
from specdec.drafting.scored import ScoredSession
from tests.drafters.agreeing import PROMPTS, agreements
from tests.forwards import outcome_of
from tests.models import tiny_model

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


def random_heads(num_heads: int = 3, **settings: Any) -> MedusaHeads:
    heads = MedusaHeads(num_heads=num_heads, hidden_size=HIDDEN, vocab_size=VOCAB, base_model="some/base", **settings)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval()


Written = dict[str, Tensor]


def as_native(heads: MedusaHeads, prefix: str = "") -> Written:
    return {prefix + name.removeprefix("heads."): tensor.clone() for name, tensor in heads.state_dict().items()}


def written(heads: MedusaHeads, block: str, output: str) -> Written:
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
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(4, 4)} | tensors
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DISTINCT = {"num_layers": 2, "shared": False}
WRITTEN: dict[str, tuple[dict[str, Any], Callable[[MedusaHeads], Written], str]] = {
    "distinct": (DISTINCT, as_native, "medusa_lm_head"),
    "modelopt": ({}, partial(as_native, prefix="medusa_heads."), "in shards"),
    "trained as a whole": ({}, partial(as_native, prefix="medusa_head."), "in shards"),
    "tensorrt-llm": (DISTINCT, as_tensorrt, "rank0"),
    "vllm": (DISTINCT, as_vllm, "model"),
    "vllm with a prefix": (DISTINCT | {"bias": False}, partial(as_vllm, prefix="medusa_heads."), "model"),
    "our vllm": ({"num_heads": 2, "num_layers": 2}, as_vllm, "layout=vllm"),
    "our own": ({"num_heads": 2, "num_layers": 2}, as_native, "layout=native"),
    "our own, 5 of 1": ({"num_heads": 5, "num_layers": 1}, as_native, "layout=native"),
    "our own, 2 of 0": ({"num_heads": 2, "num_layers": 0}, as_native, "layout=native"),
}
"""Settings of heads, their tensors, and the file in which others write them; or the layout that this project writes."""
CONFIGS = {
    "our own": {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "some/base"},
    "our vllm": {
        "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 2,
        "medusa_fc_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_every_layout_gives_the_heads_that_were_written(name: str, tmp_path: Path) -> None:
    settings, tensors_of, file = WRITTEN[name]
    heads = random_heads(**settings)
    tensors = tensors_of(heads)
    if file.startswith("layout="):
        heads.save_pretrained(tmp_path, layout=file.removeprefix("layout="))
        (stored,) = map(load_file, tmp_path.glob("*.safetensors"))
        assert stored.keys() == tensors.keys() and all(torch.equal(stored[each], tensors[each]) for each in tensors)
        config = json.loads((tmp_path / "config.json").read_text())
        assert name not in CONFIGS or config == {"hidden_size": HIDDEN, "vocab_size": VOCAB} | CONFIGS[name]
    elif file == "in shards":
        in_shards(tensors, tmp_path)
    else:
        save_file(tensors, tmp_path / f"{file}.safetensors")
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
    assert name != "our own" or loaded.base_model == heads.base_model
    assert loaded.shared == (heads.shared or heads.num_layers < 2) and loaded.bias == heads.bias


@torch.no_grad()
@pytest.mark.parametrize("rows", ["those of the map", "all"])
def test_a_reduced_vocabulary_drafts_its_tokens_alone(target: Target, rows: str, tmp_path: Path) -> None:
    heads, chosen = random_heads(shared=False), torch.tensor([40, 3, 17, 60, 9])
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
