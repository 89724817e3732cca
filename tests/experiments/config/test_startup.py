"""Commands answer ``--help``, ``--cfg`` and typing errors before anything heavy is imported."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

import experiments
from experiments.bench.chapter.models import CONFIGS

ROOT = Path(__file__).parents[3]
FOLDER = Path(experiments.__file__).parent
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if re.search(r"^main = ", path.read_text(), re.MULTILINE))
HEAVY = ("torch", "transformers", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "rich", "wandb")
TYPING_ERRORS = {
    "run": (["verifier=bloc", "-m"], "there is no verifier 'bloc'"),
    "replay": (["nowhere", "verifiers=[{name: lenient, lenence: 1}]"], "verifier lenient has no 'lenence'"),
    "replay_text": (["texts=a", "drafters=[{name: suffix, shred: true}]"], "drafter suffix has no 'shred'"),
    "demo": (["temperatures=[]"], "temperatures=[]"),
    "plan": (["acceptance=1.5"], "acceptance=1.5"),
    "compare": (["outputs/run"], "'outputs/run' has no name"),
    "export": (["drafter.name=a", "out=b", "format=vllm"], "format='vllm'"),
    "train": (["mixed_precision=fp16"], "mixed_precision='fp16'"),
}
"""Mistakes that only the annotations of settings, or the names of options, can tell."""
ASKING = """
import contextlib, io, runpy, sys
from importlib import import_module
for command, calls in {asked!r}.items():
    import_module("experiments." + command)
    for words in calls:
        sys.argv = ["command", *words]
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
            try:
                runpy.run_module("experiments." + command, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code or 0
        print(repr((command, code, shown.getvalue(), [name for name in {heavy!r} if name in sys.modules])))
"""
Answer = tuple[int, str, list[str]]


def asked(calls: dict[str, list[list[str]]], folder: Path) -> dict[str, list[Answer]]:
    """Asks commands in one fresh process, one after another.

    Returns:
        For each call of a command the exit code, the output, and the heavy modules that are loaded afterwards.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", ASKING.format(asked=calls, heavy=HEAVY)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Answer]] = {command: [] for command in calls}
    for line in done.stdout.splitlines():
        command, *answer = ast.literal_eval(line)
        found[command].append(tuple(answer))
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_questions_and_typing_errors_are_answered_at_once(every: bool, tmp_path: Path) -> None:
    """In one process for all. A plan needs no torch either.

    By default a few are asked, and of the others the modules are imported. With every command, the last call starts
    work: it shows that what is imported then would be found.
    """
    questions = {name: [["--help"], ["--cfg", "job"]] for name in (COMMANDS if every else ("run",))}
    wrong = {name: [words] for name, (words, _) in TYPING_ERRORS.items() if every or name in ("replay", "train")}
    calls = {name: [*questions.get(name, []), *wrong.get(name, [])] for name in COMMANDS}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}))
    plan = [f"target.name={tmp_path}", "drafter=eagle", "pictures=false", f"out={tmp_path / 'out'}"]
    calls["plan"] = [*calls.pop("plan"), plan]
    if every:
        calls["replay"] = [*calls.pop("replay"), ["nowhere", "verifiers=[rejection]"]]
    found = asked(calls, tmp_path)
    if every:
        code, shown, loaded = found["replay"].pop()
        assert code == 1 and {"torch", "numpy"} <= set(loaded), "only the reader of traces knows that there is none"
    code, shown, loaded = found["plan"].pop()
    assert code == 0 and "bound by memory" in " ".join(shown.split())
    assert not {"torch", "transformers", "scipy", "pandas"} & set(loaded)
    for command, answers in found.items():
        wanted = [(0, "") for _ in questions.get(command, [])]
        wanted += [(1, f"error: {TYPING_ERRORS[command][1]}")] if command in wrong else []
        for (code, shown, loaded), (wanted_code, beginning) in zip(answers, wanted, strict=True):
            assert code == wanted_code and shown.startswith(beginning) and shown.strip(), command
            assert code == 0 or shown.count("\n") == 1, "one sentence"
            assert loaded == [] or (every and command == "replay"), f"{command}, or one before it, has loaded {loaded}"
        if command in questions:
            assert "powered by Hydra" in answers[0][1]


def test_another_package_of_the_same_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package of the working directory stands before ours with ``python -m``; an installed one may as well."""
    other = ModuleType("verifiers")
    other.__spec__ = ModuleSpec("verifiers", None, origin=str(tmp_path), is_package=True)
    other.__spec__.submodule_search_locations = [str(tmp_path)]
    room = str(FOLDER / "config" / "__init__.py")
    runpy.run_path(room)
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(room)
    error = capsys.readouterr().err
    assert error.startswith("error: Python finds another package 'verifiers' before the one of specdec-research")
    assert error.count("\n") == 1


def test_every_command_is_a_console_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {f"specdec-{name.replace('_', '-')}": f"experiments.{name}:main" for name in COMMANDS}
    assert project["scripts"] == wanted
