"""Whole runs from the command line with trackers: what a user finds at wandb afterwards; and a sweep of wandb's own."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from experiments.commands.settings import RunSettings
from experiments.config.kinds import check_arguments
from experiments.config.sections import CONF, plain
from specdec.tree import TreeShape
from tests.experiments.runs import launched
from tests.experiments.tracking.datastore import Datastore

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_a_sweep_is_a_group_at_wandb(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    kept = [text for text in tiny if not text.startswith("out=")]
    sweep = [f"hydra.sweep.dir={tmp_path / 'night'}", "hydra.sweep.subdir=${hydra.job.num}"]
    more = ["drafter=ngram", "drafter.max_draft_tokens=2,4", "tracker=wandb", "tracker.timeout=120"]
    assert launched("-m", *kept, *more, *sweep, monkeypatch=monkeypatch) == 0
    found = [Datastore(tmp_path / "night" / job / "wandb") for job in "01"]
    assert [each.run.run_group for each in found] == ["night", "night"]
    assert [each.run.job_type for each in found] == ["run", "run"]
    assert [each.config["drafter"]["max_draft_tokens"] for each in found] == [2, 4]
    for each, tokens in zip(found, (2, 4), strict=True):
        assert each.run.display_name.startswith(f"drafter.max_draft_tokens={tokens} "), "what varies is the name"
        assert "out=" not in each.run.display_name and "tracker" not in each.run.display_name
        assert each.config["drafter"]["component"] == "NGramDrafter"
        assert each.config["verifier"]["component"] == "RejectionVerifier"
        assert each.config["dtype"] == "float32"
        assert "tracker" not in each.config and "out" not in each.config
        assert [place for place, _ in each.line("speedup")] == [1, 2, 3], "after every prompt"
        assert each.line("speedup")[-1][1] == each.summary["speedup"]
        assert each.summary["lossless"] == "equal"
        results = next(sizes for _, kind, sizes in each.artifacts if kind == "results")
        assert set(results) == {"manifest.json", "records.jsonl", "summary.json", "tables.txt"}
        assert any(name.startswith("media/images/pictures/time") for name in each.files)
        assert each.exit_code == 0
    assert found[0].summary.keys() == found[1].summary.keys(), "columns in common"


# ---------------------------------------------------------------- wandb sweep


SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))


def agents_commands(sweep: dict[str, Any]) -> list[list[str]]:
    """The command lines that wandb's agent runs, by the agent's own functions: each parameter's values in turn."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="wandb is not installed")
    values = {name: choice.get("values", [choice.get("value")]) for name, choice in sweep["parameters"].items()}
    lines = []
    for number in range(max(len(each) for each in values.values())):
        chosen = {name: {"value": each[number % len(each)]} for name, each in values.items()}
        parts = utils.create_sweep_command_args({"args": chosen})
        parts |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
        line: list[str] = []
        for word in utils.create_sweep_command([*sweep["command"]]):
            line += parts[word[2:-1]] if word.startswith("${") else [str(word)]
        lines.append(line)
    return lines


@pytest.mark.full
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_what_an_agent_would_run_is_a_run(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"] == {"name": "speedup", "goal": "maximize"}
    lines = agents_commands(sweep)
    shapes = set()
    for line in lines:
        assert line[:4] == ["/usr/bin/env", "python", "-m", "experiments.run"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("run", line[4:])
        # Hydra itself resolves these two, which a composition outside of it cannot.
        given = {str(name): plain(config, str(name)) for name in config if name not in ("out", "method")}
        check_arguments(RunSettings, given | {"out": ".", "method": "m"})
        assert config.tracker.mode == "online", "an agent's run has to be seen by wandb"
        shapes.add(str(config.drafter.shape))
        shape = plain(config, "drafter.shape")
        assert TreeShape.chain(shape) if isinstance(shape, int) else TreeShape.branching(*shape)
    assert len(shapes) == len(lines) > 2
