"""Commands: questions and typing errors are answered at once, ranks of torchrun; interrupted runs go on as before."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from experiments.config.sections import CONF, option_names, plain_whole, sections
from experiments.results.manifest import write_manifest
from experiments.results.records import read_records
from experiments.run import run
from experiments.session.methods import check_components
from experiments.session.resume import begun
from tests.experiments.runs import Configure, Stop, invoke, launched, local
from tests.models import tiny_model
from tests.public_models import CONFIGS

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(__file__).parents[3]
SHIMS = [name for name in COMMANDS if name not in ("load", "bench")]
HEAVY = {"torch", "transformers", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "rich", "wandb"}
IMPORTS = "; ".join(f"import experiments.{name}" for name in (*SHIMS, "demo", "check_drafter", "check_verifier"))


def said_by(*words: str, folder: Path = ROOT, **more: str) -> tuple[int, str, set[str]]:
    """The exit code and the output of Python in a fresh process, and the modules that it has imported."""
    given = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONPROFILEIMPORTTIME": "1"} | more
    done = subprocess.run([sys.executable, *words], cwd=folder, env=given, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("import time:")]
    imported = re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.MULTILINE)
    return done.returncode, done.stdout + "".join(errors), set(imported)


def test_questions_and_typing_errors_are_answered_at_once(tmp_path: Path) -> None:
    """The mistakes are such that only the names of options, or the annotations of settings, can tell."""
    for words, said in (
        (["-c", IMPORTS], ""),
        (["-m", "experiments.run", "--help"], "powered by Hydra"),
        (["-m", "experiments.run", "verifier=bloc", "-m"], "error: there is no verifier 'bloc'"),
        (["-m", "experiments.replay", "nowhere", "verifiers=[{name: lenent}]"], "error: there is no verifier 'lenent'"),
        (["-m", "experiments.train", "mixed_precision=fp16"], "error: mixed_precision='fp16'"),
    ):
        code, shown, imported = said_by(*words, folder=tmp_path)
        assert said in shown and not HEAVY & imported
        assert code == said.startswith("error") and (code == 0 or shown.count("\n") == 1)


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}))
    plan = [f"target.name={tmp_path}", "drafter=eagle", f"out={tmp_path / 'out'}"]
    code, shown, imported = said_by("-m", "experiments.plan", *plan)
    assert code == 0 and "bound by memory" in " ".join(shown.split())
    assert "numpy" in imported and not {"torch", "transformers", "scipy", "pandas"} & imported


def test_all_commands_are_scripts_and_listed_and_removed_ones_say_what_replaces_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    homes = {name: "commands.settings" if name in SHIMS else f"{name}.__main__" for name in COMMANDS}
    assert project["scripts"] == {f"specdec-{name}": f"experiments.{home}:{name}.main" for name, home in homes.items()}
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
    asked = ["-m", "experiments.run", "-sc", "query=bash"]
    for line, wanted in (
        ("specdec-run drafter=m", {f"drafter={name}" for name in ("marginals", "medusa", "merged", "model", "mtp")}),
        ("specdec-run drafter=ngram drafter.b", {"drafter.branches="}),
        ("specdec-run drafter=ngram '", set()),
    ):
        typed = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        code, shown, _ = said_by(*asked, folder=ROOT / "examples" / "project", **typed)
        assert (code, set(shown.split())) == (0, wanted)


def config(**settings: Any) -> DictConfig:
    return OmegaConf.create({"target": {"tensor_parallel": 2}, "seed": 0, "out": "runs/a", "resume": False} | settings)


def test_another_process_is_silent_and_works_on_a_copy(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As torchrun starts them; what cannot run in several processes is refused."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "records.jsonl").write_text("begun")
    own = config(out=str(tmp_path), resume=True)
    with ranks.taking_part(own):
        print("not heard")
        copy = Path(own.out)
        assert copy != tmp_path and (copy / "records.jsonl").read_text() == "begun"
        (copy / "records.jsonl").write_text("changed")
    assert not copy.exists() and (tmp_path / "records.jsonl").read_text() == "begun"
    cli.show(ValueError("no such\n  device"))
    told = capsys.readouterr()
    assert told.out == "" and told.err == "error: process 1: no such device\n"
    assert "hydra.output_subdir=null" in ranks.arguments(["a=1"])

    for settings, message in (
        ({"target": {"tensor_parallel": 1}}, "would all do the same: give target.tensor_parallel=2"),
        ({"seed": None}, "seed=null: processes that share a target need the same seed"),
        ({"contenders": {"hf": {}}}, "contenders run whole models in one process"),
    ):
        with pytest.raises(ValueError, match=message), ranks.taking_part(config(**settings)):
            pytest.fail("it began")


@pytest.mark.full
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


def test_paths_are_read_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra reads the very name of a folder, and the home is found wherever a path begins."""
    monkeypatch.chdir(tmp_path)
    Path("drafter=model").mkdir()
    for name in ("a b,c", "it's", "[x]", "a:b", "ü{}", "outputs/*/0", "drafter=model"):
        (word,) = with_folders([name], "run", several=False)
        assert OverridesParser.create().parse_override(word).value() == name
    monkeypatch.setenv("HOME", "/home/me")
    given = ["target.name=~/m", "runs=[~/a,~/b]", "dataset.files=~/a,~/b", "~methods.model", "a=b~/c", "~/bare"]
    assert with_home(given) == [
        *("target.name=/home/me/m", "runs=[/home/me/a,/home/me/b]", "dataset.files=/home/me/a,/home/me/b"),
        *("~methods.model", "a=b~/c", "~/bare"),
    ]


def test_the_search_path_of_the_job_counts_and_a_class_needs_no_file(tmp_path: Path, monkeypatch: Any) -> None:
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


TIMES = (
    "best.", "seconds", "tokens_per_second", "speedup", "stage_", "phase_", "noise_", "own_cores", "other_cores",
    "cores", "started", "resumed", "folder", "out", "load", "noisy", "user_", "total_", "device_hours_", "joules_",
    "requests_per_", "concurrency", "waiting", "ttft.", "engine_ttft.", "queue.", "tpot.", "chunk_gap.", "token_gap.",
    "e2e.", "mbu", "mfu", "of_least.", "useful_mfu", "arrived", "admitted", "prefilled", "finished",
    "emitted_at", "ingestion",
)  # fmt: skip
"""How the names begin of what no two runs have alike."""


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if not key.startswith(TIMES)}
    if isinstance(value, list):
        return [timeless(inner) for inner in value if not str(inner).startswith("NOISY TIMINGS")]
    return value


def results(folder: Path) -> tuple[Any, Any]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return timeless(records), timeless(json.loads((folder / "summary.json").read_text()))


def chats(path: Path, *counts: int) -> list[str]:
    """A file of prompts with so many turns each, and the overrides that choose it."""
    rows = [{"turns": [f"{number} turn {turn}" for turn in range(count)]} for number, count in enumerate(counts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["dataset=jsonl", f"dataset.file={path}"]


NGRAM = ["drafter=ngram", "method=ngram"]


def test_the_result_is_the_uninterrupted_one(configure, tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    """Bit for bit, also drawn and in a conversation; what cannot be resumed is said. A complete run is left alone."""
    given = [text for text in tiny if not text.startswith("dataset.")] + chats(tmp_path / "p.jsonl", 1, 2, 1, 2)
    given += [*NGRAM, "engine.max_batch_size=2", "sampling.n=2", "sampling.temperature=1"]
    run(configure("run", *given, f"out={tmp_path / 'whole'}"))
    stop = Stop(monkeypatch, KeyboardInterrupt(), {4})
    assert invoke(*given, monkeypatch=monkeypatch, tmp_path=tmp_path) == 130
    assert "INCOMPLETE" in capsys.readouterr().out
    records = tmp_path / "out" / "records.jsonl"
    before, written = read_records(records), records.read_bytes()
    for words, message in (  # it goes on with resume=true only, and with the settings and prompts that it had
        ([], "go on with resume=true"),
        (["resume=true", "drafter.branches=1"], r"had drafter\.branches=2, and this one has drafter\.branches=1"),
        (["resume=true", "+sampling.extra=1"], r"had sampling\.extra=nothing, and this one has sampling\.extra=1"),
        (["resume=true", f"out={tmp_path / 'none'}"], r"resume=true: there is no run in "),
    ):
        with pytest.raises(ValueError, match=message):
            run(configure("run", *given, *words))
    assert records.read_bytes() == written
    with records.open("a") as file:
        file.write('{"prompt": "half a li')  # as a crash would leave it
    done = stop.calls
    made = run(configure("run", *given, "resume=true"))
    assert made.complete
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    # What was finished did not run again: only the warm-up and the rest.
    whole = len(read_records(tmp_path / "whole" / "records.jsonl")) // 2
    assert stop.calls - done < whole + 1
    assert read_records(records)[0].seconds == before[0].seconds
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["config"]["resume"] is False and len(manifest["resumed"]) == 1
    # It is complete: nothing is loaded, and nothing is written.
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    load = "specdec.target.target.Target.from_pretrained"
    monkeypatch.setattr(load, lambda *_, **__: pytest.fail("a model is loaded for nothing"))
    capsys.readouterr()
    assert run(configure("run", *given, "resume=true")).rows == made.rows
    assert "complete already" in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_what_was_left_to_the_machine_is_recorded_and_kept(configure: Configure, tmp_path: Path, monkeypatch) -> None:
    """The format of a drafting model is chosen once, wherever in the drafter it is; one that is given stays."""
    asked = Mock(return_value=("int8", "int8: as measured"))
    monkeypatch.setattr("experiments.session.methods.format_here", asked)
    drafters, given = {"choice": "drafter"}, ["drafter=choice", "method=choice", f"out={tmp_path / 'out'}"]
    assert check_components(configure("run", "drafter=quantized"), drafters) == {} and not asked.called
    config = configure("run", *given)
    assert check_components(config, drafters) == {"drafter.model": "bundled/drafter drafts in int8: as measured"}
    write_manifest(tmp_path / "out", plain_whole(config))
    again = configure("run", *given, "resume=true")
    begun(again)
    assert check_components(again, drafters) == {} and again.drafter.model.quantization == "int8"
    asked.assert_called_once()
    several = configure("run", "drafter=model", "+methods.a=${drafter}", *given[2:])
    assert check_components(several, {"a": "methods.a"}) and several.methods.a.quantization == "int8"
    assert several.methods.a.name == "bundled/drafter", "a section that refers to another one stays whole"
    other = configure("run", *given, "drafter.model.quantization=int4", "resume=true")
    with pytest.raises(ValueError, match=r"had drafter\.model\.quantization=int8, and this one has .*=int4"):
        begun(other)


def test_other_prompts_or_weights_are_not_gone_on_with(configure, tiny, tmp_path: Path, monkeypatch) -> None:
    """The manifest has digests of the models, and the commit of the user's own code."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own.py").write_text("")
    monkeypatch.chdir(mine)
    for words in ("init -q", "add own.py", "-c user.name=a -c user.email=a@b commit -qm parts"):
        subprocess.run(["git", *words.split()], cwd=mine, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=mine, capture_output=True, text=True).stdout.strip()
    tiny_model(vocab_size=257).save_pretrained(mine / "drafter")
    given = [text for text in tiny if not text.startswith("dataset.")] + chats(tmp_path / "p.jsonl", 1)
    given += ["drafter=model", "method=model", f"drafter.name={mine / 'drafter'}"]
    run(configure("run", *given))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    project = manifest["project"]
    assert (project["commit"], project["folder"]) == (commit, str(mine.resolve()))
    assert project["dirty"] and "?? drafter/" in project["changes"]
    assert manifest["revisions"]["target"].startswith("files:")
    assert manifest["revisions"]["drafter"] not in (None, manifest["revisions"]["target"])
    (tmp_path / "out" / "summary.json").unlink()
    tiny_model(vocab_size=257, seed=1).save_pretrained(mine / "drafter")
    with pytest.raises(ValueError, match="had other files of its models"):
        run(configure("run", *given, "resume=true"))
    tiny_model(vocab_size=257).save_pretrained(mine / "drafter")
    chats(tmp_path / "p.jsonl", 2)
    with pytest.raises(ValueError, match="had other prompts"):
        run(configure("run", *given, "resume=true"))


@pytest.mark.full
def test_a_sweep_goes_on_after_its_finished_jobs_and_prompts(tiny, tmp_path: Path, monkeypatch, capsys) -> None:
    given = ["-m", *(text for text in tiny if not text.startswith("out=")), *NGRAM, "drafter.branches=1,2"]
    ends = {name: f"out={tmp_path / name}" for name in ("whole", "part", "none")}
    assert launched(*given, ends["whole"], monkeypatch=monkeypatch) == 0
    stop = Stop(monkeypatch, KeyboardInterrupt(), {7})  # a warm-up and three prompts each: in the second job
    assert launched(*given, ends["part"], monkeypatch=monkeypatch) == 130
    capsys.readouterr()
    assert launched(*given, "resume=true", ends["part"], monkeypatch=monkeypatch) == 0
    assert stop.calls == 7 + 3, "the second job's warm-up and two prompts"
    for job in "01":
        assert results(tmp_path / "part" / job) == results(tmp_path / "whole" / job)
    # It ends with the comparison, as the first did.
    whole, part = (json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("whole", "part"))
    assert timeless(whole) == timeless(part)
    assert launched(*given, "resume=true", ends["none"], monkeypatch=monkeypatch) == 1
    assert "give the interrupted one's folder as out=FOLDER" in capsys.readouterr().err
