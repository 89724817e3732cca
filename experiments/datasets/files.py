"""A benchmark's file, from a path or the Hugging Face hub, row by row."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import hf_hub_download, list_repo_files
from pyarrow import ArrowException, parquet

from specdec.files import offline
from specdec.origin import first_sentence

_URL = re.compile(r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[^/]+))?/(?P<path>.+)")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_KINDS = (".jsonl", ".parquet")


def rows(file: str, setting: str = "dataset.file") -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every row of a JSONL or Parquet file; blank lines are skipped.

    Args:
        file: A path; ``hf://datasets/OWNER/NAME[@REVISION]/PATH``, a file on the hub; or ``OWNER/NAME``, a dataset
            on the hub with a single such file (or a single one of its test split).

    Raises:
        ValueError: There is no such file, or it is not what its name says.
    """
    path = _locate(file, setting)
    try:
        if path.suffix == ".parquet":
            yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}, line {number} is not JSON: {error.msg} ({error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason}") from error
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read: {first_sentence(error)}") from error


def _locate(file: str, setting: str) -> Path:
    path = Path(offline(file)).expanduser()
    if path.is_file():
        return path
    url = _URL.fullmatch(file)
    if url is not None:
        return _download(url["repo"], url["path"], url["revision"])
    if file.startswith("hf://"):
        raise ValueError(f"{setting}={file!r}: write a file on the hub as hf://datasets/OWNER/NAME/PATH")
    if _REPOSITORY.fullmatch(file) and path.suffix not in (*_KINDS, ".json") and not path.parent.exists():
        return _download(file, _only_file(file, setting), None)
    raise ValueError(f"{setting}: there is no file {file!r}")


def _only_file(repository: str, setting: str) -> str:
    try:
        names = list_repo_files(repository, repo_type="dataset")
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ValueError(_unreachable(f"the dataset {repository}", error)) from error
    found = sorted(name for name in names if name.endswith(_KINDS))
    tests = [name for name in found if "test" in Path(name).name]
    for choice in (found, tests):
        if len(choice) == 1:
            return choice[0]
    if not found:
        raise ValueError(f"the dataset {repository} on the hub has no JSONL or Parquet file")
    several = ", ".join((tests or found)[:6])
    raise ValueError(
        f"the dataset {repository} on the hub has several files: give {setting}=hf://datasets/{repository}/PATH "
        f"with one of {several}"
    )


def _download(repository: str, name: str, revision: str | None) -> Path:
    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ValueError(_unreachable(f"{name} of the dataset {repository}", error)) from error


def _unreachable(what: str, error: Exception) -> str:
    """The hub's messages go on for many lines; the first says what happened."""
    reason = first_sentence(error).rstrip(".") or type(error).__name__
    return f"cannot get {what} from the Hugging Face hub (a path of a file on this machine works offline): {reason}"
