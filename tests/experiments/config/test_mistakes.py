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

from experiments.bundle import bundle
from experiments.check_verifier import check_verifier as check
from experiments.compare import compare
from experiments.config.launch import launch, sentence
from experiments.config.words import without_nulls
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
from specdec import DraftTree, TreeShape
from verifiers import RejectionVerifier

NUMBER = 3


class Lookup(NGramDrafter):
    def propose(self, slots):
        return {}["missing"]  # LINE Lookup.propose KeyError: 'missing'


class Complains(NGramDrafter):
    def propose(self, slots):
        raise ValueError("nothing to draft")  # LINE Complains.propose ValueError: nothing to draft


class Misshapen(NGramDrafter):
    def propose(self, slots):
        return DraftTree.from_shape(TreeShape.chain(2), slots.roots)  # LINE Misshapen.propose tokens of a draft tree


class Unbound(NGramDrafter):
    def bind(self, target, sizes):
        self.width = target.width  # LINE Unbound.bind AttributeError: 'Target' object has no attribute 'width'


class Unmade(NGramDrafter):
    def __init__(self):
        raise RuntimeError("cannot start")  # LINE Unmade.__init__ RuntimeError: cannot start


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
    [("drafter", "Unbound.bind"), ("drafter", "Unmade.__init__"), ("dataset", "Data.load")],
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
    [
        ("drafter", "Lookup.propose"),
        ("drafter", "Complains.propose"),
        ("drafter", "Misshapen.propose"),
        ("verifier", "Rule.laws"),
    ],
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
    "engine.kv_cache=int4": "engine.kv_cache='int4': give one of int8, fp8, or null",
    "engine.kv_cache=int8 +contender=hf_generate": "engine.kv_cache=int8 makes another target than the one that "
    "hf_generate would decode with in full precision: give engine.kv_cache=null or leave the contenders out",
    # Own components.
    "drafter=none drafter._target_=own_parts.Lokup": "drafter._target_='own_parts.Lokup': there is no 'Lokup' in "
    "own_parts: did you mean Lookup?",
    "drafter=none drafter._target_=own_parts": "drafter._target_='own_parts' is a module: name a class or function",
    "drafter=none drafter._target_=own_parts.NUMBER": "drafter._target_='own_parts.NUMBER' is of type int: name a",
    "drafter=none drafter._target_=3": "drafter._target_=3: give the dotted name of a class",
    "drafter=none drafter._target_=nowhere.X": "drafter._target_='nowhere.X': there is no module 'nowhere'",
    "drafter=none drafter._target_=own_parts.Needy": "drafter.depth is missing: give drafter.depth=…",
    "drafter=none drafter._target_=own_syntax.X": "SyntaxError: invalid syntax (at own_syntax.py:1;",
    "drafter=none drafter._target_=own_import.X": "No module named 'a_package_that_is_not_installed' "
    "(at own_import.py:1 in <module>;",
    "drafter=none drafter._target_=verifiers.RejectionVerifier": "drafter is the verifier RejectionVerifier",
    "drafter=ngram verifier._target_=drafters.NGramDrafter": "verifier is the drafter NGramDrafter: give an acceptance",
    "dataset._target_=drafters.NGramDrafter": "there is no dataset.",
    # Sections.
    "drafter=ngram target._target_=null": "target._target_=None: a run needs a target, give target=NAME",
    "drafter=ngram sampling._target_=null": "sampling._target_=None: a run needs a sampling, give sampling=NAME",
    "drafter=ngram dataset._target_=null": "dataset._target_=None: a run needs a dataset, give dataset=NAME",
    "drafter=ngram tracker._target_=null": "tracker._target_=None: a run needs a tracker, give tracker=NAME",
    "drafter=ngram engine.scheduler=fifo": "engine.scheduler='fifo': give 'engine.scheduler={{_target_:",
    "drafter=ngram engine.scheduler._target_=x.Y": "engine.scheduler is empty: give 'engine.scheduler={{_target_:…}}'",
    "drafter=ngram engine.scheduler={{_target_:own_parts.Rule}}": "scheduler is a Rule: give a Scheduler, or None",
    "verifier=null": "verifier=null: a run needs a verifier, choose among block, ",
    "target=null": "target=null: a run needs a target, choose among bundled, hf",
    "dataset=stdlib,null": "dataset=stdlib,null: a run needs a dataset, choose among ",
    "drafter=ngram method=null": "method=None: give a text",
    "device=cuda": "there is no device: did you mean target.device or drafter.device?",
    "temperature=1": "there is no temperature: did you mean drafter.temperature or sampling.temperature?",
    "max_batch_size=4": "there is no max_batch_size: did you mean engine.max_batch_size?",
    # Folders.
    "drafter=ngram out=a_file": "a_file is a file)",
    "drafter=ngram out=a_file/below/it": "a_file is a file)",
    "drafter=ngram out=3": "out=3: give the path of a folder",
    "drafter=ngram target.name=models/mine/final": "no model at 'models/mine/final': there is no such folder",
    "drafter=ngram target.name=a_file": "no model at 'a_file': it is a file, give the folder that it is in",
    "drafter=ngram target.name=nobody/nothing": "cannot load the model 'nobody/nothing', which is no local folder: ",
    "drafter.name=models/small/final": "no model at 'models/small/final': there is no such folder",
    "drafter=medusa drafter.name=heads/of/mine": "no Medusa checkpoint at heads/of/mine: there is no such folder",
    # Models and machines.
    "drafter=ngram target.device=xpu": "device='xpu' is not there, or torch cannot use it (",
    "drafter=ngram target.device=0": "device=0: give 'auto', 'cpu', 'cuda' or 'cuda:1'",
    "drafter=ngram target.inflate=3": "inflate=3: give one of 110m, 1b, 8b",
    "drafter=ngram +target.attn_implementation=flash_attention_2": "leave attn_implementation out, the engine computes",
    "drafter=ngram +target.load_in_9bit=true": "got an unexpected keyword argument 'load_in_9bit'",
    "drafter.name={short} engine.max_length=64": "the drafter {short}: max_length=64 is beyond the 48 positions of",
    # Numbers and shapes.
    "drafter=ngram sampling.max_new_tokens=2.5": "sampling.max_new_tokens=2.5: give an integer",
    "drafter=ngram engine.max_batch_size=true": "engine.max_batch_size=True: give an integer of at least 1",
    "drafter=ngram engine.max_length=long": "engine.max_length='long': give an integer of at least 2, or null",
    "drafter=ngram engine.max_length=100000": "max_length=100000 is beyond the ",
    "drafter=ngram drafter.max_draft_tokens=1000000": "make a tree of 2,000,000 nodes, and a tree may have at most",
    "drafter.shape=2.5": "chain length=2.5: give a whole number",
    "drafter.shape=true": "chain length=True: give a whole number",
    "drafter.shape=null": "the tree shape is None: give a length such as 4",
    "drafter.shape='3,2'": "the tree shape is '3,2': give a length such as 4",
    "drafter.shape=[64,64,64]": "branching factors [64, 64, 64] make a tree of 266,304 nodes, and a tree may have at",
    "drafter.shape=[[0],[0,0,0]]": "path (0, 0, 0) in a tree shape has no parent: add the path (0, 0)",
    "drafter.temperature=-1": "drafter temperature=-1: give 0 (top-k), a positive number",
    "drafter.sampling=greedy": "drafter sampling='greedy': give one of iid, ",
    "drafter=ngram verifier=lenient verifier.lenience=2": "lenience=2: give a factor in (0, 1]",
    "drafter=ngram sla.ttft=0": "sla.ttft=0: give seconds above 0, or a number with a unit (us, ms, s, min) such as",
    "drafter=ngram sla.tpot=-5ms": "sla.tpot='-5ms': give seconds above 0",
    "drafter=ngram sla.e2e=soon": "sla.e2e='soon': give seconds above 0",
    "drafter=ngram +sla.itl=1": "there is no sla.itl: choose among ttft, tpot, e2e",
    "drafter=ngram sla=fast": "sla='fast': give a section",
    "drafter=ngram price=0": "price=0: give the price of an hour, above 0, or null",
    "drafter=ngram requests_table=some": "requests_table='some': give true or false, or null",
    "drafter=ngram seed=1.5": "seed=1.5: give an integer of at least 0, or null",
    # Names, values and files.
    "dataset=nope": "there is no dataset 'nope': choose among context, gsm8k, humaneval, joined, jsonl, ",
    "drafter=nope": "there is no drafter 'nope': did you mean none?",
    "sampling.temperature=-1": "temperature=-1: give 0 (greedy) or a positive number",
    "sampling.temperature=hot": "sampling.temperature='hot': give a number",
    "sampling.top_p=2": "top_p=2: give a mass in (0, 1]",
    "sampling.heat=2": "there is no sampling.heat: choose among temperature, top_k, ",
    "sampling.temperatur=1": "there is no sampling.temperatur: did you mean sampling.temperature?",
    "sead=1": "there is no sead: did you mean seed?",
    "+sead=1": "there is no sead: did you mean seed?",
    "engine.max_batchsize=2": "there is no engine.max_batchsize: did you mean engine.max_batch_size?",
    "+engine.prefil_chunk=2": "there is no engine.prefil_chunk: did you mean engine.prefill_chunk?",
    "+bootstrap.samples=200": "there is no bootstrap.samples: did you mean bootstrap.resamples?",
    "bootstrap.resamples=many": "bootstrap.resamples='many': give an integer",
    "engine.prefill_chunk=0": "engine.prefill_chunk=0: give an integer of at least 1",
    "engine.timing=1": "engine.timing=1: give true or false",
    "threads=0": "threads=0: give an integer of at least 1, or null",
    "trace_dropped=1": "trace_dropped=1: give a mass from 0",
    "chat_template=3": "chat_template=3: give a section",
    "dataset.count=[": "cannot read 'dataset.count=['",
    "dataset=jsonl": "dataset.file has no value: give dataset.file=",
    "dataset=jsonl dataset.file={tmp}/no.jsonl": "dataset.file: there is no file",
    "dataset=jsonl dataset.file={tmp}/bad.jsonl": 'bad.jsonl, line 2: "turns" must be a list',
    "dataset=text dataset.files={tmp}/*.txt": "dataset.files: no file matches",
    "dataset.count=0": "dataset.count=0: give at least 1",
    "warmup_prompts=-1": "warmup_prompts=-1: give an integer of at least 0",
    "bootstrap.confidence=95": "confidence=95: give a level between 0 and 1",
    "target.name={tmp}/nope": "no model at ",
    "target.dtype=int8": "dtype='int8': give 'auto'",
    "drafter.name={tmp}/nope": "no model at ",
    "drafter=medusa drafter.name={tmp}/nope": "no Medusa checkpoint at ",
    "drafter=medusa drafter.name={models}/target": "no Medusa checkpoint in ",
    "drafter.name={models}/other": "vocab",
    "drafter=ngram drafter.branches=0": "branches=0: give at least 1",
    "drafter=ngram engine.max_length=20": "no prompt fits: ",
    "drafter=ngram engine.max_batch_size=0": "engine.max_batch_size=0: give an integer of at least 1",
    "drafter=ngram engine.attention=magic": "attention='magic': give one of",
    "tracker=wandb tracker.mode=upload": "tracker.mode='upload'",
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_mistake_gets_one_sentence_before_any_work(
    overrides: str, saved: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    short = mine / "short"
    places = {"short": short, "tmp": mine, "models": saved}
    (mine / "bad.jsonl").write_text('{"turns": ["a"]}\n{"turns": 3}\n')
    if "{short}" in overrides:
        model = tiny_model(vocab_size=257)
        model.config.max_position_embeddings = 48
        model.save_pretrained(short)
    defaults = {"target.name": saved / "target", "drafter.name": saved / "drafter", "out": mine / "out"}
    given = overrides.format(**places).replace("shape='3,2'", "shape='\"3,2\"'").split()
    chosen = "drafter=" in overrides
    more = [
        f"{key}={value}"
        for key, value in defaults.items()
        if not any(each.startswith((f"{key}=", f"{key.split('.')[0]}=")) for each in given)
        and not (key == "drafter.name" and chosen)
    ]
    given = [text.replace("'\"", "'").replace("\"'", "'") for text in given]
    assert invoke(run, "run", *more, *given, patch=monkeypatch, folder=mine) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: "), error
    assert BAD[overrides].format(**places) in error
    assert error.count("\n") == 1, error
    assert not (mine / "out" / "records.jsonl").exists()


ELSEWHERE = [
    ("demo", demo, "methods=3", "methods=3: give a section"),
    ("demo", demo, "methods=null", "methods=None: give a section"),
    ("demo", demo, "out=a_file", "a_file is a file)"),
    ("compare", compare, "runs=a_file", "a_file is not the folder of a run: it has no manifest.json"),
    ("replay", replay, "trace=a_file", "a_file is not the folder of a run: it has no manifest.json"),
    ("check_verifier", check, "verifier=null", "verifier=null: a run needs a verifier, choose among block, "),
    ("check_verifier", check, "verifier._target_=null", "verifier._target_=None: name the rule to check"),
    ("check_verifier", check, "verifier._target_=drafters.NGramDrafter", "verifier is the drafter NGramDrafter"),
    ("check_verifier", check, "verifier._target_=own_parts.Data", "verifier is a Data: give an acceptance rule"),
    ("train", train, "out=a_file", "a_file is a file)"),
    ("bundle", bundle, "work=a_file/below", "a_file is a file)"),
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


def test_null_stands_for_none_only_where_a_group_is_chosen() -> None:
    given = ["-m", "drafter=null,ngram", "experiment=null", "seed=null", "drafter.shape=null", "+a=null", "x"]
    assert without_nulls(given) == ["-m", "drafter=none,ngram", *given[2:]]


def test_the_manifest_has_revisions_and_the_users_own_repository(
    configure: Configure, saved: Path, tiny: list[str], mine: Path, capsys: Any
) -> None:
    """A digest says whether a model has changed, and a commit what the user's own code was."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=mine, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def manifest(name: str, *more: str) -> dict[str, Any]:
        given = [text for text in tiny if not text.startswith("out=")]
        run(configure("run", *given, f"out={mine.parent / name}", f"method={name}", *more))
        return json.loads((mine.parent / name / "manifest.json").read_text())

    first = manifest("first", "drafter=ngram", "dataset.count=1")
    assert first["project"] is None, "no repository"
    assert first["revisions"]["target"].startswith("files:")
    assert first["revisions"]["drafter"] is None, "nothing was loaded for it"

    git("init", "-q")
    git("add", "own_parts.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "parts")
    other = mine / "other"
    changed = tiny_model(vocab_size=257, seed=1)
    changed.save_pretrained(other)
    model = [f"drafter.name={saved / 'drafter'}", "dataset.count=1"]
    second = manifest("second", *model)
    assert second["project"]["commit"] == git("rev-parse", "HEAD")
    assert second["project"]["folder"] == str(mine.resolve())
    assert second["project"]["dirty"] and "?? a_file" in second["project"]["changes"]
    assert second["revisions"]["target"] == first["revisions"]["target"]
    assert second["revisions"]["drafter"] not in (None, second["revisions"]["target"])
    third = manifest("third", f"drafter.name={other}", "dataset.count=1")
    assert third["revisions"]["drafter"] not in (None, second["revisions"]["drafter"]), "other weights"


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
