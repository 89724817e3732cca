"""The pictures of runs as data URIs: those in their folders, or drawn again where one is missing."""

import base64
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.reporting.categories import category_plot
from experiments.reporting.comparison_plots import acceptance_lines, comparison_plot
from experiments.reporting.requests import in_flight_plot, requests_plot
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.results.comparison import make_rows, title
from experiments.results.runs import SUMMARY, Run

_PLOTS = {**RUN_PLOTS, "requests.png": requests_plot, "in_flight.png": in_flight_plot, "categories.png": category_plot}
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Picture:
    """A picture inside the page.

    Attributes:
        name: What it shows, in words.
        uri: The picture itself, as a data URI.
    """

    name: str
    uri: str


def pictures_of(run: Run) -> list[Picture]:
    """The pictures of one run."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, plot in _PLOTS.items():
            path = next(
                (p for p in (run.folder / name).parent.glob(f"{Path(name).stem}.*") if p.suffix in _TYPES), None
            )
            if path is None:
                path = plot(run.summary, Path(scratch) / name, _title(run))
            if path is not None:
                found.append(_picture(path))
    return found


def comparison_pictures(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of several runs together."""
    rows = make_rows(runs)
    with tempfile.TemporaryDirectory() as scratch:
        plots = {"comparison.png": comparison_plot, "acceptance.png": acceptance_lines}
        paths = [plot(rows, Path(scratch) / name, title(runs)) for name, plot in plots.items()]
        return [_picture(path) for path in paths if path is not None]


def _title(run: Run) -> str:
    """The line that the run itself put under its pictures' titles."""
    try:
        return str(json.loads((run.folder / SUMMARY).read_text(encoding="utf-8"))["title"])
    except (OSError, KeyError, TypeError, ValueError):
        return title([run])


def _picture(path: Path) -> Picture:
    content = base64.b64encode(path.read_bytes()).decode()
    return Picture(path.stem.replace("_", " "), f"data:{_TYPES[path.suffix]};base64,{content}")
