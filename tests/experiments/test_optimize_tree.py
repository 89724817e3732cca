"""The command that finds the best tree: from a traced run to a shape that a run takes, and bad input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from experiments.config.sections import plain
from experiments.replay import replay
from experiments.reporting.best_tree import written_shape
from experiments.run import run
from specdec import DraftTree, TreeShape
from specdec.drafting.costs import RoundCosts
from tests.experiments.runs import Configure, local
from tests.experiments.traced import traced


@pytest.fixture
def traced_run(configure: Configure, saved: Path, tmp_path: Path) -> Path:
    """A made-up run with a tree of 3 and 6 nodes, in 20 rounds of four prompts."""
    folder = tmp_path / "run"
    shape = TreeShape.branching(3, 2)
    said = torch.from_numpy(np.random.default_rng(0).choice([0, 0, 0, 1, 2, 7], (20, 10)))
    p = torch.nn.functional.one_hot(said, 8).float()
    tree = DraftTree.from_shape(shape, torch.tensor(shape.ranks).expand(20, -1))
    traced(folder, tree, p, [str(row % 4) for row in range(20)])
    words = [f"target.name={saved / 'target'}", *local(saved, "model"), "drafter.shape=[3,2]"]
    config = configure("run", *words)
    sections = ("target", "drafter", "verifier", "sampling", "dataset", "engine")
    manifest = {"config": {name: plain(config, name) for name in sections}, "target": {"name": "tiny"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def chosen(configure: Configure, tmp_path: Path) -> Configure:
    """Composes the command's configuration for a trace, made quick, with its output in ``tmp_path / "found"``."""
    quick = ["bootstrap.resamples=200", "threads=1", "rounds=2", f"out={tmp_path / 'found'}"]
    return lambda trace, *overrides: configure("replay", "best=tree", f"trace={trace}", *quick, *overrides)


def test_from_a_trace_to_a_tree(
    traced_run: Path, chosen: Configure, configure: Configure, saved: Path, tmp_path: Path, capsys: Any
) -> None:
    """Without costs, the largest tree that is allowed is best; what is written composes with a run."""
    (found,) = replay(chosen(traced_run, "costs=none", "max_nodes=5"))
    assert found.best.nodes == 5
    shown = " ".join(capsys.readouterr().out.split())
    override = re.search(r"'drafter\.shape=(\S+)'", shown)
    assert override and TreeShape.of(yaml.safe_load(override[1])) == found.best.shape
    for text in ("3", "[3,2,1]", "[[0],[1],[0,0]]"):
        assert written_shape(TreeShape.of(yaml.safe_load(text))) == text
    assert "as many nodes as were allowed or recorded (5)" in shown
    out = tmp_path / "found"
    config = configure("run", f"hydra.searchpath=[file://{out}]", "tree=T1", f"drafter.name={saved / 'drafter'}")
    assert TreeShape.of(json.loads(json.dumps(list(config.drafter.shape), default=list))) == found.best.shape
    figures = json.loads((out / "T1.json").read_text())
    assert figures["rounds"] == found.recorded.rounds and figures["recorded_shape"] == [3, 2]
    assert [len(rates) for rates in figures["rates"]] == [3, 2]
    assert (out / "T1_tree.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("seconds", "pays", "words"),
    [(2.0, True, "4 nodes, predicted at"), (40.0, False, "none pays here: at T=1 the fastest tree is predicted at 0.")],
)
def test_a_tree_is_recommended_only_where_it_pays(
    seconds: float, pays: bool, words: str, traced_run: Path, chosen: Configure, tmp_path: Path, no_pictures: None,
    capsys: Any,
) -> None:  # fmt: skip
    """Rounds that take twice as long as plain ones may pay here; those that take 40 times as long do not."""
    costs = RoundCosts(rows=(1,), table=((1.6, seconds, seconds * 1.01),), trees=((0, 0), (1, 1), (9, 2)))
    costs.save(tmp_path / "costs.json")
    (found,) = replay(chosen(traced_run, f"costs={tmp_path / 'costs.json'}", "max_nodes=4"))
    text = " ".join(capsys.readouterr().out.split())
    assert found.pays == pays and words in text
    assert ("'drafter.shape=" in text) == pays
    assert json.loads((tmp_path / "found" / "T1.json").read_text())["pays"] == pays


@pytest.mark.full
def test_costs_are_measured(
    configure: Configure, chosen: Configure, saved: Path, tiny: list[str], tmp_path: Path
) -> None:
    traced_run = tmp_path / "real"
    words = [*tiny, *local(saved, "model"), "trace=true", "drafter.shape=[3,2]", f"out={traced_run}"]
    run(configure("run", *words))
    (found,) = replay(chosen(traced_run, "max_nodes=4"))
    assert found.costs is not None and found.costs.plain > 0 and set(found.costs.trees) >= {(1, 1), (3, 1)}
    out = tmp_path / "found"
    assert RoundCosts.load(out / "tree_costs_T0.json") == found.costs
    # Once more with these costs: nothing is timed, and the tree is the same.
    given = [f"costs={out / 'tree_costs_T0.json'}", "max_nodes=4", f"out={tmp_path / 'again'}"]
    (again,) = replay(chosen(traced_run, *given))
    assert again.best == found.best


@pytest.mark.full
def test_what_does_not_fit_the_trace(traced_run: Path, chosen: Configure, tmp_path: Path) -> None:
    """What the run or the drafter was is known before any model is loaded."""
    for overrides, words in [(["method=medusa"], r"^method='medusa': "), (["max_depth=3"], r"^max_depth=3: ")]:
        with pytest.raises(ValueError, match=words):
            replay(chosen(traced_run, "costs=none", *overrides))
    shutil.copytree(traced_run, tmp_path / "other")
    manifest = json.loads((traced_run / "manifest.json").read_text())
    manifest["config"]["drafter"] = {"_target_": "drafters.ngram.NGramDrafter"}
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"^drafters\.ngram\.NGramDrafter takes no shape of its own"):
        replay(chosen(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"^the traces are of different runs \(drafter\._target_ is "):
        replay(chosen(f"[{traced_run},{tmp_path / 'other'}]"))
