"""The figures of a measurement that go to a tracker, under which names and when."""

from collections.abc import Sequence
from pathlib import Path

from experiments.results.records import PLAIN, Record
from experiments.results.rows import Row
from experiments.results.summary import running_figures
from experiments.tracking.base import TrackedRun, Tracker
from experiments.tracking.flat import acceptance_lines, accepted_histogram, figures_of, prompt_table

_POINTS = 100
"""Most points of a running figure: computing one takes time that grows with the records."""


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
        """Log what is known at the end."""
        figures: dict[str, float | str] = {}
        positions: dict[str, dict[int, float]] = {}
        counts: dict[str, dict[int, float]] = {}
        for row in rows:
            figures |= {"complete": float(row["complete"]), "planned": row["planned"]}
            prefix = self._prefix(row["method"], row["temperature"])
            figures |= {f"{prefix}{name}": value for name, value in figures_of(row).items()}
            if row["method"] != PLAIN:
                own = [r for r in records if (r.method, r.temperature) == (row["method"], row["temperature"])]
                positions |= {f"{prefix}{name}": line for name, line in acceptance_lines(row).items()}
                counts |= {f"{prefix}{name}": line for name, line in accepted_histogram(own).items()}
        # The most important first: a tracker that fails at one of these is told nothing more.
        self._tracker.summary(figures)
        self._tracker.curve("position", positions)
        self._tracker.curve("accepted_tokens", counts)
        self._tracker.table("prompts", *prompt_table(records))
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
