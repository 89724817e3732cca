"""What the documents show has to work: Python blocks run, commands exist, and files that are named are there.

Every fenced block in README.md, CONTRIBUTING.md and docs/ is ``python``, ``bash``, ``text``, or ``yaml`` that shows
a file of conf/ or sweeps/. A document's Python blocks run in order in one namespace, as in a notebook. Commands are
resolved, not run to their end: a make target has to be in the Makefile, an application has to compose its
configuration. The README's blocks and commands are tried by default, those of the other documents in the full matrix.

``make docs`` checks what is left: links between the pages, their anchors, and the docstrings of the API reference.
"""

import gc
import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hydra import compose, initialize_config_dir

import specdec
from experiments.config.launch import Command, bare_words, with_folders
from experiments.config.sections import CONF, TABLES
from specdec.interfaces import Verifier
from tests.experiments.made_runs import made
from tests.verifiers.cases import complete

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = {name: f"experiments.{name.removeprefix('specdec-')}" for name in PROJECT["scripts"]}
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
PLUGINS = {
    "experiment=fastest_shape": "hydra_optuna_sweeper",
    "hydra/launcher=processes": "hydra_joblib_launcher",
    "hydra/launcher=slurm": "hydra_submitit_launcher",
    "hydra/launcher=ray": "hydra_ray_launcher",
}
"""Choices that exist only where an extra is installed."""
MOST_LINES = 150
"""What a visitor reads of a README."""
SHORT = {"experiments.replay": "trace", "experiments.compare": "runs"}
"""Commands that take bare folders, and the setting that these stand for."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str) -> list[tuple[int, str, str]]:
    """Returns line number, language and text of every fenced block, whose title names a file (``test_guards``)."""
    text = text_of(document)
    found = list(re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(found), f"{document} has a fence that does not close"
    return [(text.count("\n", 0, match.start()) + 1, match[1].partition(" ")[0], match[2]) for match in found]


def commands() -> list[tuple[str, str]]:
    """Returns place and text of every command in a ``bash`` block, each once."""
    found: dict[str, str] = {}
    for document, (line, language, text) in [(page, block) for page in DOCUMENTS for block in blocks(page)]:
        for offset, command in enumerate(text.replace("\\\n", "  ").splitlines(), start=1):
            if language == "bash" and command.strip() and not command.strip().startswith("#"):
                found.setdefault(command.strip(), f"{document}:{line + offset}")
    return [(place, command) for command, place in found.items()]


WITH_PYTHON = [document for document in DOCUMENTS if any(language == "python" for _, language, _ in blocks(document))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_of_a_kind_that_is_checked(document: str) -> None:
    for line, language, _ in blocks(document):
        place, title = f"{document}:{line}", text_of(document).splitlines()[line - 1]
        assert language in ("python", "bash", "text", "yaml"), f"{place}: a block of {language!r} is not checked"
        file = re.fullmatch(r'```yaml title="((?:(?:examples/project/)?conf|sweeps)/[\w/]+\.yaml)"', title)
        shown = file and (ROOT / file[1]).is_file()
        assert language != "yaml" or shown, f"{place}: yaml shows a file of conf/ or sweeps/"


@pytest.mark.parametrize("document", [complete(name, strong=name == "README.md") for name in WITH_PYTHON])
def test_python_blocks_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if document == "docs/measurements.md":  # a page about reading results
        for number in range(2):
            path = made(tmp_path / "outputs" / "sweep" / str(number), "drafter=model") / "manifest.json"
            manifest = json.loads(path.read_text())
            manifest["config"]["drafter"] = {"shape": number + 2}
            path.write_text(json.dumps(manifest))
        monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "project")  # a page shows a file that imports its package
    namespace: dict[str, Any] = {"__name__": document}
    try:
        for line, language, text in blocks(document):
            if language == "python":
                # Blank lines before the block, so that a traceback names the line of the document.
                exec(compile("\n" * line + text, document, "exec"), namespace)
    finally:
        # Refusals name every rule that has been defined, so a page's own rules must not outlive its test.
        namespace.clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
        gc.collect()
    assert not [rule for rule in Verifier.__subclasses__() if rule.__module__ == document]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))


def jobs(words: list[str]) -> Iterator[list[str]]:
    """Yields the overrides of a job: of a sweep (``-m``) as many as it takes to see every value of ``name=a,b``."""
    if "-m" not in words:
        yield words
        return
    choices = []
    for word in words:
        name, _, values = word.partition("=")
        if word != "-m":
            several = [values] if values.startswith("[") else values.split(",")
            choices.append([f"{name}={value}" for value in several])
    for number in range(max(map(len, choices))):
        yield [values[number % len(values)] for values in choices]


@pytest.mark.parametrize(
    ("place", "command"),
    [complete(*each, strong=not each[0].startswith("docs/")) for each in commands()],
    ids=lambda value: str(value),
)
def test_commands_resolve(place: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        variables = set(re.findall(r"^([A-Z_]+) \?=|\$\(([A-Z_]+)\)", text_of("Makefile"), re.MULTILINE))
        for word in words[1:]:
            name, assigned, _ = word.partition("=")
            known = {name for pair in variables for name in pair} if assigned else make_targets()
            assert name in known, f"{place}: the Makefile has no {name!r}"
        return
    if words[0] == "eval":
        (script,) = re.findall(r"^\$\((specdec-[\w-]+) -sc install=bash\)$", words[1])
        assert script in SCRIPTS, f"{place}: there is no {script}"
        return
    if words[:2] == ["pip", "install"]:
        extras = {extra for group in re.findall(r"\[(.*?)\]", command) for extra in group.split(",")}
        assert extras <= PROJECT["optional-dependencies"].keys(), f"{place}: pyproject.toml has not all of {extras}"
        return
    if words[0] == "python" and words[1].startswith("examples/"):
        assert (ROOT / words[1]).is_file(), f"{place}: there is no {words[1]}"
        return
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        words = ["python", *words[3:]]
    if words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
        module, arguments = words[2], words[3:]
    elif words[0] in SCRIPTS:
        module, arguments = SCRIPTS[words[0]], words[1:]
    else:
        pytest.fail(f"{place}: no way to check {command!r}: teach tests/test_readme.py one")
    application = importlib.import_module(module)
    if hasattr(application, "__path__"):  # a room that is a command, too
        application = importlib.import_module(f"{module}.__main__")
    commands = [part for part in vars(application).values() if isinstance(part, Command)]
    assert len(commands) == 1, f"{place}: {module} is no command"
    if module in SHORT:
        arguments = with_folders(arguments, SHORT[module], several=True)
    for choice in PLUGINS.keys() & set(arguments):
        pytest.importorskip(f"hydra_plugins.{PLUGINS[choice]}", reason=f"{choice} needs an extra")
    assert not bare_words(arguments), f"{place}: {module} takes no bare word"
    if module == "experiments.demo":
        module, arguments = "experiments.run", ["experiment=demo", *arguments]
    if "--config-dir" in arguments:
        at = arguments.index("--config-dir")
        arguments[at : at + 2] = [f"hydra.searchpath=[file://{ROOT / 'examples' / 'project' / arguments[at + 1]}]"]
    for job in jobs(arguments):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose(module.removeprefix("experiments."), overrides=job)
        assert composed, f"{place}: {command} has no configuration"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_text_names_exists(document: str) -> None:
    text = text_of(document)
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in make_targets(), f"{document} names make {target}, which the Makefile does not have"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
        there = (ROOT / document).parent / link
        assert there.exists(), f"{document} links to {link}, which does not exist"
    # x.py and x.yaml stand for the reader's own file.
    named = r"`((?:specdec|drafters|verifiers|experiments|conf|tests|docs|\.ci)/[\w./-]+)(?:::(\w+))?`"
    for path, function in re.findall(named, text):
        if Path(path).stem != "x":
            assert (ROOT / path).exists(), f"{document} names {path}, which does not exist"
            assert not function or f"def {function}(" in text_of(path), f"{document} names {path}::{function}"


def test_the_readme_is_short_and_the_results_page_shows_the_same_figures() -> None:
    lines = len(text_of("README.md").splitlines())
    assert lines <= MOST_LINES, f"README.md has {lines} lines, and at most {MOST_LINES} are read: move some to docs/"
    _, _, rest = text_of("README.md").partition("<!-- results:begin")
    table, end, _ = rest.partition("<!-- results:end -->")
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert end and len(rows) > 2, "the README has the table of the demo between its two marks"
    shown = text_of("docs/results.md").splitlines()
    missing = [row for row in rows if row not in shown]
    assert not missing, f"docs/results.md does not have these rows of the README's table: {missing}"


def test_every_basic_has_a_line_that_says_where_it_is() -> None:
    lines = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", text_of("docs/what-is-covered.md"), re.MULTILINE)
    assert [int(number) for number, _, _ in lines] == list(range(1, 103))
    assert len({what for _, what, _ in lines}) == len(lines)
    assert [what for _, what, where in lines if not re.search(r"\]\(|`", where)] == []


def test_every_group_of_the_configuration_is_named() -> None:
    _, _, rest = text_of("docs/experiments.md").partition("## Configuration\n")
    cells = re.findall(r"^\| (`.*?) \|", rest.partition("\n## ")[0], re.MULTILINE)
    named = set(re.findall(r"`([\w/]+)`", "".join(cells)))
    there = {path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")} - {".", "options"} | {*TABLES}
    assert named == there, f"docs/experiments.md and conf/ differ in {sorted(named ^ there)}"


def test_every_public_name_is_in_the_api_reference() -> None:
    entries = re.findall(r"^::: (\S+)", "\n".join(text_of(page) for page in PAGES), re.MULTILINE)
    missing = set(specdec.__all__) - {entry.rpartition(".")[2] for entry in entries}
    assert not missing, f"docs/api/ leaves out {sorted(missing)}"
    for entry in entries:
        module, _, name = entry.rpartition(".")
        package = importlib.import_module(module)
        there = hasattr(package, name) or importlib.util.find_spec(entry) is not None
        assert there, f"docs/api/ has {entry}, which does not exist"


NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_outputs_of_the_notebook_are_kept() -> None:
    assert list((ROOT / "examples").glob("*.ipynb")) == [NOTEBOOK]
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq")  # it asks asyncio for a policy that is to go
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_the_notebook_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell again, in a new kernel; the rules' total variations are numbers without chance."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Its process runs beside other tests: where threads outnumber free cores, each waits for one that does not run.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = [texts(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    pairs = zip(kept, map(texts, notebook.cells), strict=True)
    ((old, new),) = [pair for pair in pairs if "total variation" in pair[0]]
    for line_old, line_new in zip(old.splitlines(), new.splitlines(), strict=True):
        assert line_old.split()[-4:] == line_new.split()[-4:], "accepted per round"


def texts(cell: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text", "") for output in cell.get("outputs", []) if output.get("name", "stdout") == "stdout"
    )
