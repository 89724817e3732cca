"""Paired differences: by hand, what they are of, coverage of their intervals, and what pairing is worth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest

from experiments.reporting.comparison import report_differences
from experiments.reporting.terminal import console
from experiments.results import metrics
from experiments.results.comparison import METHOD, entries_of, paired_differences
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.records import read_records, replace_records
from experiments.results.rows import positions
from experiments.results.runs import load_run
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.results.timing import lead
from tests.experiments.made_runs import made
from tests.experiments.results.outputs import output

QUICK = Bootstrap(resamples=300)


def written(folder: Path, *overrides: str, accepted: int = 2, prompts: int = 4, **facts: object) -> Path:
    """A run whose drafter accepts one token more on every second prompt, which are of a category of their own."""
    made(folder, *overrides, prompts=prompts, **facts)
    changed = [
        each
        if each.method == "plain"
        else replace(
            each,
            accepted=(accepted + place // 2 % 2, 0),
            expected_accepted=(2.0, 0.0),
            proposed_depth=(4, 4),
            proposed_nodes=(4, 4),
            category="odd" if place // 2 % 2 else "even",
        )
        for place, each in enumerate(read_records(folder / "records.jsonl"))
    ]
    replace_records(folder / "records.jsonl", changed)
    return folder


def test_two_drafters_by_hand_and_by_category(tmp_path: Path) -> None:
    folders = [written(tmp_path / f"{name}{k}", f"drafter={name}", f"k={k}", accepted=count) for name, k, count in (
        ("one", 2, 0), ("one", 4, 1), ("two", 2, 2), ("two", 4, 3))]  # fmt: skip
    for folder in folders[2:]:  # `made` calls its method "model"
        records = read_records(folder / "records.jsonl")
        replace_records(
            folder / "records.jsonl", [replace(r, method=r.method.replace("model", "two")) for r in records]
        )
    rows = entries_of([load_run(folder, width=0.5) for folder in folders])
    setting, found = paired_differences(rows)
    assert setting == "drafter"
    assert [(each["k"], each["category"], (each["reference"], each["compared"])) for each in found] == [
        (k, category, ("model", "two")) for k in "24" for category in ("all", "even", "odd")
    ]
    # Two rounds of each prompt: two tokens more in one of them is one token per round, on every prompt alike.
    for each in found:
        assert [each[name] for name in ("difference", "difference_low", "difference_high")] == pytest.approx([1] * 3)
        assert each["prompts"] == (4 if each["category"] == "all" else 2)
    assert (found[0]["length"], found[0]["reference_length"]) == pytest.approx((2.25, 1.25))
    assert paired_differences(rows, "k")[0] == "k"
    with pytest.raises(ValueError, match=r"difference='size': the runs do not differ in it, choose among .*k"):
        paired_differences(rows, "size")
    report_differences(rows, tmp_path / "out", console())
    table = pandas.read_csv(tmp_path / "out" / "differences.csv")
    assert list(table.category) == ["all", "even", "odd"] * 2 and set(table.difference) == {1}
    assert "| 2 | even | two - model |" in (tmp_path / "out" / "differences.md").read_text()


def test_two_runs_are_compared_whatever_they_differ_in_and_other_prompts_never(tmp_path: Path) -> None:
    first, second = (load_run(written(tmp_path / name, f"a={name}", f"b={name}")) for name in "xy")
    setting, found = paired_differences(entries_of([first, second]))
    assert setting == METHOD and [each["difference"] for each in found if each["category"] == "all"] == [0]
    other = replace(second, manifest=second.manifest | {"prompts_hash": "other"})
    assert paired_differences(entries_of([first, other]))[1] == []


TRIALS = 40
"""Simulated experiments. An honest interval misses the truth in about 7 of 100: more than 8 in 40, 1 time in 2,000."""


@pytest.fixture(scope="module")
def simulated() -> list[tuple[Frame, Frame]]:
    """Two drafters on the same 30 prompts, which differ among each other by far more than the drafters on each.

    A drafted token is accepted with a chance of 0.2 to 0.8, by prompt; the first drafter's chance is 0.1 larger.
    """

    def of(draw: np.random.Generator, name: str, shares: np.ndarray) -> Frame:
        shape, noisy = {"proposed_depth": (4,) * 60, "proposed_nodes": (4,) * 60}, draw.normal(0, 0.03, 30)
        chances = enumerate(np.clip(shares + noisy, 0, 1))
        return frame_of(
            output(f"p{prompt}", name, accepted=tuple(draw.binomial(4, chance, 60).tolist()), **shape)
            for prompt, chance in chances
        )

    made = []
    for seed in range(TRIALS):
        draw = np.random.default_rng(seed)
        ease = draw.uniform(0.2, 0.8, 30)
        made.append((of(draw, "two", ease + 0.1), of(draw, "one", ease)))
    return made


def test_intervals_over_prompts_hold_the_truth_and_those_over_rounds_do_not(
    simulated: list[tuple[Frame, Frame]],
) -> None:
    """The mutant resamples rounds as if each had a prompt of its own: its intervals are less than half as wide."""
    ease = np.linspace(0.2, 0.8, 10_001)
    truths = (3.0, float((ease**4).mean()))  # 1 + 4 · 0.5 tokens per round; all four accepted
    hits = {name: [0, 0] for name in ("prompts", "rounds")}
    for _, frame in simulated:
        rounds = rounds_of(frame)
        for name, resampled in (("prompts", rounds), ("rounds", rounds.assign(prompt=range(len(rounds))))):
            columns = [1 + rounds.accepted, np.ones(len(rounds))]
            low, high = QUICK.over_prompts(ratio_of_sums, resampled.prompt, columns) or (0, 0)
            by = metrics.acceptance_by_position(resampled, QUICK)
            hits[name][0] += low <= truths[0] <= high
            hits[name][1] += (by["acceptance_low_at.4"] or 0) <= truths[1] <= (by["acceptance_high_at.4"] or 1)
    assert min(hits["prompts"]) >= TRIALS - 8
    assert max(hits["rounds"]) < TRIALS - 8


def test_pairing_narrows_a_difference_and_still_holds_the_truth(simulated: list[tuple[Frame, Frame]]) -> None:
    """The mutant takes the other drafter's prompts in another order, as if they had nothing to do with these."""
    hits, widths = 0, []
    for seed, (two, one) in enumerate(simulated):
        other = one.assign(prompt=np.random.default_rng(seed).permutation(one.prompt))
        paired, mixed = (
            lead("mean_acceptance_length", ({}, two, None), ({}, each, None), QUICK) for each in (one, other)
        )
        assert paired is not None and mixed is not None and paired.prompts == 30
        assert mixed.difference == pytest.approx(paired.difference)
        hits += paired.interval[0] <= 0.4 <= paired.interval[1]
        widths.append((paired.interval[1] - paired.interval[0]) / (mixed.interval[1] - mixed.interval[0]))
    assert hits >= TRIALS - 8
    assert max(widths) < 0.6, "the pairing is worth more than half of the width in every one"


def test_what_some_choice_of_prompts_leaves_open_has_no_interval() -> None:
    """One of three prompts reached position 2: the others alone say nothing of what follows there."""
    frame = frame_of(
        output(f"p{n}", accepted=(n // 2 * 2,), proposed_depth=(3,), proposed_nodes=(3,)) for n in range(3)
    )
    by = metrics.acceptance_by_position(rounds_of(frame), QUICK)
    assert positions(by) == pytest.approx([1 / 3, 1 / 3, 0])
    assert positions(by, "conditional_acceptance_at") == pytest.approx([1 / 3, 1, 0])
    assert by["acceptance_low_at.1"] == 0 and by["acceptance_high_at.1"] == 1
    assert by["conditional_acceptance_low_at.2"] is None and by["conditional_acceptance_high_at.3"] is None
