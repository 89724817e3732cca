"""Plain decoding, n-grams, a small model and Medusa on the bundled models: ``python -m experiments.demo``.

First plain decoding and one method are shown side by side as live text. Then all methods are measured on several
prompts, greedy and sampled, and a table and pictures say how they compare.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import DEMO

if TYPE_CHECKING:
    from experiments.results.summary import Summary


def demo(config: DictConfig) -> "Summary":
    """Measure the configuration's methods at its temperatures."""
    check_early(config, DEMO)
    methods = {str(name): f"methods.{name}" for name in config.methods}
    if config.race is not None and config.race not in methods:
        raise ValueError(f"race={config.race!r}: give one of {', '.join(methods)}, or null")
    from experiments.commands.demo import demonstrate, with_tree

    with_tree(config, methods)

    return demonstrate(config, methods)


def main() -> None:
    """Run the demonstration."""
    launch(demo, "demo")


if __name__ == "__main__":
    main()
