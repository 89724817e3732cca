"""Traces in the four public formats, on tiny files; the bundled ones by what is published of them."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.load.recorded import Trace, read

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
