"""Folders on the command line without the name of a setting."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.config.words import with_folders


def test_folders_become_a_list_and_the_rest_stays() -> None:
    words = ["a", "out=x.html", "--config-dir", "mine", "b", "-cd", "other"]
    assert with_folders(words, "runs", several=True) == [
        "runs=['a','b']", "out=x.html", "--config-dir", "mine", "-cd", "other",
    ]  # fmt: skip
    assert with_folders(["out=x"], "runs", several=True) == ["out=x"]


def test_one_folder_is_a_value() -> None:
    assert with_folders(["a", "prompt=3"], "run", several=False) == ["run='a'", "prompt=3"]
    with pytest.raises(ValueError, match="give one folder, not 2: a b"):
        with_folders(["a", "b"], "run", several=False)


@pytest.mark.parametrize("name", ["plain", "a b,c", "it's", "[x]", "a:b", "ü{}", "outputs/*/0"])
def test_hydra_reads_the_very_name(name: str) -> None:
    (word,) = with_folders([name], "run", several=False)
    assert OverridesParser.create().parse_override(word).value() == name


def test_a_folder_whose_name_has_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drafter=model").mkdir()
    assert with_folders(["drafter=model", "round=2"], "run", several=False) == ["run='drafter=model'", "round=2"]
