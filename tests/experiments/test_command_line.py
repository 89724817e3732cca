"""The run command: bad input is one sentence before any work, exit codes, sweeps, and once from a shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config.launch import sentence
from experiments.results.records import read_records
from experiments.run import run
from tests.experiments.runs import Configure, Stop, invoke, local, summary_file

ROOT = Path(__file__).parents[2]

BAD = [
    (["dataset=nope"], "there is no dataset 'nope': choose among context, gsm8k, humaneval, joined, jsonl, "),
    (["drafter=nope"], "there is no drafter 'nope': did you mean none?"),
    (["sampling.temperature=-1"], "temperature=-1: give 0 (greedy) or a positive number"),
    (["sampling.temperature=hot"], "sampling.temperature='hot': give a number"),
    (["sampling.top_p=2"], "top_p=2: give a mass in (0, 1]"),
    (["sampling.heat=2"], "there is no sampling.heat: choose among temperature, top_k, "),
    (["sampling.temperatur=1"], "there is no sampling.temperatur: did you mean sampling.temperature?"),
    (["sead=1"], "there is no sead: did you mean seed?"),
    (["+sead=1"], "there is no sead: did you mean seed?"),
    (["engine.max_batchsize=2"], "there is no engine.max_batchsize: did you mean engine.max_batch_size?"),
    (["+engine.prefil_chunk=2"], "there is no engine.prefil_chunk: did you mean engine.prefill_chunk?"),
    (["+bootstrap.samples=200"], "there is no bootstrap.samples: did you mean bootstrap.resamples?"),
    (["bootstrap.resamples=many"], "bootstrap.resamples='many': give an integer"),
    (["engine.prefill_chunk=0"], "engine.prefill_chunk=0: give an integer of at least 1"),
    (["engine.timing=1"], "engine.timing=1: give true or false"),
    (["threads=0"], "threads=0: give an integer of at least 1, or null"),
    (["trace_dropped=1"], "trace_dropped=1: give a mass from 0"),
    (["chat_template=3"], "chat_template=3: give a section"),
    (["dataset.count=["], "cannot read 'dataset.count=['"),
    (["dataset=jsonl"], "dataset.file has no value: give dataset.file="),
    (["dataset=jsonl", "dataset.file={tmp}/no.jsonl"], "dataset.file: there is no file"),
    (["dataset=jsonl", "dataset.file={tmp}/bad.jsonl"], 'bad.jsonl, line 2: "turns" must be a list'),
    (["dataset=text", "dataset.files={tmp}/*.txt"], "dataset.files: no file matches"),
    (["dataset.count=0"], "dataset.count=0: give at least 1"),
    (["warmup_prompts=-1"], "warmup_prompts=-1: give an integer of at least 0"),
    (["bootstrap.confidence=95"], "confidence=95: give a level between 0 and 1"),
    (["target.name={tmp}/nope"], "no model at "),
    (["target.dtype=int8"], "dtype='int8': give 'auto'"),
    (["drafter.name={tmp}/nope"], "no model at "),
    (["drafter=medusa", "drafter.name={tmp}/nope"], "no Medusa checkpoint at "),
    (["drafter=medusa", "drafter.name={models}/target"], "no Medusa checkpoint in "),
    (["drafter.name={models}/other"], "vocab"),
    (["drafter=ngram", "drafter.branches=0"], "branches=0: give at least 1"),
    (["drafter=ngram", "engine.max_length=20"], "no prompt fits: "),
    (["drafter=ngram", "engine.max_batch_size=0"], "engine.max_batch_size=0: give an integer of at least 1"),
    (["drafter=ngram", "engine.attention=magic"], "attention='magic': give one of"),
    (["tracker=wandb", "tracker.mode=upload"], "tracker.mode='upload'"),
]


@pytest.mark.parametrize(
    ("overrides", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_sentence_before_any_work(
    overrides: list[str], message: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a"]}\n{"turns": 3}\n')
    given = [text.format(tmp=tmp_path, models=saved) for text in overrides]
    defaults = [f"target.name={saved / 'target'}", f"out={tmp_path / 'out'}"]
    if not any(text.startswith("drafter") for text in overrides):
        defaults.append(f"drafter.name={saved / 'drafter'}")
    assert invoke(*defaults, *given, monkeypatch=monkeypatch, tmp_path=tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: "), error
    assert message in error
    assert error.count("\n") == 1, "one line"
    assert not (tmp_path / "out" / "records.jsonl").exists()


@pytest.mark.parametrize(
    "bad", ["engine.prefill_chunk=0", "bootstrap.resamples=1", "tracker.mode=1", "target.quantization=8", "seed=-1"]
)
def test_bad_settings_are_refused_before_a_model_is_loaded(
    bad: str, configure: Configure, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **more: object) -> None:
        pytest.fail("a model was loaded before the settings were checked")

    monkeypatch.setattr("specdec.target.target.load", load)
    monkeypatch.setattr("drafters.model.load_model", load)
    config = configure("run", *tiny, "method=model", "tracker=wandb", bad)
    with pytest.raises(ValueError, match=f"{bad.split('=')[0]}"):
        run(config)
    assert not (tmp_path / "out").exists()


def test_tracebacks_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="warmup_prompts=-1"):
        invoke("warmup_prompts=-1", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_other_errors_are_named_by_type() -> None:
    assert sentence(KeyError("x\ny")) == "KeyError: 'x\\ny' (HYDRA_FULL_ERROR=1 shows the whole traceback)"
    assert sentence(ValueError("a\n  b")) == "a b"


def test_ctrl_c_exits_with_130(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, KeyboardInterrupt(), {3})
    code = invoke(*tiny, *local(saved, "ngram"), monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert code == 130
    assert len(read_records(tmp_path / "out" / "records.jsonl")) == 2
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_sweep_goes_on_after_a_bad_job(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sweep = [f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweep.subdir=${hydra.job.num}", "drafter.branches=0,1"]
    kept = [text for text in tiny if not text.startswith("out=")]
    code = invoke("-m", *kept, "drafter=ngram", *sweep, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert code == 1
    assert "error: branches=0: give at least 1" in capsys.readouterr().err
    assert not (tmp_path / "sweep" / "0" / "summary.json").exists()
    assert summary_file(tmp_path / "sweep" / "1")["complete"]
    again = invoke("-m", *kept, "drafter=ngram", *sweep, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert again == 1 and "holds the results of another run" in capsys.readouterr().err
    assert [path.parent.name for path in (tmp_path / "sweep").glob("*/error.txt")] == ["0"], "1 is as good as it was"


def test_from_the_shell(saved: Path, tiny: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.run",
        *tiny,
        *local(saved, "ngram"),
        f"hydra.run.dir={tmp_path / 'hydra'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mean acceptance length" in done.stdout
    assert summary_file(tmp_path / "out")["complete"]
