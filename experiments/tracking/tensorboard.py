"""Mirrors a run to TensorBoard. The only file that imports it, and only when a run asks for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tracking.base import Figures, TrackedRun, dotted
from experiments.tracking.guard import Guard


class TensorBoardTracker:
    """Writes a run's event files, by default into the folder ``tensorboard`` of the run's own.

    ``tensorboard --logdir outputs`` then shows all runs; its page HPARAMS is a table of their settings and figures.

    Args:
        folder: Where the event files go; None for a folder in the run's own.
        timeout: Seconds that a call may take.
    """

    def __init__(self, *, folder: str | None = None, timeout: float = 60.0):
        self._folder = folder
        self._guard = Guard("tensorboard", "'specdec[tensorboard]'", timeout)
        self._run: TrackedRun | None = None
        self._writer: Any = None
        self._prompts = 0

    def start(self, run: TrackedRun) -> None:
        """Open the event file."""

        def begin() -> None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self._folder) / run.name if self._folder else run.folder / "tensorboard"
            self._writer = SummaryWriter(str(folder))

        self._run, self._prompts = run, 0
        self._guard.open()
        self._guard.call(begin)

    def progress(self, figures: Mapping[str, float], prompts: int) -> None:
        """Write scalars whose step is the number of prompts."""

        def write() -> None:
            self._prompts = prompts
            for name, value in figures.items():
                self._writer.add_scalar(name, value, prompts)

        self._guard.call(write)

    def curve(self, axis: str, lines: Mapping[str, Mapping[int, float]]) -> None:
        """Write scalars whose step is the place on the axis."""

        def write() -> None:
            for name, line in lines.items():
                for place, value in line.items():
                    self._writer.add_scalar(name, value, place)

        self._guard.call(write)

    def summary(self, figures: Figures) -> None:
        """Write the configuration and the main figures as a row of the table HPARAMS, and the words as a text.

        The main figures are those without a slash in their name: TensorBoard has a column for each.
        """
        words = {name: value for name, value in figures.items() if isinstance(value, str)}
        main = {name: value for name, value in figures.items() if "/" not in name and name not in words}

        def write() -> None:
            assert self._run is not None, "the guard is open, so the run has begun"
            settings = {
                name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in dotted(self._run.config).items()
            }
            self._writer.add_hparams(settings | words, main, run_name=".", global_step=self._prompts)
            for name, value in words.items():
                self._writer.add_text(name, value)

        self._guard.call(write)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write nothing: TensorBoard has no tables, and the records are in the run's folder."""

    def files(self, kind: str, paths: Sequence[Path]) -> None:
        """Show pictures; TensorBoard keeps no other files."""

        def write() -> None:
            from matplotlib.image import imread

            for path in paths:
                if path.suffix == ".png":
                    self._writer.add_image(f"pictures/{path.stem}", imread(path)[..., :3], dataformats="HWC")

        self._guard.call(write)

    def finish(self, exit_code: int) -> None:
        """Close the event file."""
        self._guard.call(lambda: self._writer.close())
        self._guard.close()
        self._writer = None
