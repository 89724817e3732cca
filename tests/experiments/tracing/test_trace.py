"""Traces of whole runs, and replays of them: figures by hand and by enumeration, the best tree, what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import verifiers
from experiments.replay import replay
from experiments.results.records import Record, read_records
from experiments.results.statistics import Bootstrap
from experiments.run import run
from experiments.tracing.rounds import outputs_of
from experiments.tracing.scoring import figures, find_drafts, refusal, score
from experiments.tracing.trace import FOLDER, read_trace, shards
from specdec import DraftSampling, DraftTree, TreeShape, Verifier
from specdec.checks.drafts import WeightedDrafts, enumerate_drafts
from specdec.checks.outcomes import enumerate_outcome
from specdec.checks.tables import Tables
from specdec.drafting.costs import Conditions
from specdec.physics.calibrated import Box, CalibratedRounds
from specdec.physics.costs import PartCost, StepCost
from tests.experiments.conftest import traced_run
from tests.experiments.made_runs import traced, write_run
from tests.experiments.runs import Configure, Stop, launched, local

pytestmark = pytest.mark.usefixtures("no_pictures")
IID, SWOR, TOP = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.DETERMINISTIC
QUICK = Bootstrap(resamples=200)
SAMPLED = ["sampling.temperature=1", "engine.max_batch_size=2"]


def drafting(folder: Path) -> list[Record]:
    return [record for record in read_records(folder / "records.jsonl") if record.method != "plain"]


def keys_of(folder: Path) -> list[Any]:
    return [each.key for shard in read_trace(folder) for each in shard]


def test_a_trace_has_every_round_leads_to_the_output_and_changes_nothing(configure, saved, tiny, tmp_path) -> None:
    words = [*tiny, *local(saved, "model"), *SAMPLED, "drafter.shape=[2,1]", "drafter.sampling=without_replacement"]
    made = run(configure("run", *words, "trace=true", "trace_dropped=0"))
    assert made.rows[1]["distance_tv"] is None, "the rule is exact"
    run(configure("run", *words, f"out={tmp_path / 'blind'}"))
    folder = tmp_path / "out"
    records = drafting(folder)
    assert [record.token_ids for record in records] == [record.token_ids for record in drafting(tmp_path / "blind")]
    assert not (tmp_path / "blind" / FOLDER).exists()

    keys = keys_of(folder)
    logged = {(r.prompt, number): value for r in records for number, value in enumerate(r.expected_accepted)}
    assert {(key.prompt, key.round) for key in keys} == logged.keys()
    assert all(key.expected_accepted == pytest.approx(logged[key.prompt, key.round], abs=1e-5) for key in keys)
    assert {(key.exactness, key.temperature) for key in keys} == {("exact", 1.0)}

    (drafts,) = find_drafts(folder)
    assert drafts.laws == {SWOR}
    (found,) = score(drafts, {"rejection": verifiers.RejectionVerifier()})
    assert len(found.accepted) == sum(len(record.accepted) for record in records)
    assert found.accepted.sum() == pytest.approx(sum(sum(record.expected_accepted) for record in records), abs=1e-3)

    # Accepted nodes and following tokens, one round after the other, are the output of the engine.
    outputs, notes = outputs_of(folder, records)
    assert not notes and sum(sum(output.record.accepted) for output in outputs) > 0
    for output in outputs:
        taken = ((*(each.nodes[node] for node in each.path), each.next) for each in output.rounds)
        emitted = [token.token for tokens in taken for token in tokens]
        assert tuple(emitted[: len(output.tokens)]) == output.record.token_ids
        for before, after in zip(output.rounds, output.rounds[1:], strict=False):
            assert after.nodes[0].token == before.next.token, "the root is the last token"


@pytest.mark.full
def test_a_resumed_run_has_no_round_twice(configure, saved: Path, tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    overrides = [*tiny, *local(saved, "ngram"), "trace=true"]
    with monkeypatch.context() as patch:
        Stop(patch, KeyboardInterrupt(), {3})
        with pytest.raises(KeyboardInterrupt):
            run(configure("run", *overrides))
    # An attempt that had traced a batch, and not recorded it.
    first = shards(tmp_path / "out" / FOLDER)[0]
    (first.parent / "00007.parquet").write_bytes(first.read_bytes())
    run(configure("run", *overrides, "resume=true"))
    keys = keys_of(tmp_path / "out")
    assert len({key.place for key in keys}) == len(keys)
    assert len(keys) == sum(len(record.accepted) for record in drafting(tmp_path / "out"))
    (drafts,) = find_drafts(tmp_path / "out")
    assert drafts.laws == {TOP}


@pytest.mark.full
def test_a_lossy_rule_logs_its_divergence(configure: Configure, saved: Path, tiny: list[str], tmp_path: Path) -> None:
    plain, method = run(configure("run", *tiny, *local(saved, "medusa"), *SAMPLED, "verifier=typical")).rows
    assert plain["distance_tv"] is None and method["distance_tv"] > 0.01
    for record in drafting(tmp_path / "out"):
        assert len(record.distance_tv) == len(record.accepted) == len(record.distance_kl)


def test_a_trace_that_is_missing_damaged_or_of_another_version_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no trace: make one with experiments\.run trace=true"):
        next(read_trace(tmp_path))
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "00000.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"00000\.parquet is damaged"):
        next(read_trace(tmp_path))
    folder = write_run(tmp_path / "run")
    for named in (None, {b"specdec.trace.version": b"2"}):
        for path in shards(folder / FOLDER):
            pq.write_table(pq.read_table(path).replace_schema_metadata(named), path)
        with pytest.raises(ValueError, match=r"was made by another version of this program: run it again"):
            list(read_trace(folder))


def test_figures_by_hand_and_drawn_tokens_are_not_taken_for_p(tmp_path: Path) -> None:
    """Two prompts of one round; the first drafted token 2, the second token 0."""
    p, q = [0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.5, 0.0]
    tokens, laws = torch.tensor([[0, 2], [0, 0]]), torch.tensor([q, p]).expand(2, 2, 4)
    tree = DraftTree.from_shape(TreeShape.chain(1), tokens, sampling=IID, draft_probs=laws)
    traced(tmp_path, tree, torch.tensor([p, p]).expand(2, 2, 4), ["a", "b"])
    (drafts,) = find_drafts(tmp_path)
    # Token 2 has p / q = .2 / .5; token 0 has .5 / .25. A walk of the target's goes to it with p.
    scores = score(drafts, {"rejection": verifiers.RejectionVerifier(), "walk": verifiers.TargetWalkVerifier()})
    rejection, walk = figures(scores, baseline="rejection", bootstrap=QUICK)
    assert (rejection["accepted"], walk["accepted"]) == (pytest.approx(0.7), pytest.approx(0.35))
    assert [walk[name] for name in ("gain", "gain_low", "gain_high")] == pytest.approx([-0.35, -0.5, -0.2])
    assert rejection["reach.1"] == pytest.approx(0.7) and "reach.2" not in rejection

    noise = verifiers.SharedNoiseVerifier()
    (shared,) = find_drafts(tmp_path, ran=noise)
    assert refusal(verifiers.RejectionVerifier(), drafts) is None and refusal(noise, shared) is None
    assert "the tokens that the target had drawn" in str(refusal(verifiers.RejectionVerifier(), shared))
    assert "draws with shared noise" in str(refusal(noise, drafts))


ENUMERATED = [
    (verifiers.RejectionVerifier(), TreeShape.branching(2, 1), SWOR),
    (verifiers.RejectionVerifier(), TreeShape.branching(2, 1), IID),
    (verifiers.TraversalVerifier(), TreeShape.branching(2, 2), SWOR),
    (verifiers.KSeqVerifier(), TreeShape.branching(3), IID),
    (verifiers.BlockVerifier(), TreeShape.chain(3), IID),
    (verifiers.TargetWalkVerifier(), TreeShape.branching(2, 1), TOP),
    (verifiers.TransportVerifier(), TreeShape.branching(2), IID),
]


@pytest.mark.parametrize(("rule", "shape", "law"), ENUMERATED, ids=lambda value: type(value).__name__)
def test_the_replay_of_all_drafts_is_their_enumeration(rule: Verifier, shape, law, tmp_path: Path) -> None:
    tables = Tables.random(3, shape.max_depth, seed=1)
    drafts = enumerate_drafts(tables, shape, law)
    every = [str(row) for row in range(len(drafts.tree.tokens))]
    traced(tmp_path, drafts.tree, drafts.target_probs.nan_to_num(), every)
    (found,) = score(find_drafts(tmp_path)[0], {"rule": rule})
    weights = drafts.probability.numpy()[[int(prompt) for prompt in found.prompts]]
    expected = enumerate_outcome(rule, tables, shape, law).expected_accepted
    assert weights @ found.accepted == pytest.approx(expected, abs=1e-5)


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    drafts: WeightedDrafts = enumerate_drafts(Tables.random(3, 1, seed=0), TreeShape.branching(2), SWOR)
    traced(tmp_path / "small", drafts.tree, drafts.target_probs, ["a"] * len(drafts.tree.tokens))
    known = (verifiers.BlockVerifier(), verifiers.KSeqVerifier(), verifiers.RejectionVerifier())
    scores = score(find_drafts(tmp_path / "small")[0], {type(rule).__name__: rule for rule in known})
    block, kseq, rejection = (str(found.refused) for found in scores)
    assert "takes chains only" in block and "not made for drafts that are WITHOUT_REPLACEMENT" in kseq
    made = figures(scores, baseline="RejectionVerifier", bootstrap=QUICK)
    assert rejection == "None" and [bool(row["refused"]) for row in made] == [True, True, False]

    vocab = 200  # pairs of which are too many for a linear program
    rows = torch.rand(1, vocab, generator=torch.Generator().manual_seed(0)).softmax(-1)[:, None].expand(1, 3, -1)
    tree = DraftTree.from_shape(TreeShape.branching(2), torch.tensor([[0, 1, 2]]), sampling=SWOR, draft_probs=rows)
    traced(tmp_path / "large", tree, rows, ["a"])
    (found,) = score(find_drafts(tmp_path / "large")[0], {"transport": verifiers.TransportVerifier()})
    assert "too many for a linear program" in str(found.refused)


def test_the_application(configure: Configure, traced_out: Path, tmp_path: Path, capsys: Any) -> None:
    rules = "verifiers=[rejection,block,typical,kseq,{name:lenient,lenience:0.5}]"
    words = [f"trace={traced_out}", rules, "bootstrap.resamples=200", f"out={tmp_path / 'replay'}"]
    rows = {row["rule"]: row for row in replay(configure("replay", *words))}
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("block (exact)", "typical (lossy)", "identical contexts"):
        assert text in shown, text
    block, lenient = rows["block"], rows["lenient, lenience=0.5"]
    assert block["gain"] is not None and block["distance_tv"] is None
    assert lenient["gain"] > 0 and lenient["distance_tv"] is not None
    content = json.loads((tmp_path / "replay" / "replay.json").read_text())
    assert content["rows"][0]["exactness"] == "exact" and (tmp_path / "replay" / "replay.csv").is_file()
    assert "| rejection (exact) |" in (tmp_path / "replay" / "replay.md").read_text()


@pytest.mark.full
def test_a_sweep_ends_with_the_replay_of_its_jobs(saved: Path, tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    words = [text for text in tiny if not text.startswith(("out=", "dataset.count"))]
    words += [f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra.sweep.subdir=${hydra.job.num}", "dataset.count=2"]
    words += [f"drafter.name={saved / 'drafter'}", "drafter.shape=2,[2,1]", "drafter.sampling=iid"]
    words.append("sampling.temperature=1")
    assert launched("experiment=verifiers", *words, "engine.max_length=200", monkeypatch=monkeypatch) == 0
    assert {"comparison.md", "replay.md", "replay.csv"} <= {path.name for path in (tmp_path / "sweep").iterdir()}
    rows = json.loads((tmp_path / "sweep" / "replay.json").read_text())["rows"]
    assert len({row["drafts"] for row in rows}) == 2
    block = {bool(row["refused"]): row.get("gain") for row in rows if row["rule"] == "block"}
    assert block.keys() == {True, False} and block[False] > -1e-2, "it takes chains only"
    assert np.isfinite([row["accepted"] for row in rows if not row["refused"]]).all()


@pytest.fixture(scope="module")
def trees(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_run(saved, tmp_path_factory.mktemp("trees") / "out", "drafter.shape=[3,2]")


@pytest.fixture
def chosen(configure: Configure, tmp_path: Path) -> Configure:
    quick = ["bootstrap.resamples=200", "threads=1", f"out={tmp_path / 'found'}"]
    return lambda trace, *overrides: configure("replay", "best=tree", f"trace={trace}", *quick, *overrides)


def test_from_a_trace_to_a_tree(trees: Path, chosen, configure, saved: Path, tmp_path: Path, capsys: Any) -> None:
    """Without costs, the largest tree that is allowed is best; what is written composes with a run."""
    (found,) = replay(chosen(trees, "max_nodes=5"))
    assert found.costs is None and found.best.nodes == 5
    shown = " ".join(capsys.readouterr().out.split())
    override = re.search(r"'drafter\.shape=(\S+)'", shown)
    assert override and TreeShape.of(yaml.safe_load(override[1])) == found.best.shape
    assert "as many nodes as were allowed or recorded (5)" in shown
    out = tmp_path / "found"
    config = configure("run", f"hydra.searchpath=[file://{out}]", "tree=T0", f"drafter.name={saved / 'drafter'}")
    assert TreeShape.of(json.loads(json.dumps(list(config.drafter.shape), default=list))) == found.best.shape
    assert json.loads((out / "T0.json").read_text())["recorded_shape"] == [3, 2]


def test_a_tree_is_recommended_only_where_it_pays(trees: Path, chosen, tmp_path: Path, capsys) -> None:
    """Rounds that take twice as long as plain ones may pay here; those that take 40 times as long do not."""
    for seconds, pays, words in (
        (2.0, True, "4 nodes, predicted at"),
        (40.0, False, "none pays here: at T=0 the fastest tree is predicted at 0."),
    ):
        CalibratedRounds(
            conditions=Conditions(device="a chip", dtype="float32", model="a model", fingerprint="0123456789ab"),
            box=Box(batch=(1, 8), context=(1, 512), drafted=(0, 9)),
            target=StepCost.affine(fixed=1.6, per_token=0.0, per_position=0.0),
            drafting=PartCost(fixed=seconds - 1.6),
            deepest=2,
        ).save(tmp_path / "costs.json")
        (found,) = replay(chosen(trees, f"costs={tmp_path / 'costs.json'}", "max_nodes=4"))
        text = " ".join(capsys.readouterr().out.split())
        assert found.pays == pays and words in text
        assert ("'drafter.shape=" in text) == pays
        assert json.loads((tmp_path / "found" / "T0.json").read_text())["pays"] == pays


@pytest.mark.full
def test_what_does_not_fit_the_trace(trees: Path, chosen: Configure, tmp_path: Path) -> None:
    shutil.copytree(trees, tmp_path / "other")
    manifest = json.loads((trees / "manifest.json").read_text())
    manifest["config"]["drafter"] = {"_target_": "drafters.ngram.NGramDrafter"}
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(manifest))
    for trace, words, said in (
        (trees, ["method=medusa"], r"^method='medusa': "),
        (trees, ["max_depth=3"], r"^max_depth=3: "),
        (tmp_path / "other", [], r"^drafters\.ngram\.NGramDrafter takes no shape of its own"),
        (f"[{trees},{tmp_path / 'other'}]", [], r"^the traces are of different runs \(drafter\._target_ is "),
    ):
        with pytest.raises(ValueError, match=said):
            replay(chosen(trace, *words))
