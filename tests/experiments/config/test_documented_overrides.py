"""Overrides that the documents show in running text name settings and options that there are.

Commands in blocks of their own are composed by ``tests/test_readme.py``.
"""

import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from experiments.config.sections import CONF, TABLES
from tests.experiments.runs import command_of

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN = "## Your own project"
"""The section about options of a project of one's own, the last one of its page, which has a test of its own."""
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()} | {*TABLES}
SETTINGS = {field.name for command in ("run", "train") for field in fields(command_of(command).settings)}
PLACEHOLDERS = re.compile(r"…|\bNAME\b|\bFOLDER\b|\bRUN\b|=x$|=$|[a-z]\||<Tab>|package\.module")
"""What a reader has to fill in."""


def overrides_in(text: str) -> list[str]:
    """The overrides in the code spans of a text: none of Python's keywords, no placeholders."""
    found = []
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", text):
        try:
            words = shlex.split(span)
        except ValueError:
            continue  # an apostrophe: no command
        # A mapping with blanks is one override, also where the text leaves the quotes to the shell.
        words = [span] if re.fullmatch(r"[\w.]+=\{[^}]*\}", span) else words
        for word in words:
            name = word.partition("=")[0].lstrip("+~")
            if "=" in word and name.split(".")[0] in GROUPS | SETTINGS and not PLACEHOLDERS.search(word):
                found.append(word)
    return found


@cache
def content_of(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path))


@cache
def sections(name: str) -> list[Any]:
    """What a section of that name may hold: its files, and what commands and studies say of it."""
    files = [*(CONF / name).rglob("*.yaml"), *CONF.glob("*.yaml"), *(CONF / "experiment").glob("*.yaml")]
    loaded = [(path, content_of(path)) for path in files]
    found = [content if path.parent.name == name else content.get(name) for path, content in loaded]
    return [*found, *TABLES.get(name, {}).values()]


def exists(override: str) -> bool:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    first, *keys = parsed.key_or_group.split(".")
    if not keys:
        value = parsed.value()
        chosen = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
        options = {path.stem for path in (CONF / first).rglob("*.yaml")} | {*TABLES.get(first, ())}
        return set(chosen) <= options if first in GROUPS and chosen else first in GROUPS | SETTINGS
    if parsed.is_add() or first in ("methods", "rules", "policies", "setups", "contenders"):
        return True  # a name of the reader's
    found = sections(first)
    for key in keys:
        found = [each[key] for each in found if isinstance(each, dict) and key in each]
    return bool(found)


SHOWN = sorted({word for document in DOCUMENTS for word in overrides_in(document.read_text().partition(OWN)[0])})


def test_shown_overrides_exist() -> None:
    """A few are surely found; those that there are not would be noticed."""
    assert {"chat_template={enable_thinking: false}", "dataset.tasks={}", "target.inflate=110m"} <= set(SHOWN)
    assert [override for override in SHOWN if not exists(override)] == []
    assert not any(map(exists, ["dataset.taks={}", "drafter=ngrm", "sed=1"]))
