"""Commands start: questions and typing errors answered at once, ranks of torchrun, words and settings checked."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from experiments import removed
from experiments.__main__ import COMMANDS
from experiments.config import launch as cli
from experiments.config import ranks
from experiments.config.launch import with_folders, with_home
from experiments.config.sections import CONF, option_names, sections
from experiments.results.records import read_records
from experiments.run import run
from tests.experiments.runs import Configure, local
from tests.public_models import CONFIGS

ROOT = Path(__file__).parents[3]
ALIASES = ("demo", "check_drafter", "check_verifier")
SHIMS = [name for name in COMMANDS if name not in ("load", "bench")]
HEAVY = {"torch", "transformers", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "rich", "wandb"}
IMPORTS = "; ".join(f"import experiments.{name}" for name in (*SHIMS, *ALIASES))


def said_by(*words: str, folder: Path = ROOT) -> tuple[int, str, set[str]]:
    """The exit code and the output of Python in a fresh process, and the modules that it has imported."""
    given = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=given, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("import time:")]
    imported = re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.MULTILINE)
    return done.returncode, done.stdout + "".join(errors), set(imported)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-c", IMPORTS], ""),
        (["-m", "experiments.run", "--help"], "powered by Hydra"),
        (["-m", "experiments.run", "verifier=bloc", "-m"], "error: there is no verifier 'bloc'"),
        (["-m", "experiments.replay", "nowhere", "verifiers=[{name: lenent}]"], "error: there is no verifier 'lenent'"),
        (["-m", "experiments.train", "mixed_precision=fp16"], "error: mixed_precision='fp16'"),
    ],
)
def test_questions_and_typing_errors_are_answered_at_once(words: list[str], said: str, tmp_path: Path) -> None:
    """The mistakes are such that only the names of options, or the annotations of settings, can tell."""
    code, shown, imported = said_by(*words, folder=tmp_path)
    assert said in shown and not HEAVY & imported
    assert code == said.startswith("error") and (code == 0 or shown.count("\n") == 1)


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}))
    plan = [f"target.name={tmp_path}", "drafter=eagle", f"out={tmp_path / 'out'}"]
    code, shown, imported = said_by("-m", "experiments.plan", *plan)
    assert code == 0 and "bound by memory" in " ".join(shown.split())
    assert "numpy" in imported and not {"torch", "transformers", "scipy", "pandas"} & imported


def test_every_command_is_a_console_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    homes = {name: "commands.settings" if name in SHIMS else f"{name}.__main__" for name in COMMANDS}
    wanted = {f"specdec-{name}": f"experiments.{home}:{name}.main" for name, home in homes.items()}
    assert project["scripts"] == wanted


def test_all_commands_are_listed_and_removed_ones_say_what_replaces_them() -> None:
    code, listed, imported = said_by("-m", "experiments", "--help")
    assert code == 0 and all(re.search(rf"^  {name} ", listed, re.MULTILINE) for name in COMMANDS)
    assert len(COMMANDS) == 10 and not {"hydra", "torch", "numpy"} & imported
    assert said_by("-m", "experiments", "rum")[:2] == (1, "error: there is no command rum: did you mean run?\n")
    for words, told in (
        (["experiments", "pays"], removed.SENTENCES["commands"]["pays"]),
        (["experiments.pays"], removed.SENTENCES["commands"]["pays"]),
        (["experiments", "load", "memory=1e9"], removed.SENTENCES["options"]["load memory"]),
    ):
        code, said, _ = said_by("-m", *words)
        assert code == 1 and said.count("\n") == 1 and told in said


@pytest.mark.full
def test_names_and_settings_are_completed() -> None:
    """By what bash calls on Tab: nothing else is printed in the middle of the user's line."""
    command = [sys.executable, "-m", "experiments.run", "-sc", "query=bash"]
    models = {f"drafter={name}" for name in ("marginals", "medusa", "merged", "model", "mtp")}
    for line, wanted in (
        ("specdec-run drafter=m", models),
        ("specdec-run drafter=ngram drafter.b", {"drafter.branches="}),
        ("specdec-run drafter=ngram '", set()),
    ):
        given = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT / "examples" / "project", env=given, capture_output=True, text=True)
        assert (done.returncode, done.stderr, set(done.stdout.split())) == (0, "", wanted)


Become = Callable[[int], None]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Makes this process one of two, as torchrun does."""

    def become(rank: int) -> None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return become


def config(**settings: Any) -> DictConfig:
    return OmegaConf.create({"target": {"tensor_parallel": 2}, "seed": 0, "out": "runs/a", "resume": False} | settings)


def test_another_process_is_silent_and_works_on_a_copy(process: Become, capsys: Any, tmp_path: Path) -> None:
    process(1)
    (tmp_path / "records.jsonl").write_text("begun")
    own = config(out=str(tmp_path), resume=True)
    with ranks.taking_part(own):
        print("not heard")
        copy = Path(own.out)
        assert copy != tmp_path and (copy / "records.jsonl").read_text() == "begun"
        (copy / "records.jsonl").write_text("changed")
    assert not copy.exists() and (tmp_path / "records.jsonl").read_text() == "begun"
    cli.show(ValueError("no such device"))
    told = capsys.readouterr()
    assert told.out == "" and told.err == "error: process 1: no such device\n"
    assert "hydra.output_subdir=null" in ranks.arguments(["a=1"])


def test_what_cannot_run_in_several_processes(process: Become) -> None:
    process(0)
    for settings, message in (
        ({"target": {"tensor_parallel": 1}}, "would all do the same: give target.tensor_parallel=2"),
        ({"seed": None}, "seed=null: processes that share a target need the same seed"),
        ({"contenders": {"hf": {}}}, "contenders run whole models in one process"),
    ):
        with pytest.raises(ValueError, match=message), ranks.taking_part(config(**settings)):
            pytest.fail("it began")


@pytest.mark.full
@pytest.mark.usefixtures("no_pictures")
def test_a_run_in_two_processes_is_the_run_of_one(configure: Configure, saved: Path, tmp_path: Path) -> None:
    words = [f"target.name={saved}/target", *local(saved, "model"), "target.dtype=float32", "peaks=none"]
    words += ["dataset.count=2", "sampling.max_new_tokens=12", "warmup_prompts=0", "dataset.prompt_tokens=40"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "experiments.run", *words, "target.tensor_parallel=2", f"out={tmp_path / 'two'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("mean acceptance length") == 1
    run(configure("run", *words, f"out={tmp_path / 'one'}"))
    folders = (tmp_path / name / "records.jsonl" for name in ("one", "two"))
    one, two = ([record.token_ids for record in read_records(path)] for path in folders)
    assert one == two and len(one) == 4


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


def test_the_search_path_of_the_job_counts_and_a_class_needs_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    """A user's folder has a rule of its own, and its name a blank, as folders have."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    mine = tmp_path / "my conf" / "verifier" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("_target_: verifiers.LenientVerifier\nlenience: 0.25\n")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = compose("run", [f"hydra.searchpath=['file://{mine.parent.parent}']"], return_hydra_config=True)
        HydraConfig.instance().set_config(found)
        assert {"mine", "block"} <= set(option_names("verifier"))
        own = {"_target_": "verifiers.LenientVerifier", "lenience": 0.75}
        rules = sections("verifier", ["block", "mine", {"name": "mine", "lenience": 0.5}, own])
    assert list(rules) == ["block", "mine", "mine, lenience=0.5", "LenientVerifier, lenience=0.75"]
    assert [section.get("lenience") for section in rules.values()] == [None, 0.25, 0.5, 0.75]
    HydraConfig.instance().cfg = None
    assert "mine" not in option_names("verifier"), "and is forgotten"
