"""Engines hold what was planned; and the most memory that there was."""

from typing import Any

import torch

from drafters import MedusaDrafter, MergedDrafter, ModelDrafter, NGramDrafter
from experiments.measuring.held import PeakMeter, held_by
from specdec.engine.engine import Engine
from specdec.physics.capacity import Served
from specdec.physics.precision import Precision
from specdec.physics.shape import ModelShape
from specdec.target.target import Target
from tests.components import medusa_heads
from tests.models import tiny_model
from verifiers import RejectionVerifier

SIZES: Any = {"max_batch_size": 3, "max_length": 40}


def test_engines_hold_what_is_planned() -> None:
    target, small = Target(tiny_model()), tiny_model("llama_mqa_tied")
    engine = Engine(target, ModelDrafter(small, shape=[2, 2], kv_cache="int8"), RejectionVerifier(), **SIZES)
    alone = Engine(target, **SIZES)
    held = held_by([engine, engine, alone])
    float32 = Precision.of("float32")
    served = Served(
        shape=ModelShape.of(target.model.config),
        precision=float32,
        drafter=ModelShape.of(small.config),
        drafter_precision=Precision.of("float32", kv="int8"),
        drafted=6,
        shown=6,
    )
    planned = served.memory(rows=3, length=40)
    assert held.kv == 2 * planned.kv, "an engine that is named twice counts once"
    assert held.drafter_kv == planned.drafter_kv
    assert held.scratch == planned.scratch
    for model, here, there in ((target.model, planned.weights, held.weights), (small, planned.drafter, held.drafter)):
        vectors = [*model.buffers(), *(p for p in model.parameters() if p.ndim < 2)]
        assert there == here + sum(v.numel() * v.element_size() for v in vectors), "a table that is shared counts once"
    assert held.total == sum((held.weights, held.drafter, held.kv, held.drafter_kv, held.scratch, held.copies)), (
        "no part is forgotten"
    )


def test_heads_and_parts_of_other_drafters_count() -> None:
    target = Target(tiny_model())
    heads = medusa_heads(target.model)
    drafter = MergedDrafter(lookup=NGramDrafter(), model=MedusaDrafter(heads))
    held = held_by([Engine(target, drafter, RejectionVerifier(), **SIZES)])
    assert held.drafter == sum(p.numel() * p.element_size() for p in heads.parameters()) > 0
    assert held.drafter_kv == 0


def test_copies_of_weights_count_once() -> None:
    target = Target(tiny_model())
    engines = [Engine(target, **SIZES), Engine(target, **SIZES)]
    assert held_by(engines).copies == sum(engines[0].runner.executor.copies().values())


def test_the_peak_is_that_since_the_meter_began() -> None:
    size = 128 << 20
    meter = PeakMeter(torch.device("cpu"))
    torch.ones(size, dtype=torch.uint8)
    peak = meter.peak()
    assert 0.9 * size < peak.used, "it is gone by now"
    assert peak.before > 0 and peak.fragmentation is None
