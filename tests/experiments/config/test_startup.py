"""Commands start: questions and typing errors answered at once, ranks of torchrun, words and settings checked."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import experiments
from experiments import removed
from experiments.__main__ import COMMANDS
from experiments.config import launch as cli
from experiments.config import ranks
from experiments.config.kinds import Count, OneOrMore, Wanted, check_arguments
from experiments.config.launch import with_folders, with_home
from experiments.config.sections import CONF, build, option_names, sections
from tests.experiments.runs import Configure
from tests.models import tiny_model
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
    plan = [f"target.name={tmp_path}", "drafter=eagle", f"out={tmp_path / 'out'}"]
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
    homes = {name: "commands.settings" if name in SHIMS else f"{name}.__main__" for name in COMMANDS}
    wanted = {f"specdec-{name}": f"experiments.{home}:{name}.main" for name, home in homes.items()}
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
        assert code == 1 and said.count("\n") == 1 and removed.SENTENCES["commands"]["pays"] in said
    code, said = said_by("-m", "experiments", "load", "memory=1e9")
    assert code == 1 and said.count("\n") == 1 and removed.SENTENCES["options"]["load memory"] in said


def offered(line: str) -> set[str]:
    """The words that the function asks for which bash calls on Tab."""
    given = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"experiments.{line.split()[0].removeprefix('specdec-')}", "-sc", "query=bash"]
    done = subprocess.run(command, cwd=ROOT / "examples" / "project", env=given, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.full
def test_names_and_settings_are_completed() -> None:
    assert offered("specdec-run dra") == {"drafter=", "drafter."}
    models = {f"drafter={name}" for name in ("marginals", "medusa", "merged", "model", "mtp")}
    assert offered("specdec-run drafter=m") == models
    assert offered("specdec-run drafter=ngram drafter.b") == {"drafter.branches="}
    assert offered("specdec-run drafter=ngram '") == set(), "nothing is printed in the middle of the user's line"
    assert offered("specdec-replay basel") == {"baseline="}
    _, installed = said_by("-m", "experiments.run", "-sc", "install=bash")
    assert "-F hydra_bash_completion" in installed


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of two, as torchrun does."""

    def become(rank: int) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")

    return become


def config(**settings: Any) -> DictConfig:
    return OmegaConf.create({"target": {"tensor_parallel": 2}, "seed": 0, "out": "runs/a", "resume": False} | settings)


def test_another_process_is_silent_and_works_on_a_copy(
    process: Callable[[int], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    process(1)
    (tmp_path / "records.jsonl").write_text("begun")
    own = config(out=str(tmp_path), resume=True)
    with ranks.taking_part(own):
        print("not heard")
        copy = Path(own.out)
        assert copy != tmp_path and (copy / "records.jsonl").read_text() == "begun"
        (copy / "records.jsonl").write_text("changed")
    assert not copy.exists()
    assert (tmp_path / "records.jsonl").read_text() == "begun"
    cli.show(ValueError("no such device"))
    told = capsys.readouterr()
    assert told.out == "" and told.err == "error: process 1: no such device\n"
    assert "hydra.output_subdir=null" in ranks.arguments(["a=1"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": {"tensor_parallel": 1}}, "give target.tensor_parallel=2"),
        ({"target": None}, "would all do the same"),
        ({"seed": None}, "seed=null: processes that share a target need the same seed"),
        ({"contenders": {"hf": {}}}, "contenders run whole models in one process"),
    ],
)
def test_what_cannot_run_in_several_processes(
    process: Callable[[int], None], settings: dict[str, Any], message: str
) -> None:
    process(0)
    with pytest.raises(ValueError, match=message), ranks.taking_part(config(**settings)):
        pytest.fail("it began")


@pytest.mark.full
def test_a_run_in_two_processes_is_the_run_of_one(saved: Path, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [f"target.name={saved}/target", f"drafter.name={saved}/drafter", "target.dtype=float32"]
    words += ["dataset.count=2", "sampling.max_new_tokens=12", "warmup_prompts=0", "dataset.prompt_tokens=40"]

    def outputs(folder: Path, start: list[str], more: list[str]) -> list[Any]:
        command = [sys.executable, *start, "-m", "experiments.run", *words, *more, f"out={folder}"]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("mean acceptance length") == 1
        return [json.loads(line)["token_ids"] for line in (folder / "records.jsonl").read_text().splitlines()]

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = outputs(tmp_path / "two", torchrun, ["target.tensor_parallel=2"])
    assert len(together) == 4
    assert together == outputs(tmp_path / "one", [], [])


def test_hydra_reads_the_very_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("drafter=model").mkdir()
    for name in ("a b,c", "it's", "[x]", "a:b", "ü{}", "outputs/*/0", "drafter=model"):
        (word,) = with_folders([name], "run", several=False)
        assert OverridesParser.create().parse_override(word).value() == name


def test_the_home_is_found_wherever_a_path_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["target.name=~/m", "runs=[~/a,~/b]", "dataset.files=~/a,~/b", "~methods.model", "a=b~/c", "~/bare"]
    assert with_home(given) == [
        *("target.name=/home/me/m", "runs=[/home/me/a,/home/me/b]", "dataset.files=/home/me/a,/home/me/b"),
        *("~methods.model", "a=b~/c", "~/bare"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's configuration with a rule that is new and one that takes the place of the package's."""
    conf = tmp_path / "my conf"  # with a space, as folders have
    (conf / "verifier").mkdir(parents=True)
    (conf / "verifier" / "mine.yaml").write_text("_target_: verifiers.LenientVerifier\nlenience: 0.25\n")
    (conf / "verifier" / "empty.yaml").write_text("lenience: 0.25\n")
    return conf


@pytest.fixture
def searching(folder: Path) -> Iterator[str]:
    """A job that was started with a folder in ``hydra.searchpath``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("run", [f"hydra.searchpath=['file://{folder}']"], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        yield "verifier"
    HydraConfig.instance().cfg = None


def test_the_search_path_of_the_job_counts_and_a_class_needs_no_file(searching: str) -> None:
    assert {"mine", "block"} <= set(option_names(searching))
    own = {"_target_": "verifiers.LenientVerifier", "lenience": 0.75}
    found = sections(searching, ["block", "mine", {"name": "mine", "lenience": 0.5}, own])
    assert list(found) == ["block", "mine", "mine, lenience=0.5", "LenientVerifier, lenience=0.75"]
    assert [section.get("lenience") for section in found.values()] == [None, 0.25, 0.5, 0.75]
    HydraConfig.instance().cfg = None
    assert "mine" not in option_names("verifier"), "and is forgotten"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Count


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    sizes: OneOrMore[Count] = 1
    mode: Literal["a", "b"] | None = None
    even: Annotated[int, Wanted("an even number", lambda value: value % 2 == 0)] = 0
    flag: bool = True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner": {"size": 0}}, "inner.size=0: give an integer of at least 1"),
        ({"inner": {"size": True}}, "inner.size=True: give an integer of at least 1"),
        ({"inner": {"sise": 1}}, "there is no inner.sise: did you mean inner.size?"),
        ({"inner": {}}, "inner.size is missing"),
        ({"inner": 3}, "inner=3: give a section"),
        ({"sizes": [1, 0]}, "sizes=[1, 0]: give an integer of at least 1, or a list"),
        ({"mode": "c"}, "mode='c': give one of a, b, or null"),
        ({"even": 3}, "even=3: give an even number"),
        ({"flag": 1}, "flag=1: give true or false"),
        ({"flg": True}, "there is no flg: did you mean flag?"),
    ],
)
def test_a_wrong_setting_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        check_arguments(Outer, {"inner": {"size": 1}} | options)
    assert sentence in str(raised.value)


class Options(TypedDict, total=False):
    size: int


class Made:
    """Made by a class method, which passes options on to the constructor."""

    def __init__(self, **options: Unpack[Options]):
        self.options = options

    @classmethod
    def load(cls, name: str, **options: Unpack[Options]) -> "Made":
        return cls(**options)


class Wider(Made):
    def __init__(self, *, weight: float = 0.5, **options: Unpack[Options]):
        super().__init__(**options)


def test_what_a_subclass_adds_can_be_given_to_the_class_method_that_makes_it() -> None:
    check_arguments(Wider.load, {"name": "a", "size": 2, "weight": 0.3})
    for made, options in ((Made, {"weight": 0.3}), (Wider, {"weight": "a"}), (Wider, {"wight": 0.3})):
        with pytest.raises(ValueError, match=r"weight='a': give a number|there is no (weight|wight)"):
            check_arguments(made.load, {"name": "a", **options})


def test_a_target_may_borrow_a_tokenizer(configure: Configure, saved: Path, tmp_path: Path) -> None:
    tiny_model(vocab_size=257).save_pretrained(tmp_path / "bare")
    named = f"target.name={tmp_path / 'bare'}"
    assert build(configure("run", named), "target").tokenizer is None
    target = build(configure("run", named, f"target.tokenizer={saved / 'target'}"), "target")
    assert target.tokenizer is not None and target.name == str(tmp_path / "bare")
