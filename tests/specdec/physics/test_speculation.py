"""Tokens per round, best draft lengths and what limits them, on published and on hand-made figures."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from specdec.drafting.policies.lengths import best_depths
from specdec.physics.costs import StepSize
from specdec.physics.precision import Precision
from specdec.physics.rounds import LLAMA_8B_H100 as FITTED
from specdec.physics.rounds import DraftModel, RoofRounds, TimedRounds, round_seconds
from specdec.physics.shape import Layer, ModelShape, nominal
from specdec.physics.speculation import (
    best_length,
    break_even_batch,
    chain_tokens,
    critical_context,
    speedup_of,
)
from specdec.physics.work import Roof, step_work
from tests.public_models import DEEPSEEK_V3, LLAMA_8B, ROUND_8B, ROUND_70B

H100 = Roof(bandwidth=3.35e12, flops=989.4e12)
HALF = Precision()


def test_tokens_per_round_by_enumeration_and_with_a_rate_per_position() -> None:
    for rate, length in ((0.8, 4), (0.5, 7), (0.0, 3), (0.9, 1), (1.0, 2), (0.5, 0)):
        expected = sum(
            rate ** sum(flags) * (1 - rate) ** (length - sum(flags)) * (1 + len(list(itertools.takewhile(bool, flags))))
            for flags in itertools.product((True, False), repeat=length)
        )
        assert chain_tokens(rate, length) == pytest.approx(expected)
    assert chain_tokens([0.5, 0.2], 1) == pytest.approx(1.5)
    assert chain_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02), "the last rate goes on"


def test_best_length_where_verifying_is_free() -> None:
    for rate, cost, length, best in ((0.6, 0.1, 3, 1.674), (0.8, 0.05, 8, 3.092), (0.9, 0.02, 19, 6.365)):
        free = TimedRounds(nodes=[1, 31], seconds={1: [1.0, 1.0]}, share=cost)
        found = best_length(free, rate, batch=1, context=0, longest=30)
        assert (found.drafted, found.speedup) == (length, pytest.approx(best, abs=5e-4))


BATCHES = (1, 8, 32, 64, 128, 256, 512)


@pytest.mark.parametrize(
    ("rate", "context", "batches", "cells"),
    [
        (0.5, 1024, BATCHES, "7/1.51 4/1.41 3/1.27 2/1.20 2/1.14 1/1.10 1/1.09"),
        (0.7, 1024, BATCHES, "8/2.42 8/2.18 5/1.80 4/1.62 3/1.47 3/1.36 2/1.31"),
        (0.8, 1024, BATCHES, "8/3.27 8/2.95 7/2.33 6/2.01 4/1.76 4/1.60 3/1.51"),
        (0.9, 1024, BATCHES, "8/4.63 8/4.17 8/3.29 8/2.75 7/2.30 6/2.01 5/1.84"),
        (0.7, 256, (1, 8, 32, 128, 512), "8/2.42 8/2.16 5/1.73 3/1.29 1/1.07"),
        (0.7, 4096, (1, 8, 32, 128, 512), "8/2.43 8/2.25 6/2.02 4/1.87 4/1.83"),
        (0.7, 16_384, (1, 8, 32, 128, 512), "8/2.46 8/2.44 7/2.43 7/2.44 7/2.44"),
    ],
)
def test_best_length_under_load_and_by_context(rate: float, context: int, batches: tuple[int, ...], cells: str) -> None:
    """The best lengths and their speedups; and what a policy chooses that knows the rate, row by row."""
    found = [best_length(FITTED, rate, batch=batch, context=context, longest=8) for batch in batches]
    assert [f"{each.drafted}/{each.speedup:.2f}" for each in found] == cells.split()
    for batch, best in zip(batches, found, strict=True):
        survival = np.tile(rate ** np.arange(1, 9), (batch, 1))
        assert set(best_depths(survival, FITTED, float(batch * context)).tolist()) == {best.drafted}


def test_published_costs_are_one_formula() -> None:
    """Rows may have drafts of different lengths, and pieces of prompts cost what other tokens do."""
    (seconds,) = FITTED.ragged(32, 32 * 900.0, drafted=np.array([128]), deepest=np.array([8]))
    assert seconds == pytest.approx(round_seconds(FITTED, batch=32, drafted=4, context=900.0))
    chunk = FITTED.prefill_seconds(StepSize(tokens=512, positions=1000, pairs=0))
    assert chunk == pytest.approx(5.88590713e-3 + 512 * 2.10103129e-5 + 1000 * 3.92645679e-8)
    with pytest.raises(ValueError, match="up to 8 tokens, and drafts are 9 deep"):
        FITTED.check_depth(9)


def test_when_it_pays_is_the_closed_form() -> None:
    """(tokens - 1)(fixed + positions + outside) against what rejected tokens and drafting cost."""
    for batch, drafted, context in ((1, 3, 1024), (300, 3, 1024), (64, 8, 16_384)):
        tokens = chain_tokens(0.5, drafted)
        target, positions = FITTED.target.ranges[0], batch * context
        shared = (tokens - 1) * (target.fixed + FITTED.target.per_position * positions + FITTED.outside)
        paid = target.per_token * batch * (drafted + 1 - tokens)
        paid += FITTED.draft(batch=batch, drafted=drafted, context=context)
        seconds = {n: round_seconds(FITTED, batch=batch, drafted=n, context=context) for n in (0, drafted)}
        found = tokens * seconds[0] - seconds[drafted]
        assert found == pytest.approx(shared - paid)
        assert (found > 0) == (speedup_of(FITTED, 0.5, batch=batch, drafted=drafted, context=context) > 1)
    batch = break_even_batch(FITTED, 0.5, drafted=3, context=1024)
    assert batch is not None and 256 < batch < 512
    assert speedup_of(FITTED, 0.5, batch=batch, drafted=3, context=1024) >= 1
    assert speedup_of(FITTED, 0.5, batch=batch + 1, drafted=3, context=1024) < 1
    assert break_even_batch(FITTED, 0.5, drafted=3, context=16_384) is None, "long contexts pay at any batch"
    assert break_even_batch(FITTED, 0.0, drafted=3, context=1024) == 0, "nothing is ever accepted"


def windowed(shape: ModelShape) -> ModelShape:
    """The same with a window of 1,024 positions in every other layer."""
    parts = [layer.attention for layer in shape.layers if layer.attention is not None]
    windows = [replace(part, window=1024 if index % 2 else None) for index, part in enumerate(parts)]
    return replace(shape, layers=tuple(Layer(attention=part) for part in windows))


def test_critical_context() -> None:
    for shape, drafted, context in (
        (ROUND_70B, 0, 1487),
        (ROUND_70B, 3, 6490),
        (ROUND_8B, 0, 420),
        (ROUND_8B, 3, 1748),
        (windowed(ROUND_70B), 0, 2 * 1487 - 1024),
        (windowed(ROUND_70B), 3, 2 * 6490 - 1024),
    ):
        found = critical_context(shape, HALF, ridge=H100.ridge, drafted=drafted)
        assert found is not None and found == pytest.approx(context, abs=1.5)
        step = step_work(shape, HALF, batch=1, context=found, drafted=drafted)
        # Operations of a row's tokens over what it reads, without the weights.
        rate = (step.attention_flops + 2 * (drafted + 1) * shape.active_weights) / step.kv_read_bytes
        assert rate == pytest.approx(H100.ridge, rel=2e-3)
    # Operations per byte of decode's attention with a key for every head, one for 8 heads, and latents.
    multi_head = nominal(32, layers=32, heads=32, kv_heads=32)
    for shape, intensity in ((multi_head, 1.0), (ROUND_70B, 8.0), (DEEPSEEK_V3, 241.8)):
        assert shape.pair_flops / (2.0 * shape.kept_per_position) == pytest.approx(intensity, abs=0.05)


def test_drafting_one_by_one_costs_a_forward_each() -> None:
    model = DraftModel(shape=nominal(32_000_000, layers=1, heads=32, kv_heads=8), precision=HALF)
    chained = RoofRounds(shape=LLAMA_8B, precision=HALF, roof=H100, drafter=model, overhead=1e-4)
    at_once = replace(chained, drafter=replace(model, at_once=True))
    options = {"batch": 1, "context": 0}
    assert chained.draft(drafted=0, **options) == 0
    assert chained.draft(drafted=4, **options) == pytest.approx(4 * chained.draft(drafted=1, **options), rel=1e-3)
    assert at_once.draft(drafted=4, **options) == pytest.approx(at_once.draft(drafted=1, **options), rel=1e-3)
    whole = round_seconds(chained, batch=1, drafted=4, context=0)
    assert whole == chained.verify(drafted=4, **options) + chained.draft(drafted=4, **options)
