"""The parts of the benchmark as frames: forwards by nodes, rounds by stage, and both beside another checkout's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from experiments.bench.play import Case, Checkout, folder_of, play
from experiments.results.manifest import ROOT


def step_cases(
    base: Case, *, dtypes: Sequence[str], quantizations: Sequence[str | None], rows: Sequence[int], nodes: Sequence[int]
) -> list[Case]:
    """Return chains whose verification is a forward of so many nodes per row, root included; 1 is plain decoding."""
    found = []
    for dtype, quantization, number, count in product(dtypes, quantizations, rows, sorted({1, *nodes})):
        case = replace(base, drafts="plain" if count == 1 else "chain", nodes=count - 1, rows=number)
        found.append(replace(case, dtype=dtype, quantization=quantization))
    return found


def round_cases(base: Case, *, drafts: Sequence[str], temperatures: Sequence[float], rows: Sequence[int]) -> list[Case]:
    """Return rounds of every drafter, behind plain ones."""
    return [
        replace(base, drafts=name, temperature=temperature, rows=number)
        for temperature, number, name in product(temperatures, rows, dict.fromkeys(("plain", *drafts)))
    ]


def steps(cases: Sequence[Case]) -> pd.DataFrame:
    """Time the verify stage of every case: milliseconds, and those of one node as 1."""
    rows, one = list[dict[str, Any]](), 1.0
    for case in cases:
        taken = 1000 * play(case)["verify"]
        one = taken if case.drafts == "plain" else one
        rows.append({**_about(case, "dtype", "quantization", "rows"), "nodes": case.nodes + 1, "ms": taken})
        rows[-1] |= {"over_one_node": taken / one}
    return pd.DataFrame(rows)


def rounds(cases: Sequence[Case]) -> pd.DataFrame:
    """Time the rounds of every case: milliseconds by stage, and how many times plain decoding's speed that is.

    ``outside`` is the share of a round that is neither drafting nor the target's forward.
    """
    rows: list[dict[str, Any]] = []
    plain: dict[str, float] = {}
    for case in cases:
        found = play(case)
        plain = found if case.drafts == "plain" else plain
        stages = {f"{name}_ms": 1000 * found[name] for name in ("round", "draft", "verify", "accept", "commit")}
        rows.append({**_about(case, "drafts", "temperature", "rows"), **stages})
        rows[-1] |= {
            "outside": 1 - (found["draft"] + found["verify"]) / found["round"],
            "tokens": found["tokens"],
            "speedup": _per_token(plain) / _per_token(found),
        }
    return pd.DataFrame(rows)


def against(revision: str, parts: Mapping[str, Sequence[Case]], *, repeats: int, processes: int) -> pd.DataFrame:
    """Play every case in this checkout and in another one, in turn; a ratio above 1 says that this one is faster.

    Compared are seconds of a forward (``steps``) and per emitted token (``rounds``). Two processes of the same code
    differ by up to a tenth, by where their weights lie in memory. So a case is played ``repeats`` times in each of so
    many ``processes`` per checkout, and the 95 % interval is over pairs of them; ``sure``: it leaves out 1.

    Raises:
        ValueError: There is no such revision, or it cannot play a case.
    """
    figure_of = {"steps": lambda played: played["verify"], "rounds": _per_token}
    cases = [(part, case) for part, of_part in parts.items() for case in of_part]
    seconds = np.zeros((processes, len(cases), 2))
    with folder_of(revision, ROOT) as other:
        for process in range(processes):
            with Checkout(ROOT) as ours, Checkout(other) as theirs:
                for number, (part, case) in enumerate(cases):
                    plays = np.zeros((repeats + 1, 2))
                    for turn, side in product(range(repeats + 1), (0, 1)):  # who comes after whom changes
                        index = (side + turn + process) % 2
                        plays[turn, index] = figure_of[part]((ours, theirs)[index].play(case))
                    seconds[process, number] = np.median(plays[1:], axis=0)  # the first play captures
            ratios = seconds[process, :, 1] / seconds[process, :, 0]
            print(f"processes {process + 1} of {processes}: {', '.join(map('{:.3f}'.format, ratios))}", flush=True)
    logs = np.log(seconds[..., 1] / seconds[..., 0])
    interval = stats.ttest_1samp(logs, 0.0, axis=0).confidence_interval(0.95)
    names = ("drafts", "nodes", "dtype", "quantization", "rows", "temperature")
    frame = pd.DataFrame([{"part": part, **_about(case, *names)} for part, case in cases])
    frame[["ours_ms", "theirs_ms"]] = 1000 * np.median(seconds, axis=0)
    frame["ratio"], frame["low"], frame["high"] = np.exp([logs.mean(axis=0), interval.low, interval.high])
    return frame.assign(sure=(frame.low > 1) | (frame.high < 1))


def _about(case: Case, *names: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(case).items() if name in names}


def _per_token(found: Any) -> float:
    return found["round"] / found["tokens"]
