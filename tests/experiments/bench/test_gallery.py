"""The gallery and the pages of results name commands and pictures that are there, and take their tables from runs."""

import json
import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.bench.evidence import RESULTS, STUDIES, Evidence, block, placed
from experiments.bench.gallery import STUDIES as GALLERY
from experiments.bench.gallery import Study, run
from experiments.config.sections import CONF
from tests.experiments.showcase import write_run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", GALLERY)
def test_every_study_composes_and_its_pictures_are_shown(name: str) -> None:
    study = GALLERY[name]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose(study.module.removeprefix("experiments."), overrides=list(study.overrides))
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for shown in study.pictures:
        assert (ROOT / "docs" / "images" / f"{shown}.png").is_file()
        assert f"images/{shown}.png" in pages


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    study = Study("experiments.nothing", [], pictures={"shown": "made"})
    shutil.copyfile(ROOT / "docs" / "images" / "scaling.png", tmp_path / "made.png")
    assert run(study, tmp_path) >= 0


def test_a_command_that_fails_is_one_sentence(tmp_path: Path) -> None:
    study = Study("experiments.demo", ["temperatures=[]"], pictures={"shown": "made"})
    with pytest.raises(ValueError, match=r"experiments\.demo ended with exit code 1: see above"):
        run(study, tmp_path / "demo")


@pytest.mark.parametrize("name", STUDIES)
def test_every_table_composes_and_has_its_place(name: str) -> None:
    study, page = STUDIES[name].study, (ROOT / STUDIES[name].page).read_text()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(study.module.rpartition(".")[2], overrides=list(study.overrides))
    assert config.target.inflate in (None, "110m")
    assert set(study.pictures.values()) <= set(STUDIES[name].captions)
    text = placed(page, name, "a new text")
    assert text.count("a new text") == 1
    assert placed(text, name, "another") == placed(page, name, "another"), "what stood there is gone"
    assert text.index(f"<!-- {name}:begin") < text.index("a new text") < text.index(f"<!-- {name}:end -->")


def test_a_text_needs_its_marks() -> None:
    with pytest.raises(ValueError, match="no marks <!-- other:begin"):
        placed((ROOT / RESULTS).read_text(), "other", "text")


def test_a_study_is_a_table_and_its_pictures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trace=False)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"] |= {
        "labels": {"model": "a small model"},
        "target": {"inflate": None},
        "sampling": {"max_new_tokens": 7},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    study = Study("experiments.run", [], pictures={"shown": "methods"})
    text = block(Evidence(study, page=RESULTS, captions={"methods": STUDIES["drafters"].captions["methods"]}), folder)
    assert "| 1 | a small model | 2.33 [2.33, 2.33] |" in text
    assert text.endswith("\n\n![Tokens per round and speedup of every drafter, with intervals](images/shown.png)")


def test_a_study_that_writes_its_own_text(tmp_path: Path) -> None:
    (tmp_path / "found.md").write_text("a machine.\n\n| a |\n|---|\n")
    study = Study("experiments.calibrate", ["a=1"], pictures={"shown": "drawn"})
    text = block(Evidence(study, page=RESULTS, text="found.md", captions={"drawn": "what is drawn"}), tmp_path)
    assert text.startswith("`python -m experiments.calibrate a=1`: a machine.\n\n| a |")
    assert text.endswith("\n\n![what is drawn](images/shown.png)")
