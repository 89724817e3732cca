"""Part 4, three minutes: the kernels of one replay of every stage, by name and by what they are for."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

from experiments.bench.gpu.kernels import kernels_by_stage, shares
from experiments.bench.gpu.outcome import Outcome
from experiments.bench.gpu.rounds import Case, Method, playing
from experiments.bench.models import make_target
from experiments.bench.timing import Budget, show
from experiments.results.manifest import ROOT
from specdec.target.target import Target

NAMES = 20
"""Kernels whose names are shown."""
NCU_SECONDS = 90


def run(outcome: Outcome) -> None:
    """Look at greedy rounds of EAGLE-3, and at a plain round that samples."""
    case = Case.of(outcome)
    target = make_target(case.large, outcome.device, case.dtype)
    measure_kernels(outcome, case, target, Budget(120, outcome.left_out), [Method("eagle3"), Method("plain", 1.0)])
    for each in outcome.records.get("kernels", []):
        rows = [
            {"kernel": name[:100], "for": kind, "runs": str(runs), "ms": f"{1000 * seconds:.4f}"}
            for name, kind, runs, seconds in each["names"][:NAMES]
        ]
        show(f"{each['stage']} of {each['method']}", rows)
        if each["method"] == "eagle3" and each["stage"] in ("draft", "verify"):
            outcome.figures[each["stage"]] = each["products"] + each["attention"]
    del target
    with outcome.going_on("ncu"):
        _ncu(outcome)


def measure_kernels(outcome: Outcome, case: Case, target: Target, budget: Budget, methods: Sequence[Method]) -> None:
    """Count the kernels of a replay of every stage, and what they are for by their time, method by method."""
    for method in methods:
        what = f"kernels of {method}"
        if budget.spent(what):
            continue
        with outcome.going_on(what), playing(case, target, method) as engine:
            for stage, kernels in kernels_by_stage(engine).items():
                count, parts = sum(each.runs for each in kernels), shares(kernels)
                seconds = sum(each.seconds for each in kernels)
                outcome.add(
                    "kernels", method=method.name, temperature=method.temperature, stage=stage, kernels=count,
                    seconds=seconds, **parts, names=kernels,
                )  # fmt: skip
                if method == Method("plain") and stage == "verify" and count:
                    outcome.figures["kernels"] = count / (target.num_layers or 1)
    outcome.table("Kernels of one replay, and their shares of its time", "kernels")


def _ncu(outcome: Outcome) -> None:
    """Look at a few kernels of part 2 one by one, where the profiler for that is there."""
    if outcome.rehearsal or shutil.which("ncu") is None:
        return
    look = ["ncu", "-k", "regex:attend_piece|_product", "-c", "8", "--kill", "yes"]
    command = [sys.executable, "-m", "experiments.bench", "gpu", "part=2", "only=[attention,products]"]
    command.append(f"out={(outcome.out / 'ncu').resolve()}")
    done = subprocess.run([*look, *command], cwd=ROOT, capture_output=True, text=True, timeout=NCU_SECONDS)
    (outcome.out / "4-ncu.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    print(done.stdout[-4000:])
