"""The ladder of ingredients: its ratios by hand, what is said of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.reporting.ingredients import ladders, report_ingredients, sentences
from experiments.results.frame import Figures
from experiments.results.records import Record
from experiments.results.statistics import Bootstrap
from tests.experiments.made_runs import made
from tests.experiments.results.outputs import moments, output

QUICK = Bootstrap(resamples=100)
PLAIN = {"target": "t", "forwards": "slow", "weights": "bfloat16", "drafter": "none", "batch": "1"}
FAST = PLAIN | {"forwards": "fast"}
SMALL = FAST | {"weights": "int4"}
DRAFTED = SMALL | {"drafter": "model"}
ALL = DRAFTED | {"batch": "4"}
# Seconds for the ten tokens of a prompt. Batches count as tokens per second of all, as everything else.
METHODS = {
    "plain": (PLAIN, 10.0),
    "fast": (FAST, 5.0),
    "small": (SMALL, 4.0),
    "drafted": (DRAFTED, 2.0),
    "all": (ALL, 1.0),
    "only_small": (PLAIN | {"weights": "int4"}, 8.0),
    "only_drafted": (PLAIN | {"drafter": "model"}, 4.0),
    "only_batch": (PLAIN | {"batch": "4"}, 2.5),
    "without_drafter": (SMALL | {"batch": "4"}, 1.5),
    "without_fast": (ALL | {"forwards": "slow"}, 3.0),
}
ORDER = list(METHODS)[:5]
TOKENS = 10


def records() -> list[Record]:
    """Three prompts; a method with other weights writes another sixth token."""
    found = []
    for number in range(3):
        for method, (ingredients, seconds) in METHODS.items():
            other = ingredients["weights"] != "bfloat16"
            tokens = tuple(100 * (other and place >= 5) + place for place in range(TOKENS))
            seen = [(seconds * (place + 1) / TOKENS, 1) for place in range(TOKENS)]
            fields = {"batch": number, "seconds": seconds * (1 + number / 10), "accepted": (0,) * TOKENS}
            found.append(output(f"p{number}", method, **fields | moments(*seen) | {"token_ids": tokens}))
    return found


@pytest.fixture(scope="module")
def ladder() -> Figures:
    (found,) = ladders(records(), {name: each for name, (each, _) in METHODS.items()}, ORDER, QUICK)
    return found


def test_the_rungs_by_hand(ladder: Figures) -> None:
    assert [rung.changed for rung in ladder.rungs] == [(), ("forwards",), ("weights",), ("drafter",), ("batch",)]
    before = [rung.over_before.value for rung in ladder.rungs[1:] if rung.over_before is not None]
    first = [rung.over_first.value for rung in ladder.rungs[1:] if rung.over_first is not None]
    assert before == pytest.approx([2, 1.25, 2, 2])
    assert first == pytest.approx([2, 2.5, 5, 10])
    # 30 tokens in 10 + 11 + 12 seconds.
    assert ladder.rungs[0].tokens_per_second == pytest.approx(30 / 33)
    assert ladder.rungs[0].user_tokens_per_second == pytest.approx(1.0)
    assert [rung.same_law for rung in ladder.rungs] == [True, True, False, False, False]
    same = [rung.sameness for rung in ladder.rungs[1:]]
    assert [(each.equal, each.tokens) for each in same if each] == [(3, 1.0), (0, 0.5), (0, 0.5), (0, 0.5)]
    assert ladder.shared == {"target": "t"}
    # Each ingredient alone, and as the last.
    found = {effect.lever: effect for effect in ladder.effects}
    assert list(found) == ["forwards", "weights", "drafter", "batch"]
    alone = {lever: effect.alone.value for lever, effect in found.items() if effect.alone is not None}
    assert alone == pytest.approx({"forwards": 2, "weights": 1.25, "drafter": 2.5, "batch": 4})
    last = {lever: effect.last.value for lever, effect in found.items() if effect.last is not None}
    assert last == pytest.approx({"forwards": 3, "drafter": 1.5, "batch": 2}), "nothing runs without int4 alone"
    assert [effect.same_law for effect in ladder.effects] == [True, False, True, True]


def test_the_headline_falls_into_what_keeps_the_law_and_what_does_not(ladder: Figures) -> None:
    assert ladder.headline is not None and ladder.headline.value == pytest.approx(10)
    assert ladder.same_law == pytest.approx(8)
    assert ladder.other_law == pytest.approx(1.25)
    assert ladder.product_of_alone == pytest.approx(2 * 1.25 * 2.5 * 4)
    said = " ".join(sentences(ladder, {}))
    assert '"10.0x"' in said and "8.00x leaves the output's law" in said and "1.25x comes from other weights" in said
    assert "2.50x on the first rung, 1.50x with everything else" in said


def test_what_is_written(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"ingredients": {name: each for name, (each, _) in METHODS.items()}}
    folder = made(tmp_path / "run", config={"sampling": {"max_new_tokens": TOKENS}}, **facts)
    tables, files = report_ingredients(folder, records(), ORDER, {"all": "+ a batch"}, QUICK)
    assert len(tables) == 3 and all(file.exists() for file in files)
    assert [file.name for file in files] == ["ingredients.md", "ingredients.json", "ingredients.png"]
    text = (folder / "ingredients.md").read_text()
    assert "| + a batch | 9.1" in text and "10.00x" in text and "ANOTHER" in text
    (figures,) = json.loads((folder / "ingredients.json").read_text())["ladders"]
    assert figures["headline"]["value"] == pytest.approx(10)
    drawn = (folder / "ingredients.svg").read_text()
    assert "10.0x in all" in drawn and "another law" in drawn


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (["plain", "slow"], "ladder: the run has no records of 'slow'"),
        (["plain", "again"], "plain and again have the same ingredients: give again one more in setups"),
    ],
)
def test_a_wrong_ladder_is_one_sentence(order: list[str], sentence: str) -> None:
    ingredients = {name: each for name, (each, _) in METHODS.items()} | {"slow": FAST, "again": PLAIN}
    again = [output("p0", "again")]
    with pytest.raises(ValueError, match=sentence):
        ladders([*records(), *again], ingredients, order, QUICK)
