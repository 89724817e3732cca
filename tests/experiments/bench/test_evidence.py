"""The documentation's studies name commands and pictures that are there, and take their tables from runs."""

import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.bench.evidence import STUDIES, Study, placed, run
from experiments.config.sections import CONF

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_every_study_composes_and_has_its_place() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for study in STUDIES.values():
            module, *overrides = study.asked.split()
            assert compose(module.removeprefix("experiments."), overrides=overrides)
    for name, study in STUDIES.items():
        if study.page is None:
            for shown in study.pictures:
                assert (ROOT / "docs" / "images" / f"{shown}.png").is_file() and f"images/{shown}.png" in pages
            continue
        assert len(study.captions) == len(study.pictures)
        page = (ROOT / study.page).read_text()
        text = placed(page, name, "a new text")
        assert text.index(f"<!-- {name}:begin") < text.index("a new text") < text.index(f"<!-- {name}:end -->")
        assert placed(text, name, "another") == placed(page, name, "another"), "what stood there is gone"
        with pytest.raises(ValueError, match="no marks <!-- other:begin"):
            placed(page, "other", "text")


def test_a_finished_study_is_not_run_again_and_a_failing_one_is_one_sentence(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "docs" / "images" / "heads.png", tmp_path / "made.png")
    assert run(Study("experiments.nothing", {"shown": "made"}), tmp_path) >= 0
    with pytest.raises(ValueError, match=r"experiments\.demo ended with exit code 1: see above"):
        run(Study("experiments.demo temperatures=[]", {"shown": "made"}), tmp_path / "demo")
