"""What steps cost on this machine: ``python -m experiments.calibrate target.inflate=110m``.

Times the target's forwards over a grid of rows, contexts and drafted nodes, and the other parts of rounds with the
drafter. It fits a few constants to them, shows what each one means and how well they predict sizes that they were not
fitted to, and writes a file. ``experiments.run costs=FILE`` then predicts every round, policies choose by it, and
``experiments.plan costs=FILE`` plans with it.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.checking import check_settings
from experiments.config.launch import launch
from experiments.config.sections import check_early, plain
from experiments.config.settings import CALIBRATE, GRID

if TYPE_CHECKING:
    from specdec.physics.calibrated import CalibratedRounds


def calibrate(config: DictConfig) -> "CalibratedRounds":
    """Measure, fit, print and write what steps cost.

    Raises:
        ValueError: The grid does not fit the model, or what was measured is faster than physics.
    """
    check_early(config, CALIBRATE)
    for name in ("grid", "held_out"):
        check_settings(plain(config, name), GRID, within=name)
    from experiments.commands.calibrate import run_calibration

    return run_calibration(config)


def main() -> None:
    """Calibrate."""
    launch(calibrate, "calibrate")


if __name__ == "__main__":
    main()
