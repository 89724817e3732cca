"""Well-known pairs: each is composed, made with stand-ins for its files, and checked against what is known of these.

No test goes to the hub. A stand-in has the pair's own ``config.json``, as far as its authors' repositories and
publications give it, and tiny tensors under the published names; the numbers below are from the same sources.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from drafters.block import BlockDrafter
from drafters.eagle import EagleDrafter
from drafters.heads.eagle import EagleHead
from drafters.heads.eagle3 import Eagle3Head
from drafters.medusa import DEFAULT_SHAPE, MedusaDrafter
from drafters.mtp import MTPDrafter
from experiments.config import pairs
from experiments.config.pairs import check_reachable, overrides_of
from experiments.config.sections import CONF, build, component_of
from experiments.exporting.kinds import kind_of
from experiments.reporting.table import Column, Table
from specdec.drafting.builders import ExpansionTree, StaticTree
from specdec.interfaces import Drafter
from specdec.target.target import Target
from specdec.tree import TreeShape
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


def eagle1() -> dict[str, Tensor]:
    fc = {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "fc.bias": torch.zeros(WIDTH)}
    return fc | layer("layers.0.")


def eagle3(
    *, states: int = 3, vocab: int, columns: int | None, first: str = "midlayer.", qwen: bool = False
) -> dict[str, Tensor]:
    found = layer(first, joined=2 * WIDTH, qwen=qwen)
    found |= {f"{first}{name}.weight": torch.ones(WIDTH) for name in ("hidden_norm", "input_layernorm")}
    found |= {"fc.weight": torch.zeros(WIDTH, states * WIDTH), "norm.weight": torch.ones(WIDTH)}
    found["lm_head.weight"] = torch.zeros(columns or vocab, WIDTH)
    if columns is not None:
        found["d2t"] = torch.zeros(columns, dtype=torch.long)
        found["t2d"] = torch.arange(vocab) < columns
    return found


def block(*, layers: int = 5, states: int = 5, rank: int = 0, vocab: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for index in range(layers):
        prefix = f"layers.{index}."
        found |= layer(prefix, qwen=True) | {f"{prefix}input_layernorm.weight": torch.ones(WIDTH)}
    found |= {"fc.weight": torch.zeros(WIDTH, states * WIDTH)}
    found |= {f"{name}.weight": torch.ones(WIDTH) for name in ("hidden_norm", "norm")}
    if rank:
        found["markov_head.markov_w1.weight"] = torch.zeros(vocab, rank)
        found["markov_head.markov_w2.weight"] = torch.zeros(vocab, rank)
        found["confidence_head.proj.weight"] = torch.zeros(1, WIDTH + rank)
        found["confidence_head.proj.bias"] = torch.zeros(1)
        found |= {f"{name}.weight": torch.zeros(vocab, WIDTH) for name in ("embed_tokens", "lm_head")}
    return found


def medusa(*, heads: int, vocab: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for head in range(heads):
        found[f"{head}.0.linear.weight"] = torch.zeros(WIDTH, WIDTH)
        found[f"{head}.0.linear.bias"] = torch.zeros(WIDTH)
        found[f"{head}.1.weight"] = torch.zeros(vocab, WIDTH)
    return found


def mtp(at: int) -> dict[str, Tensor]:
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj")
    return {f"model.layers.{at}.{name}.weight": torch.zeros(1) for name in names}


@dataclass(frozen=True)
class Known:
    """What is known of a pair.

    Attributes:
        config: The drafter's ``config.json``, or of the target for a module that ships with it.
        tensors: Makes tiny tensors under its names.
        drafter: The class.
        facts: Numbers that the drafter has then.
        layers: The target's layers, where the drafter's files leave it to them.
    """

    config: Mapping[str, Any]
    tensors: Callable[[], dict[str, Tensor]]
    drafter: type[Drafter]
    facts: Mapping[str, Any] = field(default_factory=dict)
    layers: int | None = None


LLAMA3 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 1,
          "rms_norm_eps": 1e-05, "draft_vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip
VICUNA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 1,
          "max_position_embeddings": 2048, "rms_norm_eps": 1e-06}  # fmt: skip
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-06, "rope_theta": 1000000}
DSPARK = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5,
    "block_size": 7, "mask_token_id": 151669, "enable_confidence_head": True, "confidence_head_with_markov": True,
    "markov_rank": 256, "markov_head_type": "vanilla", "num_anchors": 512,
}  # fmt: skip
LLAMA3_EAGLE3: dict[str, Any] = {"vocab": 128256, "columns": 32000}
EVENLY_36 = (2, 10, 18, 26, 34)  # outputs 1, 9, 17, 25, 33


def dspark(layers: int, outputs: tuple[int, ...]) -> Known:
    config = DSPARK | {"num_target_layers": layers, "target_layer_ids": list(outputs)}
    facts = {"layers": tuple(each + 1 for each in outputs), "tokens": 7, "mask": 151669, "vocab": 151936}
    make = lambda: block(rank=256, vocab=151936)  # noqa: E731
    return Known(config, make, BlockDrafter, facts | {"markov": (256, "vanilla"), "confidence": True})


def dflash(layers: int, outputs: list[int] | None, size: int, facts: Mapping[str, Any]) -> Known:
    inner = {"mask_token_id": 151669} | ({} if outputs is None else {"target_layer_ids": outputs})
    config = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": size, "num_target_layers": layers}
    return Known(config | {"dflash_config": inner}, block, BlockDrafter, facts)


KNOWN: dict[str, Known] = {
    "llama31_8b_eagle3": Known(
        LLAMA3, lambda: eagle3(**LLAMA3_EAGLE3), EagleDrafter, {"layers": (2, 16, 29), **LLAMA3_EAGLE3}, layers=32
    ),
    "deepseek_r1_8b_eagle3": Known(
        LLAMA3, lambda: eagle3(**LLAMA3_EAGLE3), EagleDrafter, {"layers": (2, 16, 29), **LLAMA3_EAGLE3}, layers=32
    ),
    "llama33_70b_eagle3": Known(
        LLAMA3, lambda: eagle3(**LLAMA3_EAGLE3), EagleDrafter, {"layers": (2, 40, 77), **LLAMA3_EAGLE3}, layers=80
    ),
    "vicuna_13b_eagle3": Known(
        VICUNA, lambda: eagle3(vocab=32000, columns=None), EagleDrafter, {"layers": (2, 20, 37), "vocab": 32000}, 40
    ),
    "qwen3_8b_eagle3": Known(
        QWEN3 | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 9, 17, 25, 33], "ttt_length": 7},
        lambda: eagle3(states=5, vocab=151936, columns=None, first="layers.0.", qwen=True),
        EagleDrafter,
        {"layers": EVENLY_36, "vocab": 151936},
    ),
    "qwen3_8b_eagle3_speculators": Known(
        {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
            "transformer_layer_config": {"model_type": "llama", "vocab_size": 151936, **LAYERS},
            "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        },
        lambda: eagle3(vocab=151936, columns=32000, first="layers.0."),
        EagleDrafter,
        {"layers": (2, 18, 33), "columns": 32000},
        layers=36,
    ),
    "llama31_8b_dflash": dflash(32, None, 10, {"layers": (2, 9, 16, 23, 30), "tokens": 9}),
    "qwen3_4b_dflash": dflash(36, [1, 9, 17, 25, 33], 16, {"layers": EVENLY_36, "tokens": 15, "mask": 151669}),
    "qwen3_8b_dflash": dflash(36, [1, 9, 17, 25, 33], 16, {"layers": EVENLY_36, "tokens": 15, "mask": 151669}),
    "qwen3_4b_dspark": dspark(36, (1, 9, 17, 25, 33)),
    "qwen3_8b_dspark": dspark(36, (1, 9, 17, 25, 33)),
    "qwen3_14b_dspark": dspark(40, (1, 10, 19, 28, 37)),
    "glm45_air_mtp": Known(
        {"model_type": "glm4_moe", "num_hidden_layers": 46, "num_nextn_predict_layers": 1}, lambda: mtp(46), MTPDrafter
    ),
    "deepseek_v3_mtp": Known(
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1},
        lambda: mtp(61),
        MTPDrafter,
    ),
    "vicuna_7b_medusa": Known(
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"},
        lambda: medusa(heads=5, vocab=32000),
        MedusaDrafter,
        {"heads": 5, "vocab": 32000, "base": "lmsys/vicuna-7b-v1.3"},
    ),
    "vicuna_7b_eagle": Known(VICUNA, eagle1, EagleDrafter, {"layers": (-1,), "vocab": 32000}),
    "llama2_7b_eagle": Known(VICUNA, eagle1, EagleDrafter, {"layers": (-1,), "vocab": 32000}),
    "llama3_8b_eagle": Known(LLAMA3, eagle1, EagleDrafter, {"layers": (-1,), "vocab": 128256}),
}  # fmt: skip
SAME = {  # as dear as the others of their kind, and no other case
    *("deepseek_r1_8b_eagle3", "llama33_70b_eagle3", "qwen3_4b_dflash", "qwen3_4b_dspark", "qwen3_14b_dspark"),
    *("llama2_7b_eagle", "llama3_8b_eagle"),
}


def test_every_pair_is_known() -> None:
    assert KNOWN.keys() == set(PAIRS)


ANYWHERE = [
    *((name, "run") for name in PAIRS),
    ("qwen3_8b_dspark", "check_drafter"),
    *(pytest.param(name, "check_drafter", marks=pytest.mark.full) for name in PAIRS if name != "qwen3_8b_dspark"),
]


@pytest.mark.parametrize(("name", "application"), ANYWHERE)
def test_a_pair_resolves_to_constructor_arguments(name: str, application: str, configure: Configure) -> None:
    config = configure(application, f"pair={name}", "drafter.temperature=0.5")
    component, options = component_of(config, "drafter")
    assert component.__self__ is KNOWN[name].drafter
    assert options["temperature"] == 0.5
    assert component_of(config, "target")[0].__self__ is Target
    names = [config.target.name, *([] if KNOWN[name].drafter is MTPDrafter else [config.drafter.name])]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", each) for each in names)
    chosen = overrides_of(CONF / "pair" / f"{name}.yaml")
    assert chosen.keys() == {"target", "drafter"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in SAME else []) for n in PAIRS])
def test_a_pair_drafts_as_its_files_say(name: str, configure: Configure, tmp_path: Path) -> None:
    known = KNOWN[name]
    stored = dict(known.config) if known.drafter in (MTPDrafter, MedusaDrafter) else {**known.config, **LAYERS}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    medusas = known.drafter is MedusaDrafter
    save_file(known.tensors(), tmp_path / ("medusa_lm_head.safetensors" if medusas else "model.safetensors"))
    config = configure("run", f"pair={name}")
    if known.drafter is MTPDrafter:
        assert kind_of(str(tmp_path)) == "mtp"  # found behind the target's last layer
        assert config.drafter.name is None  # the target's own files
    else:
        config.drafter.name = str(tmp_path)
    drafter = build(config, "drafter")
    assert type(drafter) is known.drafter
    check_tree(drafter)
    assert facts_of(drafter, known) == known.facts


def check_tree(drafter: Any) -> None:
    """Trees and laws are those of the drafter's kind by default."""
    if isinstance(drafter, EagleDrafter):
        assert isinstance(drafter.tree, ExpansionTree) and drafter.max_nodes == 59
        assert drafter.sampling is DraftSampling.DETERMINISTIC
    elif isinstance(drafter, MedusaDrafter):
        assert isinstance(drafter.tree, StaticTree) and drafter.tree.shape == DEFAULT_SHAPE
        assert drafter.sampling is DraftSampling.DETERMINISTIC
    else:
        chain = TreeShape.chain(3 if isinstance(drafter, MTPDrafter) else drafter.tokens)
        assert isinstance(drafter.tree, StaticTree) and drafter.tree.shape == chain
        assert drafter.sampling is DraftSampling.IID


def facts_of(drafter: Any, known: Known) -> dict[str, Any]:
    """The known facts, as the drafter has them."""
    if isinstance(drafter, MTPDrafter):
        return {}
    if isinstance(drafter, MedusaDrafter):
        heads = drafter.heads
        return {"heads": heads.num_heads, "vocab": heads.vocab_size, "base": heads.base_model}
    head: Any = drafter.head
    found: dict[str, Any] = {"vocab": head.config.vocab_size}
    if isinstance(drafter, EagleDrafter):
        assert isinstance(head, Eagle3Head if "columns" in known.facts or len(known.facts["layers"]) > 1 else EagleHead)
        target: Any = SimpleNamespace(num_layers=known.layers)
        found["layers"] = drafter.layers_for(drafter.head, target)
        if head.draft_ids is not None:
            found["columns"] = len(head.draft_ids)
    else:
        config = head.config
        found |= {"layers": drafter.hidden_layers, "tokens": drafter.tokens, "mask": drafter.mask_token_id}
        found["markov"] = (config.markov_rank, config.markov_head_type)
        found["confidence"] = config.confidence
    return {name: found[name] for name in known.facts}


# ---------------------------------------------------------------- without a network, and beside other choices


def test_a_pair_that_is_not_here_says_how_it_is_downloaded(configure: Configure) -> None:
    """Tests are offline: a hub that is asked says so at once."""
    config = configure("run", "pair=llama31_8b_eagle3")
    with pytest.raises(ValueError, match="the hub cannot be reached") as caught:
        check_reachable("llama31_8b_eagle3", [config.target.name, config.drafter.name])
    sentence = str(caught.value)
    assert (
        "meta-llama/Llama-3.1-8B-Instruct and yuhuili/EAGLE3-LLaMA3.1-Instruct-8B are not on this machine" in sentence
    )
    assert "'hf download yuhuili/EAGLE3-LLaMA3.1-Instruct-8B'" in sentence and "\n" not in sentence


def test_a_pair_that_is_here_asks_nobody(tmp_path: Path, saved: Path) -> None:
    check_reachable("mine", [str(saved / "target"), str(saved / "eagle")])
    with pytest.raises(ValueError, match="mine/other is not on this machine"):
        check_reachable("mine", [str(saved / "target"), "mine/other"])


def test_a_model_that_the_hub_does_not_give_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Any = SimpleNamespace(headers={}, request=None)
    monkeypatch.setattr(pairs, "_asked", lambda name: GatedRepoError("gated", response=answer))
    with pytest.raises(ValueError, match=r"accept its terms at huggingface\.co/mine/other and log in with"):
        check_reachable("mine", ["mine/other"])


@pytest.mark.parametrize(("word", "group"), [("drafter=ngram", "drafter"), ("target=bundled", "target")])
def test_another_drafter_beside_a_pair_is_refused(word: str, group: str) -> None:
    """Its name would be the pair's."""
    command = [sys.executable, "-m", "experiments.run", "pair=glm45_air_mtp", word]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CONF.parent)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: pair=glm45_air_mtp brings its own {group}, and {word} is chosen beside it")


# ---------------------------------------------------------------- the documentation


def pair_table() -> Table:
    """A row per pair."""
    table = Table([Column(title, "left") for title in ("`pair=`", "target", "drafter", "what it is")])
    for path in sorted((CONF / "pair").glob("*.yaml")):
        given: Any = OmegaConf.to_container(OmegaConf.load(path))
        kind = overrides_of(path)["drafter"]
        head = (given.get("drafter") or {}).get("name")
        note = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ").removesuffix(".")
        shown = f"`{kind}`: {head}" if head else f"`{kind}`, in the target's files"
        table.add(f"`{path.stem}`", given["target"]["name"], shown, note)
    return table


def test_the_documentation_lists_every_pair() -> None:
    assert pair_table().markdown() in PAGE.read_text()


def test_every_pair_says_what_it_is() -> None:
    for name in PAIRS:
        first, second, *_ = (CONF / "pair" / f"{name}.yaml").read_text().splitlines()
        assert first == "# @package _global_" and second.startswith("# ") and second.endswith(".")
        assert OmegaConf.load(CONF / "pair" / f"{name}.yaml").keys() <= {
            "defaults",
            "target",
            "drafter",
            "chat_template",
        }
