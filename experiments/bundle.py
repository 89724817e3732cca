"""Make the bundled models: ``python -m experiments.bundle``.

Stages: a byte-level BPE tokenizer; the target, trained on the standard library's sources; text sampled from it;
a small drafter and Medusa heads, both distilled from it on the sources and on its own text; the model card.
Each finished stage is kept in ``work`` and skipped by the next call; an interrupted one goes on from its last
checkpoint. ``accelerate launch -m experiments.bundle`` uses the GPUs there are.

One more stage, which has to be asked for, copies heads of ``python -m experiments.train`` beside them:
``'stages=[heads]' heads.eagle3=FOLDER out=specdec/bundled``.
"""

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early, plain, typed
from experiments.config.settings import BUNDLE


def bundle(config: DictConfig) -> None:
    """Make the models by the configuration's recipe."""
    check_early(config, BUNDLE)
    from experiments.bundling.config import Recipe

    recipe = typed(Recipe, {str(name): plain(config, str(name)) for name in config})
    if set(recipe.stages) - {"heads"}:
        from experiments.bundling.recipe import run_stages

        run_stages(recipe)
    if "heads" in recipe.stages:
        from pathlib import Path

        import torch

        from experiments.bundling.heads import install_heads

        torch.set_num_threads(recipe.threads)
        install_heads(recipe.heads, Path(recipe.out))


def main() -> None:
    """Make the bundled models."""
    launch(bundle, "bundle")


if __name__ == "__main__":
    main()
