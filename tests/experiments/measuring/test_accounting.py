"""The work of a call, counted by hand from the steps of two requests."""

from dataclasses import replace

import pytest

from experiments.measuring.accounting import Accountant, ModelWork
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
    work = Accountant(target=TARGET, chunk=512).of_call(CALL)
    assert (work["verified"], work["committed"]) == (4 + 3 + 2, 3 + 1 + 2)
    # Rows behind 4, 8 and 7 positions; the nodes of a chain see themselves and half of their own, on average.
    assert work["verify_bytes"] == 2 * 700 + 16 * (4 + 8 + 7) + 16 * (4 + 3 + 2)
    pairs = 4 * (4 + 1 + 1.5) + 3 * (8 + 1 + 1) + 2 * (7 + 1 + 0.5)
    assert work["verify_flops"] == pytest.approx(TOKEN * 9 + PAIR * pairs)
    assert work["useful_flops"] == pytest.approx(TOKEN * 6 + PAIR * (3 * 5 + 1 * 9 + 2 * 8))


def test_a_prefill_in_pieces_is_counted_by_hand() -> None:
    work = Accountant(target=TARGET, chunk=6).of_call(CALL)
    # Prompts of 4 and 8 tokens before their last: 4 and 6 at once, then 2 more behind 6. No logits, so no output layer.
    assert work["prefill_forwards"] == 2
    assert work["prefill_bytes"] == pytest.approx(2 * 700 * 300 / 350 + 16 * 6 + 16 * 12)
    assert work["prefill_flops"] == pytest.approx(2 * 300 * 12 + PAIR * (4 * 2.5 + 6 * 3.5 + 2 * (6 + 1.5)))


def test_a_drafter_reads_its_weights_once_per_level() -> None:
    accountant = Accountant(target=TARGET, drafter=ModelWork.of(SHAPE, weight_bytes=30.0, kv_bytes=16.0))
    work = accountant.of_call(CALL)
    assert work["draft_forwards"] == 3 + 1
    assert work["draft_bytes"] == 30 * 4 + 16 * (3 * 4 + 2 * 8 + 1 * 7)
    assert replace(accountant, at_once=True).of_call(CALL)["draft_forwards"] == 2
