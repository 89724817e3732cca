"""What mkdocs calls while it builds the documentation: the chapter and its pictures are made there and then.

The files in docs/ are the same, so that the chapter can be read without building anything; a test compares them.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: Any) -> Files:
    """Put pictures that are drawn now in the place of the files."""
    for name, content in pictures().items():
        path = f"images/{name}.png"
        there = files.get_file_from_path(path)
        if there is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Return the chapter as it is rendered now, and every other page as it is."""
    from experiments.bench.chapter.page import PAGE, chapter

    return chapter() if page.file.src_uri == PAGE.name else markdown


@functools.cache
def pictures() -> dict[str, bytes]:
    """Return the pictures' files, drawn once however often ``mkdocs serve`` builds."""
    from experiments.bench.chapter.pictures import PICTURES

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, picture in PICTURES.items():
            path = Path(folder) / f"{name}.png"
            picture.save(path)
            found[name] = path.read_bytes()
    return found
