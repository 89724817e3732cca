"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

from omegaconf import DictConfig

from experiments.app.assembly import Report, measure_methods
from experiments.app.cli import launch
from experiments.app.settings import RUN
from experiments.reporting.categories import category_plot, category_table
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import run_table
from experiments.reporting.table import Table
from experiments.results.summary import Summary


def run(config: DictConfig) -> Summary:
    """Measure the configuration's drafter."""
    report = Report(tables=_tables, plots={**RUN_PLOTS, "categories.png": category_plot})
    return measure_methods(config, known=RUN, methods={config.method: "drafter"}, report=report)


def _tables(summary: Summary, title: str) -> list[Table]:
    categories = category_table(summary)
    return [run_table(summary, title), *([categories] if categories is not None else [])]


def main() -> None:
    """Entry point of ``specdec-run``."""
    launch(run, "run")


if __name__ == "__main__":
    main()
