"""A run of several methods, each with a rule of its own if it likes, on tiny models."""

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.results.runs import load_run
from experiments.run import run
from tests.experiments.runs import Configure, summary_file

TWO = [
    "drafter=none",
    "method=none",
    "+drafter@methods.copied=ngram",
    "+drafter@methods.drawn=model",
    "+verifier@rules.drawn=block",
    "+labels={copied: prompt lookup, drawn: 'model: chain'}",
]


def test_methods_are_measured_together(
    configure: Configure, saved: Path, tiny: list[str], tmp_path: Path, capsys: Any
) -> None:
    more = [f"methods.drawn.name={saved / 'drafter'}", "methods.drawn.shape=2", "temperatures=[0,1]"]
    more.append("study={_target_:experiments.session.temperatures.temperatures,_partial_:true}")
    run(configure("run", *tiny, *TWO, *more, "compared_with=copied", "dataset.count=2", "sampling.max_new_tokens=8"))
    summary = summary_file(tmp_path / "out")
    found = [(method["temperature"], method["method"]) for method in summary["methods"]]
    assert found == [(t, name) for t in (0, 1) for name in ("plain", "copied", "drawn")]
    assert summary["complete"]
    assert summary["methods"][2]["gain"]["over"] == "copied"
    assert load_run(tmp_path / "out").summary.methods[5].gain is not None, "read back, it is compared again"
    assert {"methods.png", "nodes.png", "tables.txt", "temperatures.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    shown = capsys.readouterr().out
    assert "What drafting brings by temperature" in shown, "the study"
    assert "prompt lookup" in shown and "model: chain" in shown and "difference" in shown


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["drafter=ngram"], "drafter and methods=['copied', 'drawn'] are both given: give drafter=none, or no methods"),
        (["compared_with=drown"], "compared_with='drown': there is no such method: did you mean drawn?"),
        (["+verifier@rules.drown=block"], "rules.drown: there is no method 'drown': did you mean drawn?"),
        (["objective=speedup"], "objective=speedup is of one method, and there are 2: give null"),
        (["+rules.drawn.lenience=2"], "there is no rules.drawn.lenience, and nothing else can be set here"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    more: list[str], sentence: str, configure: Configure, tiny: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        run(configure("run", *tiny, *TWO, *more))
    assert not (tmp_path / "out").exists(), "before any work"


@pytest.mark.parametrize("name", ["drafters", "heads", "markov_trees"])
def test_the_studies_name_what_they_have(name: str, configure: Configure) -> None:
    config = configure("run", f"experiment={name}")
    assert list(config.labels) == list(config.methods), "every method has a label, in their order"
    assert set(config.rules) <= set(config.methods)
    # A smaller size, as for a first look, and a method less.
    config = configure("run", f"experiment=[{name},quick]", f"~methods.{next(iter(config.methods))}")
    assert config.dataset.count == 4
    assert len(config.methods) == len(config.labels) - 1
