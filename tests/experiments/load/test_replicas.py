"""Engines behind one queue: their outputs are those of one engine, wherever they run."""

import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from drafters.ngram import NGramDrafter
from experiments.config import ranks
from experiments.load.driver import Driver
from experiments.load.peers import Lent, borrow, lend
from experiments.load.replicas import Here, Replicas, Sizes
from experiments.load.run import LoadRun, load_runs
from experiments.load.texts import Asked
from experiments.load.workloads import Planned
from specdec import Engine, Paging, SamplingParams, Target
from tests.models import tiny_model
from verifiers.rejection import RejectionVerifier

ROOT = Path(__file__).parents[3]
PROMPTS = [[first, *range(5, 17), first, 3, 4] for first in (1, 2, 1, 2, 1, 1, 2, 1)]
SAMPLING = [SamplingParams(temperature=number % 2, max_new_tokens=5 + number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(scale=4.0))


def engine(target: Target) -> Engine:
    cache = Paging(page_size=4, shared=True)
    return Engine(target, NGramDrafter(), RejectionVerifier(), max_batch_size=2, max_length=64, cache=cache)


def outputs(engine: Engine | Replicas, abort: int | None = None) -> dict[int, list[int]]:
    """The tokens of all requests, by their place in the list; one of them is dropped at its first step."""
    ids = [engine.submit(*each) for each in zip(PROMPTS, SAMPLING, strict=True)]
    found: dict[int, list[int]] = {place: [] for place in range(len(ids))}
    while engine.unfinished:
        for step in engine.step():
            assert step.request in ids, "nothing is heard of those that were dropped"
            found[ids.index(step.request)] += step.token_ids
        if abort is not None and found[abort] and ids[abort] >= 0:
            engine.abort(ids[abort])
            ids[abort] = -1
    return found


def in_process(target: Target) -> Replicas:
    engines = [engine(target), engine(target)]
    return Replicas([Here(each) for each in engines], Sizes.of(engines[0]), margin=64)


def test_two_engines_answer_as_one(target: Target) -> None:
    alone, together = engine(target), in_process(target)
    expected = outputs(alone)
    assert outputs(together) == expected and len(expected) == len(PROMPTS)
    assert (together.max_batch_size, together.paging.pages) == (4, 2 * (alone.paging.pages or 0))
    counts = together.page_counts
    assert counts.queried == sum(len(prompt) - 1 for prompt in PROMPTS) and counts.reused
    together.forget()
    assert len({step.request for step in together.stream(PROMPTS, SAMPLING)}) == 2 * len(PROMPTS)


def driven(engine: Engine | Replicas, *, in_process: bool = True) -> LoadRun:
    pieces = ((0, 1),)
    asked = [
        Asked(planned=Planned(klass="", pieces=pieces, output_tokens=1), prompt_ids=prompt, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]
    driver = Driver(engine, asked, np.zeros(len(asked)), loop="open", in_process=in_process)
    driver.run()
    return driver.result(method="", rate=1.0)


def test_a_load_run_of_replicas_has_everything_that_an_engines_has(target: Target) -> None:
    alone, together = driven(engine(target)), driven(in_process(target))
    same = ["outcome", "output_tokens", "rounds", "drafted", "accepted"]
    assert alone.requests[same].equals(together.requests[same])
    assert together.totals.queried == alone.totals.queried and together.totals.reused > 0
    assert together.turns.running.max() == 4 and together.turns.waiting.max() == 4


def test_engines_elsewhere_answer_as_one_here(target: Target) -> None:
    """By the connections of processes, in threads; also where a request is dropped before its steps have come."""
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    engines = [engine(target), engine(target)]
    methods = [("plain", False, None, 0), ("ngram", True, "exact", 0)]
    sizes = [Sizes.of(engines[0])]
    lent = Lent(name="tiny", tokenizer=None, device="here", dtype="float32", engines=sizes, methods=methods)
    threads = [
        Thread(target=lend, args=(connection, lent, [own]), daemon=True)
        for connection, own in zip(theirs, engines, strict=True)
    ]
    for thread in threads:
        thread.start()
    expected = outputs(engine(target))
    told, queues = borrow(list(ours), margin=64)
    assert (told.name, told.methods) == ("tiny", methods) and len(queues) == 1
    assert outputs(queues[0]) == expected
    queues[0].forget()
    found = outputs(queues[0], abort=3)
    greedy = range(0, len(PROMPTS), 2)  # the others have other streams now, by their number in the queue
    assert [found[place] for place in greedy] == [expected[place] for place in greedy]
    assert queues[0].page_counts.queried == 2 * sum(len(prompt) - 1 for prompt in PROMPTS)
    for connection in ours:
        connection.close()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "it ends with whoever has the queue"
    lost = Pipe()
    lost[1].close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        borrow([lost[0]], margin=64)


@pytest.mark.parametrize(
    ("processes", "local", "message"),
    [
        (1, 1, "replicas=2: this process was started alone; start the program with torchrun --nproc-per-node 3: "),
        (2, 2, "replicas=2: torchrun has started 2 processes; start the program with torchrun --nproc-per-node 3: "),
        (3, 2, "replicas=2: moments are compared by one clock, so start all on one machine"),
        (3, 3, ""),
    ],
)
def test_replicas_need_their_processes(
    processes: int, local: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", 0), ("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, str(value))

    def check() -> None:
        ranks.check_replicas(1)
        ranks.check_replicas(2)

    if message:
        with pytest.raises(ValueError, match=f"^{message}"):
            check()
    else:
        check()


@pytest.mark.full
def test_a_load_study_of_two_replicas_decodes_what_one_engine_does(saved: Path, tmp_path: Path) -> None:
    """Three processes under torchrun, of which one has the queue: token for token the outputs of one engine."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    words = [f"target.name={saved}/target", f"drafter.name={saved}/drafter", "target.dtype=float32", "sampling=sample"]
    words += ["requests=8", "rates=[20,40]", "dataset.count=8", "engine.max_length=128", "warmup_prompts=1"]
    words += ["workload.classes.chat.input=24", "workload.classes.chat.output=12", "bootstrap.resamples=100"]

    def study(folder: Path, start: list[str], *more: str) -> dict[tuple[str, float], LoadRun]:
        command = [sys.executable, *start, "-m", "experiments.load", *words, *more, f"out={folder}"]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("Beside goodput") == 1
        return {(run.method, run.rate): run for run in load_runs(folder)}

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    together, alone = study(tmp_path / "two", torchrun, "replicas=2"), study(tmp_path / "one", [])
    assert list(together) == list(alone) and len(alone) == 4
    same = ["outcome", "prompt_tokens", "output_tokens", "rounds", "drafted", "accepted"]
    for name, run in alone.items():
        assert run.requests[same].equals(together[name].requests[same]), name
        assert [list(each) for each in run.requests.tokens] == [list(each) for each in together[name].requests.tokens]
    assert (tmp_path / "two" / "manifest.json").read_text().count('"replicas": 2') == 2
