"""Bootstrap intervals: by hand, coverage, what they refuse; and the noise in timings."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from scipy.stats import binom

from experiments.reporting.columns import FEW_PROMPTS
from experiments.results.comparison import METHOD, entries_of, paired_differences
from experiments.results.frame import Frame, frame_of, rounds_of
from experiments.results.records import PLAIN, Record
from experiments.results.runs import Run
from experiments.results.statistics import Bootstrap, ratio_of_sums
from experiments.results.timing import lead, noise_of
from tests.experiments.made_runs import loaded
from tests.experiments.results.outputs import output


def test_two_prompts_by_hand() -> None:
    # Resamples are both prompts (half of the time), or either one twice: lengths 2, 1.5 and 1.
    assert Bootstrap().interval(ratio_of_sums, [[20, 10], [10, 10]]) == (1, 2)
    # Student's quantile with one degree of freedom times the root of 2 leaves a normal tail of 0.28: the middle ones.
    assert Bootstrap(confidence=0.25).interval(ratio_of_sums, [[20, 10], [10, 10]]) == (1.5, 1.5)


@pytest.mark.parametrize(("prompts", "covered"), [(3, 0.74), (FEW_PROMPTS, 0.92)])
def test_coverage_of_few_prompts(prompts: int, covered: float) -> None:
    """Intervals of three prompts are too narrow, as tables say; percentiles alone would be at five, too (85 %)."""
    draw, quick, hits = np.random.default_rng(2), Bootstrap(resamples=2000), 0
    for _ in range(1000):
        low, high = quick.interval(np.mean, [draw.normal(size=prompts)]) or (0, 0)
        hits += low <= 0 <= high
    few, many = binom(1000, covered).ppf([1e-3, 1 - 1e-3])
    assert few <= hits <= many
    assert prompts != FEW_PROMPTS or few > binom(1000, 0.853).ppf(0.999)


def test_bad_settings() -> None:
    for name, value in {"confidence": 95, "resamples": 1, "seed": -1}.items():
        with pytest.raises(ValueError, match=rf"bootstrap\.{name}={value}"):
            Bootstrap(**{name: value})  # type: ignore[arg-type]


IDLE = {"cores": 4, "own": 1.0, "others": 0.1}


def record(batch: int, per_round: float, *, tokens: int = 50, **more: object) -> Record:
    """Ten rounds of so many seconds, and a prefill of 1 s."""
    fields = {"batch": batch, "prompt_tokens": tokens, "accepted": (0,) * 10, "seconds": 1 + 10 * per_round}
    fields |= {"prompt": f"p{batch}", "stage_seconds": {"prefill": 1.0}, "load": IDLE}
    return output(**{"method": PLAIN} | fields | more)


def noise(times: Sequence[float], load: Mapping[str, float] = IDLE) -> dict[str, Any]:
    return noise_of([record(batch, time, load=load) for batch, time in enumerate(times)], PLAIN)


def test_the_spread_is_the_standard_deviation_over_the_median() -> None:
    chance = random.Random(0)
    # 400 draws: the estimate from quartiles is off by more than 15 % with odds of about 1 in 100; seeded.
    found = noise([chance.gauss(0.1, 0.02) for _ in range(400)])
    assert found["noise_spread"] == pytest.approx(0.2, rel=0.15) and found["noisy"]
    # The mutant: a tenth of that is within the limit.
    assert not noise([chance.gauss(0.1, 0.002) for _ in range(400)])["noisy"]


def test_what_the_length_explains_is_no_noise() -> None:
    """A round takes longer after a longer prompt: 0.1 s at 100 tokens, 0.4 s at 1600."""
    lengths = [100, 400, 700, 1000, 1300, 1600]
    records = [record(n, 0.1 + 0.0002 * (size - 100), tokens=size) for n, size in enumerate(lengths)]
    assert noise_of(records, PLAIN)["noise_spread"] == pytest.approx(0, abs=1e-9)
    # The mutant: the same times at one length are noise.
    alike = [record(n, 0.1 + 0.0002 * (size - 100)) for n, size in enumerate(lengths)]
    assert noise_of(alike, PLAIN)["noisy"]


def test_the_load_of_other_processes_is_a_mean_over_time_and_counts_a_batch_once() -> None:
    cases = {(4, 1.0, 0.3): False, (4, 1.0, 1.5): False, (4, 2.0, 1.5): True, (2, 1.0, 0.9): True}
    for (cores, own, others), noisy in cases.items():  # by a tenth of the cores, unless more than a quarter is idle
        assert noise([0.1] * 5, load={"cores": cores, "own": own, "others": others})["noisy"] is noisy
    slow = {"cores": 4, "own": 1.0, "others": 3.0}
    below = {"cores": 4, "own": 1.0, "others": -0.2}  # of a short time, as the system counts in steps
    records = [record(0, 0.9, load=slow), record(0, 0.9, prompt="other", load=slow), record(1, 0.0, load=below)]
    assert noise_of(records, PLAIN)["other_cores"] == pytest.approx((10 * 3.0 - 1 * 0.2) / 11)


QUICK = Bootstrap(resamples=300)


def drafted(folder: Path, *overrides: str, method: str = "model", accepted: int = 2) -> Run:
    """A run whose drafter accepts one token more on every second prompt, which are of a category of their own."""
    records = []
    for number in range(4):
        shared: dict[str, Any] = {"category": "odd" if number % 2 else "even", "batch": number}
        records.append(output(f"p{number}", "plain", **shared))
        drafts = {"accepted": (accepted + number % 2, 0), "proposed_depth": (4, 4)}
        records.append(output(f"p{number}", method, **drafts, **shared))
    return loaded(folder, *overrides, prompts=4, records=records)


def test_two_drafters_by_hand_and_by_category(tmp_path: Path) -> None:
    made = enumerate((name, k) for name in ("model", "two") for k in (2, 4))
    runs = [drafted(tmp_path / f"{n}", f"drafter={name}", f"k={k}", method=name, accepted=n) for n, (name, k) in made]
    rows = entries_of(runs)
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


def test_two_runs_are_compared_whatever_they_differ_in_and_other_prompts_never(tmp_path: Path) -> None:
    first, second = (drafted(tmp_path / name, f"a={name}", f"b={name}") for name in "xy")
    setting, found = paired_differences(entries_of([first, second]))
    assert setting == METHOD and [each["difference"] for each in found if each["category"] == "all"] == [0]
    other = replace(second, manifest=second.manifest | {"prompts_hash": "other"})
    assert paired_differences(entries_of([first, other]))[1] == []


def accepted(draw: np.random.Generator, name: str, ease: np.ndarray) -> Frame:
    """Sixty rounds of four drafted tokens on every prompt, each accepted with the prompt's ease, roughly."""
    chances = np.clip(ease + draw.normal(0, 0.03, 30), 0, 1)
    counts = (tuple(draw.binomial(4, chance, 60).tolist()) for chance in chances)
    return frame_of(
        output(f"p{prompt}", name, accepted=each, proposed_depth=(4,) * 60) for prompt, each in enumerate(counts)
    )


def test_intervals_over_prompts_hold_the_truth_and_pairing_narrows_them() -> None:
    """Two drafters on 30 prompts, which differ among each other by far more than the drafters on each.

    A drafted token is accepted with a chance of 0.2 to 0.8, by prompt; the other drafter's chance is 0.1 larger. An
    honest interval misses the truth in about 7 of 100: more than 8 in 40, 1 time in 2,000. The mutants resample rounds
    as if each had a prompt of its own, and take the other drafter's prompts in another order.
    """
    hits = {"prompts": 0, "rounds": 0, "pairs": 0}
    for seed in range(40):
        draw = np.random.default_rng(seed)
        ease = draw.uniform(0.2, 0.8, 30)
        two, one = accepted(draw, "two", ease + 0.1), accepted(draw, "one", ease)
        rounds = rounds_of(one)
        for name, prompts in (("prompts", rounds.prompt), ("rounds", pandas.Series(range(len(rounds))))):
            columns = [1 + rounds.accepted, np.ones(len(rounds))]
            low, high = QUICK.over_prompts(ratio_of_sums, prompts, columns) or (0, 0)
            hits[name] += low <= 1 + 4 * 0.5 <= high
        other = one.assign(prompt=draw.permutation(one.prompt))
        paired, mixed = (
            lead("mean_acceptance_length", ({}, two, None), ({}, each, None), QUICK) for each in (one, other)
        )
        assert paired is not None and mixed is not None and paired.prompts == 30
        assert mixed.difference == pytest.approx(paired.difference)
        hits["pairs"] += paired.interval[0] <= 4 * 0.1 <= paired.interval[1]
        assert np.ptp(paired.interval) < 0.6 * np.ptp(mixed.interval), "worth more than half of the width"
    assert min(hits["prompts"], hits["pairs"]) >= 40 - 8 > hits["rounds"]
