"""The benchmark of schedules and pages: its parts that take no time, and its arithmetic."""

from typing import Any

import numpy as np
import pytest

from experiments.bench import load
from specdec.engine import scheduler


def test_pages_take_less_than_slots_and_packing_less_than_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ROWS", 6)
    packed, reserved = (float(each["ratio"]) for each in load.measure_memory(load.Options()))
    lengths = [len(prompt) + sampling.max_new_tokens for prompt, sampling in load.mixed(6)]
    worst, most = 6 * max(lengths), sum(-(-each // 16) * 16 for each in lengths)
    assert reserved == pytest.approx((most + 6 * 32) / worst, abs=1e-4), "two pages of each slot are its own"
    assert 0.2 < packed <= reserved


def test_every_policy_is_timed_and_a_missed_goal_is_said() -> None:
    assert {*load.NAMES} == {*scheduler.__all__} - {"Scheduler", "View", "Work"}
    reached, missed = (load.row("a", ratio, 0.0, 1.0, 0.01, "") for ratio in (0.01, 0.02))
    found: list[Any] = [str(each["goal"]) for each in (reached, missed)]
    assert found == ["<= 0.01 reached", "<= 0.01 MISSED"]
    prompts = [len(prompt) for prompt, _ in load.mixed(400)]
    assert np.mean(prompts) > 1.3 * np.median(prompts), "few are long"
