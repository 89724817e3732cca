"""The gallery names commands and pictures that are there."""

import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.bench.gallery import STUDIES, Study, run
from experiments.config.sections import CONF

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_composes_and_its_pictures_are_shown(name: str) -> None:
    study = STUDIES[name]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose(study.module.removeprefix("experiments."), overrides=list(study.overrides))
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for shown in study.pictures:
        assert (ROOT / "docs" / "images" / f"{shown}.png").is_file()
        assert f"images/{shown}.png" in pages


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    study = Study("experiments.nothing", [], sweep=False, pictures={"shown": "made"})
    shutil.copyfile(ROOT / "docs" / "images" / "scaling.png", tmp_path / "made.png")
    assert run(study, tmp_path) >= 0


def test_a_command_that_fails_is_one_sentence(tmp_path: Path) -> None:
    study = Study("experiments.demo", ["temperatures=[]"], sweep=False, pictures={"shown": "made"})
    with pytest.raises(ValueError, match=r"experiments\.demo ended with exit code 1: see above"):
        run(study, tmp_path / "demo")
