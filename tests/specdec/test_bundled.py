"""What ships with the package: all of it, unchanged, and small enough."""

import pytest

from specdec import bundled


def test_every_file_is_the_one_that_was_installed_and_all_are_small() -> None:
    assert (bundled.FOLDER / bundled.SUMS).read_text() == bundled.checksums()
    assert sum(path.stat().st_size for path in bundled.files()) <= bundled.MOST_BYTES
    assert {path.parent.name for path in bundled.files()} == set(bundled.NAMES) >= {"target", "drafter", "medusa"}


def test_every_model_has_weights_and_a_card() -> None:
    shared = (bundled.FOLDER / "MODEL_CARD.md").read_text()
    for name in bundled.NAMES:
        folder = bundled.FOLDER / name
        assert bundled.resolve(f"bundled/{name}") == str(folder)
        assert list(folder.glob("*.safetensors")), name
        own = folder / "MODEL_CARD.md"
        card = own.read_text() if own.is_file() else shared
        assert "python -m experiments." in card, "says what made it"
        if own.is_file():
            assert f"bundled/{name}" in card and f"{name}/MODEL_CARD.md" in shared


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"'eagle'.* bundled/drafter, "):
        bundled.resolve("bundled/eagle")
