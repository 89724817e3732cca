"""Plain decoding, n-grams, a small model and Medusa on the bundled models: ``python -m experiments.demo``."""

from omegaconf import DictConfig

from experiments.app.assembly import Report, measure_methods
from experiments.app.cli import launch
from experiments.app.config import settings_of
from experiments.app.settings import DEMO
from experiments.reporting.run_plots import RUN_PLOTS
from experiments.reporting.run_tables import comparison_table
from experiments.results.summary import Summary


def demo(config: DictConfig) -> Summary:
    """Measure the configuration's methods at its temperatures."""
    settings_of(config, DEMO)
    methods = {str(name): f"methods.{name}" for name in config.methods}
    report = Report(tables=lambda summary, title: [comparison_table(summary, title)], plots=RUN_PLOTS)
    return measure_methods(config, known=DEMO, methods=methods, report=report, temperatures=config.temperatures)


def main() -> None:
    """Run the demonstration."""
    launch(demo, "demo")


if __name__ == "__main__":
    main()
