"""The whole command on tiny models, in time and in virtual time; studies go on, and those of many machines are one."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.commands.compare import compare
from experiments.commands.load import load
from experiments.commands.run import run
from experiments.load.arrivals import Gaps
from experiments.load.driver import Driver
from experiments.load.figures import latencies
from experiments.load.run import DONE, OPEN, UNFINISHED, import_results, load_runs
from experiments.load.studies import Study, merged
from experiments.load.virtual import Accepted, VirtualEngine, _Play
from experiments.load.workloads import Asked, Planned, ask
from experiments.tracing.trace import read_trace
from specdec import Engine, Paging, SamplingParams, Target
from specdec.drafting.policies import AdditiveLength
from specdec.engine.scheduler import FirstCome, Priority, Scheduler, TokenBudget
from specdec.physics.calibrated import Box, CalibratedRounds, Conditions
from specdec.physics.costs import StepCost
from specdec.physics.rounds import AffineRounds
from tests.experiments.conftest import composed
from tests.experiments.made_runs import made
from tests.experiments.runs import Configure, local
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_plain_decoding_and_a_method_get_the_same_requests_at_the_same_moments(study: Path) -> None:
    runs = sorted(load_runs(study), key=lambda run: (run.rate, run.method != "plain"))
    assert [(run.method, run.rate) for run in runs] == [(m, r) for r in (100, 200) for m in ("plain", "ngram")]
    asked = ["request", "klass", "arrived", "prompt_tokens", "output_tokens", "outcome"]
    for plain, other in zip(runs[::2], runs[1::2], strict=True):
        assert plain.requests[asked].equals(other.requests[asked]) and (plain.requests.outcome == DONE).all()
        assert len(plain.requests) == 3, "no warm-up counts"
        assert plain.requests.nodes.sum() == 0 < other.requests.nodes.sum()
        assert plain.requests.tokens.map(tuple).equals(other.requests.tokens.map(tuple)), "greedy outputs are the same"
    manifest = json.loads((study / "manifest.json").read_text())
    assert {"config", "git", "versions", "prompts_hash", "device", "dtype", "loop"} <= manifest.keys()
    assert manifest["config"]["seed"] == 0 and manifest["config"]["rates"] == [100, 200]


def test_chats_find_their_beginnings_in_the_cache(configure: Configure, tiny: list[str], tmp_path: Path) -> None:
    chats = "workload.systems=1 workload.system=32 workload.turns=2 workload.said=4 workload.output=4"
    words = [*tiny, "drafter=ngram", "method=ngram", "requests=6", "title=false", "workload=shared", *chats.split()]
    runs = load(configure("load", *words, "engine=paged", "arrival=closed", "arrival.rate=1"))
    rows = json.loads((tmp_path / "out" / "load.json").read_text())["runs"]
    found = [row for row in rows if row["group"] == "all"]
    for each, figures in zip(runs, found, strict=True):
        assert figures["hit_rate"] > 0.3 and figures["saved_tokens"] == each.requests.reused_tokens.sum() >= 32 * 4
    plain, drafted = (run.requests.reused_tokens.tolist() for run in runs)
    assert plain == [0, *[32] * 5], "the system prompt is two pages"
    # Where drafts follow, the token behind a page belongs to its key: of the second page, a user's first.
    assert drafted[0] == 0 and set(drafted[1:]) <= {16, 32}
    both = [run.requests.tokens.map(tuple) for run in runs]
    assert both[0].equals(both[1])


def words(saved: Path) -> list[str]:
    return [
        *(f"target.name={saved / 'target'}", "drafter=ngram", "method=ngram", "threads=1", "bootstrap.resamples=100"),
        *("dataset.count=3", "warmup_prompts=1", "engine.max_length=128", "requests=3", "rates=[100,200]"),
        *(f"workload.classes.chat.{setting}" for setting in ("input=24", "output=6", "spread=0.5")),
    ]


@pytest.fixture(scope="module")
def study(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of two rates. Nothing may be written there."""
    out = tmp_path_factory.mktemp("study") / "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *arguments, **more: None)
        load(composed("load", *words(saved), f"out={out}"))
    return out


def copied(study: Path, folder: Path, **facts: Any) -> Path:
    """A study as another machine would have made it."""
    shutil.copytree(study, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["machine"]["host"] = f"host-{folder.name}"
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))
    return folder


def test_a_killed_study_goes_on_run_by_run(saved: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Two of four runs were there: they stay as they are, and the one that was stopped is played again."""
    given, play = [*words(saved), f"out={tmp_path / 'out'}"], Driver.run
    played: list[Driver] = []

    def stopped(driver: Driver) -> None:
        played.append(driver)
        play(driver)
        if len(played) == 3:
            driver.columns["outcome"][0] = UNFINISHED  # as if a request were there when Ctrl-C came
            raise KeyboardInterrupt

    monkeypatch.setattr(Driver, "run", stopped)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # a job that Slurm restarts before it had begun begins
    with pytest.raises(KeyboardInterrupt):
        load(composed("load", *given))
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    found = {path.parent.name: path.read_bytes() for path in (tmp_path / "out").glob("*/load.json")}
    assert sorted(found) == ["ngram_100", "plain_100", "plain_200"]
    assert "BROKEN OFF" in (tmp_path / "out" / "load.md").read_text()
    assert "INCOMPLETE: 2 runs of" in "".join(_compared(tmp_path / "out", tmp_path / "table"))
    with pytest.raises(ValueError, match="holds the results of another load study: give another out, remove it, or"):
        load(composed("load", *given))
    with pytest.raises(ValueError, match="had requests=3, and this one has requests=4: give what it was begun with"):
        load(composed("load", *given, "resume=true", "requests=4"))
    capsys.readouterr()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # instead of resume=true
    runs = load(composed("load", *given))
    assert len(played) == 5 and all(run.facts["complete"] for run in runs)
    assert [(run.method, run.rate) for run in runs] == [(m, r) for r in (100, 200) for m in ("plain", "ngram")]
    after = {path.parent.name: path.read_bytes() for path in (tmp_path / "out").glob("*/load.json")}
    assert [after[name] == text for name, text in sorted(found.items())] == [True, True, False]
    assert "2 of the runs are from an earlier attempt" in " ".join(capsys.readouterr().out.split())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["resumed"]) == 1 and manifest["target"]["name"] and manifest["machine"]["host"]


def _compared(*given: Path, mixed: bool = False) -> list[str]:
    """The rows and remarks of a comparison of all folders but the last, which it is written into."""
    runs, out = f"runs=[{','.join(map(str, given[:-1]))}]", given[-1]
    compare(composed("compare", runs, f"out={out}", f"allow_mixed={str(mixed).lower()}"))
    return (out / "load.md").read_text().splitlines()


def test_studies_of_several_machines_are_one_table(study: Path, tmp_path: Path) -> None:
    other = copied(study, tmp_path / "1", device="Another GPU", git={"commit": "f" * 40, "dirty": False})
    lines = _compared(study, other, tmp_path / "out")
    rows = [line.split("|")[1:3] for line in lines if line.startswith(("| 1", "| 2"))][:8]
    device = json.loads((study / "manifest.json").read_text())["device"]
    names = [f"{method}, {each}" for each in (device, "Another GPU") for method in ("plain", "ngram")]
    assert [(rate.strip(), name.strip()) for rate, name in rows] == [(r, n) for r in ("100", "200") for n in names]
    text = "\n".join(lines)
    assert "made on different devices" in text and "made by different code (commit " in text
    assert "host-1, Another GPU, float32, commit ffffffffff" in text, "where runs were made"
    rows = json.loads((tmp_path / "out" / "load.json").read_text())["runs"]
    own = {(row["method"], row["rate"]): row for row in json.loads((study / "load.json").read_text())["runs"]}
    assert len(rows) == 8
    for row in rows:  # every figure is that of its own study, over plain decoding of the same one
        assert row | {"method": ""} == own[row["method"].partition(",")[0], row["rate"]] | {"method": ""}


def test_methods_are_called_by_what_studies_differ_in(study: Path, tmp_path: Path) -> None:
    """Rates have a column, and the drafter is the method's name; what is alike all the same has its folder's name."""
    given = {"a": ["rates=[1]", "drafter=ngram"], "b": ["rates=[2]", "policy=fixed"], "c": ["policy=fixed"]}
    studies = [Study.read(copied(study, tmp_path / name, overrides=each)) for name, each in given.items()]
    assert [run.method for run in merged(studies)][:6] == [
        *("plain, drafter=ngram", "ngram"),
        *("plain, policy=fixed, b", "ngram, policy=fixed, b"),
        *("plain, policy=fixed, c", "ngram, policy=fixed, c"),
    ]


def test_unlike_studies_are_refused(study: Path, tmp_path: Path) -> None:
    closed = copied(study, tmp_path / "closed", loop="closed")
    mixed = copied(study, tmp_path / "mixed", dtype="bfloat16", prompts_hash="x")
    for folders, message in (
        ((study, closed), r"differ in their loop \(open or closed\), or in .* one of each: compare them apart"),
        ((study, mixed), "differ in their texts and in their dtype: allow_mixed=true compares"),
        ((study, made(tmp_path / "run")), r"0 is a study of load, and .*run is none: compare them apart"),
    ):
        with pytest.raises(ValueError, match=message):
            _compared(*folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    lines = _compared(study, mixed, tmp_path / "out", mixed=True)
    assert "MIXED: the studies differ in their dtype" in "".join(lines)


VLLM = {
    "model_id": "m", "request_rate": 2.0, "max_concurrency": None, "start_times": [100.0, 100.5, 101.0],
    "ttfts": [0.5, 0.25, 0.0], "itls": [[0.25, 0.25], [0.5], []], "input_lens": [7, 8, 9], "output_lens": [5, 2, 0],
    "errors": ["", "", "gone"],
}  # fmt: skip


def test_moments_and_tokens_of_vllm(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "x.json")]
    for path, content in zip(files, (VLLM, VLLM, {**VLLM, "ttfts": [1.0]}), strict=True):
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"x\.json is no result of another load generator .*: give the JSON of vllm"):
        import_results(files[2], tmp_path / "none")
    (run,) = load_runs(imported := import_results(files[1], tmp_path / "study"))
    found = latencies(run)
    assert (run.method, run.rate, run.loop, run.seconds) == ("b", 2.0, "open", 1.25)
    assert found.outcome.tolist() == ["done", "done", "failed"] and found.reason[2] == "gone"
    assert found.ttft.dropna().tolist() == [0.5, 0.25] and found.e2e.dropna().tolist() == [1.0, 0.75]
    assert found.tpot.dropna().tolist() == [0.5 / 4, 0.5], "over tokens, not over chunks"
    assert found.prompt_tokens.tolist() == [7, 8, 9]
    text = "\n".join(_compared(files[0], imported, tmp_path / "out"))
    assert "| a" in text and "| b" in text and "another load generator" in text


COSTS = AffineRounds(target=StepCost.affine(fixed=5e-3, per_token=2e-5, per_position=4e-8), outside=1e-3)


def requests(prompts: list[int], outputs: list[int]) -> list[Asked]:
    sizes = enumerate(zip(prompts, outputs, strict=True))
    planned = [Planned(klass="any", pieces=((number, one),), output_tokens=tokens) for number, (one, tokens) in sizes]
    return ask(planned, None, SamplingParams())


def test_latencies_are_sums_of_the_costs() -> None:
    """One request of 11 prompt tokens and 3 output tokens: three rounds, of which the first reads the prompt, too."""
    engine = VirtualEngine(costs=COSTS, slots=1, max_length=64)
    row = engine.play(requests([11], [3]), np.array([0.5]), loop=OPEN).requests.iloc[0]
    prefill = 10 * 2e-5
    rounds = [5e-3 + 2e-5 + 4e-8 * context + 1e-3 for context in (10, 11, 12)]
    assert row.first_token - row.arrived == pytest.approx(prefill + rounds[0])
    assert row.finished - row.arrived == pytest.approx(prefill + sum(rounds))


def test_passes_over_the_weights_are_those_that_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in seconds, as each takes one and nothing else takes any; pieces of several lengths are among them."""
    prompts, outputs, sizes = [9, 9, 21, 6, 6], [3, 5, 2, 4, 4], {"max_length": 64, "prefill_chunk": 8}
    engine, passes = Engine(Target(tiny_model()), max_batch_size=2, **sizes), []
    for name in ("run", "run_together"):
        own = getattr(engine.runner, name)
        monkeypatch.setattr(engine.runner, name, lambda given, own=own: (passes.append(given), own(given))[1])
    sampled = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in outputs]
    engine.generate([[number + 1] * length for number, length in enumerate(prompts)], sampled)

    def counted(executor: str) -> float:
        about = Conditions(device="", dtype="", model="", fingerprint="", executor=executor)
        box, one = Box(batch=(1, 2), context=(1, 64), drafted=(0, 0)), {"fixed": 1, "per_token": 0, "per_position": 0}
        costs = CalibratedRounds(conditions=about, box=box, target=StepCost.affine(**one))
        played = VirtualEngine(costs=costs, slots=2, **sizes).play(requests(prompts, outputs), np.zeros(5), loop=OPEN)
        return float(played.turns.seconds.sum())

    assert counted(type(engine.runner.executor).__name__) == len(passes) < counted("as on a GPU")


@pytest.mark.parametrize(
    ("reserve", "scheduler"), [(1.0, FirstCome()), (0.0, FirstCome()), (0.0, TokenBudget(64)), (0.0, Priority(64))]
)
def test_pages_are_conserved_and_everybody_ends(reserve: float, scheduler: Scheduler, monkeypatch: Any) -> None:
    left: list[int | None] = []
    monkeypatch.setattr(_Play, "close", lambda play: left.append(play.free_pages))
    rng = np.random.default_rng(2)
    asked = requests(rng.integers(2, 90, 60).tolist(), rng.integers(1, 90, 60).tolist())
    kept = np.random.default_rng(0).random((8, 20, 4)) < 0.7
    accepted = np.logical_and.accumulate(kept, -1).sum(-1).tolist()
    traces = Accepted.of([[(count, [1] * 4) for count in output] for output in accepted])  # chains of four
    drafts = {"scheduler": scheduler, "accepted": traces, "policy": AdditiveLength()}
    paging = Paging(page_size=8, pages=26, reserve=reserve)
    engine = VirtualEngine(costs=COSTS, slots=6, max_length=200, paging=paging, **drafts)
    run = engine.play(asked, Gaps(rate=30).times(rng, 60), loop=OPEN)
    table = run.requests
    assert (table.outcome == DONE).all() and left == [26]
    assert table.output_tokens.tolist() == [each.planned.output_tokens for each in asked]
    assert (table.preemptions.sum() > 0) == (table.recomputed_tokens.sum() > 0) == (reserve < 1)
    assert (table.accepted + table.rounds >= table.output_tokens).all()
    ends = np.append(0.0, run.turns.begin + run.turns.seconds)
    entered = np.maximum(table.arrived, ends[np.searchsorted(run.turns.begin, table.arrived)])
    stays = float((table.finished - entered).sum())  # Little's law
    assert float(((run.turns.running + run.turns.waiting) * run.turns.seconds).sum()) == pytest.approx(stays, rel=0.05)


def test_a_shorter_draft_is_what_was_left_of_the_recorded_one() -> None:
    """Behind a draft that was accepted whole, the next token is right as often as the deepest ones were."""
    found = Accepted.of([[(2, [1, 1, 1]), (0, [2, 1, 1]), (3, [1, 1, 1]), (1, [1, 1])]])
    assert found.lengths.tolist() == [3 + 1 + 4 + 2]
    assert found.able[:5].tolist() == [2, 1, 0, 0, 3] and found.able[8:].tolist() == [1, 0]
    assert found.able[5:8].tolist() in ([2, 1, 0], [3, 3, 2]), "it ends, or goes on as the next round"
    assert found.proposed.tolist() == [3] * 8 + [2] * 2 and found.nodes[3].tolist() == [2, 3, 4]
    ends = {tuple(Accepted.of([[(2, [1, 1]), (1, [1, 1])]] * 40, seed).able[1:3].tolist()) for seed in range(9)}
    assert ends == {(1, 0), (2, 2)}, "the mutant that never goes on has one"


def test_a_trace_is_played_as_the_engine_has_played_it(configure, saved: Path, tiny: list[str], tmp_path: Path) -> None:
    """Greedy rounds of the trace's depth are the engine's own."""
    words = [*tiny, *local(saved, "model"), "target.dtype=float32", "title=false", "drafter.shape=6"]
    words.append("engine.max_length=128")
    run_words = ["dataset.count=6", "dataset.too_long=cut", "sampling.max_new_tokens=16", "sampling.ignore_eos=true"]
    run_words += ["warmup_prompts=0", "trace=true"]
    run(configure("run", *words, *run_words, f"out={tmp_path / 'trace'}"))
    found = Accepted.read(tmp_path / "trace", "model")
    assert len(found.lengths) == 6 and found.nodes.shape[1] == 6 and (found.lengths >= 16).all()
    clock = ["clock=virtual", "clock.costs=llama_8b_h100", f"clock.traces={tmp_path / 'trace'}"]
    more = ["workload.classes.chat={input: 12, output: 16, spread: 0}", "requests=6", "rates=[5,50]"]
    policies = ["+policy@policies.best=oracle", "+policy@policies.fixed=fixed", "policies.fixed.depth=null"]
    runs = load(configure("load", *words, *clock, *more, *policies, f"out={tmp_path / 'virtual'}"))
    assert [(run.method, run.rate) for run in runs] == [(m, r) for r in (5.0, 50.0) for m in ("plain", "best", "fixed")]
    assert all((run.requests.outcome == DONE).all() for run in runs)
    rounds = Counter(traced.key.prompt for shard in read_trace(tmp_path / "trace", tables=False) for traced in shard)
    assert runs[2].requests.rounds[:6].tolist() == list(rounds.values())
    text = (tmp_path / "virtual" / "load.md").read_text()
    assert "VIRTUAL TIME, llama_8b_h100" in text and "Does it pay" in text and "regret" in text


def test_what_virtual_time_has_not() -> None:
    with pytest.raises(ValueError, match=r"swap=100, shared=False: .* preempted by recomputation alone"):
        VirtualEngine(costs=COSTS, slots=1, max_length=64, paging=Paging(swap=100))
    with pytest.raises(ValueError, match="has no round with a draft"):
        Accepted.of([[(0, [])]])
