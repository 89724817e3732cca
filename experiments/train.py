"""Make the bundled models: ``python -m experiments.train``.

Stages: a byte-level BPE tokenizer; the target, trained on the standard library's sources; text sampled from it;
a small drafter and Medusa heads, both distilled from it on the sources and on its own text; the model card.
Each finished stage is kept in ``work`` and skipped by the next call; an interrupted one goes on from its last
checkpoint. ``accelerate launch -m experiments.train`` uses the GPUs there are.
"""

from omegaconf import DictConfig

from experiments.app.cli import launch
from experiments.app.config import check_early, plain, typed
from experiments.app.settings import TRAIN


def train(config: DictConfig) -> None:
    """Make the models by the configuration's recipe."""
    check_early(config, TRAIN)
    from experiments.training.config import Recipe
    from experiments.training.recipe import run_stages

    run_stages(typed(Recipe, {str(name): plain(config, str(name)) for name in config}))


def main() -> None:
    """Train the bundled models."""
    launch(train, "train")


if __name__ == "__main__":
    main()
