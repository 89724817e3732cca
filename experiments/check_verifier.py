"""Is a rule exact, and what does it accept? ``python -m experiments.check_verifier verifier=block``.

A rule of your own needs a class and a YAML in ``conf/verifier/``, or ``verifier._target_=package.module.Class``. It is
tried on built-in tables, dense and degenerate, by enumerating all drafts, so there is no sampling noise. A rule that is
EXACT_WRT another distribution is compared with that one; the table shows its distance to the target, too.

Where drafter and target share their noise, nothing is random once the tree is given, so another check decides: over
many seeds, every output has to equal plain decoding's token for token, whatever was drafted, and plain decoding has to
follow the target.
"""

from collections.abc import Sequence

from omegaconf import DictConfig

from experiments.app.cli import launch
from experiments.app.config import build, settings_of
from experiments.app.settings import CHECK_VERIFIER
from experiments.measuring.exactness import LAWS, SHARED_LEVEL, Case, SharedCase, cases, shared_cases
from experiments.reporting import terminal
from experiments.reporting.exactness import exactness_table, shared_table
from specdec.engine.doors import check_verifier
from specdec.interfaces import Verifier
from specdec.types import DraftSampling, Exactness, Noise

NARROW = 80
"""Characters per line in a file or pipe: the tables are that narrow."""


def check(config: DictConfig) -> list[Case] | list[SharedCase]:
    """Try the configuration's verifier on every case that it takes, and print the verdict.

    Raises:
        ValueError: It says that it is exact, and is not.
    """
    settings_of(config, CHECK_VERIFIER)
    rule: Verifier = build(config, "verifier")
    if rule is None:
        raise ValueError("verifier._target_=None: name the rule to check, verifier=NAME or verifier._target_=…")
    check_verifier(rule)
    name = type(rule).__name__
    if rule.noise is Noise.SHARED:
        return _check_shared(rule, config)
    done = list(cases(rule, config.vocab, config.tables, config.seed, list(config.temperatures)))
    if not done:
        raise ValueError(f"{name} takes none of the drafts that are tried: chains and trees, {_words(list(LAWS))}")
    console = terminal.console(NARROW)
    console.print(terminal.render(exactness_table(rule, done), terminal.Frame.TIGHT))
    worst = max(done, key=lambda case: case.tv)
    exact = worst.tv < config.threshold
    where = f"{worst.shape}, {worst.law.name}, {worst.rows} tables, temperature {worst.temperature:g}"
    if rule.exactness is not Exactness.LOSSY and not exact:
        raise ValueError(
            f"{name} says that it is {rule.exactness.value} and is not: total variation {worst.tv:.3g} ({where})"
        )
    found = "exact" if exact else f"not exact: total variation up to {worst.tv:.3g} ({where})"
    if exact and rule.exactness is Exactness.EXACT_WRT:
        distance = max(case.target_tv for case in done)
        found = (
            f"exact with respect to the distribution that it states, which is up to {distance:.3g} from the target's"
        )
    console.print(f"{name} is {found}, over {len(done)} cases. It says of itself: {rule.exactness.value}.")
    return done


def _check_shared(rule: Verifier, config: DictConfig) -> list[SharedCase]:
    """Try a rule with shared noise, and print the verdict."""
    name = type(rule).__name__
    done = list(shared_cases(rule, config.vocab, config.tables, config.seed, list(config.temperatures), config.streams))
    console = terminal.console(NARROW)
    console.print(terminal.render(shared_table(rule, done), terminal.Frame.TIGHT))
    differing = sum(case.differing for case in done)
    p_value = min(case.p_value for case in done)
    if differing or p_value < SHARED_LEVEL:
        raise ValueError(
            f"{name} says that its noise is shared, and {differing} outputs are not those of plain decoding, whose "
            f"law fits the target's with a p-value of {p_value:.2g}"
        )
    console.print(
        f"{name} is exact by its own check: over {len(done)} cases of {config.streams} seeds each, no output differs "
        f"from plain decoding's, which follows the target (smallest p-value {p_value:.2g}). "
        f"It says of itself: {rule.exactness.value}, noise {rule.noise.value}."
    )
    return done


def _words(laws: Sequence[DraftSampling]) -> str:
    return ", ".join(law.name.lower() for law in laws)


def main() -> None:
    """Check a verifier."""
    launch(check, "check_verifier")


if __name__ == "__main__":
    main()
