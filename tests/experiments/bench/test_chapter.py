"""The documentation's numbers: the chapter about costs is what the code computes today; studies have their place."""

import re
import shutil
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from matplotlib import __version__ as matplotlib_version
from PIL import Image

from experiments.bench import chapter as page
from experiments.bench.chapter.pictures import PICTURES, digest, save
from experiments.bench.evidence import GALLERY, STUDIES, Study, pages_of, placed, run
from experiments.config.sections import CONF

IMAGES = page.ROOT / "docs/images"
TEMPLATE = page.TEMPLATE.read_text()
CHAPTER = page.rendered()


def test_the_page_is_what_the_code_says_today() -> None:
    assert page.PAGE.read_text() == CHAPTER, "run python -m experiments.bench chapter"


def test_nothing_is_left_of_the_template_and_what_it_names_must_exist() -> None:
    found = re.findall(r"\{\{|\}\}|\{%|Undefined|None|\bnan\b|\binf\b|<bound|object at", CHAPTER)
    assert not found
    with pytest.raises(jinja2.UndefinedError, match="no attribute 'loda'"):
        page.rendered("{{ f.loda | s }}")
    with pytest.raises(jinja2.TemplateAssertionError, match="No filter named 'furlongs'"):
        page.rendered("{{ f.load | furlongs }}")


KNOWN = """
Two phases; [1000, 4096]; 33.6 MB
The bandwidth wall; 16 GB; 8 ms; 125 tokens/s; 1.6 TB; 51.3 ms; 800 ms; 851 ms; 6 %; 94 %
How little is computed; 16 GFLOP; 0.005 %; 2 TFLOP/s; **0.64 %**; 30 %; 75 %
The roofline; | 295 |; | 591 |; | 201 |; | 153 |; 494.7; 1,979; 20.9 ms; 160 sums
A large model, line by line; 140 GB; 20 s; 573 TFLOP; 4,096 FLOP per byte; 4,093; 13.9 times; 0.58 s; 1.16 s; 0.83 s
A large model, line by line; 256 FLOP per byte; 140 GFLOP; 41.8 ms; 23.9 tokens/s; 295 times; | 17.9 |; | 4.48 |; 766
The KV cache; 327,680; 320 KiB; 1.34 GB; 1.51 GB; 32.8 GB; 141.5 GB; 1.07 %; 42.24 ms
The KV cache; 131,072; 147,456; 16,384; 70,272; 3,997,696
Two examples that are often printed; 33.6 MB; 1.07 GB; 14 GB; 15.6 GB to 16.1 GB; 8 GiB; **2 GiB**; 17.2 GB to 17.7 GB
What grows with the length; 2,621,440; 22 TFLOP; 53,406; | 10.7 | 7.7 % | 3.8 % |
Batching; 766 tokens/s; 3,063; 3,072; 56.2 ms; 99.5 ms; 100.7; 50 GB; 26 requests; **13**
Batching; | 2,048 | 200 |; | 4,096 | 100 |; | 32,768 | 12 |; 398 rows; | 0.73 |
Fewer bytes: quantization; 35 GB; 10.4 ms; stays at 295; 591; 0.53125; 0.5625; 1.59 times
What is on the chip; | 132 | 33 | 33 | 50 | 80 GB | 3.35 |; 5 µs to 10 µs
The best draft length; | 7: 1.51 | 4: 1.41 | 3: 1.27 | 2: 1.20 | 2: 1.14 | 1: 1.10 | 1: 1.09 |; | 0.96 |
The best draft length; | 8: 2.43 | 8: 2.25 | 6: 2.02 | 4: 1.87 | 4: 1.83 |; 1,487; 6,490; 421
Where it pays less; | 2 | 5.47 | 7.2 | 8 |; | 8 | 29.1 | 51.6 | 112 |; | 8 | 30.5 | 57.4 | 163 |; 242
Where the time goes; 296 MB
"""
"""Sections, and figures that are known from elsewhere or were worked out by hand."""


def test_known_figures_are_where_they_belong() -> None:
    for line in KNOWN.strip().splitlines():
        section, *figures = line.split("; ")
        (text,) = re.findall(rf"^##+ {re.escape(section)}\n(.*?)(?=^##|\Z)", CHAPTER, re.DOTALL | re.MULTILINE)
        assert [figure for figure in figures if figure not in " ".join(text.split())] == [], section


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_what_the_code_says_today(name: str, tmp_path: Path) -> None:
    committed, facts = opened(IMAGES / f"{name}.png")
    assert f"images/{name}.png" in CHAPTER
    figures = PICTURES[name][0]()
    assert facts["Description"] == digest(figures), "run python -m experiments.bench chapter"
    one, same, other = ({"rows": [1.0, value]} for value in (2.0, 2.0 + 1e-12, 2.001))
    assert digest(one) == digest(same) != digest(other), "the last digit is the machine's"
    if matplotlib_version in facts["Software"]:  # another version draws letters in other places
        save(name, tmp_path / "now.png")
        now, _ = opened(tmp_path / "now.png")
        assert now.shape == committed.shape
        assert (np.abs(now - committed) > 64).mean() < 0.001, "run python -m experiments.bench chapter"


def opened(path: Path) -> tuple[np.ndarray, dict[str, str]]:
    """Returns a picture's pixels, and what its file says of it."""
    with Image.open(path) as image:
        return np.asarray(image, float), {key: str(value) for key, value in image.info.items()}


ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_every_study_composes_and_has_its_place() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for study in STUDIES.values():
            module, *overrides = study.asked.split()
            assert compose(module.removeprefix("experiments."), overrides=overrides)
    for name, study in STUDIES.items():
        if name in GALLERY:
            for shown in study.pictures:
                assert (ROOT / "docs" / "images" / f"{shown}.png").is_file() and f"images/{shown}.png" in pages
            continue
        assert len(study.captions) == len(study.pictures)
        page = pages_of(name)[0].read_text()
        text = placed(page, name, "a new text")
        assert text.index(f"<!-- {name}:begin") < text.index("a new text") < text.index(f"<!-- {name}:end -->")
        assert placed(text, name, "another") == placed(page, name, "another"), "what stood there is gone"
        with pytest.raises(ValueError, match="no marks <!-- other:begin"):
            placed(page, "other", "text")
    with pytest.raises(ValueError, match="no page has the marks <!-- other:begin"):
        pages_of("other")


def test_a_finished_study_is_not_run_again_and_a_failing_one_is_one_sentence(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "docs" / "images" / "heads.png", tmp_path / "made.png")
    assert run(Study("experiments.nothing", {"shown": "made"}), tmp_path) >= 0
    with pytest.raises(ValueError, match=r"experiments\.demo ended with exit code 1: see above"):
        run(Study("experiments.demo temperatures=[]", {"shown": "made"}), tmp_path / "demo")
