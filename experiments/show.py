"""One output on the terminal, token by token: ``python -m experiments.show outputs/run/… prompt=3``.

Tokens are colored by where they came from: accepted from the draft, recovered, bonus. ``round=5`` draws that round's
draft tree, with p and q, where the run was made with ``trace=true``. Without ``prompt`` the prompts are listed.
"""

from omegaconf import DictConfig, OmegaConf

from experiments.config.launch import launch, rewrite_command_line
from experiments.config.sections import check_early
from experiments.config.settings import SHOW
from experiments.config.short_form import with_folders


def show_outputs(config: DictConfig) -> None:
    """Print the outputs that the configuration names.

    Raises:
        ValueError: There is no such run, prompt, method or round.
    """
    if OmegaConf.is_missing(config, "run"):
        raise ValueError("run has no value: give experiments.show FOLDER, the folder of a run")
    check_early(config, SHOW)
    from experiments.commands.show import print_outputs

    print_outputs(config)


def main() -> None:
    """Show the outputs that the command line names; ``experiments.show FOLDER`` is short for ``run=FOLDER``."""
    rewrite_command_line(lambda words: with_folders(words, "run", several=False))
    launch(show_outputs, "show")


if __name__ == "__main__":
    main()
