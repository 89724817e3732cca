"""Exports into folders that hold something, wrong settings, and what is said."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.exporting.kinds import kind_of
from tests.experiments.exporting.conftest import VOCAB, Export
from tests.models import tiny_model


def test_a_folder_that_holds_something_is_not_touched(written: Callable[[str], Path], exported: Export) -> None:
    folder = written("dflash")
    out = exported(folder, "native")
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # would be read first
    with pytest.raises(ValueError, match=r"is not empty: give another folder, or replace its drafter with overwrite"):
        exported(folder, "speculators")
    assert "dflash_config" in json.loads((out / "config.json").read_text())
    exported(folder, "speculators", "overwrite=true")
    assert "dflash_config" not in json.loads((out / "config.json").read_text())
    assert (out / "notes.txt").read_text() == "mine"
    assert kind_of(str(out)) == "dflash" and not (out / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="is the folder that the drafter is read from"):
        exported(folder, "native", f"out={folder}", "overwrite=true")


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("dflash", ["drafter.hidden_layers=[1,9]"], r"states \[1, 9\] does not fit the target .* of 4"),
        ("dflash", ["drafter.mask_token_id=99"], "its mask token 99 is outside of the vocabulary of 64 tokens"),
        ("dflash", ["tokens=4"], "drafts 3 tokens per round, give at most as many"),
        ("medusa", ["drafter.mask_token_id=3"], r"^drafter\.mask_token_id: .* holds Medusa heads, which has none"),
        ("lm", ["drafter.embeddings=own"], r"^drafter\.embeddings: .* holds a small causal LM"),
        ("eagle3", ["drafter.dtype=float23"], "float23"),
        ("eagle3", ["+drafter.colour=1"], r"there is no drafter\.colour"),
        ("eagle3", ["format=gguf"], "format='gguf': give one of native, speculators, sglang"),
    ],
)
def test_bad_settings(
    kind: str, words: list[str], message: str, written: Callable[[str], Path], exported: Export, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        exported(written(kind), "native", *words)
    assert [path.name for path in tmp_path.iterdir()] == [kind]


def test_a_target_of_another_size_is_refused(written: Callable[[str], Path], exported: Export, tmp_path: Path) -> None:
    other = tmp_path / "other"
    model = tiny_model("llama", vocab_size=VOCAB - 10)
    model.save_pretrained(other)
    with pytest.raises(ValueError, match=r"a small causal LM of 64 tokens does not fit the target .*, which has 54"):
        exported(written("lm"), "native", f"target.name={other}")
    with pytest.raises(ValueError, match=r"^target\.name=.*: there is no config\.json"):
        exported(written("lm"), "native", f"target.name={tmp_path}", "overwrite=true")


def test_speculators_names_the_target(written: Callable[[str], Path], exported: Export) -> None:
    folder = written("dflash")
    (folder / "training.json").unlink()
    with pytest.raises(ValueError, match=r"^format=speculators names the target.*: give target\.name=NAME$"):
        exported(folder, "speculators")
    out = exported(folder, "speculators", "target.name=some/target")  # which is not on this machine
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some/target", "architectures": []}


def test_a_folder_that_holds_no_drafter(exported: Export, tmp_path: Path) -> None:
    (folder := tmp_path / "odd").mkdir()
    (folder / "config.json").write_text("{}")
    torch.save({"some.weight": torch.zeros(1)}, folder / "pytorch_model.bin")
    for name, said in (
        ("nowhere", r"no checkpoint at '.*nowhere': there is no such folder"),
        ("odd", r"holds no drafter that is known here, its tensors are some\.weight …: give"),
    ):
        with pytest.raises(ValueError, match=said):
            exported(tmp_path / name, "native")


def test_what_is_said(written: Callable[[str], Path], exported: Export, capsys: pytest.CaptureFixture[str]) -> None:
    out = exported(written("dflash"), "speculators")
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert "DFlash head: " in words
    assert "reads the inputs of layers 1 and 3; blocks of 4 places for 3 tokens; mask token 63" in words
    assert "read back and compared: equal" in shown
    assert f"vLLM: vllm serve {out}\n" in shown
    assert re.search(r"vLLM: vllm serve \S+ --speculative-config '{\"method\": \"dflash\", ", shown)
    exported(written("dspark"), "sglang", "overwrite=true")
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path" in capsys.readouterr().out
