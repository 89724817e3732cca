"""A head runs on the target that its training names, wherever that is, and on another one only if told so."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from drafters import BlockDrafter, EagleDrafter, MedusaDrafter, MTPDrafter
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import MTPHead, save_mtp
from drafters.heads.trained_on import TrainedOn, facts_of, trained_on
from specdec import Sizes, Target, bundled
from specdec.inflate import inflate
from specdec.target.loading import load_model
from tests.components import block_head, eagle_head, medusa_heads
from tests.models import tiny_model

SIZES = Sizes(max_batch_size=1, max_length=32)
KINDS: dict[str, tuple[Callable[[PreTrainedModel, Path], object], Any]] = {
    "eagle": (lambda model, folder: save_eagle(eagle_head(model), folder), EagleDrafter),
    "block": (lambda model, folder: block_head(model).save_pretrained(folder), BlockDrafter),
    "medusa": (lambda model, folder: medusa_heads(model).save_pretrained(folder), MedusaDrafter),
    "mtp": (lambda model, folder: save_mtp(MTPHead.for_target(model), folder), MTPDrafter),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=64)


@pytest.fixture(scope="module")
def other() -> PreTrainedModel:
    """Another model of the same sizes."""
    torch.manual_seed(5)
    like = tiny_model(vocab_size=64)
    return type(like)(like.config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_another_target_is_refused_unless_any_is_right(
    kind: str, model: PreTrainedModel, other: PreTrainedModel, tmp_path: Path
) -> None:
    save, drafter = KINDS[kind]
    save(model, tmp_path)
    noted = {"target": "runs/mine", "target_facts": facts_of(model)}
    (tmp_path / "training.json").write_text(json.dumps(noted))
    drafter.from_pretrained(tmp_path).bind(Target(model, name="elsewhere"), SIZES)
    words = r"was trained on runs/mine, and the target strange is another model: give .* any_target=True$"
    with pytest.raises(ValueError, match=words):
        drafter.from_pretrained(tmp_path).bind(Target(other, name="strange"), SIZES)
    drafter.from_pretrained(tmp_path, any_target=True).bind(Target(other, name="strange"), SIZES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_of_the_target_in_any_dtype_is_the_same_model(dtype: str, tmp_path: Path) -> None:
    """The bundled heads name their target and nothing else; its files are compared."""
    shutil.copytree(bundled.resolve("bundled/target"), tmp_path / "copy")
    noted = trained_on("bundled/eagle3")
    assert noted is not None and noted == TrainedOn("bundled/target")
    copy = Target(load_model(str(tmp_path / "copy"), dtype=dtype, device="cpu"))
    noted.check("x", copy)
    if dtype == "float32":
        noted.check("x", Target(inflate(copy.model, "110m"), name="wide"))
    with pytest.raises(ValueError, match="another model"):
        noted.check("x", Target(load_model("bundled/drafter", dtype=dtype, device="cpu")))


def test_what_facts_tell(model: PreTrainedModel, other: PreTrainedModel) -> None:
    noted = TrainedOn("a", facts_of(model))
    noted.check("x", Target(tiny_model(vocab_size=64).half()))
    for strange in (other, tiny_model(vocab_size=128)):
        with pytest.raises(ValueError, match="another model"):
            noted.check("x", Target(strange))


def test_names_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    """Without facts, and without the folder that is named, the last part of a path decides."""
    model.save_pretrained(tmp_path / "name")
    here = Target(load_model(str(tmp_path / "name"), device="cpu"))
    TrainedOn("org/name").check("x", here)
    with pytest.raises(ValueError, match="another model"):
        TrainedOn("org/other").check("x", here)
    assert trained_on(tmp_path / "name") is None
