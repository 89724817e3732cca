"""Methods measured against plain decoding, and what is shown of them."""

from omegaconf import DictConfig

from experiments.config.sections import build, plain
from experiments.reporting.run_plots import RUN_PLOTS, speedup_plot
from experiments.reporting.run_tables import category_table, comparison_table, requests_table, run_table
from experiments.results.rows import Row
from experiments.results.runs import Run
from experiments.session.assembly import measure_methods
from experiments.session.measurement import Plot, Report
from experiments.session.methods import drafters_of


def run(config: DictConfig) -> Run | list[Row]:
    """Measure the configuration's drafter, its drafter with every policy, or all methods; or grade answers."""
    if config.grading is not None:
        from experiments.commands.accuracy import accuracy  # lm-eval need not be installed

        return accuracy(config)
    methods = drafters_of(config)
    main = comparison_table if config.labels or config.methods or len(methods) > 1 else run_table
    plots: dict[str, Plot] = {"methods.png": speedup_plot} if config.labels else RUN_PLOTS
    asked = config.requests_table
    if asked is None:  # by default where there are limits or a price
        asked = config.price is not None or any(limit is not None for limit in plain(config, "sla").values())
    report = Report(
        tables=lambda made, title: [main(made, title), category_table(made), requests_table(made) if asked else None],
        plots=plots,
        studies=[] if config.study is None else [build(config, "study")],
    )
    return measure_methods(config, methods=methods, report=report, temperatures=config.temperatures or ())
