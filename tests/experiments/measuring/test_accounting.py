"""The work of a call and its predicted time, counted by hand from the steps of two requests."""

from dataclasses import replace

import pytest

from experiments.measuring.accounting import Accountant, ModelWork
from specdec.physics.calibrated import Box, CalibratedRounds, Conditions
from specdec.physics.costs import PartCost, StepCost, TokenRange
from specdec.physics.shape import Attention, Layer, Mlp, ModelShape
from specdec.types import Completion, Step

# One layer of 100 weights in attention and 200 in the MLP, 50 in the output layer; 4 FLOP per head and width; 8 numbers
# of keys and values per position.
ATTENTION = Attention.grouped(weights=100, heads=3, kv_heads=2, head_dim=2)
SHAPE = ModelShape(
    kind="toy", hidden=5, vocab=10, layers=(Layer(attention=ATTENTION, mlp=Mlp(weights=200)),),
    table_weights=50, output_weights=50, tied=True,
)  # fmt: skip
TARGET = ModelWork.of(SHAPE, weight_bytes=700.0, kv_bytes=16.0)
PAIR = 4 * 3 * 2
TOKEN = 2 * (300 + 50)
FIRST = {"prefill": 1.0, "draft": 0.1, "verify": 0.5, "accept": 0.2, "commit": 0.1}
SECOND = {"draft": 0.2, "verify": 0.6, "accept": 0.1, "commit": 0.1}


def step(number: int, seconds: dict[str, float], *, nodes: int, depth: int, accepted: int) -> Step:
    drafted = {"proposed_nodes": nodes, "proposed_depth": depth, "accepted": accepted}
    return Step(request=0, round=number, token_ids=(1,), seconds=seconds, **drafted)


def done(prompt: int, *steps: Step) -> Completion:
    return Completion(prompt_ids=(1,) * prompt, token_ids=(), text="", finish_reason="length", steps=steps)


# Two rows. In the first round they verify 3 and 2 nodes besides the root, and keep 2 and 0; the second has one row.
CALL = [
    done(5, step(0, FIRST, nodes=3, depth=3, accepted=2), step(1, SECOND, nodes=1, depth=1, accepted=1)),
    done(9, step(0, FIRST, nodes=2, depth=2, accepted=0)),
]


def test_the_verified_and_the_committed_are_counted_by_hand() -> None:
    work = Accountant(target=TARGET, chunk=512).of_call(CALL).work
    assert (work["verified"], work["committed"]) == (4 + 3 + 2, 3 + 1 + 2)
    # Rows behind 4, 8 and 7 positions; the nodes of a chain see themselves and half of their own, on average.
    assert work["verify_bytes"] == 2 * 700 + 16 * (4 + 8 + 7) + 16 * (4 + 3 + 2)
    pairs = 4 * (4 + 1 + 1.5) + 3 * (8 + 1 + 1) + 2 * (7 + 1 + 0.5)
    assert work["verify_flops"] == pytest.approx(TOKEN * 9 + PAIR * pairs)
    assert work["useful_flops"] == pytest.approx(TOKEN * 6 + PAIR * (3 * 5 + 1 * 9 + 2 * 8))


def test_a_prefill_in_pieces_is_counted_by_hand() -> None:
    work = Accountant(target=TARGET, chunk=6).of_call(CALL).work
    # Prompts of 4 and 8 tokens before their last: 4 and 6 at once, then 2 more behind 6. No logits, so no output layer.
    assert work["prefill_forwards"] == 2
    assert work["prefill_bytes"] == pytest.approx(2 * 700 * 300 / 350 + 16 * 6 + 16 * 12)
    assert work["prefill_flops"] == pytest.approx(2 * 300 * 12 + PAIR * (4 * 2.5 + 6 * 3.5 + 2 * (6 + 1.5)))


def test_a_drafter_reads_its_weights_once_per_level() -> None:
    accountant = Accountant(target=TARGET, drafter=ModelWork.of(SHAPE, weight_bytes=30.0, kv_bytes=16.0))
    work = accountant.of_call(CALL).work
    assert work["draft_forwards"] == 3 + 1
    assert work["draft_bytes"] == 30 * 4 + 16 * (3 * 4 + 2 * 8 + 1 * 7)
    assert replace(accountant, at_once=True).of_call(CALL).work["draft_forwards"] == 2


def costs(**box: tuple[int, int]) -> CalibratedRounds:
    return CalibratedRounds(
        conditions=Conditions(device="x", dtype="y", model="z", fingerprint="0"),
        box=Box(**{"batch": (1, 2), "context": (1, 100), "drafted": (0, 4), "chunk": (1, 64), **box}),
        target=StepCost(ranges=(TokenRange(upto=None, fixed=0.1, per_token=0.01),), per_position=0.001, per_pair=0.0),
        prefill=StepCost(ranges=(TokenRange(upto=None, fixed=0.5, per_token=0.01),), per_position=0.0, per_pair=0.0),
        drafting=PartCost(fixed=0.05, levels=(TokenRange(upto=None, fixed=0.01, per_token=0.0),)),
        judging=PartCost(fixed=0.1, levels=(TokenRange(upto=None, fixed=0.02, per_token=0.0),)),
        deepest=4,
    )


def test_rounds_are_predicted_by_hand_and_residuals_add_up() -> None:
    account = Accountant(target=TARGET, costs=costs()).of_call(CALL)
    # Two rows of four nodes behind 4 and 8 positions; then one row of two behind 7.
    verify = [0.1 + 8 * 0.01 + 12 * 0.001, 0.1 + 2 * 0.01 + 7 * 0.001]
    draft, judge = [0.05 + 3 * 0.01, 0.05 + 0.01], [0.1 + 3 * 0.02, 0.1 + 0.02]
    rounds = [sum(parts) for parts in zip(verify, draft, judge, strict=True)]
    assert account.predicted == (pytest.approx(tuple(rounds)), pytest.approx((rounds[0],)))
    work = account.work
    assert work["predicted_verify"] == pytest.approx(sum(verify)) and work["measured_verify"] == pytest.approx(1.1)
    assert (work["predicted_rounds"], work.get("unpredicted_rounds", 0)) == (2, 0)
    # Residuals of the stages together are those of the rounds together, where every round counts once.
    parts = ("draft", "verify", "judge")
    by_stage = sum(work[f"measured_{part}"] - work[f"predicted_{part}"] for part in parts)
    assert by_stage == pytest.approx(sum(account.seconds[0]) - sum(rounds))
    # Two prompts side by side, padded to the longer one.
    assert work["predicted_prefill"] == pytest.approx(0.5 + 16 * 0.01) and work["measured_prefill"] == 1.0


def test_rounds_outside_of_the_box_are_counted_and_not_predicted() -> None:
    account = Accountant(target=TARGET, costs=costs(batch=(2, 4), chunk=(1, 8))).of_call(CALL)
    assert account.predicted[0][0] is not None and account.predicted[0][1] is None
    assert (account.work["predicted_rounds"], account.work["unpredicted_rounds"]) == (1, 1)
    assert "predicted_prefill" not in account.work, "sixteen tokens at once were not calibrated"
