"""Methods measured against plain decoding, and what is shown of them."""

from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from experiments.commands.race import race
from experiments.config.sections import bootstrap_of, build, plain
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
from experiments.reporting.studies.policies import loss_table, policy_losses
from experiments.results.runs import Run
from experiments.session.assembly import measure_methods
from experiments.session.measurement import Ended, Report, Shown
from experiments.session.policies import policy_of
from specdec.drafting.costs import RoundCosts
from specdec.drafting.policies import CostAwareLength, FixedLength, LengthPolicy
from specdec.engine.engine import Engine
from specdec.physics.calibrated import CalibratedRounds


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
        studies=[partial(_policy_losses, config)] if config.policies else [],
    )


def _report_on_several() -> Report:
    return Report(
        tables=lambda made, title: [methods_table(made, title), category_table(made)],
        plots={"methods.png": speedup_plot, "nodes.png": nodes_plot},
    )


def _policy_losses(config: DictConfig, ended: Ended) -> Shown:
    """A table of what several policies lose against the best fixed length."""
    found = {
        each.method: policy_of(each.engine.drafter) for each in ended.contenders if isinstance(each.engine, Engine)
    }
    policies = {name: found[name] for name in map(str, config.policies) if name in found}
    fixed = [name for name, policy in policies.items() if isinstance(policy, FixedLength)]
    given = [each.costs for each in policies.values() if isinstance(each, CostAwareLength)]
    costs = [each.rounds() if isinstance(each, CalibratedRounds) else each for each in given]
    measured = [each for each in costs if isinstance(each, RoundCosts)]
    bootstrap = bootstrap_of(config)
    losses = policy_losses(
        ended.records,
        fixed=fixed,
        by_depth=[name for name, policy in policies.items() if isinstance(policy, LengthPolicy)],
        others=[name for name in policies if name not in fixed],
        costs=measured[0] if measured else None,
        rows=config.engine.max_batch_size,
        bootstrap=bootstrap,
    )
    return [loss_table(losses, bootstrap.confidence)], []


def _with_requests(report: Report) -> Report:
    """The report with the table and the pictures of requests."""
    return replace(
        report,
        tables=lambda made, title: [*report.tables(made, title), requests_table(made)],
        plots={**report.plots, "requests.png": requests_plot},
    )
