"""Warming up an engine: what rounds would capture later is captured now, and nothing else changes."""

import pytest

import specdec.execution.replay
from drafters import ModelDrafter
from drafters.ngram import NGramDrafter
from specdec import Drafter, Engine, SamplingParams, Target
from specdec.tree_parts import common_sizes
from tests.models import tiny_model
from verifiers import RejectionVerifier

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 1, 2, 3, 1, 2]]


def engine_with(drafter: Drafter) -> Engine:
    target = Target(tiny_model("llama", layers=1))
    return Engine(target, drafter, RejectionVerifier(), max_batch_size=2, max_length=64)


def sizes(engine: Engine) -> set[tuple[int, int]]:
    """The rows and nodes of the target's captured forwards."""
    keys = engine.runner.executor.recordings.keys  # type: ignore[attr-defined]
    return {tuple(shape) for _, _, (shape, _), *_ in keys}


def decode(engine: Engine) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24)
    return [done.token_ids for done in engine.generate(PROMPTS, sampling)]


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_rounds_of_a_warm_engine_capture_nothing_more(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.execution.replay, "CAPTURE_AFTER", 2)
    with engine_with(NGramDrafter(max_draft_tokens=7)) as engine:
        if warm:
            engine.warm_up()
        assert engine.drafter is not None
        wanted = {(2, 1), *((2, 1 + size) for size in common_sizes(engine.drafter.max_nodes))}
        before = sizes(engine)
        decode(engine)
        new = {size for size in sizes(engine) - before if size[0] == engine.max_batch_size}
    assert bool(new) is not warm, "a cold engine captures what a warm one has"
    assert before == (wanted if warm else set())


def test_a_wide_tree_does_not_need_positions_that_the_model_lacks() -> None:
    drafter = ModelDrafter(tiny_model("llama", layers=1), shape=(30,))
    with Engine(
        Target(tiny_model("llama", layers=1)), drafter, RejectionVerifier(), max_batch_size=1, max_length=24
    ) as engine:
        engine.warm_up()
        assert (1, 31) in sizes(engine)


def test_sizes_that_there_are_none_of_and_running_requests_are_refused() -> None:
    with engine_with(NGramDrafter(max_draft_tokens=7)) as engine:
        for nodes in ([-1], [2, 1000]):
            with pytest.raises(ValueError, match=f"nodes={nodes[-1]}: "):
                engine.warm_up(nodes)
        assert not sizes(engine)
        engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=4))
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            engine.warm_up()
