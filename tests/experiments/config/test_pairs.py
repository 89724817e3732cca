"""Well-known pairs: each is composed, and two are made with stand-ins for their files.

No test goes to the hub. A stand-in has the pair's own ``config.json``, as far as its authors' repositories and
publications give it, and tiny tensors under the published names; the numbers below are from the same sources.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from experiments.config.pairs import check_reachable, overrides_of
from experiments.config.sections import CONF, build, component_of
from experiments.exporting.kinds import kind_of
from experiments.reporting.table import Column, Table
from specdec.target.target import Target
from specdec.types import DraftSampling

Configure = Callable[..., DictConfig]
PAGE = CONF.parent / "docs" / "training.md"
PAIRS = sorted(path.stem for path in (CONF / "pair").glob("*.yaml"))
WIDTH, HEADS, DIM = 8, 2, 4
LAYERS = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM}
"""The stand-ins' sizes."""


def layer(prefix: str, *, joined: int = WIDTH, qwen: bool = False) -> dict[str, Tensor]:
    """A decoder layer whose projections read so many channels."""
    found = {f"self_attn.{name}_proj.weight": torch.zeros(WIDTH, joined) for name in "qkv"}
    found |= {"self_attn.o_proj.weight": torch.zeros(WIDTH, WIDTH)}
    found |= {f"mlp.{name}_proj.weight": torch.zeros(WIDTH, WIDTH) for name in ("gate", "up", "down")}
    found["post_attention_layernorm.weight"] = torch.ones(WIDTH)
    if qwen:
        found |= {f"self_attn.{name}_norm.weight": torch.ones(DIM) for name in "qk"}
    return {prefix + name: tensor for name, tensor in found.items()}


def eagle3(*, vocab: int, columns: int) -> dict[str, Tensor]:
    found = layer("midlayer.", joined=2 * WIDTH)
    found |= {f"midlayer.{name}.weight": torch.ones(WIDTH) for name in ("hidden_norm", "input_layernorm")}
    found |= {"fc.weight": torch.zeros(WIDTH, 3 * WIDTH), "norm.weight": torch.ones(WIDTH)}
    found |= {"lm_head.weight": torch.zeros(columns, WIDTH), "d2t": torch.zeros(columns, dtype=torch.long)}
    return found | {"t2d": torch.arange(vocab) < columns}


def block(*, rank: int, vocab: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index in range(5):
        prefix = f"layers.{index}."
        found |= layer(prefix, qwen=True) | {f"{prefix}input_layernorm.weight": torch.ones(WIDTH)}
    found |= {"fc.weight": torch.zeros(WIDTH, 5 * WIDTH)}
    found |= {f"{name}.weight": torch.ones(WIDTH) for name in ("hidden_norm", "norm")}
    found |= {f"markov_head.markov_w{number}.weight": torch.zeros(vocab, rank) for number in (1, 2)}
    found["confidence_head.proj.weight"] = torch.zeros(1, WIDTH + rank)
    found["confidence_head.proj.bias"] = torch.zeros(1)
    return found | {f"{name}.weight": torch.zeros(vocab, WIDTH) for name in ("embed_tokens", "lm_head")}


LLAMA3 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 1,
          "rms_norm_eps": 1e-05, "draft_vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-06, "rope_theta": 1000000}
DSPARK = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
    "block_size": 7, "mask_token_id": 151669, "enable_confidence_head": True, "confidence_head_with_markov": True,
    "markov_rank": 256, "markov_head_type": "vanilla", "num_anchors": 512, "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
}  # fmt: skip
EVENLY_36 = (2, 10, 18, 26, 34)  # outputs 1, 9, 17, 25, 33
KNOWN: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "llama31_8b_eagle3": (
        LLAMA3,
        lambda: eagle3(vocab=128256, columns=32000),
        {"layers": (2, 16, 29), "vocab": 128256, "columns": 32000, "nodes": 59},
    ),
    "qwen3_8b_dspark": (
        DSPARK,
        lambda: block(rank=256, vocab=151936),
        {"layers": EVENLY_36, "nodes": 7, "mask": 151669, "vocab": 151936, "markov": (256, "vanilla")},
    ),
}
"""The drafter's ``config.json``, tiny tensors under its names, and numbers that the drafter has then."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_resolves_to_constructor_arguments(name: str, configure: Configure) -> None:
    config = configure("check_drafter" if name.endswith("_mtp") else "run", f"pair={name}", "drafter.temperature=0.5")
    assert component_of(config, "drafter")[1]["temperature"] == 0.5
    assert component_of(config, "target")[0].__self__ is Target
    names = [config.target.name, *([] if name.endswith("_mtp") else [config.drafter.name])]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", each) for each in names)
    assert overrides_of(CONF / "pair" / f"{name}.yaml").keys() == {"target", "drafter"}
    first, second, *_ = (CONF / "pair" / f"{name}.yaml").read_text().splitlines()
    assert first == "# @package _global_" and second.startswith("# ") and second.endswith(".")


@pytest.mark.parametrize("name", KNOWN)
def test_a_pair_drafts_as_its_files_say(name: str, configure: Configure, tmp_path: Path) -> None:
    config, tensors, facts = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps({**config, **LAYERS}))
    save_file(tensors(), tmp_path / "model.safetensors")
    drafter: Any = build(configure("run", f"pair={name}", f"drafter.name={tmp_path}"), "drafter")
    eagle = "eagle" in name
    assert (drafter.sampling is DraftSampling.IID) != eagle
    own, target = drafter.head.config, SimpleNamespace(num_layers=32)
    found = {
        "vocab": own.vocab_size,
        "layers": drafter.layers_for(drafter.head, target) if eagle else drafter.hidden_layers,
        "nodes": drafter.max_nodes,
        "columns": len(drafter.head.draft_ids) if eagle else None,
        "mask": None if eagle else drafter.mask_token_id,
        "markov": None if eagle else (own.markov_rank, own.markov_head_type),
    }
    assert {key: found[key] for key in facts} == facts


def test_a_module_in_the_targets_own_files_is_found(configure: Configure, tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj")
    save_file({f"model.layers.61.{name}.weight": torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert kind_of(str(tmp_path)) == "mtp"
    config = configure("run", "pair=deepseek_v3_mtp")
    assert config.drafter.name is None and build(config, "drafter").max_nodes == 3


def test_a_pair_that_is_not_here_says_how_it_is_downloaded(configure: Configure, saved: Path) -> None:
    """Tests are offline: a hub that is asked says so at once."""
    check_reachable("mine", [str(saved / "target"), str(saved / "eagle")])
    config = configure("run", "pair=llama31_8b_eagle3")
    with pytest.raises(ValueError, match="are not on this machine, and the hub cannot be reached") as caught:
        check_reachable("llama31_8b_eagle3", [config.target.name, config.drafter.name])
    assert "'hf download yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'" in str(caught.value) and "\n" not in str(caught.value)


def test_the_documentation_lists_every_pair() -> None:
    table = Table([Column(title, "left") for title in ("`pair=`", "target", "drafter", "what it is")])
    for path in sorted((CONF / "pair").glob("*.yaml")):
        given: Any = OmegaConf.to_container(OmegaConf.load(path))
        kind = overrides_of(path)["drafter"]
        head = (given.get("drafter") or {}).get("name")
        note = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ").removesuffix(".")
        shown = f"`{kind}`: {head}" if head else f"`{kind}`, in the target's files"
        table.add(f"`{path.stem}`", given["target"]["name"], shown, note)
    assert table.markdown() in PAGE.read_text()
