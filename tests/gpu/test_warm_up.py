"""Warm-ups and padded rows as CUDA graphs: nothing is captured while requests run, and the rows do not notice."""

from dataclasses import replace

import pytest
import torch

import specdec.forward as forward_module
from specdec.engine.engine import Engine
from specdec.requests import SamplingParams
from specdec.target.target import Target
from tests.components import DRAFTERS, fitting
from tests.models import tiny_model
from tests.test_lossless import SAMPLING, prompts

pytestmark = pytest.mark.gpu

LONGEST = 192


@pytest.fixture(autouse=True)
def several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention reads comes in four sizes."""
    monkeypatch.setattr(forward_module, "_LEAST_KEYS", 64)


def engine_of(model, drafter: str | None, recording: str = "auto") -> Engine:
    made = None if drafter is None else DRAFTERS[drafter](model)
    rule = None if made is None else fitting(made)
    return Engine(Target(model), made, rule, max_batch_size=12, max_length=LONGEST, recording=recording)


@pytest.mark.parametrize("drafter", [None, "model_chain_iid", "eagle3_chain_iid", "medusa", "ngram"])
def test_rounds_of_a_warm_engine_are_replayed(drafter: str | None) -> None:
    """Whatever the number of rows, and in every size of attention."""
    model = tiny_model().cuda()
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    kinds = (greedy, replace(greedy, temperature=1.0))
    with engine_of(model, drafter) as engine:
        engine.warm_up(sampling=kinds)
        before = engine.recording_counts
        assert not before.refused, before.refused
        reserved = torch.cuda.memory_reserved()
        for sampling in kinds:
            for rows, length in ((12, 20), (7, 100), (3, 160), (1, 20)):
                given = [[1 + row + place % 40 for place in range(length)] for row in range(rows)]
                engine.generate(given, sampling)
        after = engine.recording_counts
        assert not after.refused and after.replayed / after.rounds >= 0.98
        assert after.stages == before.stages and torch.cuda.memory_reserved() < reserved + 2**27


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_rows_do_not_notice_those_behind_them(drafter: str | None) -> None:
    """Greedy and sampled requests together; another kind of engine has no rows behind them."""
    model = tiny_model().cuda()
    outputs = []
    for recording in ("rounds", "off"):
        with engine_of(model, drafter, recording) as engine:
            longer = [replace(each, max_new_tokens=64) for each in SAMPLING]
            found = [engine.generate(prompts()[:5], longer[:5]), engine.generate([*prompts(), *prompts()], longer * 2)]
            outputs.append([each.token_ids for completions in found for each in completions])
            if recording == "rounds":
                assert engine.recording_counts.replays > 20 and not engine.recording_counts.refused
    assert outputs[0] == outputs[1]


def test_a_stage_that_makes_the_host_wait_is_told_by_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """It is refused by name before a capture could break off, and captures that come later succeed."""
    with engine_of(tiny_model().cuda(), None) as engine:
        rounds, verify = engine._rounds, engine.runner.run
        engine.runner.run = lambda *given: (torch.ones(1, device="cuda").item(), verify(*given))[1]  # type: ignore[method-assign, assignment]
        engine.generate([[1, 2, 3]] * 2, SamplingParams(max_new_tokens=30, ignore_eos=True))
        counts = engine.recording_counts
        assert list(counts.refused) == ["verify"] and "makes the host wait" in counts.refused["verify"][0]
        assert len(caplog.records) == 1 and {key[0] for key in rounds.recorder.recordings.keys} == {"judge", "commit"}  # type: ignore[union-attr]
