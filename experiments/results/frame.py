"""The frame: a row for every output with its record's fields as columns. All figures are computed from it.

``frame_of`` adds what follows from one row alone: how many tokens and rounds it has, and its latencies, which
docs/measurements.md defines. Latencies are empty where the engine does not tell its moments; those that need the end,
where the request failed.
"""

from collections.abc import Iterable
from dataclasses import fields
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas

from experiments.results.records import Record
from experiments.results.rows import ROUNDS
from experiments.results.rows import Frame as Frame

Outputs = Iterable[Record] | Frame
"""Records, or the frame that was made of them."""


_FIELDS = tuple(field.name for field in fields(Record))
_TYPES = {
    **dict.fromkeys(("seconds", "joules", "arrived", "admitted", "prefilled", "finished", "ingestion"), "float64"),
    **dict.fromkeys(("margin", "tie_bound", "temperature"), "float64"),
    **dict.fromkeys(("turn", "sample", "batch", "prompt_tokens"), "int64"),
    "equals_plain": "boolean",
    "divergence": "Int64",
}


def frame_of(outputs: Outputs, run: str = "") -> Frame:
    """Return the frame of some records of one run, under the run's name; a frame is returned as it is."""
    if isinstance(outputs, pandas.DataFrame):
        return outputs
    records = list(outputs)
    frame = pandas.DataFrame({name: [getattr(record, name) for record in records] for name in _FIELDS}, dtype=object)
    frame = frame.astype(_TYPES).assign(run=run, failed=frame.finish_reason == "error")
    for name, counted in (("tokens", "token_ids"), ("rounds", "accepted")):
        frame[name] = frame[counted].map(len).astype("int64")
    length = 1 + frame.accepted.map(sum).astype("float64") / frame.rounds
    return _with_latencies(frame.assign(mean_acceptance_length=length.where(frame.rounds > 0)))


def _with_latencies(frame: Frame) -> Frame:
    def column(values: Iterable[Any], dtype: type) -> pandas.Series:
        return pandas.Series(list(values), frame.index, dtype=dtype)

    told = frame[["arrived", "admitted", "prefilled"]].notna().all(axis=1)
    first = column((moments[0] if moments else np.nan for moments in frame.emitted_at), float)
    emitted = column(map(sum, frame.emitted), float)
    end = frame.finished.where(~frame.failed)
    latencies = {
        "first_token": first,
        "queue": frame.admitted - frame.arrived,
        "ttft": first - frame.arrived,
        "engine_ttft": first - frame.admitted,
        "tpot": ((end - first) / (emitted - 1)).where(emitted > 1),
        "e2e": end - frame.arrived,
    }
    gaps = [tuple(after - before for before, after in pairwise(moments)) for moments in frame.emitted_at]
    by_token = (
        tuple(gap / count for gap, count in zip(own, counts[1:], strict=False) for _ in range(count))
        for own, counts in zip(gaps, frame.emitted, strict=True)
    )
    return frame.assign(
        told=told,
        **{name: values.where(told) for name, values in latencies.items()},
        chunk_gap=column(gaps, object),
        token_gap=column(by_token, object),
    )


def rounds_of(frame: Frame) -> Frame:
    """Return a row for every round of every output that did not fail (``rows.ROUNDS``).

    The columns before ``round`` are those that a round shares with its output; the record's fields of the other names
    hold them as lists.
    """
    good, names = frame[~frame.failed], list(ROUNDS)
    counts, place = good.rounds.to_numpy(), names.index("round")
    rounds = good.loc[good.index.repeat(counts), names[:place]].reset_index(drop=True)
    rounds["round"] = list(chain.from_iterable(map(range, counts)))
    for name in names[place + 1 :]:
        # Some columns may be shorter: a stop string may have cut all tokens of the last round, say.
        padded = ((*own[:count], *[None] * (count - len(own))) for own, count in zip(good[name], counts, strict=True))
        values = pandas.Series(list(chain.from_iterable(padded)), dtype=object)
        rounds[name] = values.astype(ROUNDS[name])
    return rounds
