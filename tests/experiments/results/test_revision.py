"""What the manifest says about the files of a model."""

from pathlib import Path

from experiments.results.revision import _PIECE, _PIECES, revision_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_of_a_download_it_is_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "models--owner--name"
    for name in ("config.json", "heads/medusa_lm_head.pt"):
        path = folder / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for more in ({}, {"revision": COMMIT}, {"subfolder": "heads"}):
        assert revision_of("owner/name", cache_dir=str(tmp_path), **more) == f"hub:{COMMIT}"
    assert revision_of("owner/other", cache_dir=str(tmp_path)) is None
    assert revision_of("owner/name", cache_dir=str(tmp_path), revision="other") is None


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
    others = [bytes(99) + b"x", bytes(101), large, bytes(end), bytes(inner)]
    found = [model("a"), model("b", config="{ }"), *(model(f"c{n}", weights=each) for n, each in enumerate(others))]
    assert len(set(found)) == len(found)
    assert all(each is not None and each.startswith("files:") for each in found)
    assert model("again", notes="not part of the model") == found[0], "the same wherever it lies"
    assert revision_of(str(tmp_path / "a" / "config.json")) == found[0], "a file stands for its folder"
    shipped = {revision_of("bundled/target"), revision_of("bundled/drafter")}
    assert len(shipped) == 2 and None not in shipped
