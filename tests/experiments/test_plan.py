"""``experiments.plan``: a plan from a configuration alone, whether speculation pays, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.config.sections import build
from experiments.plan import plan
from experiments.reporting.costs import break_even, verdict
from experiments.run import run
from specdec import Target
from specdec.physics.calibrated import Box, CalibratedRounds, Conditions
from specdec.physics.costs import Errors, PartCost, StepCost, TokenRange
from specdec.physics.rounds import TimedRounds
from specdec.physics.speculation import chain_tokens, rate_for
from tests.experiments.runs import Configure
from tests.public_models import CONFIGS


@pytest.fixture
def planned(configure: Configure, tmp_path: Path) -> Any:
    """Plans for a model of which nothing is there but its configuration, with more settings."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"torch_dtype": "bfloat16"}))
    return lambda *words: plan(configure("plan", f"target.name={folder}", f"out={tmp_path / 'out'}", *words))


def test_a_plan_says_what_a_reader_wants_to_know(planned: Any, tmp_path: Path, capsys: Any) -> None:
    planned("drafter=eagle", "price=2", "batch=[1,8,512]", "context=4096")
    said = " ".join(capsys.readouterr().out.split())
    parts = ["8.03 billion parameters", "ridge 295 FLOP/byte", "acceptance 0.7, an assumption", "128 KiB of KV cache"]
    assert not [part for part in (*parts, "there is no room for a batch of 512", "million tokens") if part not in said]
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["asked"]["device"] == "h100" and written["asked"]["prompt"] == 4096 - 256
    assert [row["fits"] for row in written["memory"]] == [True, True, False]
    decode = next(row for row in written["forwards"] if row["what"].startswith("decode"))
    assert decode["seconds"] == pytest.approx((decode["weight_bytes"] + decode["kv_read_bytes"]) / 3.35e12, rel=1e-3)
    assert written["break_even"]["64"] > 8 and written["break_even"]["4096"] is None


def test_formats_and_draft_vocabularies_change_bytes(planned: Any, saved: Path, tmp_path: Path) -> None:
    half, int4 = (planned(*words).rooms[0] for words in ([], ["target.quantization=int4", "engine.kv_cache=int8"]))
    assert int4.weights < 0.4 * half.weights
    assert int4.kv / half.kv == pytest.approx((128 + 4) / 256), "a byte per number, a factor per vector"
    for words in (["drafter=model", f"drafter.name={tmp_path / 'llama-8b'}"], ["drafter=mtp"]):
        whole, cut = (planned(*words, f"drafter.vocabulary={n}").asked.drafter.model.shape for n in ("null", 16384))
        assert cut.output_weights == whole.output_weights * 16384 // whole.vocab
        assert cut.table_weights == whole.table_weights and not cut.borrowed and cut.vocab == 16384
    assert planned("drafter=ngram").longest == 8, "a look-up has no forward of its own"
    said = {"drafter": "target's vocabulary", "other": "in 257 tokens", "pard": "width of vocabulary"}
    for name, words in said.items():
        drafter = ["drafter=model", f"drafter.name={saved / name}"]
        made = planned(f"target.name={saved / 'target'}", *drafter, "context=99", "output=9")
        assert made.asked.drafter.title.endswith(words)


@pytest.mark.parametrize(("drafter", "borrowed"), [("eagle", False), ("block", True)])
def test_a_head_that_is_here_has_its_own_sizes(drafter: str, borrowed: bool, configure, tmp_path: Path) -> None:
    """The bundled heads for the bundled target: the bytes of what the engine loads, and the target's output layer."""
    config = configure("plan", f"drafter={drafter}", f"out={tmp_path}", "target.dtype=float32")
    made = plan(config)
    assert made.asked.drafter is not None and made.asked.drafter.model is not None
    assert "sizes from bundled/" in made.asked.drafter.title
    shape, target = made.asked.drafter.model.shape, Target.from_pretrained("bundled/target", dtype="float32")
    assert shape.vocab == (4096 if drafter == "eagle" else target.vocab_size) and shape.borrowed == borrowed
    (module,) = build(config, "drafter").describe(target).parts
    assert shape.weights == sum(each.numel() for each in {*module.parameters()})


H100 = Conditions(
    device="NVIDIA H100 80GB HBM3", dtype="bfloat16", model="llama", fingerprint="", drafter="EagleDrafter"
)
CHAINS = CalibratedRounds(
    conditions=H100,
    box=Box(batch=(1, 8), context=(64, 5000), drafted=(0, 6), chunk=(16, 4096)),
    target=StepCost.affine(fixed=6e-3, per_token=2e-5, per_position=4e-8),
    prefill=StepCost.affine(fixed=5e-3, per_token=2e-5, per_position=0.0),
    drafting=PartCost(fixed=1e-3, levels=(TokenRange(upto=None, fixed=2e-4, per_token=0.0),)),
    judging=PartCost(fixed=3e-4),
    host=2e-4,
    deepest=5,
    depths=((6, 2),),
    errors={"target": {"held_out": Errors(median=0.031, p95=0.1, worst=0.2, points=24)}},
    peaks={"copy": 2.9e12, "read": 3.0e12, "flops": 7e14, "cache_bytes": 5e7, "memory": 85e9},
    work={"weight_bytes": 1.5e10, "kv_bytes": 131_072, "token_flops": 2.0 * 7_504_658_432, "pair_flops": 524_288},
)
"""Of an 8B model: what it must do agrees with its configuration."""


@pytest.fixture
def costs(tmp_path: Path) -> str:
    CHAINS.save(tmp_path / "costs.json")
    return f"costs={tmp_path / 'costs.json'}"


def test_measured_costs_take_the_place_of_the_least_times(planned: Any, costs: str, tmp_path: Path, capsys) -> None:
    """By hand, at 1,024 positions and 4 rows: a step, a draft of 3 with its decision, and what is left of a round."""
    made = planned("drafter=eagle", costs, "batch=[4,9]", "context=1024", "longest=3", "price=2")
    assert made.asked.device.name == "h100", "the file's own, by the name that the driver gives it"
    plain, verify = (6e-3 + 2e-5 * 4 * tokens + 4e-8 * 4 * 1024 for tokens in (1, 4))
    draft = 1e-3 + 3 * 2e-4
    by_kind = {phase.kind: phase for phase in made.phases if phase.batch == 4}
    found = [by_kind[kind].predicted_seconds for kind in ("decode", "draft", "verify")]
    assert found == pytest.approx([plain, draft, verify])
    speculation, outside = made.speculations
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert speculation.best.drafted == 3, "as many as may be considered"
    assert speculation.best.speedup == pytest.approx(tokens * (plain + 5e-4) / (verify + draft + 5e-4))
    request, unknown = made.requests(speculate=False)
    prefill = 2 * (5e-3 + 2e-5 * 4 * 384)
    halfway = 6e-3 + 2e-5 * 4 + 4e-8 * 4 * (768 + 128) + 5e-4
    assert outside is None and unknown is None, "nine rows were not measured"
    assert request.prefill_seconds == pytest.approx(prefill)
    assert request.seconds == pytest.approx(prefill + 256 * halfway)
    assert request.price == pytest.approx(2e6 / 3600 / (4 * 256 / request.seconds))
    said = " ".join(capsys.readouterr().out.split())
    assert "Times are predicted by costs measured on NVIDIA H100 80GB HBM3, with a median error of 3.1%" in said
    assert "slower than plain decoding at no batch up to 8 with 64 to 4,096 positions per row" in said
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["speculation"][1] is None and written["forwards"][1]["predicted_seconds"] == pytest.approx(plain)


def test_nothing_is_said_beyond_what_was_measured_nor_of_other_conditions(planned: Any, costs, tmp_path) -> None:
    made = planned("drafter=eagle", costs, "batch=[1]", "longest=99")
    assert made.longest == 5, "no chain is deeper than what was drafted, though trees had six nodes"
    assert made.asked.context == 5000, "the longest that was measured"
    assert [*made.break_even] == [64, 128, 256, 512, 1024, 2048, 4096] and made.most == 8
    far = planned("drafter=eagle", costs, "batch=[1]", "context=6000")
    assert far.speculations == [None] and all(phase.predicted_seconds is None for phase in far.phases[1:])
    assert planned("drafter=none", costs, "batch=[16]").phases[1].predicted_seconds is None
    for word, said in (
        ("device=a10", "device is NVIDIA H100 SXM5 80GB there and NVIDIA A10 24GB here"),
        ("drafter=medusa", "drafter is EagleDrafter there and MedusaDrafter here"),
    ):
        with pytest.raises(ValueError, match=rf"^costs=.* were measured under other conditions .*{said}"):
            planned(costs, word)
    # A processor is in no table: its peaks are those that were measured.
    replace(CHAINS, conditions=replace(CHAINS.conditions, device="a chip")).save(tmp_path / "costs.json")
    asked = planned("drafter=eagle", costs, "batch=1").asked
    assert asked.device.title == "a chip" and asked.measured
    assert (asked.roof.bandwidth, asked.roof.flops, asked.usable) == (3.0e12, 7e14, 0.9 * 85e9)


ROUNDS = TimedRounds(nodes=[1, 2, 4, 8, 16], seconds={1: [1.0, 1.1, 1.2, 1.5, 2.4], 4: [2.0, 3.0, 5.0, 11.0, 30.0]})


def test_rounds_at_the_break_even_acceptance_are_as_fast_as_plain_decoding() -> None:
    """A round's time over plain decoding's is its tokens; what never pays and what always does is said."""
    for batch, drafted, share, passes in (
        (1, 3, 0.0, 1.2),
        (1, 6, 0.2, 1.425 + 6 * 0.2),
        (1, 15, 0.05, 2.4 + 15 * 0.05),
        (4, 2, 0.05, (4.0 + 2 * 0.1) / 2),
    ):
        rate = break_even(ROUNDS, batch, drafted, share)
        assert rate is not None and chain_tokens(rate, drafted) == pytest.approx(passes)
    assert break_even(ROUNDS, 4, 7, 0.5) is None and rate_for(4.5, 3) is None and rate_for(4, 3) == pytest.approx(1)
    assert break_even(replace(ROUNDS, seconds={1: [1.0, 0.9, 0.9, 0.9, 0.9]}), 1, 3, 0.0) == 0.0
    said = verdict(replace(ROUNDS, seconds={1: [1.0, 2.5, 5.0, 10.0, 20.0]}), [0.0], passes=3)
    assert said[0] == "1 row, drafter free: nothing pays, whatever is drafted."
    said = verdict(ROUNDS, [0.2], passes=3)
    assert said[0] == "1 row, drafter 20%: pays from an acceptance of 30% on, with 1 drafted."


def test_the_command_times_forwards(configure: Configure, saved: Path, tmp_path: Path, capsys: Any) -> None:
    words = [f"target.name={saved / 'target'}", "threads=1", "seconds=0", "batch=[1,2]", "context=16"]
    words += [f"out={tmp_path}", "nodes=[4,2]"]
    found = plan(configure("plan", "costs=timed", *words))
    assert found.nodes == [1, 2, 4] and all(min(each) > 0 for each in found.seconds.values())
    file = json.loads((tmp_path / "pays.json").read_text())
    assert [row["batch"] for row in file["rows"]] == [1, 2] and file["rows"][0]["seconds"] == found.seconds[1]
    shown = " ".join(capsys.readouterr().out.split())
    assert "from which chains pay" in shown and "timed 3 times" in shown


@pytest.mark.full
def test_a_calibration_is_written_shown_and_taken_by_a_run(configure, saved: Path, tmp_path: Path, capsys) -> None:
    models = [f"target.name={saved}/target", "target.dtype=float32", f"drafter.name={saved}/drafter", "drafter.shape=2"]
    given = ["threads=1", "seconds=0", "rounds=1", f"out={tmp_path}/made", "grid.batch=[1,2]", "grid.context=[4,240]"]
    given += ["grid.chunk=[8,24]", "grid.drafted=[0,1,3]", "held_out.batch=[2]", "held_out.context=[20]"]
    given += ["held_out.drafted=[2]", "held_out.chunk=[16]"]
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
