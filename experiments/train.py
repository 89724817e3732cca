"""Train a drafter for a target: ``python -m experiments.train head=medusa target.name=… data=chat data.file=…``.

The same command trains a small model, Medusa heads, EAGLE-3, MTP modules and block drafters: ``head=`` chooses. From
time to time the head drafts for held-out prompts in the engine, and the weights with the greatest mean acceptance
length are kept. ``accelerate launch -m experiments.train …`` uses the GPUs there are, and ``resume=true out=FOLDER``
goes on with a training that was interrupted.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import TRAIN

if TYPE_CHECKING:
    from pathlib import Path


def train(config: DictConfig) -> "Path":
    """Train the configuration's head, and return the folder of the best weights."""
    check_early(config, TRAIN)
    from experiments.commands.train import train_head

    return train_head(config)


def main() -> None:
    """Entry point of ``specdec-train``."""
    launch(train, "train")


if __name__ == "__main__":
    main()
