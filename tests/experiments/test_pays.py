"""Whether speculation pays: formulas against rounds that are played, a mutant, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.plan import plan
from experiments.reporting.pays import break_even, verdict
from experiments.run import run
from specdec.physics.calibrated import CalibratedRounds
from specdec.physics.rounds import TimedRounds
from specdec.physics.speculation import rate_for
from tests.experiments.runs import Configure

ROUNDS = TimedRounds(nodes=[1, 2, 4, 8, 16], seconds={1: [1.0, 1.1, 1.2, 1.5, 2.4], 4: [2.0, 3.0, 5.0, 11.0, 30.0]})


def played(rate: float, drafted: int, seconds: float, plain: float, *, bonus: bool = True) -> tuple[float, float]:
    """The speed over plain decoding's of 40,000 rounds that are played token by token, and its standard error."""
    accepted = (np.random.default_rng(0).random((40_000, drafted)) < rate).cumprod(1).sum(1) + bonus
    speeds = accepted * plain / seconds
    return float(speeds.mean()), float(speeds.std() / 200)


@pytest.mark.parametrize(("batch", "drafted", "share"), [(1, 3, 0.0), (1, 6, 0.2), (1, 15, 0.05), (4, 2, 0.05)])
def test_rounds_at_the_break_even_acceptance_are_as_fast_as_plain_decoding(
    batch: int, drafted: int, share: float
) -> None:
    rate = break_even(ROUNDS, batch, drafted, share)
    assert rate is not None
    plain = ROUNDS.seconds[batch][0]
    verify = float(np.interp(drafted + 1, ROUNDS.nodes, ROUNDS.seconds[batch]))
    seconds = verify + drafted * share * plain
    speed, error = played(rate, drafted, seconds, plain)
    assert abs(speed - 1) < 5 * error
    # A mutant that forgets the token behind the accepted ones is far off.
    wrong, error = played(rate, drafted, seconds, plain, bonus=False)
    assert abs(wrong - 1) > 20 * error


def test_what_never_pays_and_what_always_does_is_said() -> None:
    assert break_even(ROUNDS, 4, 7, 0.5) is None and rate_for(4.5, 3) is None and rate_for(4, 3) == pytest.approx(1)
    assert break_even(replace(ROUNDS, seconds={1: [1.0, 0.9, 0.9, 0.9, 0.9]}), 1, 3, 0.0) == 0.0
    said = verdict(replace(ROUNDS, seconds={1: [1.0, 2.5, 5.0, 10.0, 20.0]}), [0.0], passes=3)
    assert said[0] == "1 row, drafter free: nothing pays, whatever is drafted."
    assert (
        verdict(ROUNDS, [0.2], passes=3)[0] == "1 row, drafter 20%: pays from an acceptance of 30% on, with 1 drafted."
    )


def test_the_command_times_forwards_and_refuses_what_does_not_fit(
    configure: Configure, saved: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [f"target.name={saved / 'target'}", "threads=1", "seconds=0", "batch=[1,2]", "context=16"]
    words += [f"out={tmp_path}", "nodes=[4,2]"]
    found = plan(configure("plan", "costs=timed", *words))
    assert found.nodes == [1, 2, 4] and all(min(each) > 0 for each in found.seconds.values())
    file = json.loads((tmp_path / "pays.json").read_text())
    assert [row["batch"] for row in file["rows"]] == [1, 2] and file["rows"][0]["seconds"] == found.seconds[1]
    shown = " ".join(capsys.readouterr().out.split())
    assert "from which chains pay" in shown and "timed 3 times" in shown
    with pytest.raises(ValueError, match="positions, give at most so many together"):
        plan(configure("plan", "costs=timed", *words, "context=100000"))
    with pytest.raises(ValueError, match=r"draft_costs=.* 0 or more"):
        plan(configure("plan", "costs=timed", *words, "draft_costs=[-1]"))


# ---------------------------------------------------------------- fitted costs

SMALL = ("threads=1", "seconds=0", "rounds=1", "grid.batch=[1,2]", "grid.context=[4,240]", "grid.chunk=[8,24]")
HELD_OUT = ("held_out.batch=[2]", "held_out.context=[20]", "held_out.drafted=[2]", "held_out.chunk=[16]")


@pytest.mark.full
def test_a_calibration_is_written_shown_and_taken_by_a_run(
    configure: Configure, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"target.name={saved}/target", "target.dtype=float32", f"drafter.name={saved}/drafter", "drafter.shape=2"]
    given = ["grid.drafted=[0,1,3]", *SMALL, *HELD_OUT, f"out={tmp_path}/made"]
    found = plan(configure("plan", "costs=fit", "drafter=model", *models, *given))
    file = tmp_path / "made" / "costs.json"
    assert CalibratedRounds.load(file) == found
    assert found.conditions.drafter == "ModelDrafter" and found.deepest == 2
    assert found.box.drafted == (0, 3) and found.box.context == (4, 240)
    assert found.errors["target"]["fit"].points == 16 and found.errors["target"]["held_out"].points == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Step costs of" in shown and "held out" in shown and "every forward was timed 3 times only" in shown

    options = ["threads=1", "dataset.count=2", "sampling.max_new_tokens=8", "warmup_prompts=0", f"policy.costs={file}"]
    options += ["policy=cost_aware", "method=model", "dataset.too_long=cut", "engine.max_length=200"]
    for row in run(configure("run", *models, *options, f"out={tmp_path}/run")).rows:
        assert row["mbu.prefill"] is not None and row["mbu.verify"] is not None
    assert "Use of the device" in capsys.readouterr().out

    # The same file elsewhere.
    replace(found, conditions=replace(found.conditions, device="another processor")).save(file)
    with pytest.raises(ValueError, match=r"under other conditions \(device is another processor there"):
        run(configure("run", *models, *options, f"out={tmp_path}/refused"))
