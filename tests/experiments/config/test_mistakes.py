"""Mistakes that a new user makes on the command line: each gets one sentence, before any work.

The user's own components live in a folder of their own, as they do in practice.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments.check_verifier import check_verifier as check
from experiments.compare import compare
from experiments.config.launch import launch, sentence
from experiments.demo import demo
from experiments.replay import replay
from experiments.results.records import read_records
from experiments.run import run
from experiments.train import train
from tests.models import tiny_model

Configure = Callable[..., DictConfig]
MINE = """
from drafters import NGramDrafter
from experiments.datasets.prompt import Prompt
from verifiers import RejectionVerifier

NUMBER = 3


class Lookup(NGramDrafter):
    def propose(self, slots):
        return {}["missing"]  # LINE Lookup.propose KeyError: 'missing'


class Unbound(NGramDrafter):
    def bind(self, target, sizes):
        self.width = target.width  # LINE Unbound.bind AttributeError: 'Target' object has no attribute 'width'


class Needy(NGramDrafter):
    def __init__(self, depth):
        super().__init__(depth)


class Rule(RejectionVerifier):
    def laws(self, tree, target_probs):
        return super().laws(tree, target_probs / 0 .real if 1 / 0 else 0)  # LINE Rule.laws ZeroDivisionError


class Data:
    count, seed = None, 0

    def load(self):
        import json

        return [Prompt(**json.loads("{oops"))]  # LINE Data.load Expecting property name
"""
LINES = {
    words.split()[0]: (number, words.partition(" ")[2])
    for number, line in enumerate(MINE.splitlines(), start=1)
    for _, found, words in [line.partition("# LINE ")]
    if found
}
"""What raises in the user's file: number of its line, and what is said, by the name of the function."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with components that fail, from where the commands are started."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own_parts.py").write_text(MINE)
    (folder / "own_syntax.py").write_text("def f(:\n    pass\n")
    (folder / "own_import.py").write_text("import a_package_that_is_not_installed\n")
    (folder / "a_file").write_text("notes\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("own_parts", "own_syntax", "own_import"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def invoke(task: Callable[..., Any], name: str, *arguments: str, patch: pytest.MonkeyPatch, folder: Path) -> int:
    """The exit code of an application in this process."""
    patch.setattr(sys, "argv", [f"{name}.py", *arguments, f"hydra.run.dir={folder / 'hydra'}"])
    try:
        launch(task, name)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def own(kind: str, drafter: str) -> list[str]:
    """Overrides that use a component of ``own_parts``."""
    chosen = {"drafter": ["drafter=none"], "verifier": ["drafter=ngram"], "dataset": ["drafter=ngram"]}[kind]
    return [*chosen, f"{kind}._target_=own_parts.{drafter}"]


@pytest.mark.parametrize(
    ("kind", "function"),
    [("drafter", "Unbound.bind"), ("dataset", "Data.load")],
)
def test_a_failing_component_shows_its_line(
    kind: str, function: str, saved: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Not the framework's line that called it, nor Python's or torch's that it called."""
    number, said = LINES[function]
    more = [f"target.name={saved / 'target'}", "out=out"]
    if kind == "dataset":  # all settings of the section but these are another dataset's
        (mine / "own").mkdir()
        (mine / "own" / "dataset").mkdir()
        (mine / "own" / "dataset" / "data.yaml").write_text("_target_: own_parts.Data\n")
        overrides = ["--config-dir", str(mine / "own"), "drafter=ngram", "dataset=data"]
    else:
        overrides = own(kind, function.split(".")[0])
    assert invoke(run, "run", *overrides, *more, patch=monkeypatch, folder=mine) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert said in error
    assert f"(at own_parts.py:{number} in {function}" in error
    assert ("HYDRA_FULL_ERROR=1 shows the whole traceback" in error) == (kind != "dataset"), "a ValueError is input"


@pytest.mark.parametrize(
    ("kind", "function"),
    [("drafter", "Lookup.propose"), ("verifier", "Rule.laws")],
)
def test_a_component_that_fails_in_a_round_shows_its_line_in_the_records(
    kind: str, function: str, configure: Configure, tiny: list[str], mine: Path, capsys: Any
) -> None:
    number, said = LINES[function]
    config = configure("run", *tiny, *own(kind, function.split(".")[0]), "method=mine", "warmup_prompts=0")
    with pytest.raises(ValueError, match="every prompt failed with mine: ") as raised:
        run(config)
    place = f"(at own_parts.py:{number} in {function})"
    assert place in str(raised.value) and said in str(raised.value)
    errors = [record.error for record in read_records(Path(config.out) / "records.jsonl") if record.method == "mine"]
    assert len(errors) == 3
    assert all(error is not None and error.endswith(place) and "\n" not in error for error in errors)


def test_the_whole_traceback_on_demand(saved: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    overrides = [*own("drafter", "Unbound"), f"target.name={saved / 'target'}", "out=out"]
    with pytest.raises(AttributeError, match="has no attribute 'width'"):
        invoke(run, "run", *overrides, patch=monkeypatch, folder=mine)


def test_an_error_of_the_framework_shows_its_deepest_line() -> None:
    with pytest.raises(TypeError) as raised:
        read_records(None)  # type: ignore[arg-type]
    below = raised.value.with_traceback(raised.tb.tb_next)  # as if no code of a user had called it
    assert "records.py:" in sentence(below)
    assert "in read_records; HYDRA_FULL_ERROR=1 shows the whole traceback)" in sentence(below)


BAD = {
    "engine.kv_cache=int4": "engine.kv_cache='int4': give one of int8, fp8, fp8_e5m2, or null",
    "engine.kv_cache=int8 +contender=hf_generate": "engine.kv_cache=int8 makes another target than the one that",
    "drafter=none drafter._target_=own_parts.Lokup": "drafter._target_='own_parts.Lokup': there is no 'Lokup' in",
    "drafter=none drafter._target_=own_parts": "drafter._target_='own_parts' is a module: name a class or function",
    "drafter=none drafter._target_=own_parts.NUMBER": "drafter._target_='own_parts.NUMBER' is of type int: name a",
    "drafter=none drafter._target_=3": "drafter._target_=3: give the dotted name of a class",
    "drafter=none drafter._target_=nowhere.X": "drafter._target_='nowhere.X': there is no module 'nowhere'",
    "drafter=none drafter._target_=own_parts.Needy": "drafter.depth is missing: give drafter.depth=…",
    "drafter=none drafter._target_=own_syntax.X": "SyntaxError: invalid syntax (at own_syntax.py:1;",
    "drafter=none drafter._target_=own_import.X": "No module named 'a_package_that_is_not_installed' (at",
    "drafter=none drafter._target_=verifiers.RejectionVerifier": "drafter is the verifier RejectionVerifier",
    "drafter=ngram verifier._target_=drafters.NGramDrafter": "verifier is the drafter NGramDrafter: give an acceptance",
    "dataset._target_=drafters.NGramDrafter": "there is no dataset.",
    "drafter=ngram target._target_=null": "target._target_=None: a run needs a target, give target=NAME",
    "drafter=ngram engine.scheduler=fifo": "engine.scheduler='fifo': give 'engine.scheduler={{_target_:",
    "drafter=ngram engine.scheduler._target_=x.Y": "engine.scheduler is empty: give 'engine.scheduler={{_target_:…}}'",
    "drafter=ngram engine.scheduler={{_target_:own_parts.Rule}}": "scheduler is a Rule: give a Scheduler, or None",
    "verifier=null": "verifier=null: a run needs a verifier, choose among block, ",
    "dataset=stdlib,null": "dataset=stdlib,null: a run needs a dataset, choose among ",
    "drafter=ngram method=null": "method=None: give a text",
    "temperature=1": "there is no temperature: did you mean drafter.temperature or sampling.temperature?",
    "drafter=ngram out=a_file": "a_file is a file)",
    "drafter=ngram out=3": "out=3: give the path of a folder",
    "drafter=ngram target.name=models/mine/final": "no model at 'models/mine/final': there is no such folder",
    "drafter=ngram engine.max_batch_size=true": "engine.max_batch_size=True: give an integer of at least 1",
    "drafter=ngram engine.max_length=long": "engine.max_length='long': give an integer of at least 2, or null",
    "drafter.shape=2.5": "chain length=2.5: give a whole number",
    "drafter.shape=[[0],[0,0,0]]": "path (0, 0, 0) in a tree shape has no parent: add the path (0, 0)",
    "drafter=ngram sla.ttft=0": "sla.ttft=0: give seconds above 0, or a number with a unit (us, ms, s, min) such as",
    "drafter=ngram +sla.itl=1": "there is no sla.itl: choose among ttft, tpot, e2e",
    "drafter=ngram sla=fast": "sla='fast': give a section",
    "drafter=ngram price=0": "price=0: give the price of an hour, above 0, or null",
    "drafter=ngram seed=1.5": "seed=1.5: give an integer of at least 0, or null",
    "sampling.temperature=hot": "sampling.temperature='hot': give a number",
    "sampling.top_p=2": "top_p=2: give a mass in (0, 1]",
    "sampling.temperatur=1": "there is no sampling.temperatur: did you mean sampling.temperature?",
    "+sead=1": "there is no sead: did you mean seed?",
    "+engine.prefil_chunk=2": "there is no engine.prefil_chunk: did you mean engine.prefill_chunk?",
    "+bootstrap.samples=200": "there is no bootstrap.samples: did you mean bootstrap.resamples?",
    "bootstrap.resamples=many": "bootstrap.resamples='many': give an integer",
    "engine.prefill_chunk=0": "engine.prefill_chunk=0: give an integer of at least 1",
    "trace_dropped=1": "trace_dropped=1: give a mass from 0",
    "dataset.count=[": "cannot read 'dataset.count=['",
    "dataset=jsonl dataset.file={tmp}/no.jsonl": "dataset.file: there is no file",
    "dataset=jsonl dataset.file={tmp}/bad.jsonl": 'bad.jsonl, line 2: "turns" must be a list',
    "dataset=text dataset.files={tmp}/*.txt": "dataset.files: no file matches",
    "dataset.count=0": "dataset.count=0: give at least 1",
    "drafter=medusa drafter.name={tmp}/nope": "no checkpoint at ",
    "drafter=medusa drafter.name={models}/target": "has no weights: there is neither medusa_lm_head.safetensors",
    "drafter.name={models}/other": "vocab",
    "drafter=ngram engine.max_length=20": "no prompt fits: ",
    "tracker=wandb tracker.mode=upload": "tracker.mode='upload'",
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_mistake_gets_one_sentence_before_any_work(
    overrides: str, saved: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    places = {"tmp": mine, "models": saved}
    (mine / "bad.jsonl").write_text('{"turns": ["a"]}\n{"turns": 3}\n')
    defaults = {"target.name": saved / "target", "drafter.name": saved / "drafter", "out": mine / "out"}
    given = overrides.format(**places).split()
    chosen = "drafter=" in overrides
    more = [
        f"{key}={value}"
        for key, value in defaults.items()
        if not any(each.startswith((f"{key}=", f"{key.split('.')[0]}=")) for each in given)
        and not (key == "drafter.name" and chosen)
    ]
    assert invoke(run, "run", *more, *given, patch=monkeypatch, folder=mine) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: "), error
    assert BAD[overrides].format(**places) in error
    assert error.count("\n") == 1, error
    assert not (mine / "out" / "records.jsonl").exists()


ELSEWHERE = [
    ("demo", demo, "race=lookahead", "race='lookahead': there is no such method"),
    ("demo", demo, "methods=null", "methods=None: give a section"),
    ("compare", compare, "runs=a_file", "a_file is not the folder of a run: it has no manifest.json"),
    ("replay", replay, "trace=a_file", "a_file is not the folder of a run: it has no manifest.json"),
    ("check_verifier", check, "verifier._target_=null", "verifier._target_=None: name the rule to check"),
    ("check_verifier", check, "verifier._target_=own_parts.Data", "verifier is a Data: give an acceptance rule"),
    ("train", train, "out=a_file", "a_file is a file)"),
    ("run", run, "hydra.run.dir=a_file", "cannot use 'a_file': File exists"),
]


@pytest.mark.parametrize(("name", "task", "override", "said"), ELSEWHERE)
def test_mistakes_with_the_other_commands(
    name: str,
    task: Callable[..., Any],
    override: str,
    said: str,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", f"hydra.run.dir={mine / 'hydra'}", override])
    if override.startswith("hydra"):
        del sys.argv[1]
    with pytest.raises(SystemExit) as stopped:
        launch(task, name)
    error = capsys.readouterr().err
    assert stopped.value.code == 1
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error


def test_null_decodes_plainly(saved: Path, tiny: list[str], mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(run, "run", *tiny, "drafter=null", "tracker=null", patch=monkeypatch, folder=mine) == 0
    out = Path(next(text for text in tiny if text.startswith("out=")).removeprefix("out="))
    assert {record.method for record in read_records(out / "records.jsonl")} == {"plain"}


def test_the_manifest_has_revisions_and_the_users_own_repository(
    configure: Configure, saved: Path, tiny: list[str], mine: Path, capsys: Any
) -> None:
    """A digest says whether a model has changed, and a commit what the user's own code was."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=mine, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "own_parts.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "parts")
    config = configure("run", *tiny, f"drafter.name={saved / 'drafter'}", "method=model", "dataset.count=1")
    run(config)
    manifest = json.loads((Path(config.out) / "manifest.json").read_text())
    assert manifest["project"]["commit"] == git("rev-parse", "HEAD")
    assert manifest["project"]["folder"] == str(mine.resolve())
    assert manifest["project"]["dirty"] and "?? a_file" in manifest["project"]["changes"]
    assert manifest["revisions"]["target"].startswith("files:")
    assert manifest["revisions"]["drafter"] not in (None, manifest["revisions"]["target"])


def test_a_run_does_not_go_on_with_other_weights(
    configure: Configure, saved: Path, tiny: list[str], mine: Path, capsys: Any
) -> None:
    model = mine / "drafter"
    tiny_model(vocab_size=257).save_pretrained(model)
    given = [*tiny, f"drafter.name={model}", "method=model"]
    run(configure("run", *given))
    out = Path(configure("run", *given).out)
    (out / "summary.json").unlink()
    tiny_model(vocab_size=257, seed=1).save_pretrained(model)
    with pytest.raises(ValueError, match="had other files of its models"):
        run(configure("run", *given, "resume=true"))
