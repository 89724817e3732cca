"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``.

A rule of your own needs a class and a YAML in ``conf/verifier/``, or ``verifier._target_=package.module.Class``. It is
tried on built-in tables, dense and degenerate, by enumerating all drafts, so there is no sampling noise. A rule that is
EXACT_WRT another distribution is compared with that one; the table shows its distance to the target, too. A rule of
your own that passes as exact is remembered in the project's folder, and results call it exact from then on, instead of
"exact (declared)".

Where drafter and target share their noise, nothing is random once the tree is given, so another check decides: over
many seeds, every output has to equal plain decoding's token for token, whatever was drafted, and plain decoding has to
follow the target.
"""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from experiments.config.launch import launch
from experiments.config.sections import check_early
from experiments.config.settings import CHECK_VERIFIER

if TYPE_CHECKING:
    from experiments.measuring.exactness import Case, SharedCase


def check(config: DictConfig) -> "list[Case] | list[SharedCase]":
    """Try the configuration's verifier on every case that it takes, and print the verdict.

    Raises:
        ValueError: It says that it is exact, and is not.
    """
    check_early(config, CHECK_VERIFIER)
    from experiments.commands.check_verifier import try_verifier

    return try_verifier(config)


def main() -> None:
    """Check a verifier."""
    launch(check, "check_verifier")


if __name__ == "__main__":
    main()
