"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``.

``methods`` names several, which are then measured in turn, at all ``temperatures``: see ``experiment=drafters``.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import Command

if TYPE_CHECKING:
    from experiments.results.runs import Run


def objective(config: DictConfig, made: "Run") -> float | None:
    """The figure that the configuration's ``objective`` names, for sweepers that search for the best setting.

    Raises:
        ValueError: The run has no such figure.
    """
    if config.objective is None:
        return None
    for row in made.rows:
        if row["method"] == config.method and row[config.objective] is not None:
            return float(row[config.objective])
    raise ValueError(f"objective={config.objective}: this run has none, because {config.method} finished no prompt")


run = Command("run", objective=objective)
main = run.main

if __name__ == "__main__":
    main()
