"""MTP modules: found by name in a model's own files, made like the target's layers, and refused with a reason."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafters.heads.mtp import MTPHead, load_mtp, save_mtp
from drafters.mtp import MTPDrafter
from specdec import Engine, SamplingParams, Sizes, Target
from specdec.target.loading import load_model
from tests.architectures import tiny
from tests.components import wide
from tests.drafters.folders import logits
from tests.models import tiny_model
from verifiers import RejectionVerifier

VOCAB = 64
TARGETS = {
    "gemma3": lambda: tiny_model("gemma3", vocab_size=VOCAB),  # norms of 1 + weight, sliding layers
    "deepseek": lambda: tiny("deepseek_v3"),  # latent attention, a dense layer and others of experts
    # recurrent layers between the attention layers, of whose kind the module is; norms of 1 + weight
    "qwen3_next": lambda: tiny("qwen3_next"),
    "qwen3_5_text": lambda: tiny("qwen3_5_text"),
}


def head_of(target: PreTrainedModel, **options: bool) -> MTPHead:
    head = wide(MTPHead.for_target(target, **options), 1.5)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return head


def as_deepseek(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """A module under DeepSeek's names, one tensor per expert, with copies of embeddings and output layer."""
    parts = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
    parts |= {"norm.": "shared_head.norm.", "layers.0.": ""}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix("mtp.")
        old = next(old for old in parts if inner.startswith(old))
        found[f"model.layers.{layer}.{parts[old]}{inner.removeprefix(old)}"] = tensor
    return apart(found)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        begin, experts, part = name.partition("mlp.experts.")
        if not experts:
            found[name] = tensor
            continue
        for expert, both in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for each, one in zip(names, both.chunk(len(names)), strict=True):
                found[f"{begin}{experts}{expert}.{each}.weight"] = one.clone()
    return found


@pytest.mark.parametrize(("name", "hidden_first"), [("gemma3", True), ("deepseek", False), ("qwen3_next", False)])
def test_a_module_comes_back_as_it_was(name: str, hidden_first: bool, tmp_path: Path) -> None:
    target = TARGETS[name]()
    head = head_of(target, hidden_first=hidden_first, before_norm=hidden_first)
    save_mtp(head, tmp_path)
    again = load_mtp(tmp_path, target=target)
    assert again.before_norm == hidden_first
    torch.testing.assert_close(logits(again, target), logits(head, target))


def test_a_module_is_found_in_the_targets_own_shards(tmp_path: Path) -> None:
    """Under DeepSeek's names, behind the target's last layer, in the second place of two."""
    target = tiny("deepseek_v3")
    layers = target.config.num_hidden_layers
    heads = [head_of(target) for _ in range(2)]
    heads[1].model.proj.weight.data.mul_(-1.0)  # type: ignore[union-attr]
    target.save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    for number, head in enumerate(heads):
        folder = tmp_path / f"module{number}"
        save_mtp(head, folder)
        tensors = as_deepseek(load_file(folder / "model.safetensors"), layers + number)
        save_file(tensors, tmp_path / f"mtp{number}.safetensors")
        listing["weight_map"] |= dict.fromkeys(tensors, f"mtp{number}.safetensors")
    index.write_text(json.dumps(listing))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    for number, head in enumerate(heads):
        drafter = MTPDrafter.from_pretrained(module=number)
        drafter.bind(Target(loaded), Sizes(max_batch_size=1, max_length=32))
        read = drafter.head_for(Target(loaded))
        assert isinstance(read, MTPHead)
        torch.testing.assert_close(logits(read, target), logits(head, target))
    with pytest.raises(ValueError, match="has no MTP module 2"):
        load_mtp(tmp_path, target=loaded, module=2)


def test_a_hybrids_module_is_found_beside_it_under_qwens_names(tmp_path: Path) -> None:
    """One tensor per expert, in a folder that the target is loaded from, which leaves the module out."""
    target = TARGETS["qwen3_next"]()
    head = head_of(target)
    save_mtp(head, tmp_path / "module")
    tensors = apart(load_file(tmp_path / "module" / "model.safetensors"))
    assert {"mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"} <= set(tensors)
    target.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, **tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = Target(load_model(str(tmp_path), dtype="float32"))
    read = MTPDrafter.from_pretrained().head_for(loaded)
    torch.testing.assert_close(logits(read, target), logits(head, target))


@pytest.mark.parametrize("name", ["deepseek", "qwen3_5_text"])
def test_greedy_outputs_are_the_targets(name: str) -> None:
    """With experts and latent attention, and with recurrent layers."""
    target, prompts, sampling = TARGETS[name](), [[*range(1, 10)], [5, 9]], SamplingParams(max_new_tokens=16)
    drafter = MTPDrafter(head_of(target), [2, 1])
    with Engine(Target(target), drafter, RejectionVerifier(), max_batch_size=2, max_length=48) as engine:
        outputs, plain = (engine.generate(prompts, sampling, speculate=each) for each in (True, False))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_before_the_norm_is_the_state_before_the_norm_up_to_a_factor() -> None:
    """Also for a norm that multiplies by 1 + weight; others: ``test_pairs.py``."""
    target, state = TARGETS["gemma3"](), torch.randn(3, 5, 32)
    norm = target.get_decoder().norm
    norm.weight.data.uniform_(0.2, 0.9)
    ratio = head_of(target, before_norm=True).bound(target).fuse([norm(state)]) / state
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    """Qwen's names share a prefix among modules: layers of others are left out, and one that is missing is named."""
    target = tiny_model(vocab_size=VOCAB, layers=2)
    save_mtp(head_of(target), tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"no MTP module 1: it has \[0\]"):
        load_mtp(tmp_path, target=target, module=1)
    tensors = load_file(file)
    second = {key.replace("layers.0", "layers.1"): each + 1 for key, each in tensors.items() if "layers.0" in key}
    save_file(tensors | second, file)
    first, other = (load_mtp(tmp_path, target=target, module=module).state_dict() for module in (0, 1))
    assert first.keys() == other.keys()
    for key, value in first.items():
        torch.testing.assert_close(other[key], value + 1 if ".layers.0." in key else value, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"a jamba model's layers fit no MTP module .*: use another drafter"):
        MTPHead(tiny("jamba"))
