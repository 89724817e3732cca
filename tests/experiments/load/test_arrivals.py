"""Arrival processes: their laws, with mutants that the same tests must reject; the same seed, the same moments."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from experiments.load.arrivals import (
    Arrivals,
    Batch,
    Diurnal,
    Gaps,
    Ramp,
    Spike,
    Times,
    Users,
    arriving,
)
from experiments.load.recorded import Trace, read
from experiments.load.run import CLOSED, OPEN

COUNT = 4000
REJECTED = 1e-4
"""Fits below this are none: a right process is below it once in 10,000 seeds, and the seed is fixed."""


def drawn(arrivals: Arrivals, count: int = COUNT, seed: int = 7) -> Times:
    return arrivals.times(np.random.default_rng(seed), count)


def fit_of_gaps(times: Times, rate: float, cv: float) -> float:
    """How well gaps fit a gamma distribution of this mean and variation."""
    gaps = np.diff(times, prepend=0.0)
    return float(kstest(gaps, "gamma", args=(1 / cv**2, 0, cv**2 / rate)).pvalue)


def fit_of_rate(times: Times, expected: Callable[[Times], Times]) -> float:
    """How well times fit a Poisson process with so many expected arrivals until t: in these it has the rate 1."""
    told = expected(times)
    gaps = kstest(np.diff(told, prepend=0.0), "expon").pvalue
    return float(min(gaps, kstest(told[:-1] / told[-1], "uniform").pvalue))


@pytest.mark.parametrize(
    ("arrivals", "cv", "mutants"),
    [
        (Gaps(rate=3), 1.0, [Gaps(rate=3.4), Gaps(rate=3, cv=1.2), Gaps(rate=3, cv=0)]),
        (Gaps(rate=3, cv=2), 2.0, [Gaps(rate=4, cv=2), Gaps(rate=3, cv=2.6), Gaps(rate=3)]),
        (Gaps(rate=3, cv=0.5), 0.5, [Gaps(rate=3, cv=0.6), Gaps(rate=3)]),
    ],
)
def test_gaps_have_their_mean_and_variation(arrivals: Arrivals, cv: float, mutants: list[Arrivals]) -> None:
    assert fit_of_gaps(drawn(arrivals), 3, cv) > 0.01
    assert all(fit_of_gaps(drawn(mutant), 3, cv) < REJECTED for mutant in mutants)


def spike(at: Times, factor: float = 6.0) -> Times:
    return 3 * (at + (factor - 1) * np.clip(at - 50, 0, 100))


def diurnal(at: Times, amplitude: float = 0.8) -> Times:
    return 3 * (at + amplitude * 40 / (2 * np.pi) * (1 - np.cos(2 * np.pi * at / 40)))


def ramp(at: Times, factor: float = 5.0) -> Times:
    on_the_way = np.clip(at, 0, 200)
    return 3 * (on_the_way + (factor - 1) * on_the_way**2 / 400 + factor * np.clip(at - 200, 0, None))


def exponential(at: Times, factor: float = 5.0) -> Times:
    on_the_way = 200 / np.log(factor) * (factor ** np.clip(at / 200, 0, 1) - 1)
    return 3 * (on_the_way + factor * np.clip(at - 200, 0, None))


@pytest.mark.parametrize(
    ("arrivals", "expected", "other"),
    [
        (Spike(rate=3, factor=6, begin=50, length=100), spike, 4.8),
        (Spike(rate=3, factor=0.1, begin=50, length=100), lambda at, factor=0.1: spike(at, factor), 1.0),
        (Diurnal(rate=3, amplitude=0.8, period=40), diurnal, 0.0),
        (Ramp(rate=3, factor=5, length=200), ramp, 4.0),
        (Ramp(rate=3, factor=5, length=200, exponential=True), exponential, 4.0),
    ],
)
def test_rates_that_vary_are_thinned(arrivals: Arrivals, expected: Any, other: float) -> None:
    times = drawn(arrivals)
    assert fit_of_rate(times, expected) > 0.01
    assert fit_of_rate(times, lambda at: expected(at, other)) < REJECTED, "another height of the same shape"
    assert fit_of_rate(drawn(Gaps(rate=COUNT / times[-1])), expected) < REJECTED, "the same mean, not thinned"


def test_a_ramp_by_factors_is_not_one_by_amounts() -> None:
    assert fit_of_rate(drawn(Ramp(rate=3, factor=5, length=200)), exponential) < REJECTED


@pytest.mark.parametrize("arrivals", [Gaps(cv=0), Gaps(), Gaps(cv=2), Spike(), Diurnal(), Ramp(), Users(think=1.0)])
def test_a_seed_decides_everything(arrivals: Arrivals) -> None:
    times = drawn(arrivals, 50)
    assert (drawn(arrivals, 50) == times).all() and len(times) == 50
    assert not getattr(arrivals, "cv", 1) or (drawn(arrivals, 50, seed=8) != times).any()
    if arrivals.loop == OPEN:
        assert (np.diff(times) >= 0).all() and times[0] >= 0
        fast = drawn(arrivals.at_rate(10 * arrivals.rate), COUNT)
        assert fast[-1] < 0.2 * drawn(arrivals, COUNT)[-1] and type(arrivals.at_rate(2)) is type(arrivals)


def test_users_begin_at_once_and_think_later() -> None:
    users = Users(rate=3, think=2.0)
    times = drawn(users)
    assert users.loop == CLOSED and (times[:3] == 0).all()
    assert float(kstest(times[3:], "expon", args=(0, 2.0)).pvalue) > 0.01
    assert not drawn(Users(rate=3)).any()


def test_requests_and_seconds_both_end_the_arrivals() -> None:
    def ends(requests: int | None, seconds: float | None, arrivals: Arrivals | None = None) -> Times:
        return arriving(arrivals or Gaps(rate=5), np.random.default_rng(1), requests=requests, seconds=seconds)

    within = ends(None, 60)
    assert 200 < len(within) < 400 and within[-1] < 60
    assert (ends(len(within), None) == within).all(), "the same ones as without a limit on time"
    assert ends(len(within) + 1, None)[-1] >= 60, "and the next one is too late"
    assert (ends(10, 60) == within[:10]).all() and (ends(1000, 60)[: len(within)] == within).all()
    assert not ends(7, None, Batch()).any() and Batch().rate == np.inf
    for requests, seconds, arrivals in ((None, None, Gaps()), (None, 5.0, Users())):
        with pytest.raises(ValueError, match="requests=null: give a number"):
            ends(requests, seconds, arrivals)
    with pytest.raises(ValueError, match="seconds=1e-09: no request arrives so early"):
        ends(5, 1e-9)


AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,"API, log"
118,GPT-4,417,276,693,API log
"""
MOONCAKE = "\n".join(
    json.dumps({"timestamp": at, "input_length": size, "output_length": 9, "hash_ids": ids})
    for at, size, ids in [(0, 700, [0, 1]), (0, 512, [0]), (0, 600, [2, 3]), (3000, 1100, [0, 1, 4]), (9000, 3, [5])]
)
OFF_GRID = MOONCAKE.replace('"timestamp": 3000', '"timestamp": 2700')


def written(folder: Path, text: str, name: str = "trace") -> Path:
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return folder / name


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
@pytest.mark.parametrize(
    ("text", "times", "inputs", "outputs"),
    [
        (AZURE_2023, [0, 4.314579, 4.541977], [374, 396, 879], [44, 109, 1]),
        (AZURE_2024, [0, 0.007405, 0.99007], [2162, 2399, 76], [5, 6, 15]),
        (BURST, [0, 40, 113], [472, 1087, 417], [18, 230, 276]),
        (MOONCAKE, [0, 1, 2, 3, 9], [700, 512, 600, 1100, 3], [9] * 5),
        (OFF_GRID, [0, 0, 0, 2.7, 9], [700, 512, 600, 1100, 3], [9] * 5),
    ],
)
def test_public_formats(
    text: str, times: list[float], inputs: list[int], outputs: list[int], name: str, tmp_path: Path
) -> None:
    """Mooncake's requests of one moment are spread over the three seconds until the next; answers have a token."""
    found = read(written(tmp_path, text, name))
    np.testing.assert_allclose(found.times, times, atol=1e-6)
    assert found.inputs.tolist() == inputs and found.outputs.tolist() == outputs
    assert (found.blocks is None) == (len(times) == 3)
    assert found.blocks is None or found.blocks[3] == [0, 1, 4]


def test_a_window_and_a_rate(tmp_path: Path) -> None:
    path = str(written(tmp_path, MOONCAKE))
    part = Trace(path=path, window=(1.0, 9.0), scale=2.0)
    assert part.times(np.random.default_rng(0), 9).tolist() == [0, 0.5, 1.0], "the first in the window comes at 0"
    assert part.recorded.blocks == [[0], [2, 3], [0, 1, 4]] and part.rate == 2.0
    faster = part.at_rate(8.0)
    assert faster.rate == pytest.approx(8.0) and faster.recorded.times[-1] == 0.25 and faster.window == part.window
    with pytest.raises(ValueError, match=r"arrival.window=\[10.0, 20.0\]: nothing arrives then"):
        _ = Trace(path=path, window=(10.0, 20.0)).recorded


@pytest.mark.parametrize(
    ("name", "requests", "rate", "cv", "inputs", "outputs"),
    [("azure_code", 8819, 2.57, 13.2, 2048, 28), ("azure_conversation", 19366, 5.53, 1.09, 1155, 211)],
)
def test_the_bundled_traces_are_the_published_ones(
    name: str, requests: int, rate: float, cv: float, inputs: int, outputs: int
) -> None:
    trace = Trace(path=name)
    gaps = np.diff(trace.recorded.times)
    assert len(trace.recorded.times) == requests and trace.rate == pytest.approx(rate, abs=0.005)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.01)
    means = trace.recorded.inputs.mean(), trace.recorded.outputs.mean()
    assert means == pytest.approx((inputs, outputs), abs=0.6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read (No columns to parse from file)"),
        (AZURE_2023.splitlines()[0], "no requests in known columns"),
        ("when,how\n1,2\n", "no requests in known columns: give a trace that begins with TIMESTAMP,"),
        (AZURE_2023.replace("18:15:51.2", "18:15:49.2"), "line 4 is earlier than the one before"),
        (AZURE_2023.replace("396", "many"), "line 3 is '2023-11-16 18:15:50.9951690,many,109': give"),
        (BURST.replace("1087", "inf"), "line 3 is '45,inf,230': give"),
        (AZURE_2023.replace("879,0", "879,0,1,2"), "Expected 3 fields in line 4, saw 5"),
        (MOONCAKE.replace('"output_length": 9, ', "", 1), "line 1 is '"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        read(written(tmp_path, text))
    assert str(raised.value).startswith(f"arrival.path={tmp_path}") and "\n" not in str(raised.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(AZURE_2023.encode())[:-9])
    for path in (
        tmp_path,
        tmp_path / "none",
        tmp_path / "cut.gz",
        written(tmp_path, "\x80" * 3, "x.gz").with_suffix(""),
    ):
        with pytest.raises(
            ValueError, match=r"cannot be read .*, give a file or one of azure_code, azure_conversation"
        ):
            read(path)
