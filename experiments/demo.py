"""Plain decoding, n-grams, a small model and Medusa on the bundled models: ``python -m experiments.demo``."""

from omegaconf import DictConfig

from experiments.cli import launch
from experiments.report import comparison_table
from experiments.run import compare
from experiments.summary import Summary


def demo(config: DictConfig) -> Summary:
    """Measure the configuration's methods at its temperatures."""
    methods = {str(name): f"methods.{name}" for name in config.methods}
    return compare(config, methods=methods, table=comparison_table, temperatures=config.temperatures)


def main() -> None:
    """Run the demonstration."""
    launch(demo, "demo")


if __name__ == "__main__":
    main()
