"""Which rules results call exact, what single tokens say, and what a manifest says of a model's files."""

import json
from pathlib import Path

import pytest

from experiments.results import texts as files
from experiments.results.lossless import stated_exactness
from experiments.results.revision import _PIECE, _PIECES, revision_of
from experiments.results.texts import INCOMPLETE, in_context, read_token_texts, text_of
from verifiers import RejectionVerifier


def test_shipped_rules_are_exact_and_one_that_somebody_adds_to_the_package_is_declared() -> None:
    """A file in a clone is not tested by being there."""
    assert stated_exactness(RejectionVerifier()) == "exact"
    for name in ("Added", "RejectionVerifier"):
        added = type(name, (RejectionVerifier,), {"__module__": "verifiers.rejection"})
        assert stated_exactness(added()) == "exact (declared)"


def test_alone_and_in_a_row() -> None:
    texts = {1: b" a", 3: b"\xe2", 4: b"\x86\x92", 5: b"\xff", 6: b""}
    assert [text_of(token, texts) for token in (1, 3, 9)] == [" a", "\\xe2", "<9>"]
    assert in_context([1, 3, 4, 1], texts) == [" a", INCOMPLETE, "→", " a"]
    assert in_context([3, 1], texts) == [INCOMPLETE, "\ufffd a"], "a character that never ends"
    assert in_context([3, 9, 4], texts) == [INCOMPLETE, "\ufffd<9>", "\ufffd\ufffd"]
    assert in_context([6, 1], texts) == ["", " a"]


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    assert read_token_texts(tmp_path) == {}
    assert files.read_prompts(tmp_path) == {}
    (tmp_path / files.TOKENS).write_text(json.dumps({"1": [300]}))
    with pytest.raises(ValueError, match=r"tokens\.json is damaged.*remove it"):
        read_token_texts(tmp_path)
    (tmp_path / files.PROMPTS).write_text('{"prompt": "a", "turns": ["b"]}\n{"prompt": "c"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2 is not a prompt"):
        files.read_prompts(tmp_path)


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
