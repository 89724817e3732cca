"""Recorded rounds whose graphs write over each other's outputs, as far as graphs that share memory may.

    python -m tests.gpu.dry.pools [drafters]

plays plain decoding, then a drafter twice, on one engine, over several bounds of positions, with greedy and sampled
requests side by side, and compares tokens and accepted drafts with an engine that records nothing.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import specdec.engine.recording
import specdec.engine.round
from specdec.engine.engine import Engine
from specdec.execution.recorder import Recorder, Recording, Stage, TapeRecorder
from specdec.target.target import Target
from tests.components import DRAFTERS, fitting
from tests.gpu.dry.fake_cuda import overlaps_itself
from tests.models import tiny_model
from tests.test_lossless import SAMPLING, VOCAB, prompts

TRIED = ("ngram", "medusa", "model_chain_iid", "model_tree_without_replacement", "eagle3_expansion")
POSITIONS = 24
"""The step of the bounds of positions: outputs pass three of them."""


def by_stage(name: str) -> str:
    """The pools of ``CudaGraphRecorder``."""
    return name


class Clobbering(Recorder):
    """Records like CUDA graphs that share memory, in the worst case that torch allows.

    Inputs are read and outputs written at fixed addresses. Whoever was captured first knows nothing of the outputs of
    those captured later in the same pool, and a replay writes over all of them.
    """

    runs = True

    def __init__(self, pool: Callable[[str], str] = by_stage):
        self._inner, self._pool = TapeRecorder(), pool
        self._made: list[tuple[str, Sequence[Tensor]]] = []
        self._fixed: set[int] = set()
        self.overwritten = 0

    def record(self, name: str, stage: Stage, inputs: Sequence[Tensor]) -> tuple[Recording | str, Sequence[Tensor]]:
        """See ``Recorder.record``."""
        places = [each if each.data_ptr() in self._fixed else each.clone() for each in inputs]
        program, made = self._inner.record(name, stage, places)
        assert not isinstance(program, str), f"{name}: {program}"
        outputs = [each.clone(memory_format=torch.contiguous_format) for each in made]
        number, pool = len(self._made), self._pool(name)
        self._made.append((pool, outputs))
        self._fixed.update(each.data_ptr() for each in outputs if each.numel())

        def replay(*given: Tensor) -> Sequence[Tensor]:
            for place, each in zip(places, given, strict=True):
                assert not overlaps_itself(place)
                if place.data_ptr() != each.data_ptr():
                    place.copy_(each)
            results = [each.clone() for each in program(*places)]
            own = {each.data_ptr() for each in (*places, *outputs)}
            for other, later in self._made[number + 1 :]:
                for each in later:
                    if other == pool and each.numel() and each.data_ptr() not in own:
                        each.fill_(7 if each.is_floating_point() else 1)
                        self.overwritten += 1
            for place, each in zip(outputs, results, strict=True):
                place.copy_(each)
            return outputs

        return replay, outputs

    def clear(self) -> None:
        """See ``Recorder.clear``."""
        self._made.clear()
        self._fixed.clear()


def decoded(name: str, recorder: Recorder | None) -> list[tuple[object, ...]]:
    """Return tokens and accepted drafts of every request: plain, then with a drafter, twice."""
    model = tiny_model(vocab_size=VOCAB, layers=2)
    drafter = DRAFTERS[name](model)
    longer = [replace(each, max_new_tokens=44) for each in SAMPLING]
    options: dict[str, Any] = {"max_batch_size": 3, "max_length": 96}
    recording = "off" if recorder is None else "rounds"
    with (
        patch.object(specdec.engine.round, "bucket_of", lambda keys: -(-keys // POSITIONS) * POSITIONS),
        patch.object(specdec.engine.recording, "RECORD_AFTER", 2),
        Engine(Target(model), drafter, fitting(drafter), recording=recording, **options) as engine,
    ):
        if recorder is not None:
            assert engine._rounds.recorder.recordings is not None
            engine._rounds.recorder.recordings._recorder = recorder
        found: list[tuple[object, ...]] = []
        for speculate in (False, True, True):
            for each in engine.generate(prompts(), longer, speculate=speculate):
                found.append((each.token_ids, [step.accepted for step in each.steps], each.error))
        if recorder is not None:
            recordings = engine._rounds.recorder.recordings
            assert recordings is not None and recordings.replays > 100, "too little was replayed"
            assert len({key[1] for key in recordings.keys if key[0] == "verify"}) >= 6, "too few bounds of positions"
    return found


def main(names: Sequence[str]) -> int:
    """Compare; returns how many cases went wrong."""
    torch.set_num_threads(1)
    failed, unlike = 0, 0
    for name in names or TRIED:
        wanted = decoded(name, None)
        for pools, pool in (("a pool for each stage", by_stage), ("mutant: one pool for all", lambda stage: "one")):
            recorder = Clobbering(pool)
            try:
                found = decoded(name, recorder)
                same = sum(one == other for one, other in zip(found, wanted, strict=True))
                words = f"{same} of {len(wanted)} alike, {recorder.overwritten} outputs overwritten"
            except (RuntimeError, IndexError, ValueError) as error:
                same, words = 0, f"{type(error).__name__}: {error}"
            print(f"{name:35s} {pools:25s} {words}", flush=True)
            failed += pool is by_stage and same < len(wanted)
            unlike += pool is not by_stage and same < len(wanted)
    if not unlike:
        print("one pool for all stages was NOT REJECTED")
    return failed + (not unlike)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
