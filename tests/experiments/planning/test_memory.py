"""The memory of a run: several engines of one target, what is refused, and what would fit."""

from dataclasses import replace

import pytest

from experiments.bench.chapter.models import ROUND_8B
from experiments.planning.memory import RunMemory
from specdec.physics.capacity import Served
from specdec.physics.precision import Precision
from specdec.physics.shape import nominal

KV = 131_072
SMALL = nominal(1_000_000_000, layers=32, heads=32, kv_heads=8)
DRAFTING = Served(shape=ROUND_8B, precision=Precision(), drafter=SMALL, drafted=4, shown=3, activations=1e9)
ALONE = Served(shape=ROUND_8B, precision=Precision(), activations=2e9)
RUN = RunMemory(target="m", methods={"a": DRAFTING}, rows=2, length=1000, free=40e9, place="cpu (a chip)")


def test_engines_share_the_target_and_nothing_else() -> None:
    memory = replace(RUN, methods={"a": DRAFTING, "b": ALONE}).planned
    assert (memory.weights, memory.drafter) == (16e9, 2e9), "the target once"
    assert memory.kv == 2 * 2 * 1000 * KV, "a cache in each"
    assert memory.drafter_kv == 2 * 1000 * KV
    assert memory.scratch == 2 * (4 + 3) * KV, "four nodes in the target's cache, three in the drafter's"
    assert memory.activations == 2e9, "they take turns"


def test_targets_of_other_weights_count_each() -> None:
    several = replace(RUN, methods={"a": DRAFTING, "b": ALONE, "c": ALONE}, weights_of={"a": "x", "b": "y", "c": "x"})
    assert several.planned.weights == 2 * 16e9
    wide = replace(several, own_rows={"c": 5})
    assert wide.planned.kv == (2 + 2 + 5) * 1000 * KV


def test_a_refusal_says_what_would_fit() -> None:
    asked = replace(RUN, rows=64, length=4096)
    assert asked.planned.total > asked.free
    rows, length = asked.most_rows(asked.free, length=4096), asked.longest(asked.free, rows=64)
    said = (
        rf"^this run needs 8\d\.\d\d GiB \(weights 14\.90 GiB, drafter 1\.86 GiB, KV cache 6\d\.\d\d GiB, activations "
        rf"954 MiB\), and cpu \(a chip\) has 37\.25 GiB free: give at most engine\.max_batch_size={rows} with "
        rf"engine\.max_length=4096 or engine\.max_length={length} with engine\.max_batch_size=64$"
    )
    with pytest.raises(ValueError, match=said):
        asked.check()
    for fits in (replace(asked, rows=rows), replace(asked, length=length)):
        fits.check()
    for too_much in (replace(asked, rows=rows + 1), replace(asked, length=length + 1)):
        with pytest.raises(ValueError, match="this run needs"):
            too_much.check()


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (10e9, r"its weights alone do not fit; give target\.quantization=int8 or int4, or a smaller target$"),
        (5e9, r"its weights alone do not fit; give target\.quantization=int4, or a smaller target$"),
        (1e9, r"its weights alone do not fit; give a smaller target$"),
    ],
)
def test_weights_that_do_not_fit(free: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(RUN, free=free).check()
