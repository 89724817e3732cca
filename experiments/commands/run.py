"""Methods measured against plain decoding, and what is shown of them."""

from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from experiments.commands.race import race
from experiments.config.sections import build, plain
from experiments.reporting.run_plots import (
    RUN_PLOTS,
    category_plot,
    nodes_plot,
    requests_plot,
    speedup_plot,
)
from experiments.reporting.run_tables import (
    category_table,
    comparison_table,
    methods_table,
    requests_table,
    run_table,
)
from experiments.results.runs import Run
from experiments.session.assembly import measure_methods
from experiments.session.measurement import Report


def run(config: DictConfig) -> Run:
    """Measure the configuration's drafter, or its drafter with every policy, or all of its methods."""
    methods = {str(name): f"methods.{name}" for name in config.methods}
    methods = methods or dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")
    report = _report_on_several() if config.labels else _report_on_one(config)
    if config.race is not None:
        report = replace(report, opening=partial(race, config))
    if config.study is not None:
        report = replace(report, studies=[*report.studies, build(config, "study")])
    asked = config.requests_table
    if asked is None:  # by default where there are limits or a price
        asked = config.price is not None or any(limit is not None for limit in plain(config, "sla").values())
    if asked:
        report = _with_requests(report)
    return measure_methods(config, methods=methods, report=report, temperatures=config.temperatures or ())


def _report_on_one(config: DictConfig) -> Report:
    main = comparison_table if config.methods or len(config.policies) > 1 else run_table
    return Report(
        tables=lambda made, title: [main(made, title), category_table(made)],
        plots={**RUN_PLOTS, "categories.png": category_plot},
    )


def _report_on_several() -> Report:
    return Report(
        tables=lambda made, title: [methods_table(made, title), category_table(made)],
        plots={"methods.png": speedup_plot, "nodes.png": nodes_plot},
    )


def _with_requests(report: Report) -> Report:
    """The report with the table and the pictures of requests."""
    return replace(
        report,
        tables=lambda made, title: [*report.tables(made, title), requests_table(made)],
        plots={**report.plots, "requests.png": requests_plot},
    )
