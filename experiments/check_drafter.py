"""Does a drafter keep its contract? ``python -m experiments.check_drafter drafter=ngram``.

A drafter of your own needs a class and a YAML in ``conf/drafter/``, or ``drafter._target_=package.module.Class``. It is
tried with the target on a few prompts: attributes, the form of every tree, greedy outputs against plain decoding,
whether drafts depend on the request alone, and whether q is what the tokens were drawn from. The table has a line per
check.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import CHECK_DRAFTER

if TYPE_CHECKING:
    from specdec.drafter_checks import Finding


def check(config: DictConfig) -> "list[Finding]":
    """Try the configuration's drafter, and print a line per check and the verdict.

    Raises:
        ValueError: A check failed, or there is no drafter.
    """
    check_early(config, CHECK_DRAFTER)
    from experiments.commands.check_drafter import try_drafter

    return try_drafter(config)


def main() -> None:
    """Check a drafter."""
    launch(check, "check_drafter")


if __name__ == "__main__":
    main()
