"""Commands answer ``--help``, ``--cfg`` and typing errors before anything heavy is imported; bash completes them."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import experiments
from experiments import removed
from experiments.__main__ import COMMANDS
from tests.public_models import CONFIGS

ROOT = Path(__file__).parents[3]
FOLDER = Path(experiments.__file__).parent
ALIASES = ("demo", "check_drafter", "check_verifier")
SHIMS = [name for name in COMMANDS if name not in ("load", "bench")]
HEAVY = ("torch", "transformers", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "rich", "wandb")
TYPING_ERRORS = {
    "run": (["verifier=bloc", "-m"], "there is no verifier 'bloc'"),
    "replay": (["nowhere", "verifiers=[{name: lenent, lenience: 1}]"], "there is no verifier 'lenent'"),
    "check": (["drafter=ngram", "verifier=block"], "drafter._target_=drafters."),
    "plan": (["acceptance=1.5"], "acceptance=1.5"),
    "compare": (["runs=a", "format=pdf"], "format='pdf'"),
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


@pytest.mark.parametrize("mistaken", [("replay", "train"), pytest.param(tuple(TYPING_ERRORS), marks=pytest.mark.full)])
def test_questions_and_typing_errors_are_answered_at_once(mistaken: tuple[str, ...], tmp_path: Path) -> None:
    """In one process for all; of commands that are asked nothing, the modules are imported. A plan needs no torch."""
    questions = [["--help"], ["--cfg", "job"]]
    calls = {name: questions if name == "run" else [] for name in (*SHIMS, *ALIASES)}
    calls |= {name: [*calls[name], TYPING_ERRORS[name][0]] for name in mistaken}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}))
    plan = [f"target.name={tmp_path}", "drafter=eagle", "pictures=false", f"out={tmp_path / 'out'}"]
    calls["plan"] = [*calls.pop("plan"), plan]
    found = asked(calls, tmp_path)
    code, shown, loaded = found["plan"].pop()
    assert code == 0 and "bound by memory" in " ".join(shown.split())
    assert loaded and not {"torch", "transformers", "scipy", "pandas"} & set(loaded)
    assert all(code == 0 and "powered by Hydra" in shown for code, shown, _ in found["run"][:1])
    for command in mistaken:
        code, shown, _ = found[command][-1]
        assert code == 1 and shown.startswith(f"error: {TYPING_ERRORS[command][1]}") and shown.count("\n") == 1, command
    assert not [name for answers in found.values() for _, _, loaded in answers for name in loaded]


def test_every_command_is_a_console_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {f"specdec-{name}": f"experiments.{name}{'' if name in SHIMS else '.__main__'}:main" for name in COMMANDS}
    assert project["scripts"] == wanted


def said_by(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *words], env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_all_commands_are_listed_and_removed_ones_say_what_replaces_them() -> None:
    code, listed = said_by("-X", "importtime", "-m", "experiments", "--help")
    assert code == 0 and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in COMMANDS)
    assert len(COMMANDS) == 10 and not re.search(r"\| +(hydra|torch|numpy)$", listed, re.MULTILINE)
    assert said_by("-m", "experiments", "rum") == (1, "error: there is no command rum: did you mean run?\n")
    for words in (["experiments", "pays"], ["experiments.pays"]):
        code, said = said_by("-m", *words)
        assert code == 1 and said.count("\n") == 1 and removed.COMMANDS["pays"] in said
    code, said = said_by("-m", "experiments", "load", "memory=1e9")
    assert code == 1 and said.count("\n") == 1 and removed.OPTIONS["load memory"] in said


PROJECT = ROOT / "examples" / "project"
# What bash does on Tab: it sets these variables and calls the function that `complete` has registered.
TAB = """
eval "$({command} -sc install=bash)"
[[ $(complete -p {command}) == *" -F hydra_bash_completion {command}" ]] || exit 3
tab() {{
    COMP_LINE=$1 COMP_POINT=${{#1}}
    local typed=($1)
    COMP_CWORD=${{#typed[@]}}
    [[ $1 == *" " ]] || COMP_CWORD=$((COMP_CWORD - 1))
    COMPREPLY=()
    hydra_bash_completion
    echo "${{COMPREPLY[@]}}"
}}
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with console scripts as pip writes them, but none of the working directory on their path."""
    for command in ("run", "replay"):
        path = tmp_path / f"specdec-{command}"
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path[0] = {str(ROOT)!r}\n"
            f"from experiments.{command} import main\nsys.exit(main())\n"
        )
        path.chmod(0o755)
    return tmp_path


def offered(scripts: Path, command: str, *lines: str) -> list[set[str]]:
    """What bash offers for lines that are not finished."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    script = TAB.format(command=command) + "".join(f"tab {shlex.quote(line)}\n" for line in lines)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_names_and_settings_are_completed(scripts: Path) -> None:
    models = ("marginals", "medusa", "merged", "model", "mtp")
    wanted = {
        "specdec-run dra": {"drafter=", "drafter."},
        "specdec-run drafter=m": {f"drafter={name}" for name in models},
        "specdec-run drafter=ngram drafter.b": {"drafter.branches="},
        "specdec-run drafter=ngram '": set(),  # and nothing is printed in the middle of the user's line
    }
    assert offered(scripts, "specdec-run", *wanted) == list(wanted.values())
    assert offered(scripts, "specdec-replay", "specdec-replay basel") == [{"baseline="}]
