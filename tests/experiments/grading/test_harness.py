"""specdec as a model of lm-eval: answers, what tasks ask for, the command; and accuracy, paired."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture
def engine() -> Iterator[Engine]:
    target = Target(tiny_model(vocab_size=257), byte_tokenizer())
    with Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=3, max_length=96) as made:
        yield made


def requests(*given: Any) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="t") for each in given]


def test_answers_are_plain_decodings(engine: Engine) -> None:
    """Greedy ones too long a context included, and sampled ones follow the seed."""
    from experiments.grading.harness import SpecdecLM

    plain, drafted = (SpecdecLM(engine, speculate=speculate, max_new_tokens=24) for speculate in (False, True))
    asked = requests(*((context, {"until": ["\n\n"]}) for context in CONTEXTS))
    texts = plain.generate_until(asked)
    assert drafted.generate_until(asked) == texts
    assert len(drafted.steps) < len(plain.steps), "it drafts"
    begin = plain.tok_encode(CONTEXTS[0])
    (one,) = engine.generate([begin], SamplingParams(max_new_tokens=24, stop=("\n\n",)), speculate=False)
    assert texts[0] == one.text
    sampled = requests(*(("a", {"do_sample": True}) for _ in range(2)))
    again = [
        SpecdecLM(engine, speculate=False, max_new_tokens=24, seed=seed).generate_until(sampled) for seed in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2]
    assert again[0][0] != again[0][1], "each request has a stream of its own"


def test_tasks_of_likelihoods_are_refused(engine: Engine) -> None:
    from experiments.grading.harness import SpecdecLM

    for call in (SpecdecLM(engine)._loglikelihood_tokens, SpecdecLM(engine).loglikelihood_rolling):
        with pytest.raises(ValueError, match="compares likelihoods"):
            call(requests(("import", " os")))


def test_sampling_that_tasks_ask_for(engine: Engine) -> None:
    from experiments.grading.harness import SpecdecLM, sampling_of

    found = sampling_of(
        {"until": ["\n", ""], "max_gen_toks": 7, "do_sample": False, "temperature": 1.0}, 9, seed=1, stream=2
    )
    assert found == SamplingParams(stop=("\n",), max_new_tokens=7, seed=1, stream=2), "greedy"
    found = sampling_of({"until": "Q:", "do_sample": True, "top_p": 0.9}, 9, seed=1, stream=0)
    assert found == SamplingParams(temperature=1.0, top_p=0.9, stop=("Q:",), max_new_tokens=9, seed=1, stream=0)
    with pytest.raises(ValueError, match="num_beams=4"):
        sampling_of({"num_beams": 4}, 9, seed=0, stream=0)
    with pytest.raises(ValueError, match=r"200 tokens .* engine\.max_length=96"):
        SpecdecLM(engine).generate_until(requests(("a", {"max_gen_toks": 200})))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with two tasks, one of which runs programs."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": text, "answer": "?"} for text in ("def f(", "a b a b a", "x")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("sums", "code"):
        task: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        } | ({"unsafe_code": True} if name == "code" else {})
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def command(monkeypatch: pytest.MonkeyPatch, saved: Path, out: Path, *words: str) -> int:
    given = [f"target.name={saved / 'target'}", f"out={out}", f"hydra.run.dir={out}-hydra", "drafter=ngram"]
    more = [word if word.startswith(("drafter=", "chat_template=")) else f"grading.{word}" for word in words]
    given += ["experiment=accuracy", "threads=1", "bootstrap.resamples=200"]
    return launched(*given, *more, monkeypatch=monkeypatch)


def test_a_greedy_exact_method_has_plain_decodings_scores(
    tasks: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    words = [f"include={tasks}", "tasks=[sums,code]", "execute=true", "limit=2"]
    assert command(monkeypatch, saved, tmp_path / "out", *words) == 0
    report = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert report["exactness"] == "exact"
    assert report["mean_acceptance_length"] >= 1
    assert report["config"]["grading"]["limit"] == 2 and report["versions"]["torch"]
    assert [(row["task"], row["documents"], row["difference"], row["worse"]) for row in report["rows"]] == [
        ("sums", 2, 0.0, 0),
        ("code", 2, 0.0, 0),
    ]
    assert "exact_match" in capsys.readouterr().out
    assert (tmp_path / "out" / "accuracy.md").is_file()


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["tasks=sumz"], "tasks"),
        (["tasks=code"], "execute=true"),
        (["tasks=sums", "drafter=none"], "drafter=none"),
        (["tasks=sums", "chat=true", "chat_template={enable_thinking: false}"], "no chat template"),
        (["tasks=sums", "without lm-eval"], "lm-eval"),
    ],
)
def test_wrong_input_is_one_sentence(
    words: list[str], argument: str, tasks: Path, saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    if words[-1:] == ["without lm-eval"]:
        words.pop()
        monkeypatch.delitem(sys.modules, "experiments.grading.harness", raising=False)
        monkeypatch.setitem(sys.modules, "lm_eval", None)  # type: ignore[arg-type]
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
    # Plain decoding is right on 60 % of 300 documents, and a method loses 10 % of these answers.
    draw = np.random.default_rng(5)
    plain = (draw.random(300) < 0.6).astype(float)
    spoiled = compared(list(plain), list(plain * (draw.random(300) > 0.1)))
    assert spoiled["difference_high"] < 0 and spoiled["p"] < 1e-3 and spoiled["share_worse_low"] > 0.02


def test_a_chat_template_gets_its_arguments(engine: Engine) -> None:
    from experiments.grading.harness import SpecdecLM

    tokenizer: Any = engine.target.tokenizer
    tokenizer.chat_template = TEMPLATE
    said = [{"role": "user", "content": "Hi"}]
    thinking, not_thinking = (
        SpecdecLM(engine, template={"enable_thinking": each}).apply_chat_template(said) for each in (True, False)
    )
    assert not_thinking == thinking + "<think>\n\n</think>\n\n"


def test_scores_come_from_lm_evals_samples_and_only_what_both_have_answered_counts() -> None:
    sample = {"doc_id": 3, "filter": "none", "metrics": ["acc", "perplexity"], "acc": True, "perplexity": (-3.5, 7)}
    strict = {"doc_id": 3, "filter": "strict-match", "metrics": ["exact_match"], "exact_match": np.float64(0.5)}
    scores = scores_of({"samples": {"a": [sample], "b": [strict]}})
    assert scores == {("a", "acc"): {3: 1.0}, ("b", "exact_match, strict-match"): {3: 0.5}}
    found = accuracies(scores | {("a", "acc"): {3: 1.0, 1: 0.0}}, {("a", "acc"): {1: 1.0, 2: 1.0}}, BOOTSTRAP)
    assert [(row["task"], row["documents"], row["plain"], row["accuracy"]) for row in found] == [("a", 1, 0.0, 1.0)]
    assert found[0]["accuracy_low"] is None, "one document says nothing about the others"
