"""Examples: a project outside this repository, its commands as the page shows them, its parts; and a corpus."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from drafters.corpus import Corpus
from specdec import DraftSampling, TreeShape, Verifier
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.target.loading import load_tokenizer
from tests.changed_rule import ChangedRule
from verifiers import RejectionVerifier

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"
SECTION = "## Your own project"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the project, as the working directory; its modules are forgotten afterwards."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "project", folder, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry]
    )  # a console script has no working directory
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def commands() -> list[str]:
    """The lines of the section's shell blocks that run something."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text().partition(SECTION)[2], re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if not line.startswith("eval ")]


def smaller(command: str, saved: Path) -> list[str]:
    """The settings that make a command of the page small."""
    if "replay" in command:
        return ["bootstrap.resamples=100"]
    if "check" in command.split("--config-dir")[0]:
        return ["vocab=2", "tables=1", "temperatures=[1]"]
    more = [f"target.name={saved / 'target'}", "sampling.max_new_tokens=8", "warmup_prompts=1", "threads=1"]
    more += ["bootstrap.resamples=100", "engine.max_length=256", "dataset.count=2"]
    if "experiment=" in command:
        return [*more, "drafter=repeat,none"]
    return more if "dataset=" in command else [*more, "dataset.prompt_tokens=16"]


@pytest.mark.full
def test_the_commands_of_the_page_work(
    project: Path, saved: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a file of the project is named like a package: the working directory is searched last."""
    (project / "verifiers.py").write_text("raise RuntimeError('this is not the package verifiers')\n")
    lines = commands()
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line)
        script = words[0].removeprefix("specdec-").replace("-", "_")
        module, arguments = (words[2], words[3:]) if words[0] == "python" else (f"experiments.{script}", words[1:])
        monkeypatch.setattr(sys, "argv", [words[0], *arguments, *smaller(line, saved)])
        try:
            import_module(module).main()
        except SystemExit as end:
            pytest.fail(f"{line} ended with exit code {end.code}: {capsys.readouterr().err}")
        shown = " ".join(capsys.readouterr().out.split())
        if "check" in module:
            assert "CautiousVerifier is exact, over" in shown
        elif "replay" in module:
            assert "most=1" in shown
        else:
            assert "repeat" in shown
    (sweep,) = (project / "outputs" / "repeat_or_model").iterdir()
    assert "repeat" in (sweep / "comparison.md").read_text()


@pytest.mark.full
def test_its_own_tests_pass(project: Path) -> None:
    """The drafter conforms, and one that does not would not pass."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    drafter = project / "mine" / "drafter.py"
    drafter.write_text(drafter.read_text().replace("*followed, *[root]", "*followed[::-1], *[-1]"))
    done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "the drafter breaks its contract" in done.stdout


def rule(most: int) -> Verifier:
    return import_module("mine.rule").CautiousVerifier(most=most)


def test_the_rule_is_exact_and_stops(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    tables, chain = Tables.random(3, 3, seed=0), TreeShape.chain(3)
    accepted = []
    for most in (1, 2, 3):
        found = enumerate_outcome(rule(most), tables, chain, DraftSampling.IID)
        assert found.tv < 1e-12
        accepted.append(found.expected_accepted)
    assert accepted == sorted(accepted) and accepted[0] < accepted[1] < accepted[2]

    # The mutant: after `most` tokens it draws from what a rejection would have left.
    mistaken = ChangedRule(rule(2), after=lambda tree, p, laws, stop: RejectionVerifier().laws(tree, p).after(stop))
    assert enumerate_outcome(mistaken, tables, chain, DraftSampling.IID).tv > 1e-3


def test_a_corpus_is_made_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "a.txt").write_text("import os\n")
    out = tmp_path / "a.corpus"
    tokens = import_module("corpus").make(out, [f"{tmp_path}/*.txt"], "bundled/target").tokens.tolist()
    tokenizer = load_tokenizer("bundled/target")
    assert tokenizer is not None
    assert tokens == [*tokenizer("import os\n", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert Corpus.open(out).tokens.tolist() == tokens
