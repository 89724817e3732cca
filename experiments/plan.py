"""What will a model cost on a device? ``python -m experiments.plan target.name=… device=h100``.

Answers from the model's ``config.json`` alone: how much memory it takes and how many rows fit, what bounds each phase,
the least time of every step, how long to draft and what that brings, where speculation stops paying, what a request and
a million tokens cost. No weights are loaded, and no GPU is needed.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import PLAN

if TYPE_CHECKING:
    from experiments.planning.plan import Plan


def plan(config: DictConfig) -> "Plan":
    """Plan what the configuration asks, print the tables, write them and the pictures, and return the plan.

    Raises:
        ValueError: The target is no decoder, the device is not in the table, or a value does not fit.
    """
    check_early(config, PLAN)
    from experiments.commands.plan import print_plan

    return print_plan(config)


def main() -> None:
    """Plan."""
    launch(plan, "plan")


if __name__ == "__main__":
    main()
