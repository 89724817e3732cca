"""Commands answer ``--help``, ``--cfg`` and typing errors before anything heavy is imported."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import experiments

ROOT = Path(__file__).parents[3]
FOLDER = Path(experiments.__file__).parent
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if re.search(r"^main = ", path.read_text(), re.MULTILINE))
HEAVY = ("torch", "transformers", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "rich", "wandb")
TYPING_ERRORS = {
    "run": [
        (["drafter=ngrm"], "there is no drafter 'ngrm': did you mean ngram?"),
        (["drafter=ngram", "drafter.brnches=1"], "there is no drafter.brnches: did you mean drafter.branches?"),
        (["sed=1"], "there is no sed: did you mean seed?"),
        (["warmup_prompts=-1"], "warmup_prompts=-1: give an integer of at least 0"),
        (["engine.max_batch_size=0"], "engine.max_batch_size=0: give an integer of at least 1"),
        (["dataset=jsonl"], "dataset.file has no value: give dataset.file=…"),
        (["drafter._target_=nowhere.Drafter"], "drafter._target_='nowhere.Drafter': there is no module 'nowhere'"),
        (["drafter=none", "objective=speedup"], "objective=speedup: plain decoding alone has none, give a drafter"),
        (["objective=speed"], "objective='speed': give one of speedup, tokens_per_second, "),
        (["verifier=bloc", "-m"], "there is no verifier 'bloc': did you mean block?"),
    ],
    "demo": [(["temperatures=[]"], "temperatures=[]: give a list of temperatures")],
    "replay": [
        (["nowhere", "verifiers=[rejection,blok]"], "there is no verifier 'blok': did you mean block?"),
        (["nowhere", "verifiers=[{name: lenient, lenence: 1}]"], "verifier lenient has no 'lenence': did you mean"),
        (["nowhere", "verifiers=[{_target_: Rule}]"], "verifiers._target_='Rule': there is no module 'Rule'"),
        (["nowhere", "verifiers=[3]"], "3 is no verifier: give a name, "),
        (["nowhere", "baseline=rejetion"], "baseline: there is no verifier 'rejetion': did you mean rejection?"),
        ([], "trace has no value"),
    ],
    "replay_text": [
        (["texts=a", "drafters=[ngrm]"], "there is no drafter 'ngrm': did you mean ngram?"),
        (["texts=a", "drafters=[{name: suffix, shred: true}]"], "drafter suffix has no 'shred': did you mean shared?"),
        (["texts=a", "drafters=[ngram,{name: suffix, label: ngram}]"], "drafters: two are called 'ngram'"),
        (["texts=[]"], "texts=[]: give a file, or a list of files"),
        ([], "texts has no value"),
    ],
    "check_verifier": [(["vocab=1"], "vocab=1: give an integer of at least 2")],
    "inspect_drafter": [(["tokens=2"], "tokens=2: give an integer of at least 8")],
    "calibrate": [
        (["grid.batch=[0]"], "grid.batch=[0]: give a list, each an integer of at least 1"),
        (["seconds=-1"], "seconds=-1: give seconds, 0 or more"),
    ],
    "plan": [
        (["batch=0"], "batch=0: give an integer of at least 1, or a list of them"),
        (["batch=[1,0]"], "batch=[1, 0]: give an integer of at least 1, or a list of them"),
        (["acceptance=1.5"], "acceptance=1.5: give a probability from 0 to 1, or a list of them"),
        (["price=0"], "price=0: give the price of an hour, above 0, or null"),
        (["drafter=eagel"], "there is no drafter 'eagel': did you mean eagle?"),
    ],
    "compare": [(["outputs/run"], "'outputs/run' has no name"), ([], "runs has no value")],
    "export": [
        (["drafter.name=a", "out=b", "format=vllm"], "format='vllm': give one of native, speculators, sglang"),
        (["out=b"], "drafter.name has no value: give drafter.name=…"),
        (["drafter=eagle", "out=b"], "drafter=eagle: its files tell what kind of drafter it is, give drafter.name="),
    ],
    "bundle": [(["models=drafter"], "models='drafter': give a list of")],
    "train": [
        (["head=eagel3"], "there is no head 'eagel3': did you mean eagle3?"),
        (["mixed_precision=fp16"], "mixed_precision='fp16': give one of no, bf16"),
    ],
}
ASKING = """
import contextlib, io, runpy, sys
for command, calls in {asked!r}.items():
    for words in calls:
        sys.argv = ["command", *words]
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
            try:
                runpy.run_module("experiments." + command, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code or 0
        print(repr((command, code, shown.getvalue())))
    print(repr((command, [name for name in {heavy!r} if name in sys.modules])))
"""
Answers = tuple[list[tuple[int, str]], list[str]]


def asked(calls: dict[str, list[list[str]]], folder: Path) -> dict[str, Answers]:
    """Asks commands in one fresh process, one after another.

    Returns:
        For each command the exit code and the output of each call, and the heavy modules that are loaded afterwards.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", ASKING.format(asked=calls, heavy=HEAVY)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Answers] = {command: ([], []) for command in calls}
    for command, *answer in map(ast.literal_eval, done.stdout.splitlines()):
        if len(answer) == 2:
            found[command][0].append((answer[0], answer[1]))
        else:
            found[command][1].extend(answer[0])
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """What every command says to questions, to an option that there is not, and to its typing errors."""
    questions = [["--help"], ["--cfg", "job"], ["--info", "searchpath"], ["+nothing=1"]]
    calls = {name: [*questions, *(words for words, _ in TYPING_ERRORS.get(name, []))] for name in COMMANDS}
    return asked(calls, tmp_path_factory.mktemp("asked"))


@pytest.mark.parametrize("command", COMMANDS)
def test_questions_and_typing_errors_are_answered_at_once(command: str, answers: dict[str, Answers]) -> None:
    wrong = TYPING_ERRORS.get(command, [])
    (help_text, config, _, unknown, *errors), loaded = answers[command]
    assert loaded == [], f"experiments.{command}, or one before it, has loaded {loaded} already"
    assert help_text[0] == config[0] == 0
    assert "powered by Hydra" in help_text[1]
    assert config[1].strip()
    assert unknown[0] == 1
    for (words, sentence), (code, shown) in zip(wrong, errors, strict=True):
        assert code == 1, words
        assert shown.startswith(f"error: {sentence}"), words
        assert shown.count("\n") == 1, "one sentence"


@pytest.mark.full
def test_what_imports_heavy_modules_would_be_found(tmp_path: Path) -> None:
    """The check above on a call that starts work: the trace does not exist, which only the reader of traces knows."""
    (answer,), loaded = asked({"replay": [["nowhere", "verifiers=[rejection]"]]}, tmp_path)["replay"]
    assert answer[0] == 1
    assert {"torch", "numpy"} <= set(loaded)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """``--help | head -1``, with an output longer than a pipe holds."""
    code = (
        "import sys\nfrom experiments.run import main\nsys.stdout.write('x' * 1_000_000)\n"
        "sys.argv = ['run', '--help']\nmain()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""


def test_every_command_is_a_console_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {f"specdec-{name.replace('_', '-')}": f"experiments.{name}:main" for name in COMMANDS}
    assert project["scripts"] == wanted
