"""Whole runs on tiny models: what they leave behind when all goes well, when it does not, and when they are stopped."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from drafters.ngram import NGramDrafter
from experiments.app.cli import launch, sentence
from experiments.app.session import NotLosslessError
from experiments.demo import demo
from experiments.results.checked import remember
from experiments.results.records import read_records
from experiments.results.statistics import Bootstrap
from experiments.results.summary import summarize
from experiments.run import main as run_main
from experiments.run import run
from specdec.engine.engine import Engine
from specdec.slots import Slots
from specdec.tree import DraftTree
from verifiers.rejection import RejectionVerifier

ROOT = Path(__file__).parents[2]
Configure = Callable[..., DictConfig]


def local(saved: Path, drafter: str) -> list[str]:
    """Overrides that choose a drafter, of the tiny models where it has a checkpoint."""
    names = {"model": [f"drafter.name={saved / 'drafter'}"], "medusa": [f"drafter.name={saved / 'medusa'}"]}
    shape = {"medusa": ["drafter.shape=[2,1,1]"]}
    return [f"drafter={drafter}", f"method={drafter}", *names.get(drafter, []), *shape.get(drafter, [])]


def summary_file(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("drafter", "more"),
    [
        ("ngram", []),
        ("model", ["drafter.shape=[2,2]", "engine.max_batch_size=2", "sampling.n=2", "sampling.temperature=1"]),
        ("medusa", []),
    ],
)
def test_a_run_leaves_everything_behind(
    drafter: str, more: list[str], configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    run(configure("run", *tiny, *local(saved, drafter), *more))
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    names -= {"categories.png", "categories.svg"}  # drawn where two categories have several prompts each
    pictures = {f"{name}.{kind}" for name in ("acceptance_by_position", "time") for kind in ("png", "svg")}
    texts = {"records.jsonl", "summary.json", "manifest.json", "prompts.jsonl", "tokens.json", "tables.txt"}
    assert names == texts | pictures

    summary = summary_file(folder)
    samples = 6 if "sampling.n=2" in more else 3
    assert summary["complete"]
    assert summary["planned"] == samples
    plain, method = summary["methods"]
    assert (plain["method"], method["method"]) == ("plain", drafter)
    assert method["exactness"] == "exact"
    assert method["finished"] == samples
    assert method["failed"] == 0
    assert method["mean_acceptance_length"] >= 1
    assert plain["mean_acceptance_length"] == 1
    assert method["speedup"] > 0
    assert set(method["stage_seconds"]) == {"prefill", "draft", "verify", "accept", "commit", "other"}
    if not more:
        assert method["equal_to_plain"] == method["compared_with_plain"] == 3, "float32, so token for token"

    records = read_records(folder / "records.jsonl")
    assert len(records) == 2 * samples
    again = summarize(records, planned=samples, bootstrap=Bootstrap(resamples=200))
    assert again.methods[1].speedup == method["speedup"]
    assert list(again.methods[1].speedup_interval or ()) == method["speedup_interval"]

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["dataset"]["count"] == 3
    assert manifest["seeds"] == {"sampling": 0, "dataset": 0, "bootstrap": 0}
    assert manifest["dtype"] == "float32"
    assert manifest["versions"]["torch"]
    assert manifest["command"] == sys.argv
    assert {"device", "machine", "git"} <= set(manifest)

    shown = capsys.readouterr().out
    assert "mean acceptance length" in shown
    assert "records.jsonl" in shown


def test_plain_decoding_alone(configure: Configure, tiny: list[str], tmp_path: Path, capsys: Any) -> None:
    run(configure("run", *tiny, "drafter=none", "method=none"))
    assert [method["method"] for method in summary_file(tmp_path / "out")["methods"]] == ["plain"]


def test_sampled_outputs_do_not_depend_on_the_other_prompts(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    outputs = []
    for name, more in (("a", ["dataset.count=3"]), ("b", ["dataset.count=2", "engine.max_batch_size=2"])):
        more = [*more, "sampling.temperature=1", f"out={tmp_path / name}"]
        run(configure("run", *tiny, *local(saved, "model"), *more))
        records = read_records(tmp_path / name / "records.jsonl")
        outputs.append({(record.prompt, record.method): record.token_ids for record in records})
    common = outputs[0].keys() & outputs[1].keys()
    assert len(common) == 4
    assert all(outputs[0][key] == outputs[1][key] for key in common)


def test_the_demo(configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any) -> None:
    config = configure(
        "demo",
        "target.inflate=null",
        "target.dtype=float32",
        *tiny,
        "engine.max_length=128",
        f"methods.model.name={saved / 'drafter'}",
        f"methods.medusa.name={saved / 'medusa'}",
        "methods.medusa.shape=2",
        "dataset.count=2",
    )
    demo(config)
    summary = summary_file(tmp_path / "out")
    assert [(m["temperature"], m["method"]) for m in summary["methods"]] == [
        (temperature, method) for temperature in (0, 1) for method in ("plain", "ngram", "model", "medusa")
    ]
    assert summary["complete"]
    assert all(m["equal_to_plain"] == 2 for m in summary["methods"] if m["temperature"] == 0 and m["method"] != "plain")
    assert (tmp_path / "out" / "speedup.png").exists()
    shown = capsys.readouterr().out
    assert shown.count("mean acceptance") == 1, "one table"
    assert shown.index("drafted and accepted") < shown.index("mean acceptance"), "the two live texts come first"
    assert "speedup.png" in shown
    assert str(tmp_path / "out") in shown


# ---------------------------------------------------------------- stopped and failing


class Stop:
    """Stands in for ``Engine.generate``: raises at the n-th call that speculates."""

    def __init__(self, patch: pytest.MonkeyPatch, error: BaseException, at: set[int]):
        self.calls = 0
        original = Engine.generate

        def generate(engine: Engine, prompts: Any, sampling: Any, *, speculate: bool = True) -> Any:
            self.calls += speculate
            if speculate and self.calls in at:
                raise error
            return original(engine, prompts, sampling, speculate=speculate)

        patch.setattr(Engine, "generate", generate)


def test_ctrl_c_keeps_finished_prompts(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, KeyboardInterrupt(), {4})  # the first is the warm-up
    with pytest.raises(KeyboardInterrupt):
        run(configure("run", *tiny, *local(saved, "ngram")))
    folder = tmp_path / "out"
    assert len(read_records(folder / "records.jsonl")) == 4
    summary = summary_file(folder)
    assert not summary["complete"]
    assert [method["finished"] for method in summary["methods"]] == [2, 2]
    assert summary["methods"][1]["speedup"] > 0
    assert (folder / "manifest.json").exists()
    assert "INCOMPLETE: 2 of 3 prompts" in capsys.readouterr().out


def test_a_crash_keeps_finished_prompts(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from experiments.measuring import measure

    calls = []

    def full_disk(*arguments: object, **more: object) -> None:
        calls.append(arguments)
        if len(calls) > 2:
            raise OSError("no space left")

    # Not in the engine, where it would be a failed prompt.
    monkeypatch.setattr(measure, "find_divergence", full_disk)
    with pytest.raises(OSError, match="no space left"):
        run(configure("run", *tiny, *local(saved, "ngram")))
    summary = summary_file(tmp_path / "out")
    assert not summary["complete"]
    assert summary["methods"][1]["finished"] == 2


class WrongRoot(NGramDrafter):
    """Puts another token where the sequence's last one belongs: the output is another sequence's."""

    def propose(self, slots: Slots) -> DraftTree:
        tree = super().propose(slots)
        tokens = tree.tokens.clone()
        tokens[:, 0] = (tokens[:, 0] + 1) % slots.vocab_size
        return replace(tree, tokens=tokens)


class OwnRule(RejectionVerifier):
    """A rule that does not ship with the package."""


BROKEN = ["drafter=ngram", "method=broken", f"drafter._target_={WrongRoot.__module__}.WrongRoot"]


def test_a_broken_drafter_ends_the_run_with_an_error_and_keeps_its_results(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    config = configure("run", *tiny, *BROKEN, "target.dtype=float32")
    with pytest.raises(NotLosslessError, match=r"^broken: NOT LOSSLESS: . of 3 outputs leave plain decoding's"):
        run(config)
    folder = tmp_path / "out"
    found = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    assert found["complete"] and found["methods"][1]["lossless"]["verdict"] == "not lossless"
    worst = found["methods"][1]["lossless"]["worst"]
    assert worst["tokens"][0] != worst["tokens"][1] and worst["margin"] > worst["tie_bound"] > 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["lossless"]["broken"]["verdict"] == "not lossless" and manifest["planned"] == 3
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS" in shown[: shown.index("wrote")], "in the table"
    assert "broken: NOT LOSSLESS" in shown[shown.index("wrote") :], "and at the end"
    assert (folder / "acceptance_by_position.png").exists()
    config.resume = True
    with pytest.raises(NotLosslessError):
        run(config)  # it is complete, and as broken as before


def test_an_honest_run_ends_with_its_verdict(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    summary = run(configure("run", *tiny, *local(saved, "ngram"), "target.dtype=float32"))
    assert summary.methods[0].lossless is None, "plain decoding is what the others are compared with"
    assert capsys.readouterr().out.rstrip().endswith("ngram: equal to plain decoding in all of 3 outputs")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["lossless"]["ngram"]["verdict"] == "equal"


def test_a_sampled_run_has_no_verdict(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    run(configure("run", *tiny, *local(saved, "ngram"), "sampling.temperature=1"))
    assert summary_file(tmp_path / "out")["methods"][1]["lossless"] is None
    assert "equal to plain decoding in all" not in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["lossless"] == {}


def test_an_own_rule_is_exact_by_its_own_account(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".specdec").mkdir()
    own = f"verifier._target_={OwnRule.__module__}.OwnRule"
    run(configure("run", *tiny, *local(saved, "ngram"), own))
    assert summary_file(tmp_path / "out")["methods"][1]["exactness"] == "exact (declared)"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["exactness"]["ngram"] == "exact (declared)"
    assert "acceptance rule: exact (declared)" in capsys.readouterr().out
    remember(OwnRule())
    run(configure("run", *tiny, *local(saved, "ngram"), own, f"out={tmp_path / 'again'}"))
    assert summary_file(tmp_path / "again")["methods"][1]["exactness"] == "exact"


def test_the_command_and_a_sweep_exit_with_an_error(
    saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of a sweep's two jobs the first is broken and the second is not: both have results, and the sweep fails."""
    given = [text for text in tiny if not text.startswith("out=")]
    honest = f"{NGramDrafter.__module__}.NGramDrafter"
    words = [*given, "drafter=ngram", f"drafter._target_={WrongRoot.__module__}.WrongRoot,{honest}"]
    words += ["target.dtype=float32", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *words])
    with pytest.raises(SystemExit) as ended:
        run_main()
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "error: ngram: NOT LOSSLESS" in shown.err
    comparison = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    assert [row["lossless"]["verdict"] for row in comparison["rows"]] == ["not lossless", "equal"]
    assert "2 rows: 1 equal to plain decoding, 1 NOT LOSSLESS." in comparison["notes"][-2]
    assert "NOT LOSSLESS" in (tmp_path / "sweep" / "comparison.md").read_text()


def test_a_failing_prompt_is_counted_and_the_run_goes_on(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, RuntimeError("boom"), {3})
    run(configure("run", *tiny, *local(saved, "ngram")))
    plain, method = summary_file(tmp_path / "out")["methods"]
    assert (method["finished"], method["failed"], list(method["errors"].values())) == (2, 1, [1])
    assert re.fullmatch(r"RuntimeError: boom \(at \S+test_run.py:\d+ in \S+\)", next(iter(method["errors"])))
    assert (plain["finished"], plain["failed"]) == (3, 0)
    assert "ngram failed on 1 of 3 prompts: RuntimeError: boom" in capsys.readouterr().out


def test_a_run_of_failures_is_a_failure(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Stop(monkeypatch, RuntimeError("boom"), {2, 3, 4})
    with pytest.raises(ValueError, match="every prompt failed with ngram: RuntimeError: boom"):
        run(configure("run", *tiny, *local(saved, "ngram")))
    assert summary_file(tmp_path / "out")["methods"][1]["failed"] == 3


@pytest.mark.parametrize(("policy", "finished", "failed"), [("skip", 2, 0), ("cut", 3, 0), ("fail", 2, 1)])
def test_prompts_that_do_not_fit_are_said_once(
    policy: str,
    finished: int,
    failed: int,
    configure: Configure,
    saved: Path,
    tiny: list[str],
    tmp_path: Path,
    capsys: Any,
) -> None:
    lines = [{"prompt": "x" * size} for size in (10, 100, 20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ["dataset=jsonl", f"dataset.file={tmp_path / 'p.jsonl'}", "engine.max_length=64"]
    tiny.remove("dataset.prompt_tokens=16")
    summary = run(configure("run", *tiny, *local(saved, "ngram"), *more, f"dataset.too_long={policy}"))
    assert summary.complete
    for method in summary_file(tmp_path / "out")["methods"]:
        assert (method["finished"], method["failed"]) == (finished, failed)
    told = capsys.readouterr()
    beginning = "1 of 3 prompts do not fit into engine.max_length=64 with sampling.max_new_tokens=12"
    assert told.err.count(beginning) == 1
    reason = "100 prompt tokens and max_new_tokens=12 exceed the engine's max_length=64"
    assert (reason in told.out) == (policy == "fail")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["prompts"] == finished + failed
    counted = {"skip": "skipped", "cut": "cut", "fail": "failing"}[policy]
    nothing = {"cut": 0, "skipped": 0, "failing": 0, "of": 3, "longest": 112, "room": 64}
    assert manifest["too_long"] == nothing | {counted: 1}


def test_a_broken_tracker_changes_nothing(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(configure("run", *tiny, *local(saved, "ngram"), "tracker=wandb"))
    assert summary_file(tmp_path / "out")["complete"]


def test_another_runs_results_are_safe(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    config = configure("run", *tiny, *local(saved, "ngram"))
    run(config)
    before = (tmp_path / "out" / "manifest.json").read_text(), (tmp_path / "out" / "records.jsonl").read_text()
    with pytest.raises(ValueError, match="results of another run"):
        run(config)
    assert before == (
        (tmp_path / "out" / "manifest.json").read_text(),
        (tmp_path / "out" / "records.jsonl").read_text(),
    )


# ---------------------------------------------------------------- the command line


def invoke(*arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """The exit code of a run in this process."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, f"hydra.run.dir={tmp_path / 'hydra'}"])
    try:
        launch(run, "run")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


BAD = [
    (["dataset=nope"], "there is no dataset 'nope': choose among context, gsm8k, humaneval, jsonl, "),
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

    monkeypatch.setattr("specdec.modeling.target.load", load)
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
