"""What the manifest says about the files of a model."""

from pathlib import Path

import pytest

from experiments.results.revision import _PIECE, _PIECES, revision_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What a download leaves on the disk."""
    folder = tmp_path / "models--owner--name"
    for name in ("config.json", "heads/medusa_lm_head.pt"):
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_of_a_download_it_is_the_commit(cache: Path) -> None:
    assert revision_of("owner/name", cache_dir=str(cache)) == f"hub:{COMMIT}"
    assert revision_of("owner/name", cache_dir=str(cache), revision=COMMIT) == f"hub:{COMMIT}"
    assert revision_of("owner/name", cache_dir=str(cache), subfolder="heads") == f"hub:{COMMIT}"
    assert revision_of("owner/other", cache_dir=str(cache)) is None
    assert revision_of("owner/name", cache_dir=str(cache), revision="other") is None


def test_of_a_folder_it_changes_with_the_files(tmp_path: Path) -> None:
    def model(name: str, config: str = "{}", weights: bytes = bytes(100), **more: str) -> str | None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        for file, text in more.items():
            (folder / file).write_text(text)
        return revision_of(str(folder))

    large = bytes(3 * _PIECE * _PIECES)
    end, inner = bytearray(large), bytearray(large)
    end[-1], inner[len(large) // 2 - _PIECE : len(large) // 2 + 8 * _PIECE] = 1, b"x" * (9 * _PIECE)
    found = [
        model("a"),
        model("b", config="{ }"),
        model("c", weights=bytes(99) + b"x"),
        model("d", weights=bytes(101)),
        model("e", weights=large),
        model("f", weights=bytes(end)),
        model("g", weights=bytes(inner)),
    ]
    assert len(set(found)) == len(found)
    assert all(each is not None and each.startswith("files:") for each in found)
    assert model("again", notes="not part of the model") == found[0], "the same wherever it lies"
    assert revision_of(str(tmp_path / "a" / "config.json")) == found[0], "a file stands for its folder"


def test_a_model_that_ships_has_one() -> None:
    target, drafter = revision_of("bundled/target"), revision_of("bundled/drafter")
    assert target is not None and drafter is not None and target != drafter
