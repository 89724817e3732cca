"""A target whose files are there, folders of trained drafters, and the command that exports them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from experiments.export import export
from specdec.target.target import Target
from tests.experiments.exporting.heads import VOCAB, WRITE, Export
from tests.models import tiny_model

Configure = Callable[..., DictConfig]


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
        out_word = [] if "out" in given else [f"out={out}"]
        export(configure("export", f"drafter.name={folder}", f"format={form}", *out_word, *words))
        return out

    return run
