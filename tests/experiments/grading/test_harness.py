"""specdec as a model of lm-eval, for which a stand-in serves where it is not installed; and accuracy, paired."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafters.ngram import NGramDrafter
from experiments.reporting.studies.accuracy import accuracies, scores_of
from experiments.results.statistics import Bootstrap
from specdec import Engine, SamplingParams, Target
from tests.experiments.conftest import byte_tokenizer
from tests.experiments.runs import launched
from tests.experiments.test_compare import TEMPLATE
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

CONTEXTS = ["def main(", "a b a b a b a", "", "class A:\n" * 40]


class TaskManager:
    def __init__(self, include_path: str | None = None):
        found = [json.loads(path.read_text()) for path in sorted(Path(include_path or "nowhere").glob("*.yaml"))]
        self.known = {task["task"]: task for task in found}
        self.all_tasks = list(self.known)


def simple_evaluate(model: Any, tasks: list[str], task_manager: TaskManager, **options: Any) -> dict[str, Any]:
    samples, every = {}, {"filter": "none", "metrics": ["exact_match"]}
    for name in tasks:
        task = task_manager.known[name]
        if task.get("unsafe_code") and not options["confirm_run_unsafe_code"]:
            raise ValueError(f"Attempted to run task: {name}. Set confirm_run_unsafe_code=True to run this task.")
        lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        rows = [json.loads(line) for line in lines][: options["limit"]]
        how = task["generation_kwargs"] | (options["gen_kwargs"] or {})
        answers = model.generate_until([SimpleNamespace(args=(row["question"], how), task_name=name) for row in rows])
        right = [float(answer == row["answer"]) for row, answer in zip(rows, answers, strict=True)]
        samples[name] = [every | {"doc_id": number, "exact_match": each} for number, each in enumerate(right)]
    return {"samples": samples}


@pytest.fixture(autouse=True)
def lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        return
    for name, contents in (
        ("lm_eval", {"simple_evaluate": simple_evaluate}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"TemplateLM": object}),
        ("lm_eval.tasks", {"TaskManager": TaskManager}),
    ):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "experiments.grading.harness", raising=False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    target = Target(tiny_model(vocab_size=257), byte_tokenizer())
    with Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=3, max_length=96) as made:
        yield made


def model(engine: Engine, **options: Any) -> Any:
    """The engine as a model of lm-eval, which is imported when there is one."""
    return importlib.import_module("experiments.grading.harness").SpecdecLM(engine, **options)


def requests(*given: Any) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="t") for each in given]


def test_answers_are_plain_decodings(engine: Engine) -> None:
    """Greedy ones too long a context included; sampled ones follow the seed. A chat template gets its arguments."""
    plain, drafted = (model(engine, speculate=speculate, max_new_tokens=24) for speculate in (False, True))
    asked = requests(*((context, {"until": ["\n\n"]}) for context in CONTEXTS))
    texts = plain.generate_until(asked)
    assert drafted.generate_until(asked) == texts
    assert len(drafted.steps) < len(plain.steps), "it drafts"
    begin = plain.tok_encode(CONTEXTS[0])
    (one,) = engine.generate([begin], SamplingParams(max_new_tokens=24, stop=("\n\n",)), speculate=False)
    assert texts[0] == one.text
    sampled = requests(*(("a", {"do_sample": True}) for _ in range(2)))
    models = [model(engine, speculate=False, max_new_tokens=24, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (each.generate_until(sampled) for each in models)
    assert first == again != other
    assert first[0] != first[1], "each request has a stream of its own"
    tokenizer: Any = engine.target.tokenizer
    tokenizer.chat_template = TEMPLATE
    asked = [model(engine, template={"enable_thinking": thinking}) for thinking in (True, False)]
    thinking, silent = (each.apply_chat_template([{"role": "user", "content": "Hi"}]) for each in asked)
    assert silent == thinking + "<think>\n\n</think>\n\n"


def test_requests_are_followed_or_refused(engine: Engine) -> None:
    sampling_of = importlib.import_module("experiments.grading.harness").sampling_of
    greedy = {"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False, "temperature": 1.0}
    assert sampling_of(greedy, 9, seed=1, stream=2) == SamplingParams(stop=("\n",), max_new_tokens=7, seed=1, stream=2)
    found = sampling_of({"until": "Q:", "do_sample": True, "top_p": 0.9}, 9, seed=1, stream=0)
    assert found == SamplingParams(temperature=1.0, top_p=0.9, stop=("Q:",), max_new_tokens=9, seed=1, stream=0)
    asked, pairs = model(engine), requests(("import", " os"))
    for said, call in (
        ("num_beams=4", lambda: sampling_of({"num_beams": 4}, 9, seed=0, stream=0)),
        (r"200 tokens .* engine\.max_length=96", lambda: asked.generate_until(requests(("a", {"max_gen_toks": 200})))),
        ("compares likelihoods", lambda: asked._loglikelihood_tokens(pairs)),
        ("compares likelihoods", lambda: asked.loglikelihood_rolling(pairs)),
    ):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks, one of which runs programs."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": text, "answer": "?"} for text in ("def f(", "a b a b a", "x")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "output_type": "generate_until"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}, "doc_to_text": "{{question}}"}
    task |= {"doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8}}
    task["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    for name, more in {"sums": {}, "code": {"unsafe_code": True}}.items():
        (folder / f"{name}.yaml").write_text(json.dumps(task | {"task": name} | more))  # JSON is YAML
    return folder


def command(monkeypatch: pytest.MonkeyPatch, saved: Path, out: Path, *words: str) -> int:
    given = [f"target.name={saved / 'target'}", f"out={out}", f"hydra.run.dir={out}-hydra", "drafter=ngram"]
    more = [word if word.startswith(("drafter=", "chat_template=")) else f"grading.{word}" for word in words]
    given += ["experiment=accuracy", "threads=1", "bootstrap.resamples=200"]
    return launched(*given, *more, monkeypatch=monkeypatch)


def test_a_greedy_method_has_plain_decodings_scores(tasks, saved: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    words = [f"include={tasks}", "tasks=[sums,code]", "execute=true", "limit=2"]
    assert command(monkeypatch, saved, tmp_path / "out", *words) == 0
    report = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert report["exactness"] == "exact" and report["mean_acceptance_length"] >= 1
    assert report["config"]["grading"]["limit"] == 2 and report["versions"]["torch"]
    found = [(row["task"], row["documents"], row["difference"], row["worse"]) for row in report["rows"]]
    assert found == [("sums", 2, 0.0, 0), ("code", 2, 0.0, 0)]
    assert "exact_match" in capsys.readouterr().out
    assert (tmp_path / "out" / "accuracy.md").is_file()


def test_wrong_input_is_one_sentence(tasks: Path, saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for words, argument in (
        (["tasks=sumz"], "tasks"),
        (["tasks=code"], "execute=true"),
        (["tasks=sums", "drafter=none"], "drafter=none"),
        (["tasks=sums", "chat=true", "chat_template={enable_thinking: false}"], "no chat template"),
        (["tasks=sums"], "lm-eval"),  # which is not there
    ):
        if argument == "lm-eval":
            monkeypatch.delitem(sys.modules, "experiments.grading.harness", raising=False)
            monkeypatch.setitem(sys.modules, "lm_eval", None)
        assert command(monkeypatch, saved, tmp_path / "out", f"include={tasks}", *words) == 1
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        assert argument in error and not (tmp_path / "out").exists()


BOOTSTRAP = Bootstrap(resamples=2000)


def compared(plain: list[float], own: list[float]) -> dict[str, Any]:
    key = ("gsm8k", "exact_match")
    (found,) = accuracies({key: dict(enumerate(plain))}, {key: dict(enumerate(own))}, BOOTSTRAP)
    return found


def test_the_difference_is_paired_by_document() -> None:
    found = compared([1, 0.5, 0, 1], [1, 0, 0.5, 1])
    assert (found["plain"], found["accuracy"], found["difference"]) == (5 / 8, 5 / 8, 0.0)
    assert (found["better"], found["worse"], found["documents"]) == (1, 1, 4)
    # The differences are 0, -1/2, 1/2, 0. Unpaired, the interval would go from -1 to 1.
    assert (found["difference_low"], found["difference_high"]) == (-0.5, 0.5)
    same = compared([1, 0, 1, 1], [1, 0, 1, 1])
    assert same["accuracy_low"] < same["accuracy_high"]
    assert [same[name] for name in ("difference", "difference_low", "difference_high", "p")] == [0.0, 0.0, 0.0, 1.0]
    # But of other documents, of which none in four was worse: the share s with (1 - s)^4 = 0.025.
    assert (same["share_worse_low"], same["share_worse_high"]) == pytest.approx((0, 1 - 0.025 ** (1 / 4)))
    assert compared([1] * 12, [1, 1, *[0] * 10])["p"] == pytest.approx(2 / 2**10), "McNemar: ten heads of ten"


def test_scores_come_from_lm_evals_samples_and_only_what_both_have_answered_counts() -> None:
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc", "perplexity"], "acc": True, "perplexity": (-3.5, 7)}
    strict = {"doc_id": 3, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": np.float64(0.5)}
    scores = scores_of({"samples": {"a": [sample], "b": [strict]}})
    assert scores == {("a", "acc"): {3: 1.0}, ("b", "exact_match, strict-match"): {3: 0.5}}
    found = accuracies(scores | {("a", "acc"): {3: 1.0, 1: 0.0}}, {("a", "acc"): {1: 1.0, 2: 1.0}}, BOOTSTRAP)
    assert [(row["task"], row["documents"], row["plain"], row["accuracy"]) for row in found] == [("a", 1, 0.0, 1.0)]
    assert found[0]["accuracy_low"] is None, "one document says nothing about the others"
