"""What the documents show has to work: Python blocks run, commands exist and their configuration resolves.

Every fenced block in README.md and CONTRIBUTING.md is ``python``, ``bash`` or ``text``. Python blocks run in order in
one namespace, as in a notebook. Commands are not run to their end, which the experiments' own tests do, but resolved:
a make target has to be in the Makefile, an application has to compose its configuration. A command of which this file
does not know how to check it fails.
"""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from benchmarks.options import parse
from experiments.app.config import CONF

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def blocks(document: str) -> list[tuple[int, str, str]]:
    """Line number, language and text of every fenced block."""
    text = (ROOT / document).read_text()
    found = list(re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(found), f"{document} has a fence that does not close"
    return [(text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2]) for match in found]


def commands() -> list[tuple[str, str]]:
    """Place and text of every command in a ``bash`` block."""
    found = []
    for document in DOCUMENTS:
        for line, language, text in blocks(document):
            if language == "bash":
                for offset, command in enumerate(text.replace("\\\n", "  ").splitlines(), start=1):
                    if command.strip() and not command.strip().startswith("#"):
                        found.append((f"{document}:{line + offset}", command.strip()))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_of_a_kind_that_is_checked(document: str) -> None:
    for line, language, _ in blocks(document):
        assert language in ("python", "bash", "text"), f"{document}:{line}: a block of {language!r} is not checked"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_run(document: str) -> None:
    namespace: dict[str, Any] = {"__name__": document}
    for line, language, text in blocks(document):
        if language == "python":
            # Blank lines before the block, so that a traceback names the line of the document.
            exec(compile("\n" * line + text, document, "exec"), namespace)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(("place", "command"), commands(), ids=lambda value: str(value))
def test_commands_resolve(place: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        variables = set(re.findall(r"^([A-Z_]+) \?=|\$\(([A-Z_]+)\)", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for word in words[1:]:
            name, assigned, _ = word.partition("=")
            known = {name for pair in variables for name in pair} if assigned else make_targets()
            assert name in known, f"{place}: the Makefile has no {name!r}"
        return
    if words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
        module, arguments = words[2], words[3:]
    elif words[0] == "specdec-run":
        module, arguments = "experiments.run", words[1:]
    elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        assert parse(importlib.import_module(words[2]).Options, words[3:])
        return
    else:
        pytest.fail(f"{place}: no way to check {command!r}: teach tests/test_readme.py one")
    application = importlib.import_module(module)
    assert callable(getattr(application, "main", None)), f"{place}: {module} has no main"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose(module.removeprefix("experiments."), overrides=arguments)
    assert composed, f"{place}: {command} has no configuration"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_text_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in make_targets(), f"{document} names make {target}, which the Makefile does not have"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), f"{document} links to {link}, which does not exist"
    # x.py and x.yaml stand for the reader's own file.
    for path in re.findall(r"`((?:specdec|drafters|verifiers|experiments|conf|tests|\.ci)/[\w./-]+)`", text):
        if Path(path).stem not in ("x", "bigram"):
            assert (ROOT / path).exists(), f"{document} names {path}, which does not exist"


def test_the_file_tree_is_complete() -> None:
    tree = next(text for _, language, text in blocks("README.md") if language == "text" and "specdec/" in text)
    listed = set(re.findall(r"^  ([\w/]+(?:\.py)?)", tree, re.MULTILINE))
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "specdec").iterdir()} - {"__init__.py", "__pycache__/"}
    assert listed == there, f"the README's tree and specdec/ differ in {sorted(listed ^ there)}"
    for package in ("drafters", "verifiers"):
        names = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
        line = next(text for text in re.split(r"\n(?=\S)", tree) if text.startswith(package))
        missing = sorted(name for name in names if name not in line)
        assert not missing, f"the README's tree leaves {missing} out of {package}/"
