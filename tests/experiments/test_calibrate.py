"""The command that calibrates, what it notes of its own measurement, and a run that takes its file."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.plan import plan
from experiments.results.records import read_records
from experiments.run import run
from specdec.physics.calibrated import CalibratedRounds
from tests.experiments.runs import Configure

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
    assert (tmp_path / "made" / "predicted.png").stat().st_size > 10_000
    shown = " ".join(capsys.readouterr().out.split())
    assert "Step costs of" in shown and "held out" in shown and "every forward was timed 3 times only" in shown

    options = ["threads=1", "dataset.count=2", "sampling.max_new_tokens=8", "warmup_prompts=0", f"costs={file}"]
    options += ["method=model", "dataset.too_long=cut", "engine.max_length=200"]
    for row in run(configure("run", *models, *options, f"out={tmp_path}/run")).rows:
        predicted = row["prediction.rounds"]
        assert predicted + row["prediction.outside"] == row["rounds"] and predicted > 0
        assert row["mbu.prefill"] is not None and row["mbu.verify"] is not None
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert all(len(record.predicted_seconds) == len(record.accepted) for record in records)
    assert "Use of the device" in capsys.readouterr().out

    # The same file elsewhere.
    replace(found, conditions=replace(found.conditions, device="another processor")).save(file)
    with pytest.raises(ValueError, match=r"under other conditions \(device is another processor there"):
        run(configure("run", *models, *options, f"out={tmp_path}/refused"))
