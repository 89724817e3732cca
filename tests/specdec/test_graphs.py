"""Recorded rounds: few numbers of rows, recorded ahead; and stages as CUDA graphs, without a GPU."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import specdec.engine.recording as recording_module
import specdec.forward as forward_module
from specdec import Engine, Paging, SamplingParams, Target
from specdec.engine.slot_table import SlotTable
from specdec.execution.recorder import CudaGraphRecorder, Recorder, Recordings, Stage, recording_now
from tests.components import DRAFTERS, fitting
from tests.specdec.test_recorded_rounds import Comparing
from tests.test_lossless import SAMPLING, prompts
from tests.verifiers.cases import complete

VOCAB = 64
PLACES = {"rows": None, "pages": Paging(page_size=4, shared=True)}
GREEDY, SAMPLED = SamplingParams(max_new_tokens=14), SamplingParams(max_new_tokens=14, temperature=1.0)
PADDED = [(None, "rows"), ("model_tree_without_replacement", "pages"), ("eagle3_chain_iid", "rows"), ("ngram", "pages")]


def test_what_moves_is_not_begun_again_where_memory_ran_out() -> None:
    """The commit of a path may have moved keys already, so its requests end, and the next ones are not recorded."""

    class Breaks(Recorder):
        def record(self, name, stage, inputs):
            stage(*inputs)
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    state, recordings = torch.zeros(1), Recordings(Breaks(), after=1, most=2)
    commit = partial(recordings.run, "stage", "key", lambda step: [state.add_(step)], [torch.ones(1)], repeatable=False)
    with pytest.raises(torch.OutOfMemoryError):
        commit()
    assert state.item() == 1
    commit()
    assert state.item() == 2


class Cuda:
    """CUDA graphs without a GPU, which run once."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.captures: list[tuple[int, str]] = []
        self.stream, self.underway, self.mode = "main", list[int](), 0
        handles = itertools.count()
        fakes = {
            "device": lambda device: nullcontext(), "graph_pool_handle": lambda: next(handles),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "graph": self.graph,
            "current_stream": lambda: self.stream, "set_stream": partial(setattr, self, "stream"),
            "current_device": lambda: 0, "get_sync_debug_mode": lambda: self.mode, "set_sync_debug_mode": self.debug,
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.ended, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)

    def debug(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type, assignment]

    def ended(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    @contextmanager
    def graph(self, _: object, pool: int, **options: object) -> Iterator[None]:
        assert not self.underway, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.captures.append((pool, "broken off"))
        self.stream, before = "side", self.stream
        self.underway.append(pool)
        yield
        self.captures[-1], self.stream = (pool, "captured"), before
        self.underway.remove(pool)

    def look(self) -> None:
        """Do what makes the host wait."""
        if recording_now():
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def graphs(after: int = 1) -> Recordings:
    return Recordings(CudaGraphRecorder(torch.device("cpu")), after=after, most=9)


def plus_one(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1,)


def run(recordings: Recordings, name: str, stage: Stage, key: object = 0) -> float:
    return recordings.run(name, key, stage, [torch.ones(1)])[0].item()


def test_graphs_of_different_stages_share_no_memory(cuda: Cuda) -> None:
    """They are replayed in another order than they were captured in, and read each other's outputs."""
    recordings = graphs()
    for key in range(2):
        for name in ("verify", "judge"):
            run(recordings, name, plus_one, key)
    pools = [pool for pool, _ in cuda.captures]
    assert pools[0] == pools[2] != pools[1] == pools[3]
    recordings.clear()  # torch takes no handle again whose graphs are gone
    run(recordings, "verify", plus_one)
    assert cuda.captures[-1][0] not in pools


def test_after_a_capture_that_failed_others_succeed(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    """They get another pool; the stream and the allocator are as before. The failure is said once, and counted."""
    recordings = graphs()
    for key in range(2):
        assert run(recordings, "judge", lambda x: (cuda.look(), *plus_one(x))[1:], key) == 2
        assert (cuda.stream, cuda.underway) == ("main", [])
    run(recordings, "verify", plus_one)
    assert [what for _, what in cuda.captures] == ["broken off"] * 2 + ["captured"]
    assert len({pool for pool, _ in cuda.captures}) == 3 and recordings.made == len(recordings.kept) == 1
    ((refused, kinds),) = recordings.refused.items()
    assert (refused.stage, kinds, refused.by_design) == ("judge", 2, False)
    assert "not permitted when stream is capturing" in refused.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_stage_that_makes_the_host_wait_is_refused_before_it_is_captured(cuda: Cuda, caplog) -> None:
    """It is done to its end, once, and what the process was told before about waiting holds again."""
    cuda.mode, done = 2, []

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        done.append(cuda.mode)
        if cuda.mode < 2:
            cuda.look()
        return plus_one(x)

    recordings = graphs(after=3)
    assert [run(recordings, "commit", waits) for _ in range(5)] == [2] * 5
    assert done == [2, 1, 2, 2, 2] and not cuda.captures
    assert [(each.stage, each.by_design) for each in recordings.refused] == [("commit", False)]
    assert len(caplog.records) == 1 and f"{__name__.rpartition('.')[2]}.py" in caplog.text, "it says where"


def test_an_address_is_a_graphs_only_as_long_as_there_is_the_graph(cuda: Cuda) -> None:
    """Else a tensor of somebody else's that came to lie there would be written to."""
    recorder = CudaGraphRecorder(torch.device("cpu"))
    recording, (output,) = recorder.record("draft", plus_one, [torch.ones(1)])
    assert set(recorder._fixed) == {output.data_ptr()}
    del recording, output
    assert not recorder._fixed


def engine_of(target: Target, drafter: str | None, recording: str = "rounds", **options: object) -> Engine:
    made = None if drafter is None else DRAFTERS[drafter](target.model)
    rule = None if made is None else fitting(made)
    sizes = {"max_batch_size": 6, "max_length": 64, "prefill_chunk": 7}
    return Engine(target, made, rule, recording=recording, **{**sizes, **options})  # type: ignore[arg-type]


def rows_of(engine: Engine) -> set[int]:
    recordings = engine._rounds.recorder.recordings
    return {shape[0] for key in recordings.kept for shape, _ in key[2:3]}


def decoded(engine: Engine) -> list[tuple[int, ...]]:
    longer = [replace(each, max_new_tokens=each.max_new_tokens + 9) for each in SAMPLING]
    found = [each.token_ids for each in engine.generate(prompts()[:5], longer[:5])]
    return [*found, *(each.token_ids for each in engine.generate([*prompts(), *prompts()], [*longer, *longer]))]


@pytest.mark.parametrize(("drafter", "place"), [PADDED[0], *(complete(*each, strong=False) for each in PADDED[1:])])
def test_rows_do_not_notice_those_behind_them(target, drafter, place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "RECORD_AFTER", 2)
    monkeypatch.setattr(forward_module, "_LEAST_KEYS", 32)
    with engine_of(target, drafter, "off", cache=PLACES[place]) as engine:
        wanted = decoded(engine)
    with engine_of(target, drafter, cache=PLACES[place]) as engine:
        recorder = Comparing()
        recorder.engine, engine._rounds.recorder.recordings._recorder = engine, recorder  # type: ignore[union-attr]
        assert decoded(engine) == wanted
    padded = SlotTable.padded

    def among_others(table: SlotTable, rows):
        made = padded(table, rows)
        made.slots[len(rows) :] = made.slots[0]
        return made

    monkeypatch.setattr(SlotTable, "padded", among_others)  # mutant: rows of nobody write to a request's slot
    with engine_of(target, drafter, cache=PLACES[place]) as engine:
        assert decoded(engine) != wanted
        assert rows_of(engine) <= {1, 2, 4, 6} and recorder.compared > 20
        assert engine._slots._lengths[6:].tolist() == [1], "the spare slot stays where it is"


@pytest.mark.parametrize("drafter", ["ngram", complete("eagle3_expansion", strong=False)])
def test_rounds_of_a_warm_engine_are_replayed(target, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy or sampled, plain or not, and whatever the number of rows; more recordings are kept than by default."""
    monkeypatch.setattr(recording_module, "MOST_RECORDINGS", 1)
    counts, last = [], []
    for warm in (True, False):
        with engine_of(target, drafter) as engine:
            engine.runner.joins = False  # as on a GPU: a first round is one like the others
            if warm:
                engine.warm_up(sampling=(GREEDY, SAMPLED))
                assert rows_of(engine) == {1, 2, 4, 6} and engine.recording_counts.rounds == 0
            stages = engine.recording_counts.stages
            for sampling, rows, speculate in itertools.product((GREEDY, SAMPLED), (5, 3, 1), (True, False)):
                engine.generate([[1, 2, 3, 4, 5, 6, 7]] * rows, sampling, speculate=speculate)
            counts.append(engine.recording_counts)
            assert (counts[-1].stages == stages) is warm
            last.append(engine.generate([[1, 2, 3]] * 3, SAMPLED))
    warm, cold = counts
    assert warm.replayed_share == 1.0 and warm.rounds > 100 and cold.replayed < cold.rounds
    assert not warm.refused and not warm.by_design and warm.replays >= 3 * warm.rounds
    assert last[0] == last[1], "a warm-up leaves nothing behind"


def test_what_is_not_recorded_by_design_or_for_want_of_memory_is_said(target, monkeypatch, caplog) -> None:
    processed = replace(GREEDY, logits_processor=[lambda tokens, scores: scores])
    with engine_of(target, "model_chain_iid") as engine:
        engine.generate([[1, 2, 3]], processed, speculate=False)
        counts = engine.recording_counts
        assert counts.by_design == {"requests have logits processors": counts.rounds}
        assert not counts.refused and counts.replayed == 0
    with engine_of(target, None) as engine:
        full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        monkeypatch.setattr(engine._rounds.recorder.recordings._recorder, "record", full)  # type: ignore[union-attr]
        engine.warm_up()
        assert engine.generate([[1, 2, 3]], GREEDY)[0].finish_reason == "length"
        (refused,) = engine.recording_counts.refused.values()
    assert len(refused) == len(caplog.records) == 1 and "no memory is left for recordings" in refused[0]
