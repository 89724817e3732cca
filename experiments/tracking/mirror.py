"""The figures of a measurement that go to a tracker, under which names and when."""

from collections.abc import Sequence
from pathlib import Path

from experiments.results.frame import frame_of
from experiments.results.records import PLAIN, Record
from experiments.results.rows import Row, positions, without_missing
from experiments.results.summary import running_figures
from experiments.tracking.base import TrackedRun, Tracker

_POINTS = 100
"""Most points of a running figure: computing one takes time that grows with the records."""
_NOT_FIGURES = ("acceptance", "conditional_acceptance", "rounds_at", "temperature", "complete", "planned")
"""Columns that are lines of their own, or the run's."""
_PROMPTS = (
    *("prompt", "turn", "category", "sample", "method", "exactness", "temperature", "prompt_tokens", "tokens"),
    *("batch_seconds", "rounds", "mean_acceptance_length", "finish_reason", "equals_plain", "divergence", "margin"),
    *("error", "text"),
)
"""The columns of the table of prompts."""


class Mirror:
    """Mirrors one measurement to a tracker.

    A run's one method has its figures under their bare names (``speedup``), so that runs can be compared; plain
    decoding's are below ``plain/``. Where a run has several methods or temperatures, all have the method and the
    temperature before them (``medusa/T=0/speedup``).
    """

    def __init__(self, tracker: Tracker, methods: Sequence[str], temperatures: Sequence[float]):
        self._tracker = tracker
        others = [method for method in methods if method != PLAIN]
        self._single = len(temperatures) == 1 and len(others) <= 1
        self._bare = others[0] if others else PLAIN
        self._last = 0
        self._seen = 0

    def start(self, run: TrackedRun, kept: int = 0) -> None:
        """The run begins, with a number of records that an interrupted attempt has left."""
        self._last, self._seen = 0, kept
        self._tracker.start(run)

    def progress(self, records: Sequence[Record], done: int, steps: int) -> None:
        """Log the figures so far, at most a hundred times in a run.

        Args:
            records: All so far, also those of an interrupted attempt that this one goes on from.
        """
        # A resumed run passes over what an earlier attempt has measured: nothing is new there.
        if len(records) == self._seen or (done < steps and done - self._last < steps / _POINTS):
            return
        self._last, self._seen = done, len(records)
        figures = {
            f"{self._prefix(method, temperature)}{name}": value
            for (method, temperature), own in running_figures(records).items()
            for name, value in own.items()
        }
        self._tracker.progress(figures, done)

    def results(
        self, rows: Sequence[Row], records: Sequence[Record], files: Sequence[Path], trace: Sequence[Path] = ()
    ) -> None:
        """Log what is known at the end: a row's columns under their names (``speedup``, ``stage_seconds/verify``)."""
        frame = frame_of(records)
        figures: dict[str, float | str] = {}
        lines: dict[str, dict[int, float]] = {}
        counts: dict[str, dict[int, float]] = {}
        for row in rows:
            figures |= {"complete": float(row["complete"]), "planned": row["planned"]}
            prefix = self._prefix(row["method"], row["temperature"])
            words = {name: row[name] for name in ("exactness", "lossless") if row[name] is not None}
            for name, value in {**words, **row}.items():
                if name in words or (isinstance(value, int | float) and not name.startswith(_NOT_FIGURES)):
                    figures[f"{prefix}{name.replace('.', '/')}"] = value
            if row["method"] == PLAIN:
                continue
            for kind, name in (("unconditional", "acceptance_at"), ("conditional", "conditional_acceptance_at")):
                shares = enumerate(positions(row, name), start=1)
                lines[f"{prefix}acceptance/{kind}"] = {at: share for at, share in shares if share is not None}
            own = frame[(frame.method == row["method"]) & (frame.temperature == row["temperature"]) & ~frame.failed]
            accepted = own.accepted.explode().dropna().astype(int)
            shares = accepted.value_counts(normalize=True)
            known = range(accepted.max() + 1) if len(accepted) else ()
            counts[f"{prefix}rounds_by_accepted_tokens"] = {count: float(shares.get(count, 0.0)) for count in known}
        # The most important first: a tracker that fails at one of these is told nothing more.
        self._tracker.summary(figures)
        self._tracker.curve("position", lines)
        self._tracker.curve("accepted_tokens", counts)
        table = frame.assign(batch_seconds=frame.seconds)[list(_PROMPTS)]
        self._tracker.table("prompts", _PROMPTS, without_missing(table).to_numpy().tolist())
        self._tracker.files("results", files)
        if trace:
            self._tracker.files("trace", trace)

    def finish(self, exit_code: int) -> None:
        """The run has ended."""
        self._tracker.finish(exit_code)

    def _prefix(self, method: str, temperature: float) -> str:
        if self._single:
            return "" if method == self._bare else f"{method}/"
        return f"{method}/T={temperature:g}/"
