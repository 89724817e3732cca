"""Well-known pairs: each is composed. No test goes to the hub; heads' public files have tests of their own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from experiments.config.pairs import check_reachable, overrides_of
from experiments.config.sections import CONF, build, component_of
from experiments.exporting.kinds import kind_of
from experiments.reporting.table import Column, Table
from specdec.target.target import Target

Configure = Callable[..., DictConfig]
PAGE = CONF.parent / "docs" / "training.md"
PAIRS = sorted(path.stem for path in (CONF / "pair").glob("*.yaml"))


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
