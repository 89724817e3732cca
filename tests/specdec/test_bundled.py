"""What ships with the package: all of it, unchanged, and small enough."""

import pytest

from specdec import bundled


def test_every_file_is_the_one_that_was_installed() -> None:
    assert (bundled.FOLDER / bundled.SUMS).read_text() == bundled.checksums()


def test_all_models_together_are_small() -> None:
    assert sum(path.stat().st_size for path in bundled.files()) <= bundled.MOST_BYTES


@pytest.mark.parametrize("name", bundled.NAMES)
def test_every_model_has_weights_and_a_card(name: str) -> None:
    folder = bundled.FOLDER / name
    assert bundled.resolve(f"bundled/{name}") == str(folder)
    assert list(folder.glob("*.safetensors"))
    own = folder / "MODEL_CARD.md"
    card = (own if own.is_file() else bundled.FOLDER / "MODEL_CARD.md").read_text()
    assert "python -m experiments." in card, "says what made it"
    if own.is_file():
        assert f"bundled/{name}" in card and f"{name}/MODEL_CARD.md" in (bundled.FOLDER / "MODEL_CARD.md").read_text()


def test_no_model_is_left_out() -> None:
    assert {path.parent.name for path in bundled.files()} == set(bundled.NAMES) >= {"target", "drafter", "medusa"}


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"no bundled model 'eagle': the bundled models are bundled/drafter, "):
        bundled.resolve("bundled/eagle")
