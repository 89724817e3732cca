"""Measure one method against plain decoding: ``python -m experiments.run drafter=medusa sampling.temperature=1``.

``methods`` names several, which are then measured in turn, at all ``temperatures``: see ``experiment=drafters``.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.checking import did_you_mean
from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import RUN
from experiments.results.records import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from experiments.measuring.measure import Contender
    from experiments.reporting.table import Table
    from experiments.results.records import Record
    from experiments.results.summary import Summary
    from experiments.session.measurement import Report


def run(config: DictConfig) -> "Summary":
    """Measure the configuration's drafter, or its drafter with every policy, or all of its methods.

    Raises:
        ValueError: A setting is wrong; or as ``Session.run``.
    """
    check_early(config, RUN)
    methods = _methods(config)
    _check_methods(config, methods)
    if config.objective is not None and config.drafter.get("_target_") is None:
        raise ValueError(f"objective={config.objective}: plain decoding alone has none, give a drafter")
    from experiments.session.measurement import measure_methods

    make = _report_on_ladder if config.ladder else _report_on_several if config.methods else _report_on_one
    report = make(config)
    if _asks_for_requests(config):
        report = _with_requests(report)
    temperatures = config.temperatures or ()
    return measure_methods(config, known=RUN, methods=methods, report=report, temperatures=temperatures)


def _methods(config: DictConfig) -> dict[str, str]:
    """What is measured, by name, and the section of its drafter."""
    if config.methods:
        return {str(name): f"methods.{name}" for name in config.methods}
    return dict.fromkeys([str(name) for name in config.policies] or [config.method], "drafter")


def _check_methods(config: DictConfig, methods: dict[str, str]) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ValueError: Says which, and what to give.
    """
    if config.methods and config.drafter.get("_target_") is not None:
        raise ValueError(f"drafter and methods={list(methods)} are both given: give drafter=none, or no methods")
    if len(methods) > 1 and config.objective is not None:
        raise ValueError(f"objective={config.objective} is of one method, and there are {len(methods)}: give null")
    other = config.compared_with
    if other is not None and other not in methods:
        raise ValueError(f"compared_with={other!r}: there is no such method{did_you_mean(other, methods)}")
    _check_ladder(config, methods)


def _check_ladder(config: DictConfig, methods: dict[str, str]) -> None:
    """Refuse a ladder whose rungs do not exist.

    Raises:
        ValueError: Says which, and what to give.
    """
    ladder = [str(rung) for rung in config.ladder or ()]
    known = [PLAIN, *methods]
    for rung in ladder:
        if rung not in known:
            raise ValueError(f"ladder: there is no method {rung!r}{did_you_mean(rung, known)}")
        if rung != PLAIN and config.drafter.get("_target_") is None and not _drafts(config, rung):
            raise ValueError(f"ladder: {rung} has neither a drafter nor a setup, give setups.{rung}={{engine: …}}")
    if ladder and (len(set(ladder)) < len(ladder) or len(ladder) < 2):
        raise ValueError(f"ladder={ladder}: give at least two methods, each once")


def _drafts(config: DictConfig, method: str) -> bool:
    """Whether a method has a drafter, or is plain decoding with settings of its own."""
    own = (config.methods.get(method) or {}).get("_target_") is not None
    return own or method in config.setups


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


def _report_on_one(config: DictConfig) -> "Report":
    from experiments.commands.policy_study import closing
    from experiments.reporting.run_plots import RUN_PLOTS, category_plot
    from experiments.session.measurement import Report

    return Report(
        tables=_tables_of_several if len(config.policies) > 1 else _tables,
        plots={**RUN_PLOTS, "categories.png": category_plot},
        closing=closing(config) if config.policies else None,
    )


def _report_on_several(config: DictConfig) -> "Report":
    from experiments.reporting.run_plots import methods_plot, nodes_plot
    from experiments.reporting.run_tables import methods_table
    from experiments.session.measurement import Report

    labels = {str(name): str(label) for name, label in config.labels.items()}
    return Report(
        tables=lambda summary, title: [methods_table(summary, title, labels)],
        plots={
            "methods.png": lambda summary, path, title: methods_plot(summary, path, title, labels),
            "nodes.png": lambda summary, path, title: nodes_plot(summary, path, title, labels),
        },
    )


def _report_on_ladder(config: DictConfig) -> "Report":
    from experiments.config.sections import bootstrap_of
    from experiments.measuring.ingredients import ingredients_of
    from experiments.reporting.ingredients import report_ingredients
    from experiments.results.ingredients import check_ladder
    from experiments.session.measurement import Report

    labels = {str(name): str(label) for name, label in config.labels.items()}
    order = [str(rung) for rung in config.ladder]

    def study(folder: "Path", records: "Sequence[Record]") -> "tuple[list[Table], list[Path]]":
        return report_ingredients(folder, records, order, labels, bootstrap_of(config))

    def opening(contenders: "Sequence[Contender]", jobs: object) -> None:
        check_ladder({each.method: ingredients_of(each) for each in contenders}, order)

    return Report(tables=lambda summary, title: [], plots={}, opening=opening, study=study)


def _asks_for_requests(config: DictConfig) -> bool:
    """Whether to show what users felt: as ``requests_table`` says, by default where there are limits or a price."""
    if config.requests_table is not None:
        return config.requests_table
    return config.price is not None or any(limit is not None for limit in config.sla.values())


def _with_requests(report: "Report") -> "Report":
    """The report with the table and the picture of requests."""
    from experiments.reporting.requests import in_flight_plot, requests_plot, requests_table

    def tables(summary: "Summary", title: str) -> list["Table"]:
        requests = requests_table(summary)
        return [*report.tables(summary, title), *([requests] if requests is not None else [])]

    plots = {"requests.png": requests_plot, "in_flight.png": in_flight_plot}
    return replace(report, tables=tables, plots={**report.plots, **plots})


def _tables(summary: "Summary", title: str) -> list["Table"]:
    from experiments.reporting.run_tables import category_table, run_table

    categories = category_table(summary)
    return [run_table(summary, title), *([categories] if categories is not None else [])]


def _tables_of_several(summary: "Summary", title: str) -> list["Table"]:
    from experiments.reporting.run_tables import category_table, comparison_table

    categories = category_table(summary)
    return [comparison_table(summary, title), *([categories] if categories is not None else [])]


def main() -> None:
    """Entry point of ``specdec-run``."""
    launch(run, "run", objective)


if __name__ == "__main__":
    main()
