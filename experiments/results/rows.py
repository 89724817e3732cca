"""The frame of results: a flat row per run, method, temperature and category of prompts. All reports start from it."""

import json
from collections.abc import Mapping
from typing import Any

import pandas

ALL = "all"
"""The category of a row for all prompts together."""

Frame = Any
"""A ``pandas.DataFrame``: any object to the type checker, which cannot know its columns."""

Row = dict[str, Any]
"""A row of the frame by column; None for what is not known."""


def columns(text: str) -> dict[str, str]:
    """Columns by name, from lines of a type and the columns of that type, in the frame's order."""
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: kind for kind, _, names in lines for name in names.split()}


# docs/measurements.md says what the columns mean. A name with ``*`` stands for as many columns as the runs have: one
# per position of the draft, stage, package or setting.
FIGURES = columns("""\
string: method category label exactness
float64: temperature
bool: complete
int64: planned finished failed tokens rounds
boolean: competes not_lossless
float64: confidence mean_acceptance_length mean_acceptance_length_low mean_acceptance_length_high
float64: expected_mean_acceptance_length draft_acceptance_rate proposed_depth_per_round proposed_nodes_per_round
float64: distance_tv distance_tv_low distance_tv_high distance_kl gain gain_low gain_high
string: gain_over
float64: noise_spread own_cores other_cores cores
boolean: noisy
int64: timed_prompts
float64: seconds tokens_per_second speedup speedup_low speedup_high distinct_4_gram_rate
float64: wasted useful_mfu
Int64: requests
float64: requests_per_second output_tokens_per_second total_tokens_per_second user_tokens_per_second
float64: concurrency waiting attainment goodput
string: limits
float64: device_hours_per_million_tokens price_per_million_tokens joules_per_token
Int64: equal_to_plain compared_with_plain
string: lossless
Int64: divergences unexplained
float64: largest_margin tie_bound
boolean: best.*
float64: stage_seconds.* mbu.* mfu.* of_least.*
float64: ttft.* engine_ttft.* queue.* tpot.* chunk_gap.* token_gap.* e2e.* phase_share.*
Int64: finish.*
float64: acceptance_at.* conditional_acceptance_at.*
Int64: rounds_at.*
""")

ORIGIN = columns("""\
string: target
Int64: parameters
string: dtype device
Int64: threads
string: system processor gpus
Int64: prompts
string: prompts_hash
datetime64[us, UTC]: started
string: git_commit
boolean: git_dirty
string: overrides version.* override.*
any: config.*
""")
RUNS = {"run": "string", **FIGURES, **ORIGIN}
PROMPTS = columns("""\
category: run method exactness
float64: temperature
string: prompt
category: category
int64: turn sample batch prompt_tokens tokens rounds accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: mean_acceptance_length batch_seconds ingestion arrived admitted prefilled first_token finished
float64: ttft engine_ttft tpot e2e
category: finish_reason
bool: failed
string: error
boolean: equals_plain
Int64: divergence
float64: margin tie_bound
string: text
""")

ROUNDS = columns("""\
category: run method
float64: temperature
category: prompt category
int64: turn sample round accepted
float64: expected_accepted
int64: proposed_depth proposed_nodes
float64: distance_tv distance_kl emitted_at
Int64: emitted
""")


def typed(rows: Any, schema: Mapping[str, str]) -> Frame:
    """Return rows, or a frame, with the columns of a schema, and those of its families that occur, in its order."""
    frame: Any = rows if isinstance(rows, pandas.DataFrame) else pandas.DataFrame(list(rows))
    found: dict[str, pandas.Series] = {}
    for name, dtype in schema.items():
        if name.endswith(".*"):
            family = [column for column in frame.columns if column.startswith(name[:-1])]
            family.sort(key=lambda column: (len(column), column) if column[-1].isdigit() else (0, column))
            found |= {column: _typed(frame[column], dtype) for column in family}
        else:
            column = frame[name] if name in frame else pandas.Series([None] * len(frame), dtype=object)
            found[name] = _typed(column, dtype)
    return pandas.DataFrame(found)


def _typed(column: pandas.Series, dtype: str) -> pandas.Series:
    """A column in a type; ``any`` is the narrowest that holds the values of all runs, or text for several kinds."""
    if dtype.startswith("datetime64"):
        return pandas.to_datetime(column, utc=True, format="ISO8601").astype(dtype)
    if dtype != "any":
        return column.astype(dtype)
    narrow = column.convert_dtypes()
    if narrow.dtype != object:
        return narrow.astype("float64") if narrow.dtype == "Float64" else narrow
    # Lists become their JSON text, so that runs can be grouped by them.
    text = column.map(lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text.where(column.notna()).astype("string")


def rows_of(frame: Frame, category: str | None = ALL) -> list[Row]:
    """Return the rows of a category, or with None of all, as dictionaries; empty values are None."""
    chosen = frame if category is None else frame[frame.category == category]
    return without_missing(chosen).to_dict("records")


def without_missing(frame: Frame) -> Frame:
    """Return a frame with None in the place of missing values."""
    return frame.astype(object).where(frame.notna(), None)


def family(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a row knows of a family of columns: ``{"draft": 0.1}`` for ``stage_seconds``."""
    known = {column: value for column, value in row.items() if value is not None}
    return {column.removeprefix(f"{name}."): known[column] for column in known if column.startswith(f"{name}.")}


def positions(row: Mapping[str, Any], name: str = "acceptance_at") -> list[Any]:
    """Return the values of a family over the positions of the draft, from 1; None where one is not known."""
    depth = len(family(row, "rounds_at"))
    return [row.get(f"{name}.{place}") for place in range(1, depth + 1)]


def interval(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Return a figure's interval; None where it has none."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return None if low is None or high is None else (low, high)


def ends(name: str, bounds: tuple[float, float] | None) -> Row:
    """Return the two columns of an interval."""
    low, high = bounds or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
