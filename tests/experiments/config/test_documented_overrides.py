"""Overrides that the documents show in running text do what is said: they compose, and the value arrives.

Commands in blocks of their own are composed by ``tests/test_readme.py``.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from experiments.config.sections import CONF, component_of, plain_whole, typed
from experiments.config.settings import RunSettings, TrainSettings
from experiments.config.words import without_nulls

ROOT = Path(__file__).parents[3]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "your-project.md")
"""All but the one about options of a project of one's own, which has a test of its own."""
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
PLACEHOLDERS = re.compile(r"…|\bNAME\b|\bFOLDER\b|\bRUN\b|=x$|=$|[a-z]\||<Tab>|package\.module")
"""What a reader has to fill in."""
COMPONENTS = ("target", "drafter", "verifier", "sampling", "dataset", "tracker")
FROM_OUTSIDE = ("drafter=block", "drafter=eagle")
"""Drafters whose heads come from elsewhere: their name is the user's to give."""
TRAINING = ("head", "loss", "weights", "data", "regenerate", "recipe")
"""Groups of ``experiments.train``; all others are those of ``experiments.run``."""

Configure = Callable[..., DictConfig]


def overrides_in(text: str) -> list[str]:
    """The overrides of ``experiments.run`` in the code spans of a text: none of Python's keywords, no placeholders."""
    found = []
    known = {*GROUPS, *(field.name for field in fields(RunSettings))}
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
            if "=" in word and name.split(".")[0] in known and not PLACEHOLDERS.search(word):
                found.append(word)
    return found


SHOWN = sorted({word for document in DOCUMENTS for word in overrides_in(document.read_text())})


def arrives(override: str, configure: Configure, *more: str) -> None:
    """Compose with an override and check the configuration, and that it holds the value that was given."""
    (override,) = without_nulls([override])
    (parsed,) = OverridesParser.create().parse_overrides([override])
    training = parsed.key_or_group.split(".")[0] in TRAINING
    # Hydra itself gives these on the command line.
    given = ["out=somewhere"] if training else ["out=somewhere", "method=m"]
    config = configure("train" if training else "run", *given, *more, override)
    if parsed.key_or_group not in GROUPS:
        value = OmegaConf.select(config, parsed.key_or_group)
        got = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        assert got == parsed.value(), f"{override} gives {got}"
    if training:
        assert {field.name for field in fields(TrainSettings)} == {str(key) for key in config}
        return
    typed(RunSettings, plain_whole(config))
    for section in COMPONENTS:
        component_of(config, section)


def options_for(override: str) -> list[list[str]]:
    """What to choose in the override's group, one after the other: it may be a setting of any of its files."""
    group, dot, _ = override.partition("=")[0].partition(".")
    files = {"dataset.file": "dataset.file=p.jsonl", "dataset.files": "dataset.files=[p.txt]"}
    if group not in GROUPS or not dot or group == "experiment":
        needed = [files[name] for name in files if override.startswith(f"{group}=") and group == "dataset"]
        return [[]] if not needed else [[], [files["dataset.file"]], [files["dataset.files"]]]
    names = [path.stem for path in sorted((CONF / group).glob("*.yaml"))]
    if group != "dataset":
        given = ["target.name=bundled/target"] if group == "target" else []
        return [[f"{group}={name}", *given] for name in names]
    return [[f"dataset={name}", *extra] for name in names for extra in ([], [files["dataset.file"]])]


def test_the_documents_show_overrides() -> None:
    wanted = {"chat_template={enable_thinking: false}", "dataset.tasks={}", "drafter.branches=1", "target.inflate=110m"}
    assert wanted <= set(SHOWN)


@pytest.mark.parametrize("override", SHOWN)
def test_a_shown_override_works(override: str, configure: Configure) -> None:
    if override.startswith(("target=hf", *FROM_OUTSIDE)):
        configure("run", override)
        return
    failures = []
    for more in options_for(override):
        try:
            arrives(override, configure, *more)
        except Exception as error:
            failures.append(f"with {' '.join(more) or 'the defaults'}: {error}")
        else:
            return
    pytest.fail(f"{override} works with no option of its group:\n" + "\n".join(failures))


def test_other_names_for_categories(configure: Configure) -> None:
    given = ["dataset=spec_bench", "dataset.file=p.jsonl"]
    assert dict(component_of(configure("run", *given), "dataset")[1]["tasks"])["stem"] == "mt_bench"
    assert component_of(configure("run", *given, "dataset.tasks={}"), "dataset")[1]["tasks"] == {}
    one = component_of(configure("run", *given, "dataset.tasks={a: b}"), "dataset")[1]
    assert one["tasks"] == {"a": "b"}


@pytest.mark.parametrize("override", ["chat_template={a: b}", "dataset.taks={}", "drafter.branches=2"])
def test_an_override_that_does_not_arrive_is_found(override: str, configure: Configure) -> None:
    """The check above on a table that the override is merged into, on a name that is misspelt, and on no such key."""
    config = configure("run")
    config.chat_template = {"z": "y"}
    with pytest.raises(Exception, match=r"gives|Could not override"):
        arrives(override, lambda name, *given: config if "chat" in override else configure(name, *given))
