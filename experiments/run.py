"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.app.cli import launch
from experiments.app.config import check_early
from experiments.app.settings import RUN

if TYPE_CHECKING:
    from experiments.reporting.table import Table
    from experiments.results.summary import Summary


def run(config: DictConfig) -> "Summary":
    """Measure the configuration's drafter, with every policy if there are several.

    Raises:
        ValueError: A setting is wrong; or as ``Session.run``.
    """
    check_early(config, RUN)
    if config.objective is not None and config.drafter.get("_target_") is None:
        raise ValueError(f"objective={config.objective}: plain decoding alone has none, give a drafter")
    if config.policies and config.objective is not None:
        raise ValueError(f"objective={config.objective}: several policies have several; give one, as policy=…")
    from experiments.app.assembly import Report, measure_methods
    from experiments.app.policy_study import closing
    from experiments.reporting.categories import category_plot
    from experiments.reporting.run_plots import RUN_PLOTS

    names = [str(name) for name in config.policies] or [config.method]
    report = Report(
        tables=_tables if len(names) == 1 else _tables_of_several,
        plots={**RUN_PLOTS, "categories.png": category_plot},
        closing=closing(config) if config.policies else None,
    )
    return measure_methods(config, known=RUN, methods=dict.fromkeys(names, "drafter"), report=report)


def objective(config: DictConfig, summary: "Summary") -> float | None:
    """The figure that the configuration's ``objective`` names, for sweepers that search for the best setting.

    Raises:
        ValueError: The run has no such figure.
    """
    if config.objective is None:
        return None
    for method in summary.methods:
        value = getattr(method, config.objective)
        if method.method == config.method and value is not None:
            return float(value)
    raise ValueError(f"objective={config.objective}: this run has none, because {config.method} finished no prompt")


def _tables(summary: "Summary", title: str) -> list["Table"]:
    from experiments.reporting.categories import category_table
    from experiments.reporting.run_tables import run_table

    categories = category_table(summary)
    return [run_table(summary, title), *([categories] if categories is not None else [])]


def _tables_of_several(summary: "Summary", title: str) -> list["Table"]:
    from experiments.reporting.categories import category_table
    from experiments.reporting.run_tables import comparison_table

    categories = category_table(summary)
    return [comparison_table(summary, title), *([categories] if categories is not None else [])]


def main() -> None:
    """Entry point of ``specdec-run``."""
    launch(run, "run", objective)


if __name__ == "__main__":
    main()
