"""A target whose files are there, folders of trained drafters, and the command that exports them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafters.heads.block import BlockHead
from drafters.heads.eagle import Eagle3Head
from drafters.heads.eagle_files import save_eagle
from drafters.heads.mtp import save_mtp
from drafters.peagle import PEagleHead
from experiments.train import train
from specdec.target.target import Target
from tests.components import eagle_head, markov_head, medusa_heads, perturbed, wide
from tests.drafters.test_mtp import head_of
from tests.experiments.runs import Configure
from tests.models import tiny_model

Export = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose files are there."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama", vocab_size=VOCAB).save_pretrained(folder)
    model = tiny_model("llama", vocab_size=VOCAB)
    model.config.name_or_path = str(folder)
    return Target(model, name=str(folder))


@pytest.fixture
def written(tmp_path: Path, target: Target) -> Callable[[str], Path]:
    """Writes the folder that the trainer would have written."""

    def write(kind: str) -> Path:
        folder = tmp_path / kind
        WRITE[kind](target, folder)
        (folder / "training.json").write_text(json.dumps({"target": target.name, "seed": 3}))
        return folder

    return write


@pytest.fixture
def exported(configure: Configure, tmp_path: Path) -> Export:
    def run(folder: Path, form: str, *words: str) -> Path:
        out = tmp_path / "out"
        given = {word.partition("=")[0] for word in words}
        words = tuple(word.replace("drafter.", "+export.") for word in words)
        out_word = [] if "out" in given else [f"out={out}"]
        train(configure("train", "target.name=null", f"export={{name: {folder}}}", f"format={form}", *out_word, *words))
        return out

    return run


VOCAB = 64
IDS = [token for token in range(VOCAB) if token % 3]


def eagle3_of(target: Target, kind: type[Eagle3Head] = Eagle3Head, **options: Any) -> Eagle3Head:
    given = {"hidden_layers": (1, 2, 3), "draft_ids": IDS} | options
    return wide(kind.for_target(target.model, **given), 1.5)


def block_of(target: Target, **options: Any) -> BlockHead:
    given = {"layers": 1, "block_size": 4, "hidden_layers": (1, 3)} | options
    head = BlockHead.for_target(target.model, **given).eval()
    return wide(head)  # type: ignore[type-var]


def pard_of(target: Target) -> Any:
    model = perturbed(target.model, 0.1)
    model.config.pard_token = 5
    return model


WRITE: dict[str, Callable[[Target, Path], object]] = {
    "medusa": lambda target, folder: medusa_heads(target.model).save_pretrained(folder),
    "eagle": lambda target, folder: save_eagle(eagle_head(target.model), folder),
    "eagle3": lambda target, folder: save_eagle(eagle3_of(target), folder),
    "peagle": lambda target, folder: save_eagle(
        eagle3_of(target, PEagleHead, mask_token_id=5, tokens=4, layers=2), folder
    ),
    "mtp": lambda target, folder: save_mtp(head_of(target.model, hidden_first=True), folder),
    "dflash": lambda target, folder: block_of(target).save_pretrained(folder),
    "dspark": lambda target, folder: markov_head(target.model).save_pretrained(folder),
    "lm": lambda target, folder: perturbed(target.model, 0.1).save_pretrained(folder),
    "pard": lambda target, folder: pard_of(target).save_pretrained(folder),
}
